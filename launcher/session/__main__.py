"""The process supervisor: `python -P -m launcher.session`.

Units, sudo rules and launchers of other versions name this package, so it keeps its name.
"""

from __future__ import annotations

import sys

from launcher.session.process_supervisor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
