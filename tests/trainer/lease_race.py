"""Eight processes ask for the lease of a folder at once: `python -m tests.trainer.lease_race DIR`.

Prints a line of JSON for each folder: who got it, and what all of them said. A program of its own,
since a fork copies what there is of memory, and pytest's is large.
"""

import json
import os
import signal
import sys
from pathlib import Path

from trainer.system.storage.lease import acquire_lease

AGES = 3600.0
"""A silence that is not over before the race is."""
RUNNERS = 8


def race(folder: Path) -> None:
    """All begin when the pipe is closed, and say how it went; the winner holds on until the end."""
    begin, begin_now = os.pipe()
    told, tell = os.pipe()
    children = []
    for _ in range(RUNNERS):
        children.append(os.fork())
        if children[-1] == 0:
            os.close(begin_now)
            os.read(begin, 1)
            try:
                acquire_lease(folder, "run", silence=AGES)
                os.write(tell, b"held\n")
                os.kill(os.getpid(), signal.SIGSTOP)
            except BaseException as error:
                os.write(tell, f"{error}\n".encode())
            os._exit(0)
    os.close(begin_now)
    os.close(begin)
    os.close(tell)
    outcomes = [os.waitpid(child, os.WUNTRACED)[1] for child in children]
    winners = [c for c, status in zip(children, outcomes, strict=True) if status]
    for winner in winners:
        os.kill(winner, signal.SIGKILL)
        os.waitpid(winner, 0)
    with os.fdopen(told) as lines:
        said = lines.read().splitlines()
    print(json.dumps({"winners": winners, "said": said}), flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        race(Path(argument))
