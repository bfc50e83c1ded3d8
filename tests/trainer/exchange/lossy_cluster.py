"""A simulated cluster with a quantised codec, whose every sent and owed number is accounted for.

There is no right sequence of weights here: what is sent depends on who computes what. What must
hold instead after every commit: all who are there hold the same bits, and

    averages applied + what is owed + what was lost = the averages of all true gradients

Owed is what the coordinator's averages and each worker's sums left out, if a later step sends it.
Lost is what a worker owed at the moment it was lost, counting only what the ledger has of it, and
what is rounded off for good: by int8, and by bf16 in a flush step. All of it is kept in double
precision, as parts of the mean gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import SimulatedCluster
from tests.trainer.exchange.simulated_worker import SimulatedWorker
from trainer.config.codec import AUTO, FREE
from trainer.exchange.coordinator.ledger import Ledger
from trainer.exchange.policies.feedback import ErrorFeedback
from trainer.exchange.policies.step_policy import StepTerms
from trainer.exchange.protocol.codecs import Bytes, Codec, SenderCodec
from trainer.exchange.protocol.messages import ShardAssignment
from trainer.exchange.protocol.wire import Frame
from trainer.exchange.worker.session import Session
from trainer.model.layout import GradientLayout

Float64 = NDArray[np.float64]


class LossyProblem(ExactProblem):
    """Samples of weight 1 with gradients that no codec keeps."""

    # Not the base's list: nothing is known ahead, and a resumed run computes steps again.
    trajectory: dict[int, bytes]  # type: ignore[assignment]
    """The weights after so many updates, as the first member that applied them holds them."""

    def gradient(self, epoch: int, position: int) -> np.ndarray:
        draw = np.random.default_rng([epoch, position])
        return draw.standard_normal(self.layout.size).astype(np.float32)

    def weight(self, position: int) -> int:
        return 1

    def true_average(self, step: int) -> Float64:
        """Return the mean gradient of a step's samples, and behind it what a round flushes."""
        at = self.plan.find_samples(step)
        drawn = [self.gradient(at.epoch, position) for position in range(at.start, at.stop)]
        samples = np.array(drawn, np.float64)
        found = np.zeros(self.account.size)
        found[: self.layout.size] = np.mean(samples, axis=0)
        if self.wire_layout(step) is not self.layout:
            found[self.layout.size :] = np.mean(np.abs(samples), axis=0)
        return found

    @property
    def account(self) -> GradientLayout:
        """The layout of all that may travel."""
        return self.layout.with_second_moments if self.config.exchange.has_rounds else self.layout

    def check_event(self, event: dict[str, Any], applied: int) -> None:
        if event["event"] == "step":
            at = self.plan.find_samples(event["step"] - 1)
            covered = at.start
            for _, start, stop in event["sample_ranges"]:
                assert start == covered < stop, f"samples {event['sample_ranges']}"
                covered = stop
            assert covered == at.stop
            assert event["loss"] == self.step_loss(event["step"] - 1)
            assert applied == event["step"]

    def _compute(self) -> None:
        self.trajectory = {0: self.fresh_state().weights.tobytes()}


class Debtor:
    """One membership's account."""

    def __init__(self, session: Session, size: int) -> None:
        self.session = session
        self.owed: Float64 = np.zeros(size)
        """After the last commit, as the ledger has it."""
        self.encoded: dict[tuple[int, int], tuple[Float64, Float64]] = {}
        """In this step, by shard and block: what it added to what is owed, and rounded off."""


