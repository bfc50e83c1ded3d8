"""Runs of real processes: `trainer finetune` and stand-in workers, watched by what they write.

Nothing here sleeps blindly: everything waits for an event with a deadline. Each process has its
own process group and log; whatever still lives when a test is over is killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from launcher.runs.certificates.authority import CLOCK_SKEW, Authority
from tests.cluster.real_process import Process
from tests.ports import free_port
from tests.waiting import PATIENCE, wait_for
from trainer.checkpoint.reader import OPTIMIZER_FILE, find_checkpoint, read_run
from trainer.data.corpus import write_shell_safety
from trainer.init_model import ModelSizes, init_model
from trainer.tracking.metrics import read_metrics

SAMPLES, BATCH = 384, 32
STEPS = SAMPLES // BATCH
"""Samples, samples a step, and so steps in one epoch of the shared data."""
_NUMPY_WORKER = (sys.executable, "-m", "tests.cluster.numpy_replica")


@dataclass(frozen=True)
class Bench:
    """What all runs share: a small model, data, and one CA with a leaf for each process."""

    model: Path
    train: Path
    validation: Path
    tls: Path
    authority: Authority

    def leaf(
        self, folder: Path, role: str, run_id: str = "run", valid_in: float | None = None
    ) -> Path:
        """Write a leaf of this bench's CA; one that becomes valid in so many seconds from now."""
        return write_leaf(self.authority, folder, role, run_id, valid_in)


