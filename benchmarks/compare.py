"""Motley's star beside gloo, NCCL and MPI: the same sum of a gradient, and the same training steps.

    python benchmarks/compare.py [--backend gloo] [--megabytes 5.3] [--rate 200] [--workers 3]

All without encryption. --backend, --megabytes and --rate (Mbit/s of every link between simulated
hosts, which needs root; without it the loopback is measured) may be repeated. Ends with 2 if links
cannot be shaped here, and 3 if a worker failed.
"""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.rig import cluster, comparison
from benchmarks.rig.backends import BACKENDS
from trainer.lab.experiment import format_table
from trainer.system.errors import TrainerError


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", action="append", choices=list(BACKENDS))
    parser.add_argument("--megabytes", type=float, action="append", help="of the fp32 gradient")
    parser.add_argument("--rate", type=int, action="append", metavar="MBIT")
    parser.add_argument("--workers", type=int, default=3, choices=range(2, 17), metavar="2-16")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    cluster.end_on_terminate()
    names, sizes = options.backend or list(BACKENDS), options.megabytes or [5.3]
    rates = options.rate or []
    rows: list[comparison.Row] = []
    try:
        comparison.check_network(rates)
        for row in comparison.compare(names, sizes, rates, options.workers, options.steps):
            rows.append(row)
            print(f"measured {len(rows)}: {BACKENDS[row.backend].title}", file=sys.stderr)
    except TrainerError as error:
        print(f"compare: {error}", file=sys.stderr)
        return error.exit_code
    found = comparison.Comparison(options.workers, options.steps, rows)
    if options.json:
        print(json.dumps(found.as_json()))
        return 0
    measured = [row.cells() for row in rows if row.absent is None]
    print(f"{found.workers} workers, medians of {found.steps} sums and {found.steps} steps")
    for line in format_table(measured) if measured else ():
        print(line)
    for reason in dict.fromkeys(row.absent for row in rows if row.absent is not None):
        print(f"not measured: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
