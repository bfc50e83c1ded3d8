"""Stands in for `trainer` where the launcher is what is tested: same flags, same status.json.

Workers join by touching a file in the output folder. `behaviour.json` there says who misbehaves:
{"steps": 3, "worker-1": "exit 2", "coordinator": "exit 5", "worker-0": "never join"}.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml


def write_status(
    output: Path, arguments: argparse.Namespace, state: str, step: int, card: Sequence[str] = ()
) -> None:
    joined = [
        rank
        for rank in range(arguments.expect_workers)
        if (output / f"joined-{arguments.run_id}-{rank}").exists()
    ]
    status = {
        "schema": "motley.status/2",
        "run_id": arguments.run_id,
        "state": state,
        "reason": None,
        "pid": os.getpid(),
        "step": step,
        "total_steps": 10,
        "epoch": 0,
        "loss": 1.0,
        "tokens_per_second": 10.0,
        "workers": [{"rank": rank, "state": "active", "samples": 4} for rank in joined],
        "summary": list(card),
        "updated": time.time(),
    }
    temporary = output / "status.tmp"
    temporary.write_text(json.dumps(status))
    temporary.replace(output / "status.json")


def coordinate(output: Path, arguments: argparse.Namespace, steps: int) -> None:
    while True:
        ready = all(
            (output / f"joined-{arguments.run_id}-{rank}").exists()
            for rank in range(arguments.expect_workers)
        )
        write_status(output, arguments, "running" if ready else "waiting", 0)
        if ready:
            break
        time.sleep(0.02)
    for step in range(steps):
        write_status(output, arguments, "running", step)
        time.sleep(0.05)
    write_status(output, arguments, "completed", steps, ["took no time", "next:", "  trainer x"])
    (output / f"over-{arguments.run_id}").touch()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["finetune"])
    for flag in ("config", "run-id", "role", "tls", "bind", "coordinator", "gpu-backend", "gpus"):
        parser.add_argument(f"--{flag}")
    for flag in ("expect-workers", "rank", "threads"):
        parser.add_argument(f"--{flag}", type=int)
    arguments = parser.parse_args()
    for name in ("ca.pem", "cert.pem", "key.pem"):
        assert (Path(arguments.tls) / name).stat().st_mode & 0o777 == 0o600
    output = Path(yaml.safe_load(Path(arguments.config).read_text())["output"])
    behaviour = json.loads((output / "behaviour.json").read_text())
    name = arguments.role if arguments.role == "coordinator" else f"worker-{arguments.rank}"
    verb, _, rest = behaviour.get(name, "work").partition(" ")
    sys.stdout.write(f"{name} here, {verb} {rest}\n")
    if verb == "exit":
        sys.stdout.write(f"{name}: something specific is wrong\n")
        sys.exit(int(rest))
    if arguments.role == "coordinator":
        coordinate(output, arguments, behaviour.get("steps", 100_000))
        return
    if verb != "never":
        (output / f"joined-{arguments.run_id}-{arguments.rank}").touch()
    while not (output / f"over-{arguments.run_id}").exists():
        time.sleep(0.05)


main()
