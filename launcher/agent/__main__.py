"""The agent of a host: `python -P -m launcher.agent`.

Units, sudo rules and launchers of other versions name this package, so it keeps its name.
"""

from __future__ import annotations

import sys

from launcher.agent.server import main

if __name__ == "__main__":
    sys.exit(main())
