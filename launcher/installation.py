"""A host's installation of Motley: `python -P -m launcher.installation`.

Units, sudo rules and launchers of other versions name this module, so it stays where it is.
"""

from __future__ import annotations

import sys

from launcher.deploy.install import main

if __name__ == "__main__":
    sys.exit(main())
