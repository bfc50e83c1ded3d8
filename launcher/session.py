"""The process supervisor: `python -P -m launcher.session`.

Units, sudo rules and launchers of other versions name this module, so it stays where it is.
"""

from __future__ import annotations

import sys

from launcher.supervisor.process_supervisor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
