"""One task: a training step, a validation, or a generation, assigned as shards. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.data.metrics import sum_confusions, sum_figures
from trainer.exchange.coordinator.gradient_sum import GradientSum
from trainer.exchange.coordinator.ledger import Ledger, Shard
from trainer.exchange.protocol.actions import Step
from trainer.exchange.protocol.messages import GenerationRequest, Kind, ShardAssignment, ShardResult
from trainer.exchange.protocol.wire import Frame
from trainer.system.errors import ProtocolError


@dataclass
class Task:
    """The current task; the last column of the ledger is for results."""

    kind: Kind
    step: int
    epoch: int
    ledger: Ledger
    sums: GradientSum | None
    started: float
    deadline: float
    sent_at: dict[int, float] = field(default_factory=dict[int, float])
    weights: dict[int, int] = field(default_factory=dict[int, int])
    """Per shard the weight that its gradients came with; its result must say the same."""
    results: dict[int, ShardResult] = field(default_factory=dict[int, ShardResult])
    orphans: list[Shard] = field(default_factory=list[Shard])
    """Shards of lost workers that no ready worker could take."""
    in_bf16: bool = False
    """Whether gradients come in bf16, with all residuals."""
    flushes_residuals: bool = False
    """Whether no member has a residual after it."""
    codec: str = ""
    """The codec of a training step, as a setting."""
    inner_batch_size: int = 0
    """Samples of one inner step of a worker, about; 0 where each worker sends gradients."""
    time_limit: float | None = None
    """Seconds after which a worker hands in what it has of its first shard."""
    ask: Callable[[range], GenerationRequest] | None = None
    """Returns the prompts of a shard that is to answer."""

    @property
    def result_column(self) -> int:
        """The ledger's column for results."""
        return self.ledger.columns - 1

    @property
    def is_complete(self) -> bool:
        """True once every block was averaged and every sample has its result."""
        averaged = len(self.sums.averages) if self.sums else 0
        return averaged == self.result_column and self.ledger.is_complete(self.result_column)

    def make_assignment(self, shard: Shard) -> ShardAssignment:
        """Return the message that assigns a shard to its worker."""
        missing = self.ledger.find_missing(shard.id)
        whole = len(missing) == self.ledger.columns
        return ShardAssignment(
            kind=self.kind,
            shard=shard.id,
            step=self.step,
            epoch=self.epoch,
            start=shard.start,
            stop=shard.stop,
            missing_blocks=None if whole else tuple(c for c in missing if c != self.result_column),
            global_batch_size=self.ledger.num_samples,
            in_bf16=self.in_bf16,
            inner_batch_size=self.inner_batch_size,
            time_limit=self.time_limit if self.ledger.is_whole(shard) else None,
            generation_request=self.ask(range(shard.start, shard.stop)) if self.ask else None,
        )

    def check_frame(self, shard: Shard, frame: Frame) -> None:
        """Check that a gradient frame of a shard's worker is expected.

        Raises:
            ProtocolError: it is of another step, block or weight, or the block has already arrived.
        """
        if self.sums is None or frame.step != self.step or frame.rank != shard.rank:
            raise ProtocolError(f"a gradient of step {frame.step}, which is not in progress")
        self.sums.check_block(frame)
        if not self.ledger.needs_contribution(shard.id, frame.block):
            raise ProtocolError(f"block {frame.block} of shard {shard.id} has already arrived")
        if frame.weight != self.weights.setdefault(shard.id, frame.weight):
            raise ProtocolError(f"shard {shard.id}: its blocks differ in weight")

    def split_shard(self, shard: Shard, samples: int) -> tuple[Shard, Shard]:
        """Split a shard into its first `samples`, which are handed in, and the rest.

        Raises:
            ProtocolError: it cannot be cut there, or something of it was sent already.
        """
        begun = len(self.ledger.find_missing(shard.id)) < self.ledger.columns or (
            self.sums is not None and any(key[1] == shard.id for key in self.sums.partial)
        )
        if not self.inner_batch_size or begun or not 0 < samples < shard.size:
            raise ProtocolError(f"{samples} samples of shard {shard.id} handed in")
        middle = shard.start + samples
        kept = Shard(shard.id, shard.rank, shard.start, middle)
        return kept, Shard(shard.id, shard.rank, middle, shard.stop)

    def list_results(self) -> list[ShardResult]:
        """Return the results that count, in the order of their samples."""
        return [self.results[shard.id] for shard in self.ledger.list_counted(self.result_column)]

    def compute_loss(self) -> float | None:
        """Return the mean loss over all samples or tokens, None if there is none to learn.

        It is NaN when a shard's was not finite.
        """
        results = self.list_results()
        weight = sum(result.weight for result in results)
        sums = (math.nan if r.loss_sum is None else r.loss_sum for r in results)
        return sum(sums) / weight if weight else None

    def compute_confusion(self) -> list[list[int]] | None:
        """Return the summed confusion matrix of a classifier's validation."""
        return sum_confusions(result.confusion for result in self.list_results())

    def compute_figures(self) -> dict[str, float]:
        """Return the means over the samples of a validation by name, of those that all have."""
        total = sum_figures([result.figures for result in self.list_results()])
        return {name: value / self.ledger.num_samples for name, value in total.items()}


