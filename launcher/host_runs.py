"""What a host knows of its runs by itself, so that nobody has to read every file from far away.

Standard library only: agents answer it.
"""

from __future__ import annotations

from pathlib import Path

from launcher.session import is_final


def unfinished_runs(folder: str) -> list[str]:
    """Return the ids of the runs below a state folder of which a process had not ended for good.

    By what the keepers wrote: whether such a process still lives is for the asker to find out.
    """
    found: set[str] = set()
    for path in Path(folder).glob("runs/*/processes/*/state.json"):
        run_id = path.parents[2].name
        if run_id not in found and not is_final(path):
            found.add(run_id)
    return sorted(found)