class LossyCluster(SimulatedCluster):
    """Checks the account at every commit."""

    problem: LossyProblem
    puts_off = False  # the account is made up at each update, before any worker goes on

    def start_coordinator(self) -> None:
        size = self.problem.account.size
        self.debtors: list[Debtor] = []
        self.true, self.applied, self.lost = np.zeros(size), np.zeros(size), np.zeros(size)
        self._ledgers: dict[int, Ledger] = {}
        self._flushes: dict[int, bool] = {}
        super().start_coordinator()
        training = self.machine.training
        start = training.state.step
        self.problem.trajectory = {
            step: weights for step, weights in self.problem.trajectory.items() if step <= start
        }
        policy = training.policy
        apply, terms_of, choice = policy.apply_update, policy.make_terms, policy.choice
        own = policy.codec
        encode = own.encode

        def applied(state: Any, average: Any, rate: float, scale: float) -> None:
            self._committed(state.step, average)
            apply(state, average, rate, scale)

        def encoded(block: int, values: np.ndarray, **terms: Any) -> Any:
            due = _residual(own, block) + values
            found = encode(block, values, **terms)
            self.lost[self._span(block)] += _rounded_off(due, found, _residual(own, block))
            return found

        def terms(step: int) -> StepTerms:
            if self.problem.config.exchange.codec == AUTO:  # what is owed must survive every change
                choice.codec = FREE[step // 2 % 2]
            found = terms_of(step)
            self._flushes[step] = found.flushes_residuals
            return found

        # Wrapped on the instance, for which mypy and pyright have no type: the product keeps no
        # account, and a subclass could not be put into a machine that builds its own policy.
        policy.make_terms = terms
        policy.apply_update = applied
        own.encode = encoded

    def connect(self, worker: SimulatedWorker, certified: int | None = None) -> None:
        before = worker.session
        super().connect(worker, certified)
        if worker.session and worker.session is not before:
            self._watch(worker.session)

    def record(self, event: dict[str, Any]) -> None:
        super().record(event)
        if event["event"] == "lost":
            self._lose(event["rank"])

    def check(self) -> None:
        """Everyone who is there and has applied k updates holds the same bits."""
        if self.coordinator is None:
            return
        states = [self.coordinator.training.state]
        for worker in self.workers:
            if worker.state and worker.session and worker.member_of is worker.session:
                states.append(worker.state)
        for state in states:
            weights = state.weights.tobytes()
            assert weights == self.problem.trajectory.setdefault(state.step, weights)

    # Inside

    def _perform(self, actions: list[Any]) -> None:
        super()._perform(actions)
        if self.coordinator and (task := self.coordinator.training.task):
            self._ledgers[task.step] = task.ledger

    def _span(self, block: int) -> slice:
        found = self.problem.account.blocks[block]
        return slice(found.start, found.stop)

    def _watch(self, session: Session) -> None:
        debtor = Debtor(session, self.problem.account.size)
        self.debtors.append(debtor)
        sender, encode_late, encode = session.codec, session._encode_late, session.codec.encode
        latest: list[tuple[Float64, Float64]] = []

        def encoded(
            block: int, values: np.ndarray, *, in_bf16: bool = False, batch: int = 0
        ) -> Any:
            scaled = _residual(sender, block)
            if isinstance(sender, ErrorFeedback) and (before := sender.batches[block]):
                scaled = scaled * np.float32(batch / before)
            found = encode(block, values, in_bf16=in_bf16, batch=batch)
            after = _residual(sender, block)
            rounded = _rounded_off(scaled + values, found, after)
            latest[:] = [((after.astype(np.float64) - scaled) / batch, rounded / batch)]
            return found

        def watched(
            shard: ShardAssignment, index: int, gradient: np.ndarray, weight: int
        ) -> Iterator[Frame]:
            frames = encode_late(shard, index, gradient, weight)
            if first := next(frames, None):
                debtor.encoded.setdefault((shard.shard, index), latest[0])
                yield first
                yield from frames

        # Wrapped on the instance, as for the coordinator: the session is made by the product.
        sender.encode, session._encode_late = encoded, watched

    def _book(self, debtor: Debtor, ledger: Ledger | None) -> bool:
        """Book what the ledger has of a step; return whether that is all that was encoded."""
        whole = True
        for (shard, block), (change, rounded) in debtor.encoded.items():
            entry = ledger._entries.get(shard) if ledger else None
            if entry and block in entry.recorded:
                debtor.owed[self._span(block)] += change
                self.lost[self._span(block)] += rounded
            else:
                whole = False
        return whole

    def _lose(self, rank: int) -> None:
        for debtor in self.debtors:
            if debtor.session.accepted and debtor.session.rank == rank:
                ledger = self._ledgers[max(self._ledgers)] if self._ledgers else None
                shards = {shard for shard, _ in debtor.encoded}
                for known in self._ledgers.values():
                    if shards & known._entries.keys():
                        ledger = known
                self._book(debtor, ledger)
                self.lost += debtor.owed
        self.debtors = [
            debtor
            for debtor in self.debtors
            if not (debtor.session.accepted and debtor.session.rank == rank)
        ]

    def _committed(self, step: int, flat: np.ndarray) -> None:
        """Check the account, before any worker sees the commit."""
        own, flushes = self.machine.training.policy.codec, self._flushes[step]
        self.true += self.problem.true_average(step)
        self.applied[: flat.size] += flat[:]
        ledger = self._ledgers[step]
        for debtor in self.debtors:
            whole = self._book(debtor, ledger)
            blocks = {block for _, block in debtor.encoded}
            sender = debtor.session.codec
            if whole and isinstance(sender, ErrorFeedback):
                for block in blocks:
                    span, residual = self._span(block), sender.residuals[block]
                    if flushes:
                        assert not residual.any(), "a flush step leaves a residual"
                    batch = sender.batches[block]
                    np.testing.assert_allclose(residual / batch, debtor.owed[span], atol=1e-5)
            debtor.encoded.clear()
            if flushes:
                self.lost += debtor.owed
                debtor.owed[...] = 0
        if flushes:
            assert own.norm == 0
        blocks = range(len(self.problem.account.blocks))
        owed = np.concatenate([_residual(own, block) for block in blocks])
        owed = owed + sum(debtor.owed for debtor in self.debtors)
        np.testing.assert_allclose(self.applied + owed + self.lost, self.true, atol=1e-4)
        self._ledgers = {number: known for number, known in self._ledgers.items() if number > step}


def feedback_of(session: Session | None) -> ErrorFeedback:
    """Return the error feedback of a membership that takes outer steps in int4."""
    assert session
    assert isinstance(session.codec, ErrorFeedback)
    return session.codec


def _residual(sender: SenderCodec, block: int) -> np.ndarray:
    """Return the residual of a block that a sender has not sent."""
    if isinstance(sender, ErrorFeedback):
        return sender.residuals[block].copy()
    return np.zeros(sender._sizes[block], np.float32)


def _rounded_off(due: np.ndarray, sent: tuple[Codec, Bytes], residual: np.ndarray) -> Float64:
    """Return what is neither sent nor owed."""
    arrived = np.empty_like(due)
    codec, encoded = sent
    codec.decode(encoded, arrived)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = due.astype(np.float64) - arrived - residual
    return np.nan_to_num(rounded, posinf=0, neginf=0)  # else the run is halted
