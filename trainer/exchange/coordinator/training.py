"""The rounds of a run, one after another: deal, collect, average, commit. Sans-IO."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainer.config.run import RunConfig
from trainer.exchange.coordinator.answers import Answers, Questions
from trainer.exchange.coordinator.dealer import Dealer
from trainer.exchange.coordinator.gradient_sum import GradientSum, SumMemory
from trainer.exchange.coordinator.ledger import Shard
from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.coordinator.outliers import Outliers
from trainer.exchange.coordinator.rounds import Round, step_event
from trainer.exchange.coordinator.validation import Score, Validation
from trainer.exchange.coordinator.weight_audit import WeightAudit
from trainer.exchange.policies.outer_steps import make_policy
from trainer.exchange.protocol.actions import Save, Settle
from trainer.exchange.protocol.members import Member, Membership
from trainer.exchange.protocol.messages import ShardResult, StepCommit
from trainer.exchange.protocol.schedule import StepPlan
from trainer.exchange.protocol.wire import Frame
from trainer.model.layout import GradientLayout
from trainer.optimizer.adamw import TrainState, weights_digest
from trainer.optimizer.early_stopping import EarlyStopping
from trainer.system.errors import NonFiniteError, ProtocolError

_STEPS_BEHIND = 3
"""Times a step's deadline that a proof of equal weights may take."""


