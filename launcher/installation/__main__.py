"""A host's installation of Motley: `python -P -m launcher.installation`.

Units, sudo rules and launchers of other versions name this package, so it keeps its name.
"""

from __future__ import annotations

import sys

from launcher.installation.install import main

if __name__ == "__main__":
    sys.exit(main())
