"""Growth: the cost of a report by the number of a run's steps, and its slope.

    python benchmarks/growth.py [--steps 1000 10000]

steps: `launch report` of the output folder of a run of so many steps.

Of each size the seconds, the processor seconds of all processes and the peak memory of the largest.
The slope is that of the processor seconds from the least to the largest size on a logarithmic
scale: 1 grows as the size does, 0 does not grow.
JSON: benchmarks/results/growth.json.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rig.recorded import write_output
from rig.report import Ratio, Report

BIN = Path(sys.executable).parent
LAUNCH = str(BIN / "launch")
RUN = "growth-20261120-110300-7f3a"


class Spent(NamedTuple):
    """The cost of a command with its children."""

    seconds: float
    cpu: float
    mebibytes: float
    """The peak of its largest process."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    options = parser.parse_args()
    report = Report("growth")
    for part in PARTS:
        sizes: list[int] = sorted(getattr(options, part))
        with tempfile.TemporaryDirectory(prefix="motley-growth-") as scratch:
            found = [PARTS[part](Path(scratch), size) for size in sizes]
        for name in found[0]:
            add(report, f"{name}, {part}", sizes, [each[name] for each in found])
    return report.write()


def add(report: Report, name: str, sizes: Sequence[int], spent: Sequence[Spent]) -> None:
    """Take the figures of all sizes into the report, with their slope."""
    grown = math.log(max(sizes[-1] / sizes[0], 2.0))
    slope = math.log(max(spent[-1].cpu, 0.01) / max(spent[0].cpu, 0.01)) / grown
    memory = spent[-1].mebibytes / spent[0].mebibytes
    report.add(
        Ratio(f"{name}: slope of the processor time", slope, "linear", 1.1),
        sizes=list(sizes),
        **{field: [round(getattr(each, field), 2) for each in spent] for field in Spent._fields},
    )
    report.add(Ratio(f"{name}: peak memory of the largest size", memory, "the least"))


def measure_steps(folder: Path, steps: int) -> dict[str, Spent]:
    """Measure a report of so many steps."""
    output = folder / str(steps)
    write_output(output, RUN, steps)
    page = str(folder / f"{steps}.html")
    return {"a report": run([LAUNCH, "report", str(output), "-o", page], folder)}


PARTS: dict[str, Callable[[Path, int], dict[str, Spent]]] = {
    "steps": measure_steps,
}


def run(command: list[str], folder: Path) -> Spent:
    """Return what a command takes until it ends, with a state and a cache of its own."""
    own = {"MOTLEY_STATE_DIR": f"{folder / 'state'}", "XDG_CACHE_HOME": f"{folder / 'cache'}"}
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: {(folder / 'log').read_text()[-400:]}")
    seconds = time.monotonic() - began
    return Spent(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


if __name__ == "__main__":
    sys.exit(main())
