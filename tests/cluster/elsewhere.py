"""`trainer ...` as if on another host that shares a folder.

`python -m tests.cluster.elsewhere SILENCE ...`: locks of this host do not reach it, and it listens
for so many seconds before it takes over.
"""

import sys

from tests.trainer.lease_holder import become
from trainer.cli import main
from trainer.system.storage import lease

if __name__ == "__main__":
    become("another host")
    assert lease.acquire_lease.__kwdefaults__
    lease.acquire_lease.__kwdefaults__["silence"] = float(sys.argv.pop(1))
    main()
