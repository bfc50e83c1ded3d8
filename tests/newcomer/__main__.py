"""Make every mistake and print what came of it: `python -m tests.newcomer`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.newcomer.mistakes import MISTAKES, complaints, make, prepare


def main() -> int:
    """Return 1 if an answer is not good enough."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="motley-newcomer-") as scratch:
        folder = Path(scratch)
        prepare(folder)
        environment = {**os.environ, "MOTLEY_STATE_DIR": str(folder / "state"), "NO_COLOR": "1"}
        for mistake in MISTAKES:
            answer = make(mistake, folder, environment)
            faults = list(complaints(mistake, answer))
            wrong += bool(faults)
            print(f"{answer.code:4d}  {answer.seconds:5.2f} s  {mistake.name}: {answer.message}")
            for fault in faults:
                print(f"      WRONG: {fault}")
    print(f"{len(MISTAKES)} mistakes, {wrong} answered badly")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
