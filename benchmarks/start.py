"""Start and recovery: a worker, a run of three, and a killed worker.

    python benchmarks/start.py [--repeats 5] [--rounds 3]

1. CPU seconds of a worker's process from its start until it has joined and waits for its first
   sample, against `python -c "import torch"`, interleaved. It is not forked here.
2. Seconds from `launch cluster up` to the first committed step: three workers on this machine, with
   the quickstart's settings and a model of the demo's shape.
3. Seconds from SIGKILL of one of these workers to the commit of a step with samples of its own.

Data and model are made beforehand. Seconds of 2 and 3 are wall clock, shared with other processes:
the report names the load, and gives them as multiples of the import's wall clock too.
JSON: benchmarks/results/start.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rig.report import Ratio, Report

TICKS = os.sysconf("SC_CLK_TCK")
BIN = Path(sys.executable).parent
TRAINER = [str(BIN / "trainer")]
IMPORT = [sys.executable, "-c", "import torch"]
PLACE = ["--rank", "0", "--gpu-backend", "cpu", "--threads", "1"]
PATIENCE = 180.0
IN_THE_RUN = "joined as rank"


class Spent(NamedTuple):
    """Wall-clock and CPU time, in seconds."""

    cpu: float
    wall: float


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3, help="in each round")
    options = parser.parse_args()
    report = Report("start")
    with tempfile.TemporaryDirectory(prefix="motley-start-") as scratch:
        folder = Path(scratch)
        prepare(folder)
        single(report, folder, options.repeats)
        wall = statistics.median(run_once(IMPORT, folder).wall for _ in range(options.repeats))
        cluster(report, folder, options.rounds, options.kills, wall)
    return report.write()


def prepare(folder: Path) -> None:
    """Make the demo's data and a model of the demo's shape in the quickstart's paths."""
    made: list[list[str]] = [
        ["generate-data", "shell-safety", "-o", "demo/data"],
        ["init-model", "--data", "demo/data/train.jsonl", "-o", "demo/pretrain/checkpoints/latest"],
    ]
    for words in made:
        subprocess.run([*TRAINER, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def single(report: Report, folder: Path, repeats: int) -> None:
    """Compare a worker's start with the import of torch."""
    imports: list[Spent] = []
    starts: list[Spent] = []
    for repeat in range(repeats + 1):  # the first fills caches
        imports.append(run_once(IMPORT, folder))
        starts.append(start_worker(folder, f"single-{repeat}"))
    imports, starts = imports[1:], starts[1:]
    cpu = [statistics.median(spent.cpu for spent in each) for each in (starts, imports)]
    wall = [statistics.median(spent.wall for spent in each) for each in (starts, imports)]
    report.add(
        Ratio("a worker until its first sample, CPU", cpu[0] / cpu[1], "`import torch`", 2.5),
        worker_cpu_seconds=round(cpu[0], 3),
        import_cpu_seconds=round(cpu[1], 3),
        worker_wall_seconds=round(wall[0], 3),
        import_wall_seconds=round(wall[1], 3),
    )


def run_once(command: list[str], folder: Path) -> Spent:
    """Return the time of a whole process."""
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=folder)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return Spent(usage.ru_utime + usage.ru_stime, time.monotonic() - began)


def start_worker(folder: Path, name: str) -> Spent:
    """Return the time of a worker until it has joined a run whose coordinator is ready."""
    address = f"127.0.0.1:{free_port()}"
    words = ["finetune", "--config", "quickstart", "--run-id", name, "-o", f"out/{name}", "--role"]
    quiet: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL}
    # Expecting two workers, it assigns nothing to the first: only the start is measured.
    coordinator = subprocess.Popen(
        [*TRAINER, *words, "coordinator", "--bind", address, "--expect-workers", "2"],
        stderr=subprocess.DEVNULL,
        **quiet,
    )
    worker = None
    try:
        wait_until(lambda: answers(address), "the coordinator")
        began = time.monotonic()
        worker = subprocess.Popen(
            [*TRAINER, *words, "worker", "--coordinator", address, *PLACE],
            stderr=subprocess.PIPE,
            text=True,
            **quiet,
        )
        assert worker.stderr is not None
        for line in worker.stderr:
            if IN_THE_RUN in line:
                return Spent(cpu_of(worker.pid), time.monotonic() - began)
        raise SystemExit("the worker ended before it was in the run")
    finally:
        for process in filter(None, (worker, coordinator)):
            process.kill()
            process.communicate()


