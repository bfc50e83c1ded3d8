"""`trainer`, and on stdout whether it imported torch: `python -m tests.trainer.torch_told`."""

from __future__ import annotations

import sys

from trainer.cli import main

if __name__ == "__main__":
    try:
        main()
    finally:
        print("torch" in sys.modules)
