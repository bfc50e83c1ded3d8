"""`python elsewhere.py SILENCE ...`: `trainer ...` as if on another host that shares a folder.

Locks of this host do not reach it, and it listens for so many seconds before it takes over.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from lease_holder import become

from trainer.cli import main
from trainer.storage import lease

if __name__ == "__main__":
    become("another host")
    assert lease.take.__kwdefaults__
    lease.take.__kwdefaults__["silence"] = float(sys.argv.pop(1))
    main()