class Training:
    """The reference replica and the round that is under way."""

    def __init__(
        self,
        *,
        config: RunConfig,
        layout: GradientLayout,
        plan: StepPlan,
        validation_samples: int,
        state: TrainState,
        membership: Membership,
        outbox: Outbox,
        score: Score,
        early: EarlyStopping,
        questions: Questions | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.policy = make_policy(config, layout, plan, outbox.emit)
        self.dealer = Dealer(membership, outbox, config.exchange)
        self.state = state
        self.round: Round | None = None
        self.stopping = False
        """Whether to end after the step that is under way."""
        self.audit = WeightAudit(outbox, membership.diverged, state.step)
        self._membership = membership
        self._outbox = outbox
        self._outliers = Outliers(layout, config.exchange, outbox, self.policy.residuals.all_sent)
        self._validation = Validation(config, validation_samples, score, early)
        self._answers = Answers(questions)
        self.memory = SumMemory(layout)
        """What the sums of all steps are made in."""
        self._unsettled: Callable[[], None] | None = None
        self._saved_step = state.step

    @property
    def plan(self) -> StepPlan:
        """Which samples each step takes."""
        return self.policy.plan

    # One round

    def begin(self, now: float) -> None:
        """Open the next round and hand out its shards; leaves `round` None at the end."""
        self._open_next(self.state.step, now)
        if self.round:
            for shard in self.round.ledger.dealt:
                self.dealer.assign(self.round, shard, now)

    def gradient(self, member: Member, frame: Frame) -> None:
        """Take a gradient frame in; an average that it completes goes to all workers.

        Raises:
            ProtocolError: the frame belongs to nothing that this member was dealt.
            NonFiniteError: it completes a contribution with a NaN or Inf.
            OutlierError: it completes one that is far too long, and that is to halt the run.
        """
        round_, shard = self._dealt(member, frame.shard)
        round_.check(shard, frame)
        assert round_.sums is not None
        contribution = round_.sums.add(frame)
        if contribution is None:
            return
        if frame.block < len(self.layout.blocks):
            self._outliers.check(frame, contribution)
        round_.ledger.record(shard.id, frame.block)
        if round_.ledger.complete(frame.block):
            average = round_.sums.average(frame.block, round_.ledger.counting(frame.block))
            for other in self._membership:
                self._outbox.stream(other, round_.sums.frames(average, other.generation))
        else:
            round_.sums.begin(frame.block, round_.ledger.leading(frame.block))

    def hand_in(self, member: Member, shard_id: int, samples: int, now: float) -> None:
        """Take a shard of a round for its first samples alone; others get the rest.

        Raises:
            ProtocolError: the shard is not the member's, or cannot be cut there.
        """
        round_, shard = self._dealt(member, shard_id)
        self.dealer.shorten(round_, shard, samples, now)

    def result(self, member: Member, result: ShardResult, now: float) -> None:
        """Take the result of a shard in, which ends the member's work on it.

        Raises:
            ProtocolError: the shard is not the member's, or its gradients are not here.
            NonFiniteError: its loss is NaN or Inf.
        """
        round_, shard = self._dealt(member, result.shard)
        if round_.ledger.missing(shard.id) != (round_.result_column,):
            raise ProtocolError(f"a result of shard {shard.id} out of turn")
        if result.weight != round_.weights.setdefault(shard.id, result.weight):
            raise ProtocolError(f"shard {shard.id}: result and gradients differ in weight")
        if round_.kind == "evaluate":
            self._validation.check(result)
        if round_.kind == "answer":
            self._answers.check(result, shard.size)
        if result.loss_sum is None:
            samples = f"samples {shard.start}..{shard.stop}"
            what = f"rank {member.rank} computed a loss that is not finite in {samples}"
            raise NonFiniteError.at_step(round_.step + 1, what)
        self.policy.residuals.reported(member.rank, result.residual)
        round_.results[shard.id] = result
        round_.ledger.record(shard.id, round_.result_column)
        # What was dealt again waited for the member's own shard first: that is not its overhead.
        if round_.kind == "train" and round_.ledger.is_first(shard):
            elapsed = now - round_.sent_at[shard.id]
            self.dealer.balancer.observe(shard.rank, shard.size, result.seconds, elapsed)

    def advance(self, now: float) -> None:
        """Close the round if nothing is missing, and open the next."""
        round_ = self.round
        if round_ is None or not round_.complete:
            return
        if not math.isfinite(round_.loss() or 0.0):
            raise NonFiniteError.at_step(
                round_.step + 1, "the sum of all workers' losses overflows"
            )
        self.dealer.pace.finished(round_.kind, now - round_.started)
        if round_.kind == "train":
            self._commit(round_, now)
        else:
            if round_.kind == "evaluate":
                self._validated(round_)
            else:
                self._outbox.emit("answers", at=round_.step, answers=self._answers.done(round_))
            self.begin(now)

    def settle(self) -> None:
        """Apply the committed update here too, log it, and save when that is due."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled:
            unsettled()

    @property
    def settled(self) -> bool:
        """Whether every commit that went out was applied here too."""
        return self._unsettled is None

    # Members that come and go

    def catch_up(self, member: Member) -> None:
        """Send a joiner what the current step has averaged already."""
        if self.round and self.round.sums:
            for average in self.round.sums.averages.values():
                self._outbox.stream(member, self.round.sums.frames(average, member.generation))

    def joined(self, member: Member, now: float) -> None:
        """Count the state that a joiner proved, and deal it shards that had no taker."""
        self.audit.joined(member.rank, member.step, now + self._proof_allowance)
        if self.round:
            orphans, self.round.orphans = self.round.orphans, []
            for shard in orphans:
                self.dealer.redeal(self.round, shard, now)

    def lost(self, member: Member, now: float) -> None:
        """Deal the open shards of a lost member again; what it had sent whole stays.

        One that was not ready had none; what its rank left behind earlier is with others.
        """
        self.audit.lost(member.rank)
        self.policy.residuals.lost(member.rank, "its worker was lost")
        if self.round and member.ready:
            for shard in self.round.ledger.open_shards(member.rank):
                if self.round.sums:
                    self.round.sums.forget(shard.id)
                self.dealer.redeal(self.round, shard, now)

    def late(self, now: float) -> list[tuple[Member, str]]:
        """Return the workers whose shard or proof of weights is overdue."""
        unproved = self.audit.late(now)
        late = [
            (member, f"it did not prove its weights after step {unproved[member.rank]} in time")
            for member in self._membership.ready()
            if member.rank in unproved
        ]
        if self.round is not None and now > self.round.deadline:
            reason = "its shard was not done within the step's deadline"
            open_shards, ready = self.round.ledger.open_shards, self._membership.ready()
            if slow := [(member, reason) for member in ready if open_shards(member.rank)]:
                self.dealer.pace.missed()
            late += [(member, why) for member, why in slow if member.rank not in unproved]
        return late

    # Saving

    def save(self) -> None:
        """Ask for a checkpoint of the present step unless there is one."""
        self.settle()
        if self.state.step == self._saved_step:
            return
        self._saved_step = self.state.step
        self.policy.residuals.saved(self.state.step)
        scores = self._validation.scores(self.state.step)
        self._outbox.add(Save(self.state.snapshot(), self._membership.generation, scores))

    # Inside

    def _dealt(self, member: Member, shard_id: int) -> tuple[Round, Shard]:
        shard = self.round.ledger.shard(shard_id) if self.round else None
        if self.round is None or shard is None or shard.rank != member.rank:
            raise ProtocolError(f"shard {shard_id} is not with rank {member.rank} now")
        return self.round, shard

    def _open_next(self, step: int, now: float) -> None:
        """Open what follows after `step` updates: a validation, answers, a step, or nothing."""
        self.round = None
        if self.stopping:
            return
        total = step if self.early_end else self.plan.total_steps
        if not self.early_end and self._validation.due(step, total):
            samples = self._validation.samples
            shares = self.dealer.balancer.proportional(len(samples), self.dealer.ranks())
            self.round = self.dealer.open("evaluate", step, 0, samples, shares, now)
        elif self._answers.due(step, total) and (questions := self._answers.questions):
            prompts = range(len(questions.prompts))
            shares = {self.dealer.balancer.fastest(self.dealer.ranks()): len(prompts)}
            self.round = self.dealer.open("answer", step, 0, prompts, shares, now)
            self.round.ask = questions.asked
        elif step < total:
            terms = self.policy.terms(step)
            doubled = terms.second_moments
            sums = GradientSum(
                self.layout,
                self.policy.codec,
                step,
                settled=terms.settled,
                second_moments=doubled,
                memory=None if doubled else self.memory,
            )
            self.round = self.dealer.open_step(step, self.plan, terms, sums, now)

    def _commit(self, round_: Round, now: float) -> None:
        """Tell all workers to apply the step and what to do next, then do the same here."""
        assert round_.sums is not None
        sums, done = round_.sums, round_.step + 1
        rate = self.policy.learning_rate(round_.step)
        scale = self.policy.clip_scale(round_.step, norm := sums.norm)
        last = self.stopping or done == self.plan.total_steps
        may_end = self._validation.may_end(done, self.plan.total_steps)
        report = last or may_end or done % self.config.exchange.hash_every == 0
        loss, receivers = round_.loss(), len(self._membership)
        self.policy.residuals.committed(settled=round_.settled)
        self._open_next(done, now)
        shards = {shard.rank: shard for shard in self.round.ledger.dealt} if self.round else {}
        for member in self._membership:
            following = None
            if self.round and (shard := shards.get(member.rank)):
                self.round.sent_at[shard.id] = now
                following = self.round.assignment(shard)
            commit = StepCommit(
                step=round_.step,
                loss=loss,
                grad_norm=norm,
                clip_scale=scale,
                learning_rate=rate,
                report=report,
                settled=round_.settled,
                next=following,
            )
            self._outbox.send(member, commit, round_.step)
        self._outbox.add(Settle())

        def settle() -> None:
            self.policy.apply(self.state, sums.gradient, rate, scale)
            if report:
                ranks, due = self.dealer.ranks(), now + self._proof_allowance
                self.audit.ask(done, weights_digest(self.state.weights), ranks, due)
            event = step_event(
                round_,
                receivers,
                generation=self._membership.generation,
                learning_rate=rate,
                round_of=self.plan.inner_steps if round_.inner_batch else None,
                seconds=now - round_.started,
            )
            self._outbox.add(event)
            self.policy.choice.measured(event, self._membership.ready())
            if begins := done == self.plan.first_round:
                self._outliers.forget()
            due = begins or done % self.config.checkpoint.every == 0
            if due and self.round and self.round.kind != "evaluate":
                self.save()

        self._unsettled = settle

    def _validated(self, round_: Round) -> None:
        scores = self._validation.done(round_)
        self._outbox.emit("validation", at=round_.step, **scores)
        self.save()

    @property
    def early_end(self) -> str | None:
        """Why the run ends before its last step."""
        return self._validation.early_end if self.state.step < self.plan.total_steps else None

    @property
    def _proof_allowance(self) -> float:
        """Seconds for a proof: a worker without a share may be some steps behind the others."""
        return _STEPS_BEHIND * self.dealer.pace.allowance("train")