def cluster(report: Report, folder: Path, rounds: int, kills: int, wall: float) -> None:
    """Measure starts of a whole run, and the cost of killing a worker."""
    starts: list[Spent] = []
    returns: list[float] = []
    laps: list[str] = []
    for _ in range(rounds):
        with a_run(folder) as run:
            starts.append(run.spent)
            laps.append(run.said)
            returns += [kill_and_wait(run, 1 + kill % 2) for kill in range(kills)]
    seconds = [spent.wall for spent in starts]
    report.add(
        Ratio(
            "`cluster up` of 3 workers until the first committed step",
            statistics.median(seconds),
            "a second",
            8.0,
        ),
        seconds=[round(value, 2) for value in seconds],
        cpu_seconds=[round(spent.cpu, 2) for spent in starts],
        import_wall_seconds=round(wall, 2),
        laps=laps,
    )
    report.add(
        Ratio(
            "SIGKILL of a worker until a step is committed with its samples",
            statistics.median(returns),
            "a second",
            3.0,
        ),
        seconds=[round(value, 2) for value in returns],
        import_wall_seconds=round(wall, 2),
    )


class Cluster(NamedTuple):
    """A run in progress."""

    spent: Spent
    """From the command to the first step; the CPU seconds are those of all processes."""
    said: str
    """The output of `up` on its phases."""
    state: Path
    """The host's folder of the run."""
    metrics: Path


@contextlib.contextmanager
def a_run(folder: Path) -> Iterator[Cluster]:
    """Start a run and end it."""
    state = folder / "state"
    launch = str(BIN / "launch")
    environment = {**os.environ, "MOTLEY_STATE_DIR": str(state)}
    output = folder / "demo/output"
    # Enough steps that it does not end, and no pause for a validation.
    settings = dict.fromkeys(
        ("training.max_steps", "training.epochs", "training.evaluate_every", "checkpoint.every"),
        100_000,
    )
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    port = ["-e", f"motley_port={free_port()}", "-e", "motley_devices=[{backend: cpu}]"]
    command = [launch, "cluster", "up", "--expect-workers", "3", "--preset", "quickstart"]
    began = time.monotonic()
    up = subprocess.Popen(
        [*command, *port, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = output / "metrics.jsonl"
    try:
        wait_until(lambda: up.poll() is not None or steps_of(metrics), "the first step")
        wall = time.monotonic() - began
        mine = [pid for pid in processes() if f"MOTLEY_STATE_DIR={state}" in environment_of(pid)]
        spent = Spent(sum(map(cpu_of, mine)), wall)
        said, _ = up.communicate(timeout=PATIENCE)
        if up.returncode:
            raise SystemExit(f"up failed:\n{said}")
        (run,) = {path.parent for path in state.glob("runs/*/processes")}
        yield Cluster(spent, last_line_with("first step", said), run, metrics)
    finally:
        subprocess.run(
            [launch, "cluster", "down", "--all"],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        shutil.rmtree(state)
        shutil.rmtree(output, ignore_errors=True)


def kill_and_wait(run: Cluster, rank: int) -> float:
    """Kill an active worker, and return the seconds until it is active again."""
    # It gets a share of a step only some time after it has joined.
    began = len(steps_of(run.metrics))
    wait_until(
        lambda: sum(takes_part(step, rank) for step in steps_of(run.metrics)[began:]) >= 5,
        "steps with its samples",
    )
    state = json.loads((run.state / f"processes/worker-{rank}/state.json").read_bytes())
    os.kill(state["child"]["pid"], signal.SIGKILL)
    killed, before = time.monotonic(), len(steps_of(run.metrics))

    def is_back() -> bool:
        later = [takes_part(step, rank) for step in steps_of(run.metrics)[before:]]
        # The step of the kill may still count what it had sent.
        return False in later and later[-1]

    wait_until(is_back, "its return")
    return time.monotonic() - killed


def takes_part(step: dict[str, Any], rank: int) -> bool:
    """Return whether a rank computed samples of a step."""
    return any(part[0] == rank for part in step["sample_ranges"])


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines of the steps committed so far."""
    with contextlib.suppress(FileNotFoundError):
        lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["kind"] == "step"]
    return []


def last_line_with(words: str, text: str) -> str:
    """Return the last line of a text that contains `words`."""
    return next((line for line in reversed(text.splitlines()) if words in line), "")


def processes() -> list[int]:
    """Return the pids of this machine."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def environment_of(pid: int) -> list[str]:
    """Return a process's environment; empty if it is another user's, or gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def cpu_of(pid: int) -> float:
    """Return user and system seconds of a process so far, including reaped children."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return sum(map(int, text.rpartition(")")[2].split()[11:15])) / TICKS


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def answers(address: str) -> bool:
    """Return whether something listens."""
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {PATIENCE:.0f} s for {what}")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