def write_leaf(
    authority: Authority,
    folder: Path,
    role: str,
    run_id: str = "run",
    valid_in: float | None = None,
) -> Path:
    """Write `ca.pem`, `cert.pem` and `key.pem` of a fresh leaf into a folder."""
    folder.mkdir(parents=True)
    issued = None
    if valid_in is not None:
        issued = datetime.now(UTC) + CLOCK_SKEW + timedelta(seconds=valid_in)
    leaf = authority.issue(f"urn:motley:run:{run_id}:{role}", ["127.0.0.1"], issued)
    for name, content in leaf.contents_by_name().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Make the shared inputs once."""
    folder = tmp_path_factory.mktemp("bench")
    write_shell_safety(folder / "data", SAMPLES, 64, 0)
    train = folder / "data" / "train.jsonl"
    sizes = ModelSizes(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=512,
    )
    init_model(train, folder / "model", sizes, 0)
    authority = Authority.create()
    write_leaf(authority, folder / "tls" / "coordinator", "coordinator")
    for rank in range(3):
        write_leaf(authority, folder / "tls" / f"rank-{rank}", f"rank:{rank}")
    validation = folder / "data" / "validation.jsonl"
    return Bench(folder / "model", train, validation, folder / "tls", authority)


@pytest.fixture
def shared_memory() -> bool:
    """Whether the workers of `cluster` may use it; parametrize to run a test on both transports."""
    return True


@pytest.fixture
def cluster(bench: Bench, tmp_path: Path, shared_memory: bool) -> Iterator[Cluster]:
    """Return a cluster that leaves nothing running; its logs are shown when the test failed."""
    made = Cluster(bench, tmp_path)
    made.shared_memory = shared_memory
    made.configure()
    try:
        yield made
    finally:
        made.end()
        print(made.logs())


class Cluster:
    """One coordinator and its workers."""

    def __init__(self, bench: Bench, folder: Path, name: str = "run") -> None:
        self.bench = bench
        self.folder = folder / name
        self.output = self.folder / "output"
        self.run_id = name
        self.folder.mkdir()
        self.port = free_port()
        self.processes: list[Process] = []
        self.limits: Mapping[int, int] | None = None
        """Soft limits of resources that the coordinator starts with."""
        self._others: list[Cluster] = []
        self.config: dict[str, Any] = {}
        self.shared_memory = True
        """Whether workers may hand over gradients in shared memory, or use TCP."""
        self.certified = False
        """Whether every process gets its certificate, and so TLS where memory is not shared."""
        self.configure()

    def configure(self, **settings: Any) -> None:
        """Write the run config; dotted settings with `__` for the dot."""
        tree: dict[str, Any] = {
            "name": self.run_id,
            "num_classes": 5,
            "method": "full",
            "output": str(self.output),
            "model": {"path": str(self.bench.model)},
            "data": {"train": str(self.bench.train), "max_seq_len": 64},
            "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 1e9},
            "training": {"batch_size": BATCH},
            "exchange": {
                "split": "equal",
                "hash_every": 1,
                "join_deadline": PATIENCE,
                "shared_memory": self.shared_memory,
            },
            "checkpoint": {"every": 4, "keep_last": 100},
        }
        for key, value in settings.items():
            *sections, leaf = key.split("__")
            branch = tree
            for section in sections:
                branch = branch.setdefault(section, {})
            branch[leaf] = value
        self.config = tree
        self.run_file.write_text(yaml.safe_dump(tree))

    def another(self, name: str) -> Cluster:
        """Return one more cluster, which ends with this one."""
        made = Cluster(self.bench, self.folder, name)
        made.shared_memory = self.shared_memory
        made.configure()
        self._others.append(made)
        return made

    @property
    def run_file(self) -> Path:
        """The run config."""
        return self.folder / "run.yaml"

    @property
    def address(self) -> str:
        """Where the coordinator listens."""
        return f"127.0.0.1:{self.port}"

    # Starting

    def coordinator(
        self, expect: int, *flags: str, listening: bool = True, half: str = ""
    ) -> Process:
        """Start the coordinator and wait until it listens.

        One that is to fail at `half` a block is another program: see `half_server.py`.
        """
        before = len(self.events("listening"))
        role = ("--role", "coordinator", "--bind", self.address, "--expect-workers", str(expect))
        program = ("tests.cluster.half_server", half) if half else ("trainer.cli",)
        flags = (*role, *self._certificate("coordinator"), *flags)
        process = self.trainer("coordinator", *flags, program=program)
        if listening:
            wait_for(
                lambda: len(self.events("listening")) > before or not process.running,
                "the coordinator listens",
            )
        return process

    def worker(self, rank: int, *flags: str, address: str | None = None) -> Process:
        """Start a stand-in worker: the real client and loop around a replica of NumPy."""
        command = [*_NUMPY_WORKER, str(self.run_file), self.run_id, str(rank)]
        flags = (*self._certificate(f"rank-{rank}"), *flags)
        return self.start(f"worker-{rank}", [*command, address or self.address, *flags])

    def torch_worker(self, rank: int, *flags: str, **environment: str) -> Process:
        """Start `trainer finetune --role worker`."""
        return self.trainer(
            f"worker-{rank}",
            *("--role", "worker", "--rank", str(rank), "--coordinator", self.address),
            *("--threads", "1", *flags),
            **environment,
        )

    def _certificate(self, name: str) -> tuple[str, ...]:
        return ("--tls", str(self.bench.tls / name)) if self.certified else ()

    def trainer(
        self,
        name: str,
        *flags: str,
        program: Sequence[str] = ("trainer.cli",),
        **environment: str,
    ) -> Process:
        """Start `trainer finetune` with this run's config."""
        command = [sys.executable, "-m", *program, "finetune", "--config", str(self.run_file)]
        return self.start(name, [*command, "--run-id", self.run_id, *flags], **environment)

    def start(self, name: str, command: list[str], **environment: str) -> Process:
        """Start any process that ends with the test; keywords are variables of its environment."""
        environment = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
            **environment,
        }
        limits = self.limits if name == "coordinator" else None
        started = sum(process.name.split(".")[0] == name for process in self.processes)
        log_name = f"{name}.{started}" if started else name
        process = Process(log_name, command, self.folder, environment, limits)
        self.processes.append(process)
        return process

    # Watching

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl of one kind, without futures that were abandoned."""
        path = self.output / "metrics.jsonl"
        return [r for r in read_metrics(path) if r["kind"] == kind] if path.exists() else []

    def events(self, *kinds: str, **details: Any) -> list[dict[str, Any]]:
        """Return the events of some kinds that have these details."""
        return [
            event
            for event in self.records("event")
            if event["event"] in kinds and all(event.get(k) == v for k, v in details.items())
        ]

    def wait_event(self, *kinds: str, **details: Any) -> dict[str, Any]:
        """Wait for such an event and return the first."""
        what = f"an event {kinds} with {details}"
        return wait_for(lambda: self.events(*kinds, **details), what, self)[0]

    def wait_step(self, step: int) -> None:
        """Wait until a step is committed."""
        wait_for(lambda: self.step >= step, f"step {step}", self)

    @property
    def step(self) -> int:
        """Steps committed so far."""
        steps = self.records("step")
        return steps[-1]["step"] if steps else 0

    @property
    def status(self) -> dict[str, Any]:
        """What status.json says."""
        return json.loads((self.output / "status.json").read_text())

    @property
    def checkpoint(self) -> Path:
        """The newest complete checkpoint."""
        return find_checkpoint(self.output)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every array of the newest checkpoint: weights and both moments."""
        from safetensors.numpy import load_file

        weights = load_file(self.checkpoint / "model.safetensors")
        return {**load_file(self.checkpoint / OPTIMIZER_FILE), **weights}

    def logs(self) -> str:
        """Return the ends of all logs and the events."""
        parts = [
            f"--- {process.name} ({process.pid})\n{process.text[-3000:]}"
            for process in self.processes
        ]
        parts.append("--- events\n" + "\n".join(map(str, self.events_tail())))
        return "\n".join([*parts, *(other.logs() for other in self._others)])

    def events_tail(self) -> list[dict[str, Any]]:
        """Return the newest events."""
        return self.records("event")[-40:]

    def end(self) -> None:
        """Kill whatever is left."""
        for process in self.processes:
            process.end()
        for other in self._others:
            other.end()

    # Contracts

    def check_contracts(self, ranks: list[int] | None = None) -> None:
        """Check F-DP-001 by hash and F-DP-002 by the ledger of a run that came to its end."""
        assert self.step == self.status["total_steps"]
        self.check_contracts_so_far(ranks)

    def check_contracts_so_far(self, ranks: list[int] | None = None) -> None:
        """Check the same of a run that was stopped."""
        steps = self.records("step")
        total = self.step
        assert [step["step"] for step in steps] == list(range(1, total + 1))
        for step in steps:
            first = (step["step"] - 1) * BATCH % SAMPLES
            expected = range(first, min(first + BATCH, SAMPLES))
            assert _taken(step) == list(expected), f"step {step['step']}: {step['sample_ranges']}"
        proof = self.events("verified")[-1]
        assert proof["at_step"] == total
        if ranks is not None:
            assert proof["ranks"] == ranks
        assert proof["digest"] == read_run(self.checkpoint)["weights_digest"]
        assert not self.events("diverged")


def _taken(step: dict[str, Any]) -> list[int]:
    return [position for _, start, stop in step["sample_ranges"] for position in range(start, stop)]
