"""Measure the same sums and the same training steps by each backend, on the same hosts."""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.rig import collective, synthetic, training
from benchmarks.rig.backends import BACKENDS, Name, mpi_environment, mpiexec, nccl_environment
from benchmarks.rig.cluster import LocalCluster
from benchmarks.rig.member import PATIENCE, MemberSpec
from benchmarks.rig.network import ShapedNetwork, missing
from trainer.lab.experiment import Value
from trainer.model.layout import build_layout
from trainer.system.errors import InputError, TrainerError

WARM_UP = 3
REST = 0.05
"""Seconds between sums, so that every worker of the exchange has applied the one before."""
_SAMPLES_EACH = 2


@dataclass(frozen=True)
class Row:
    """The times of one backend: the slowest worker's, medians of all steps."""

    backend: Name
    megabytes: float
    """Of the fp32 gradient that is summed."""
    rate: int | None
    """Mbit/s of every link; None over this machine's loopback."""
    sum_milliseconds: float | None = None
    limit_milliseconds: float | None = None
    """That the busiest link needs for that sum."""
    sum_bytes: int | None = None
    """Sent or received, whichever is more, by the busiest host's interface for a sum."""
    step_milliseconds: float | None = None
    """Of a training step: forward, backward, sum and update."""
    step_bytes: int | None = None
    step_megabytes: float | None = None
    """Of the trained model's gradient."""
    loss: float | None = None
    """Of the last training step."""
    absent: str | None = None
    """What is missing here, and how to get it."""

    def cells(self) -> dict[str, Value]:
        """Return the row for people."""
        limit, took = self.limit_milliseconds, self.sum_milliseconds
        return {
            "backend": BACKENDS[self.backend].title,
            "Mbit/s": "loopback" if self.rate is None else self.rate,
            "MB": round(self.megabytes, 2),
            "sum ms": took and round(took, 1),
            "limit ms": limit and round(limit, 1),
            "of limit": took / limit if took and limit else None,
            "MB moved": self.sum_bytes and round(self.sum_bytes / 1e6, 2),
            "step ms": self.step_milliseconds and round(self.step_milliseconds, 1),
            "MB a step": self.step_bytes and round(self.step_bytes / 1e6, 2),
            "last loss": self.loss and round(self.loss, 4),
        }


