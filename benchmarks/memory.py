"""The memory that a run was planned to need, and the memory of its own that it took.

    python benchmarks/memory.py [MODEL...] [--method lora --method full] [--steps 3] [--roomy]
    python benchmarks/memory.py --method coordinator [--workers 1 2 4 8] [--late first last]

Each run is `trainer finetune` of its own on the CPU: LoRA, QLoRA and full fine-tuning in one
process, and full fine-tuning by FSDP in two. A model of hidden 320 is made and measured beside the
given ones. Every 20 ms the run's anonymous and shared pages are counted, and whenever these grew by
2 % those that it has mapped of the model's files. From the most of both, that of the same run of a
model with almost no weights is taken away: Python, torch and what else it imports. The code of
libraries does not count: the system drops and reads it again as it likes, and whether such a page
is private depends on what else runs. Rows have exactly 64 tokens, four make a micro-batch.
`coordinator` is that of a full fine-tuning over TCP by so many workers, one row each, of which one
is late: it is stopped in the middle of the run until what the others send has come.
Runs believe that memory is short and return at once what they free; with --roomy malloc's heap
keeps it, as in a run that has half as much again.
JSON: benchmarks/results/memory.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rig.report import Ratio, Report, skip

import trainer
from trainer.config.run import RunConfig, load_config
from trainer.init_model import ModelSizes, init_model
from trainer.model.files import resolve_model
from trainer.model.layout import build_layout, read_headers
from trainer.planning.model_config import read_shape
from trainer.planning.replica import plan_memory, shared_memory_needed
from trainer.planning.workers import coordinator_memory

LENGTH, ROWS = 64, 4
METHODS = ("lora", "qlora", "full", "fsdp")
COORDINATOR = "coordinator"
STEP = re.compile(r'"kind": ?"step"')
STILL = 3.0
"""Seconds in which a coordinator takes no more memory when all has come."""
EMPTY = ModelSizes(
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=64,
    vocab_size=300,
)
HIDDEN_320 = ModelSizes(
    hidden_size=320,
    num_layers=12,
    num_heads=5,
    num_kv_heads=5,
    head_dim=64,
    intermediate_size=960,
    vocab_size=4096,
)
SHORT = "import trainer.cli, trainer.planning.replica as r; r.HEAP = 1e9; trainer.cli.main()"
"""`trainer` in a process for which no memory is enough for a heap."""
GOAL = 0.1
"""Share by which a measurement may exceed its plan."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--method", choices=(*METHODS, COORDINATOR), action="append")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--late", choices=("first", "last"), nargs="+", default=["first", "last"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--roomy", action="store_true")
    options = parser.parse_args()
    if not Path("/proc/self/smaps").exists():
        skip("needs Linux: the peak is read from /proc")
    report = Report("memory")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = folder / "data.jsonl"
        text = "the quick brown fox jumps over the lazy dog and runs away from it " * 20
        data.write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(16)))
        init_model(data, folder / "empty", EMPTY, 0)
        sources = folder / "sources.jsonl"
        texts = (path.read_text() for path in sorted(Path(trainer.__path__[0]).rglob("*.py")))
        sources.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        init_model(sources, folder / "hidden-320", HIDDEN_320, 0)
        methods = options.method or [*METHODS, COORDINATOR]
        if COORDINATOR in methods:
            methods.remove(COORDINATOR)
            add_coordinators(report, folder, data, options.workers, options.late)
        for method in methods:
            imports = measure(folder / "empty", data, method, options.steps, options.roomy)
            for name in [str(folder / "hidden-320"), *options.models]:
                model = resolve_model(name)
                planned = plan(model, data, method)
                taken = measure(model, data, method, options.steps, options.roomy) - imports
                ratio = Ratio(f"{method}, {Path(name).name}", taken / planned, "the plan", 1 + GOAL)
                report.add(ratio, planned=planned, taken=taken, imports=imports)
    return report.write()


def add_coordinators(
    report: Report, folder: Path, data: Path, counts: list[int], late: list[str]
) -> None:
    """Measure coordinators of runs with so many workers, the first or the last of them late."""
    model = folder / "hidden-320"
    imports = measure_coordinator(folder / "empty", data, 1, None)
    for workers in counts:
        config: RunConfig = load_config(None, settings("full", model, data))
        layout = build_layout(model, config)
        planned = coordinator_memory(layout, workers, config.exchange)
        for which in late if workers > 1 else ["first"]:
            slow = 0 if which == "first" else workers - 1
            taken = measure_coordinator(model, data, workers, slow) - imports
            ratio = Ratio(
                f"coordinator, {workers} workers, {which} late", taken / planned, "the plan", 1.1
            )
            report.add(ratio, planned=planned, taken=taken, a_weight=taken / layout.size)


