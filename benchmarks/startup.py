"""Start-up: CPU seconds of `launch --help` beyond those of an empty Python.

    python benchmarks/startup.py [--repeats 10]

User and system time of the child, median of the repeats, interleaved so that other load affects
both alike, after one run of each to fill the caches. The target is 0.3 s over `python -c pass`.
JSON: benchmarks/results/startup.json.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rig.report import Ratio, Report, skip

COMMANDS = {"launch --help": ["--help"], "launch cluster up --help": ["cluster", "up", "--help"]}
TARGET = 0.3


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    launch = Path(sys.executable).parent / "launch"
    if not launch.exists():
        skip(f"no {launch}: run `make setup`")
    report = Report("startup")
    empty = [sys.executable, "-c", "pass"]
    for name, words in COMMANDS.items():
        command = [str(launch), *words]
        seconds: dict[str, list[float]] = {"empty": [], "command": []}
        for repeat in range(options.repeats + 1):
            for key, each in (("empty", empty), ("command", command)):
                spent = cpu_seconds(each)
                if repeat:
                    seconds[key].append(spent)
        median = {key: statistics.median(values) for key, values in seconds.items()}
        report.add(
            Ratio(
                f"{name}, CPU beyond `python -c pass`",
                median["command"] - median["empty"],
                "a second",
                TARGET,
            ),
            command_seconds=round(median["command"], 4),
            empty_seconds=round(median["empty"], 4),
            times_empty=round(median["command"] / median["empty"], 2),
        )
    return report.write()


def cpu_seconds(command: Sequence[str]) -> float:
    """Return user and system seconds of one run of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