@dataclass(frozen=True)
class Comparison:
    """The rows of one call."""

    workers: int
    steps: int
    rows: Sequence[Row]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as `motley.compare/1`."""
        return {
            "schema": "motley.compare/1",
            "workers": self.workers,
            "steps": self.steps,
            "rows": [asdict(row) for row in self.rows],
        }


def check_network(rates: Sequence[int]) -> None:
    """Check that links can be shaped to rates, if any are given.

    Raises:
        InputError: says what is missing.
    """
    if rates and (reason := missing()):
        raise InputError(f"--rate: {reason}; without --rate the loopback is measured")


def compare(
    backends: Sequence[Name],
    megabytes: Sequence[float],
    rates: Sequence[int],
    workers: int,
    steps: int,
) -> Iterator[Row]:
    """Yield a row for each rate, size and backend, as it is measured.

    Args:
        rates: in Mbit/s; none for the loopback alone.

    Raises:
        UnreachableError: a worker failed.
    """
    absent = {name: BACKENDS[name].missing(workers) for name in backends}
    for rate in rates or [None]:
        for size in megabytes:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                network = rate and stack.enter_context(ShapedNetwork(workers, rate * 10**6))
                bench = _Bench(folder, size, rate, network or None, workers, steps)
                for name in backends:
                    if (reason := absent[name]) is not None:
                        yield Row(name, size, rate, absent=reason)
                    else:
                        yield bench.measure(name)


class DivergedError(TrainerError):
    """Ranks of a collective do not hold the same weights; a defect, of Motley or of the backend."""


Stamps = list[list[dict[str, float]]]
"""By step, of each worker."""


class _Bench:
    """The hosts and the model of one size."""

    def __init__(
        self,
        folder: Path,
        megabytes: float,
        rate: int | None,
        network: ShapedNetwork | None,
        workers: int,
        steps: int,
    ) -> None:
        self._folder, self._rate, self._network = folder, rate, network
        self._workers, self._steps = workers, steps
        self._elements = synthetic.layout(max(144, int(megabytes * 1e6 / 4))).size
        self._model = training.write_decoder(folder / "model", megabytes)
        self._trained = build_layout(self._model, training.config(self._model, {})).size

    def measure(self, name: Name) -> Row:
        """Return a backend's row."""
        sums, steps, loss = self._ours() if name == "ours" else self._collective(name)
        size, took = 4e-6 * self._elements, 1e3 * statistics.median(map(span, sums[WARM_UP:]))
        limit = None
        if self._rate is not None:
            limit = 1e3 * BACKENDS[name].limit(self._workers) * 8 * size / self._rate
        ends = [max(worker["committed"] for worker in step) for step in steps[WARM_UP - 1 :]]
        return Row(
            backend=name,
            megabytes=size,
            rate=self._rate,
            sum_milliseconds=took,
            limit_milliseconds=limit,
            sum_bytes=self._network and moved_bytes(sums[WARM_UP - 1 :]),
            step_milliseconds=1e3 * statistics.median(b - a for a, b in pairwise(ends)),
            step_bytes=self._network and moved_bytes(steps[WARM_UP - 1 :]),
            step_megabytes=4e-6 * self._trained,
            loss=loss,
        )

    def _cluster(self) -> LocalCluster:
        return LocalCluster(Path(tempfile.mkdtemp(dir=self._folder)), PATIENCE)

    def _ours(self) -> tuple[Stamps, Stamps, float | None]:
        """Return the stamps of sums, and those of a training and its last loss."""
        sums, _ = self._exchange(trains=False)
        return sums, *self._exchange(trains=True)

    def _exchange(self, *, trains: bool) -> tuple[Stamps, float | None]:
        """Run a coordinator on the first host and a worker on each, over TCP in plain text."""
        steps = WARM_UP + self._steps
        spec = MemberSpec(
            role="worker",
            elements=self._elements,
            workers=self._workers,
            steps=steps,
            batch=_SAMPLES_EACH * self._workers,
            address=(self._host(0), 0),
            settings={
                "exchange.split": "equal",
                "exchange.shared_memory": False,
            },
            gated=0 if trains else steps,
            rest=REST,
            model=str(self._model) if trains else None,
        )
        with self._cluster() as cluster:
            port = cluster.start_coordinator(spec.as_coordinator(), self._inside(0))
            for rank in range(self._workers):
                cluster.start_worker(spec.as_worker(rank, port), self._inside(rank))
            stamps, _ = cluster.run_gated(self._workers)
            return stamps, cluster.last_loss if trains else None

    def _collective(self, name: Name) -> tuple[Stamps, Stamps, float]:
        """Run one rank on each host, and return the same as `_ours`.

        Raises:
            DivergedError: the ranks ended with different weights.
        """
        assert name != "ours"
        spec = collective.CollectiveSpec(
            kind=name,
            world=self._workers,
            address=f"{self._host(0)}:{_free_port()}",
            interface="lo" if self._network is None else "eth0",
            model=str(self._model),
            elements=self._elements,
            steps=WARM_UP + self._steps,
            batch=_SAMPLES_EACH * self._workers,
            results=str(self._folder),
            trains=True,
        )
        with self._cluster() as cluster:
            found = run_ranks(cluster, spec, [self._inside(rank) for rank in range(self._workers)])
        trained = [rank["training"] for rank in found]
        if len({training["digest"] for training in trained}) > 1:
            raise DivergedError(f"{name}: the ranks ended with different weights")
        return _by_step(found), _by_step(trained), trained[0]["loss"]

    def _host(self, number: int) -> str:
        return "127.0.0.1" if self._network is None else self._network.address(number)

    def _inside(self, number: int) -> list[str]:
        return [] if self._network is None else self._network.inside(number)


def _by_step(ranks: Sequence[Mapping[str, Any]]) -> Stamps:
    return [list(step) for step in zip(*(rank["stamps"] for rank in ranks), strict=True)]


def run_ranks(
    cluster: LocalCluster, spec: collective.CollectiveSpec, inside: Sequence[Sequence[str]]
) -> list[Mapping[str, Any]]:
    """Run a rank on each host and return what they found."""
    commands = [[*host, *spec.of_rank(rank)] for rank, host in enumerate(inside)]
    shaped = any(inside)
    if spec.kind == "mpi":
        words = [str(mpiexec())]
        for rank, command in enumerate(commands):
            words += [*([":"] if rank else []), "-n", "1", *command]
        cluster.start("mpiexec", words, environment=mpi_environment(shaped=shaped))
    else:
        more = nccl_environment(shaped=shaped) if spec.kind == "nccl" else None
        for rank, command in enumerate(commands):
            cluster.start(f"{spec.kind} {rank}", command, environment=more)
    for _ in cluster.events():
        pass
    return [json.loads(spec.result(rank).read_text("utf-8")) for rank in range(spec.world)]


def span(step: Sequence[Mapping[str, float]]) -> float:
    """Return the seconds from the first worker's start to the last one's sum."""
    return max(one["last_average"] for one in step) - min(one["first_send"] for one in step)


def moved_bytes(steps: Stamps) -> int:
    """Return the bytes a step of the interface that moved most, in its busier direction."""
    totals = [
        last[way] - first[way]
        for first, last in zip(steps[0], steps[-1], strict=True)
        for way in ("sent", "received")
    ]
    return round(max(totals) / (len(steps) - 1))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
