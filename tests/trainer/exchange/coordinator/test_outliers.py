"""A contribution far longer than its block's others: said, with its tensor, or the run halts."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import ArrayLike

from tests.trainer.exchange.exact_problem import ExactProblem, tiny_layout
from tests.trainer.exchange.simulated_cluster import SimulatedCluster
from tests.trainer.exchange.staging import until_step
from trainer.config.exchange import ExchangeConfig
from trainer.exchange.coordinator.gradient_sum import Contribution
from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.coordinator.outliers import FEWEST, WINDOW, OutlierDetector
from trainer.exchange.protocol.actions import Emit
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.system.errors import OutlierError

LAYOUT = tiny_layout()
HALTS = OutlierError.exit_code


class Watch:
    """The outliers of one run, and what it was told."""

    def __init__(self, **settings: object) -> None:
        self.outbox = Outbox()
        self.flushed: set[int] = set()
        self.outliers = OutlierDetector(
            LAYOUT, ExchangeConfig.model_validate(settings), self.outbox, self.flushed.__contains__
        )

    def see(
        self,
        values: ArrayLike,
        weight: int = 8,
        *,
        block: int = 0,
        rank: int = 0,
        step: int = 0,
    ) -> dict | None:
        """Show a contribution and return the event about it."""
        flat = np.broadcast_to(np.asarray(values, np.float32), LAYOUT.blocks[block].size).copy()
        kind = MessageType.GRADIENT
        frame = Frame(kind, b"", step=step, rank=rank, block=block, weight=weight)
        with np.errstate(over="ignore"):
            squares = float(np.dot(flat, flat))
        self.outliers.check_contribution(frame, Contribution(lambda: flat, weight, squares))
        events = [action.event for action in self.outbox.take_actions() if isinstance(action, Emit)]
        return events[0] if events else None

    def grow_used_to(self, values: float, weight: int = 8, count: int = FEWEST) -> None:
        for step in range(count):
            assert self.see(np.float32(values), weight, step=step) is None


def test_more_than_ten_times_the_largest():
    watch = Watch()
    watch.grow_used_to(2.0)
    values = np.full(10, 2.0, np.float32)
    values[7] = -600.0  # layers.0.v is the elements 6..9
    event = watch.see(values, rank=3, step=21)
    assert event is not None
    assert (event["event"], event["rank"], event["step"]) == ("outlier", 3, 22)
    assert (event["block"], event["tensor"]) == ("layers.0", "layers.0.v")
    assert event["norm"] == pytest.approx(np.linalg.norm(values) / 8)
    assert event["largest"] == pytest.approx(2.0 * np.sqrt(10) / 8)
    assert watch.see(np.float32(20.0), step=22) is None, "just ten times"


def test_what_is_new_has_nothing_to_be_compared_with():
    watch = Watch()
    watch.grow_used_to(1.0, count=FEWEST - 1)
    assert watch.see(np.float32(1e6)) is None
    assert watch.see(np.float32(1e6), block=1) is None, "each block has its own usual"


@pytest.mark.parametrize("factor", [1.5, 100.0])
def test_the_factor_is_a_setting(factor: float):
    watch = Watch(alarm_factor=factor)
    watch.grow_used_to(1.0)
    assert watch.see(np.float32(factor * 1.01), step=20) is not None
    assert watch.see(np.float32(factor * 0.99), step=21) is None


@pytest.mark.parametrize("kind", ["signal", "noise"])
def test_unequal_shares_compare(kind: str):
    """A sum over w samples grows like w where they agree, like its root where they are noise."""
    power = 1.0 if kind == "signal" else 0.5
    for usual, other in ((400, 1), (1, 400)):
        watch = Watch()
        watch.grow_used_to(usual**power, usual)
        assert watch.see(np.float32(other**power), other, step=20) is None
        assert watch.see(np.float32(300 * other**power), other, step=21) is not None


def test_what_stays_becomes_usual():
    watch = Watch()
    watch.grow_used_to(1.0)
    events = [watch.see(np.float32(50.0), step=20 + step) for step in range(WINDOW)]
    assert all(events[: FEWEST - 1])
    assert not any(events[FEWEST - 1 :])


def test_a_worker_that_is_wrong_again_and_again_is_said_each_time():
    watch = Watch()
    watch.grow_used_to(1.0)
    for step in range(20, 60):
        assert watch.see(np.float32(1.0), rank=0, step=step) is None
        assert watch.see(np.float32(50.0), rank=1, step=step) is not None


def test_a_hard_batch_among_many_that_are_learned_is_none():
    """Norms of a model that has learned most samples: a few are a hundred times the median."""
    watch = Watch()
    drawn = np.random.default_rng(7).lognormal(0.0, 1.5, 600)
    events = [watch.see(np.float32(norm), step=step) for step, norm in enumerate(drawn)]
    assert max(drawn) > 50 * np.median(drawn)
    assert not any(events)
    assert watch.see(np.float32(100 * max(drawn)), step=600) is not None


@pytest.mark.parametrize("weight", [0, 8])
def test_zeros_are_no_measure(weight: int):
    """As at the beginning of a LoRA, or where no token of a share counts."""
    watch = Watch()
    watch.grow_used_to(0.0, weight)
    assert watch.see(np.float32(1.0), step=20) is None


def test_one_event_for_a_rank_and_step():
    """All blocks of a share that is off would be off."""
    watch = Watch()
    for block in (0, 1):
        for step in range(FEWEST):
            watch.see(np.float32(1.0), block=block, step=step)
    assert watch.see(np.float32(99.0), block=1, rank=1, step=20) is not None
    assert watch.see(np.float32(99.0), block=0, rank=1, step=20) is None
    assert watch.see(np.float32(99.0), block=0, rank=2, step=20) is not None
    assert watch.see(np.float32(99.0), block=0, rank=1, step=21) is not None


def test_squares_too_large_for_fp32():
    watch = Watch()
    watch.grow_used_to(1e20)
    event = watch.see(np.float32(1e25), step=20)
    assert event is not None
    assert event["norm"] == pytest.approx(1e25 * np.sqrt(10) / 8)
    assert event["largest"] == pytest.approx(1e20 * np.sqrt(10) / 8)


def test_halting_instead_names_everything():
    watch = Watch(outliers="halt")
    watch.grow_used_to(1.0)
    with pytest.raises(OutlierError) as caught:
        watch.see(np.float32(99.0), rank=1, step=20)
    said = str(caught.value)
    for part in ("step 21", "rank 1", "block layers.0", "tensor layers.0.q", "last checkpoint"):
        assert part in said


# In a run


@pytest.fixture
def long_problem() -> ExactProblem:
    return ExactProblem(samples=200, training__epochs=1, training__evaluate_every=0)


@pytest.mark.usefixtures("small_frames")
def test_a_run_says_it_and_goes_on_with_the_value(long_problem: ExactProblem):
    cluster = SimulatedCluster(long_problem, workers=1)
    until_step(cluster, FEWEST)
    # The gradient is about to be wrong on purpose, so the exact weights are no judge from here on.
    cluster.check = lambda: None
    cluster.record = lambda event: cluster.events.append(event)
    assert not cluster.named("outlier")
    cluster.workers[0].poison = (1, 3, 1e6)
    until_step(cluster, FEWEST + 1)
    (event,) = cluster.named("outlier")
    assert (event["rank"], event["block"], event["tensor"]) == (0, "layers.1", "layers.1.q")
    assert event["step"] == cluster.step
    norms = {event["step"]: event["grad_norm"] for event in cluster.named("step")}
    assert norms[cluster.step] > 1000 * norms[cluster.step - 1], (
        "the result is not changed silently"
    )
    assert not cluster.named("lost")


@pytest.mark.usefixtures("small_frames")
def test_a_run_that_is_to_halt_does_so_before_the_update():
    problem = ExactProblem(
        samples=200, training__epochs=1, training__evaluate_every=0, exchange__outliers="halt"
    )
    cluster = SimulatedCluster(problem, workers=1)
    until_step(cluster, FEWEST)
    cluster.workers[0].poison = (1, 3, 1e6)
    cluster.settle_down()
    assert cluster.end.exit_code == HALTS == 5
    assert "rank 0" in cluster.end.reason
    assert cluster.named("halted")
    assert cluster.saves[-1].snapshot.step <= cluster.step
    assert all(worker.ended and worker.ended.exit_code == HALTS for worker in cluster.workers)


def test_a_settled_step_is_not_compared():
    """What workers owed of many steps comes in one."""
    watch = Watch()
    watch.flushed.add(FEWEST)
    watch.grow_used_to(2.0)
    assert watch.see(2000.0, step=FEWEST) is None
    assert watch.see(2000.0, step=FEWEST + 1)
