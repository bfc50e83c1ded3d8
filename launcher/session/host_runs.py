"""A host's own list of its runs, so that the launcher need not read every file remotely.

Standard library only: agents call it.
"""

from __future__ import annotations

import re
from pathlib import Path

from launcher.session.process_supervisor import is_final

WANTED = Path("/etc/systemd/system/multi-user.target.wants")
"""Where systemd keeps links to what it starts at boot."""

_UNIT = re.compile(r"motley-(?:worker|coordinator)@([a-z0-9][a-z0-9._-]*):[a-z0-9-]+\.service")


def unfinished_runs(folder: str) -> list[str]:
    """Return the ids of the runs below a state folder of which a process had not ended for good.

    By what the supervisors wrote: the caller checks whether such a process still runs.
    """
    found: set[str] = set()
    for path in Path(folder).glob("runs/*/processes/*/state.json"):
        run_id = path.parents[2].name
        if run_id not in found and not is_final(path):
            found.add(run_id)
    return sorted(found)


def wanted_runs(folder: Path = WANTED) -> list[str]:
    """Return the ids of the runs of which a unit would be started at boot.

    A run that ended by itself leaves them so: its supervisors may not change what systemd does.
    """
    try:
        found = [_UNIT.fullmatch(path.name) for path in folder.iterdir()]
    except OSError:
        return []
    return sorted({match.group(1) for match in found if match})