class TaskDurations:
    """The durations of tasks, and the time limit that follows from them."""

    def __init__(self, first: float, least: float) -> None:
        self._first = first
        self._least = least
        self._patience = 1.0
        self._expects_outer_steps = False
        self._seconds: dict[Kind, deque[float]] = {
            "train": deque(maxlen=50),
            "evaluate": deque(maxlen=50),
            "generate": deque(maxlen=50),
        }

    def expect_outer_steps(self, inner_steps: int) -> None:
        """Forget how long ordinary steps took, before the first outer step."""
        if not self._expects_outer_steps:
            self._expects_outer_steps = True
            self._first *= inner_steps
            self._seconds["train"].clear()

    def record_duration(self, kind: Kind, seconds: float) -> None:
        """Record the duration of a task."""
        self._seconds[kind].append(seconds)
        self._patience = 1.0

    def double_limit(self) -> None:
        """Double the limit until a task is finished: all may have become slower for good."""
        self._patience *= 2

    def compute_limit(self, kind: Kind, expected: float = 0.0) -> float:
        """Return the seconds that a task may take: max(3 x p95, least); the first one gets more.

        `expected` seconds of the slowest share count like a p95: when few workers are left, each
        takes longer than the past says.
        """
        seconds = sorted(self._seconds[kind])
        if not seconds:
            return self._patience * self._first
        p95 = seconds[int(0.95 * (len(seconds) - 1))]
        return self._patience * max(3 * max(p95, expected), self._least)


def make_step_event(
    task: Task,
    receivers: int,
    *,
    generation: int,
    learning_rate: float,
    inner_steps: int | None,
    seconds: float,
) -> Step:
    """Return the event of a committed step.

    Its exchange begins when the slowest worker hands over its first gradient. What is exposed of it
    is not hidden behind that worker's backward: what the step took beyond its computing.
    """
    assert task.sums is not None
    shards = task.ledger.list_counted(task.result_column)
    results = task.list_results()
    per_rank: dict[int, float] = {}
    computing: dict[int, float] = {}
    hiding: dict[int, float] = {}
    for shard, result in zip(shards, results, strict=True):
        rank = shard.rank
        rate_of_rank = result.tokens / result.compute_seconds if result.compute_seconds else 0.0
        per_rank[rank] = per_rank.get(rank, 0.0) + rate_of_rank
        computing[rank] = computing.get(rank, 0.0) + result.compute_seconds
        hiding[rank] = hiding.get(rank, 0.0) + min(result.overlap_seconds, result.compute_seconds)
    slowest = max(computing, key=lambda rank: computing[rank])
    exposed = max(seconds - computing[slowest], 0.0)
    sent = sum(average.encoded.size for average in task.sums.averages.values()) * receivers
    return Step(
        step=task.step + 1,
        epoch=task.epoch,
        generation=generation,
        loss=task.compute_loss(),
        learning_rate=learning_rate,
        grad_norm=task.sums.norm,
        seconds=seconds,
        tokens_per_second=sum(result.tokens for result in results) / max(seconds, 1e-9),
        sample_ranges=[[shard.rank, shard.start, shard.stop] for shard in shards],
        worker_tokens_per_second=per_rank,
        worker_seconds={rank: round(value, 6) for rank, value in computing.items()},
        worker_overlap_seconds={rank: round(value, 6) for rank, value in hiding.items()},
        exchange_ms=1e3 * (hiding[slowest] + exposed),
        exchange_exposed_ms=1e3 * exposed,
        exchange_bytes=task.sums.bytes_received + sent,
        codec=task.codec,
        inner_steps=inner_steps,
        watts={
            shard.rank: result.watts
            for shard, result in zip(shards, results, strict=True)
            if result.watts is not None
        },
    )
