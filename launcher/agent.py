"""The agent of a host: `python -P -m launcher.agent`.

Units, sudo rules and launchers of other versions name this module, so it stays where it is.
"""

from __future__ import annotations

import sys

from launcher.hosts.agent import main

if __name__ == "__main__":
    sys.exit(main())