def measure_coordinator(model: Path, data: Path, workers: int, late: int | None) -> int:
    """Return the most private bytes of a coordinator, while one of its workers is stopped."""
    with tempfile.TemporaryDirectory() as output, socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        config = load_config(
            None,
            settings("full", model, data)
            | {
                "name": "memory",
                "output": f"{output}/run",
                "training.batch_size": workers,
                "training.micro_batch_size": 1,
                "training.max_steps": 3,
                "exchange.shared_memory": False,
                "exchange.split": "equal",
                "exchange.lost_after": 300.0,
                "exchange.step_deadline": 600.0,
                "exchange.join_deadline": 600.0,
            },
        )
        Path(output, "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "trainer.cli", "finetune", "--run-id", "memory"]
        command += ["--config", f"{output}/run.yaml", "--role"]
        roles = [["coordinator", "--bind", address, "--expect-workers", str(workers)]]
        worker = ["worker", "--coordinator", address, "--gpu-backend", "cpu", "--threads", "1"]
        roles += [[*worker, "--rank", str(rank)] for rank in range(workers)]
        with Path(output, "log").open("wb+") as log:
            running = [
                subprocess.Popen([*command, *role], stdout=log, stderr=log) for role in roles
            ]
            most = watch(running, Path(output, "run", "metrics.jsonl"), late)
            log.seek(0)
            assert not any(process.wait() for process in running), log.read().decode()
        return most


def watch(running: list[subprocess.Popen[bytes]], metrics: Path, late: int | None) -> int:
    """Return the most private bytes of the first process until it ends.

    When a step is done the late worker is stopped until the first process takes no more.
    """
    most, grown, stopped = 0, 0.0, None
    while running[0].poll() is None:
        own = kibibytes(running[0].pid, "smaps_rollup", r"^Private_\w+:\s+(\d+) kB$")
        if own > 1.002 * most:
            most, grown = own, time.monotonic()
        if late is not None and metrics.exists() and STEP.search(metrics.read_text()):
            stopped, late = running[1 + late], None
            stopped.send_signal(signal.SIGSTOP)
            grown = time.monotonic()
        elif stopped is not None and time.monotonic() - grown > STILL:
            stopped.send_signal(signal.SIGCONT)
            stopped = None
        time.sleep(0.01)
    return most


def settings(method: str, model: Path, data: Path) -> dict[str, Any]:
    """Return a run's settings."""
    found: dict[str, Any] = {
        "model.path": str(model),
        "model.quantization": "nf4" if method == "qlora" else "none",
        "data.train": str(data),
        "data.validation_fraction": 0.0,
        "data.max_seq_len": LENGTH,
        "task": "causal-lm",
        "method": "full" if method in ("full", "fsdp") else "lora",
        "training.batch_size": 2 * ROWS,
        "training.micro_batch_size": ROWS,
        "training.gradient_checkpointing": "off",
    }
    return found | ({"parallel.data": "fsdp"} if method == "fsdp" else {})


def plan(model: Path, data: Path, method: str) -> int:
    """Return the bytes planned for the process that needs most."""
    config: RunConfig = load_config(None, settings(method, model, data))
    shape, headers = read_shape(model), read_headers(model)
    if method == "fsdp":
        return shared_memory_needed(shape, headers, config, 2, accelerator=False, recompute=False)
    found = plan_memory(
        shape,
        headers,
        build_layout(model, config),
        config,
        accelerator=False,
        recompute=False,
        coordinates=True,
    )
    return found.fixed + ROWS * LENGTH * found.per_token


def measure(model: Path, data: Path, method: str, steps: int, roomy: bool) -> int:
    """Return the most bytes of a run's process that had most."""
    with tempfile.TemporaryDirectory() as output:
        config = load_config(None, settings(method, model, data) | {"output": f"{output}/run"})
        run_file = Path(output, "run.yaml")
        run_file.write_text(config.to_yaml(), encoding="utf-8")
        start = ["-m", "trainer.cli"] if roomy else ["-c", SHORT]
        command = [sys.executable, *start, "finetune", "--config", str(run_file)]
        command += ["--gpu-backend", "cpu", "--threads", "1", "--max-steps", str(steps)]
        ranks: list[list[str]] = [[]]
        if method == "fsdp":
            port = str(29_400 + os.getpid() % 500)
            shared = ["--distributed", "--world-size", "2", "--master", f"127.0.0.1:{port}"]
            ranks = [[*shared, "--rank", str(rank)] for rank in range(2)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with Path(output, "log").open("wb+") as log:
            running = [
                subprocess.Popen([*command, *more], env=environment, stdout=log, stderr=log)
                for more in ranks
            ]
            files, counted_at, most = [0] * len(running), [0] * len(running), 0
            while any(process.poll() is None for process in running):
                for number, process in enumerate(running):
                    own = unmapped(process.pid)
                    if own > 1.02 * counted_at[number]:
                        counted_at[number], files[number] = own, mapped(process.pid, model)
                    most = max(most, own + files[number])
                time.sleep(0.02)
            log.seek(0)
            assert not any(process.returncode for process in running), log.read().decode()
        return most


def unmapped(pid: int) -> int:
    """Return the bytes of a process that are of no file."""
    return kibibytes(pid, "status", r"^Rss(?:Anon|Shmem):\s+(\d+) kB$")


def mapped(pid: int, model: Path) -> int:
    """Return the bytes of the model's files that a process has mapped and in memory."""
    mapping = rf"^\S+-.* {re.escape(str(model.resolve()))}/.*\nSize:.*\n(?:.*PageSize:.*\n)*"
    return kibibytes(pid, "smaps", mapping + r"Rss: +(\d+) kB$")


def kibibytes(pid: int, file: str, pattern: str) -> int:
    """Return the sum of what a pattern finds in a file of /proc, in bytes; 0 after the end."""
    try:
        text = Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(map(int, re.findall(pattern, text, re.M)))


if __name__ == "__main__":
    sys.exit(main())
