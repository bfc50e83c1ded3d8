"""Rounds by PyTorch's PostLocalSGDOptimizer and two DiLoCos, beside Motley's of real_loss.py.

    python benchmarks/rounds_peers.py RESULTS.jsonl REAL_LOSS.jsonl [--rate 2e-3 --rate 4e-3]

Three processes train what a worker of benchmarks/real_loss.py trains: adapters on the first and
last five layers of SmolLM2-135M, descriptions of Debian's packages, 200 steps of 12 rows from the
same weights, by AdamW with the same clipping and schedule, an exchange in 20 steps. PyTorch's runs
over gloo; torchft's also with a lighthouse and a manager for each worker
(`pip install torchft==0.2.0`); Forgather's with its server
(`pip install git+https://github.com/jdinalt/forgather@0002f125`). Without a package its rows are
missing. Bytes are what a worker hands to the exchange: a star sends them once, a ring of three 1.33
times.

A finished run is a line of RESULTS and is not repeated. Writes
benchmarks/results/rounds_peers.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import real_loss
from rig.finished import Found, keep, read
from rig.ranks import ALONE, Ranks
from rig.report import Ratio, Report
from rig.round_peers import WORKERS, Run, forgather, post_local, torchft

from tests.real.packages import model_file
from trainer.model.files import resolve_model

WAYS: dict[str, Callable[[Ranks, Run], dict[str, Any]]] = {
    "PostLocalSGD": post_local,
    "torchft DiLoCo": torchft,
    "Forgather DiLoCo": forgather,
}
OURS = {
    "PostLocalSGD": "rounds 20, int4",
    "torchft DiLoCo": "rounds 20, Nesterov",
    "Forgather DiLoCo": "rounds 20, Nesterov",
}
"""What Motley has for the same."""


@dataclass(frozen=True)
class Peer:
    """One training run."""

    way: str
    rate: float
    seed: int


def main() -> int:
    """Train what is missing, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("ours", type=Path, help="the results of real_loss.py")
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--rate", type=float, action="append")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--limit", type=int, default=sys.maxsize, help="of runs trained now")
    options = parser.parse_args()
    done = read(options.results, Peer)
    model = resolve_model(str(model_file())).resolve()
    work = (options.results.parent / "work" / "peers").resolve()
    with Ranks(WORKERS, ALONE) as ranks:
        for seed in range(options.seeds):
            for rate in options.rate or (2e-3, 4e-3):
                for way in options.way or WAYS:
                    peer = Peer(way, rate, seed)
                    if peer in done or options.limit < 1:
                        continue
                    package = way.split()[0].lower()
                    if way.endswith("DiLoCo") and find_spec(package) is None:
                        print(f"{package} is not installed")
                        continue
                    options.limit -= 1
                    run = Run(model, work, rate, seed)
                    run.inputs()
                    done[peer] = WAYS[way](ranks, run)
                    keep(options.results, peer, done[peer])
                    print(
                        f"{peer}: {done[peer]['loss']:.4f}, {done[peer]['score']:.3f}", flush=True
                    )
    return report(done, read(options.ours, real_loss.Case))


def report(done: dict[Peer, Found], ours: real_loss.Results) -> int:
    """Print and write each peer's loss and bytes beside Motley's with the same data and rate."""
    written = Report("rounds_peers")
    for peer, found in sorted(done.items(), key=lambda item: (item[0].way, item[0].rate)):
        case = real_loss.Case("sections", 10, "lora", OURS[peer.way], peer.rate, peer.seed)
        if case not in ours:
            continue
        for key, what in (("loss", "held-out loss"), ("bytes_up", "bytes")):
            title = f"{case.arm}, rate {peer.rate:g}, seed {peer.seed}: {what}"
            written.add(
                Ratio(title, ours[case][key] / found[key], f"{peer.way}'s", 1.0),
                ours=ours[case][key],
                theirs=found[key],
            )
    return written.write()


if __name__ == "__main__":
    sys.exit(main())
