"""The tasks of a run, one after another: assign, collect, average, commit. Sans-IO."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainer.config.run import RunConfig
from trainer.exchange.coordinator.gradient_sum import GradientSum, SumMemory
from trainer.exchange.coordinator.ledger import Shard
from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.coordinator.outliers import OutlierDetector
from trainer.exchange.coordinator.prompt_generation import GenerationSchedule, PromptSet
from trainer.exchange.coordinator.shard_assigner import ShardAssigner
from trainer.exchange.coordinator.task import Task, make_step_event
from trainer.exchange.coordinator.validation import Score, Validation
from trainer.exchange.coordinator.weight_audit import WeightAudit
from trainer.exchange.policies.step_policy import make_policy
from trainer.exchange.protocol.actions import ApplyUpdate, Save
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
    """The reference replica and the current task."""

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
        questions: PromptSet | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.policy = make_policy(config, layout, plan, outbox.emit)
        self.assigner = ShardAssigner(membership, outbox, config.exchange)
        self.state = state
        self.task: Task | None = None
        self.stopping = False
        """Whether to end after the step that is under way."""
        self.audit = WeightAudit(outbox, membership.diverged, state.step)
        self._membership = membership
        self._outbox = outbox
        self._outliers = OutlierDetector(
            layout, config.exchange, outbox, self.policy.residuals.has_residuals
        )
        self._validation = Validation(config, validation_samples, score, early)
        self._answers = GenerationSchedule(questions)
        self.memory = SumMemory(layout)
        """Buffers for the sums of all steps."""
        self._pending_update: Callable[[], None] | None = None
        self._saved_step = state.step

    @property
    def plan(self) -> StepPlan:
        """The samples of each step."""
        return self.policy.plan

    # One task

    def begin_task(self, now: float) -> None:
        """Open the next task and assign its shards; leaves `task` None at the end."""
        self._open_next_task(self.state.step, now)
        if self.task:
            for shard in self.task.ledger.initial_shards:
                self.assigner.assign_shard(self.task, shard, now)

    def add_gradient(self, member: Member, frame: Frame) -> None:
        """Add a gradient frame; an average that it completes goes to all workers.

        Raises:
            ProtocolError: the frame belongs to no shard of this member.
            NonFiniteError: it completes a contribution with a NaN or Inf.
            OutlierError: it completes one that is far too long, and that is to halt the run.
        """
        task, shard = self._find_assignment(member, frame.shard)
        task.check_frame(shard, frame)
        assert task.sums is not None
        contribution = task.sums.add_frame(frame)
        if contribution is None:
            return
        if frame.block < len(self.layout.blocks):
            self._outliers.check_contribution(frame, contribution)
        task.ledger.record_contribution(shard.id, frame.block)
        if task.ledger.is_complete(frame.block):
            average = task.sums.average_block(frame.block, task.ledger.list_counted(frame.block))
            for other in self._membership:
                self._outbox.send_frames(other, task.sums.make_frames(average, other.generation))
        else:
            task.sums.add_leading(frame.block, task.ledger.list_leading(frame.block))

    def accept_partial_shard(self, member: Member, shard_id: int, samples: int, now: float) -> None:
        """Accept a shard for its first samples only; others are assigned the rest.

        Raises:
            ProtocolError: the shard is not the member's, or cannot be cut there.
        """
        task, shard = self._find_assignment(member, shard_id)
        self.assigner.shorten_shard(task, shard, samples, now)

    def add_result(self, member: Member, result: ShardResult, now: float) -> None:
        """Record the result of a shard, which ends the member's work on it.

        Raises:
            ProtocolError: the shard is not the member's, or its gradients are not here.
            NonFiniteError: its loss is NaN or Inf.
        """
        task, shard = self._find_assignment(member, result.shard)
        if task.ledger.find_missing(shard.id) != (task.result_column,):
            raise ProtocolError(f"unexpected result of shard {shard.id}")
        if result.weight != task.weights.setdefault(shard.id, result.weight):
            raise ProtocolError(f"shard {shard.id}: result and gradients differ in weight")
        if task.kind == "evaluate":
            self._validation.check_result(result)
        if task.kind == "generate":
            self._answers.check_answers(result, shard.size)
        if result.loss_sum is None:
            samples = f"samples {shard.start}..{shard.stop}"
            what = f"rank {member.rank} computed a loss that is not finite in {samples}"
            raise NonFiniteError.at_step(task.step + 1, what)
        self.policy.residuals.record_norm(member.rank, result.residual_norm)
        task.results[shard.id] = result
        task.ledger.record_contribution(shard.id, task.result_column)
        # A reassigned shard waited for the member's own shard first: that is not its overhead.
        if task.kind == "train" and task.ledger.is_first(shard):
            elapsed = now - task.sent_at[shard.id]
            self.assigner.balancer.observe_shard(
                shard.rank, shard.size, result.compute_seconds, elapsed
            )

    def advance(self, now: float) -> None:
        """Finish the task if nothing is missing, and open the next."""
        task = self.task
        if task is None or not task.is_complete:
            return
        if not math.isfinite(task.compute_loss() or 0.0):
            raise NonFiniteError.at_step(task.step + 1, "the sum of all workers' losses overflows")
        self.assigner.durations.record_duration(task.kind, now - task.started)
        if task.kind == "train":
            self._commit_step(task, now)
        else:
            if task.kind == "evaluate":
                self._finish_validation(task)
            else:
                self._outbox.emit(
                    "answers", at_step=task.step, answers=self._answers.finish_task(task)
                )
            self.begin_task(now)

    def apply_update(self) -> None:
        """Apply the committed update to the reference replica, log it, and save when due."""
        finish_update, self._pending_update = self._pending_update, None
        if finish_update:
            finish_update()

    @property
    def is_update_applied(self) -> bool:
        """Whether every commit that was sent was applied to the reference replica too."""
        return self._pending_update is None

    # Members that come and go

    def send_averages(self, member: Member) -> None:
        """Send a joiner the averages of the current step so far."""
        if self.task and self.task.sums:
            for average in self.task.sums.averages.values():
                self._outbox.send_frames(
                    member, self.task.sums.make_frames(average, member.generation)
                )

    def add_member(self, member: Member, now: float) -> None:
        """Record the state that a joiner proved, and reassign orphaned shards."""
        self.audit.add_rank(member.rank, member.step, now + self._proof_timeout)
        if self.task:
            orphans, self.task.orphans = self.task.orphans, []
            for shard in orphans:
                self.assigner.reassign_shard(self.task, shard, now)

    def remove_member(self, member: Member, now: float) -> None:
        """Reassign the open shards of a lost member; whole contributions that it sent stay.

        One that was not ready had none; what its rank left behind earlier is with others.
        """
        self.audit.remove_rank(member.rank)
        self.policy.residuals.report_lost(member.rank, "its worker was lost")
        if self.task and member.ready:
            for shard in self.task.ledger.list_open(member.rank):
                if self.task.sums:
                    self.task.sums.discard_partial(shard.id)
                self.assigner.reassign_shard(self.task, shard, now)

    def find_late_members(self, now: float) -> list[tuple[Member, str]]:
        """Return the workers whose shard or proof of weights is overdue."""
        unproved = self.audit.find_late(now)
        late = [
            (member, f"it did not prove its weights after step {unproved[member.rank]} in time")
            for member in self._membership.list_ready()
            if member.rank in unproved
        ]
        if self.task is not None and now > self.task.deadline:
            reason = "its shard missed the step's deadline"
            open_shards, ready = self.task.ledger.list_open, self._membership.list_ready()
            if slow := [(member, reason) for member in ready if open_shards(member.rank)]:
                self.assigner.durations.double_limit()
            late += [(member, why) for member, why in slow if member.rank not in unproved]
        return late

    # Saving

    def save_checkpoint(self) -> None:
        """Request a checkpoint of the present step unless there is one."""
        self.apply_update()
        if self.state.step == self._saved_step:
            return
        self._saved_step = self.state.step
        self.policy.residuals.record_save(self.state.step)
        scores = self._validation.find_scores(self.state.step)
        self._outbox.add(Save(self.state.take_snapshot(), self._membership.generation, scores))

    # Inside

    def _find_assignment(self, member: Member, shard_id: int) -> tuple[Task, Shard]:
        shard = self.task.ledger.find_shard(shard_id) if self.task else None
        if self.task is None or shard is None or shard.rank != member.rank:
            raise ProtocolError(f"shard {shard_id} is not assigned to rank {member.rank}")
        return self.task, shard

    def _open_next_task(self, step: int, now: float) -> None:
        """Open the task after `step` updates: a validation, a generation, a step, or none."""
        self.task = None
        if self.stopping:
            return
        total = step if self.early_end else self.plan.total_steps
        if not self.early_end and self._validation.is_due(step, total):
            samples = self._validation.samples
            assignments = self.assigner.balancer.divide_proportionally(
                len(samples), self.assigner.list_ready_ranks()
            )
            self.task = self.assigner.open_task("evaluate", step, 0, samples, assignments, now)
        elif self._answers.is_due(step, total) and (questions := self._answers.questions):
            prompts = range(len(questions.prompts))
            assignments = {
                self.assigner.balancer.find_fastest(self.assigner.list_ready_ranks()): len(prompts)
            }
            self.task = self.assigner.open_task("generate", step, 0, prompts, assignments, now)
            self.task.ask = questions.make_request
        elif step < total:
            terms = self.policy.make_terms(step)
            doubled = terms.second_moments
            sums = GradientSum(
                self.layout,
                self.policy.codec,
                step,
                in_bf16=terms.in_bf16,
                second_moments=doubled,
                memory=None if doubled else self.memory,
            )
            self.task = self.assigner.open_step(step, self.plan, terms, sums, now)

    def _commit_step(self, task: Task, now: float) -> None:
        """Commit the step on all workers, with their next shards, then on the reference replica."""
        assert task.sums is not None
        sums, done = task.sums, task.step + 1
        rate = self.policy.learning_rate(task.step)
        scale = self.policy.clip_scale(task.step, norm := sums.norm)
        last = self.stopping or done == self.plan.total_steps
        may_end = self._validation.can_end_run(done, self.plan.total_steps)
        report = last or may_end or done % self.config.exchange.hash_every == 0
        loss, receivers = task.compute_loss(), len(self._membership)
        self.policy.residuals.record_commit(flushed=task.flushes_residuals)
        self._open_next_task(done, now)
        shards = (
            {shard.rank: shard for shard in self.task.ledger.initial_shards} if self.task else {}
        )
        for member in self._membership:
            following = None
            if self.task and (shard := shards.get(member.rank)):
                self.task.sent_at[shard.id] = now
                following = self.task.make_assignment(shard)
            commit = StepCommit(
                step=task.step,
                loss=loss,
                grad_norm=norm,
                clip_scale=scale,
                learning_rate=rate,
                report_weights=report,
                residuals_flushed=task.flushes_residuals,
                next_assignment=following,
            )
            self._outbox.send(member, commit, task.step)
        self._outbox.add(ApplyUpdate())

        def finish_update() -> None:
            self.policy.apply_update(self.state, sums.gradient, rate, scale)
            if report:
                ranks, due = self.assigner.list_ready_ranks(), now + self._proof_timeout
                self.audit.open_request(done, weights_digest(self.state.weights), ranks, due)
            event = make_step_event(
                task,
                receivers,
                generation=self._membership.generation,
                learning_rate=rate,
                inner_steps=self.plan.inner_steps if task.inner_batch_size else None,
                seconds=now - task.started,
            )
            self._outbox.add(event)
            self.policy.choice.record_step(event, self._membership.list_ready())
            if begins := done == self.plan.first_outer_step:
                self._outliers.reset()
            due = begins or done % self.config.checkpoint.every == 0
            if due and self.task and self.task.kind != "evaluate":
                self.save_checkpoint()

        self._pending_update = finish_update

    def _finish_validation(self, task: Task) -> None:
        scores = self._validation.finish_task(task)
        self._outbox.emit("validation", at_step=task.step, **scores)
        self.save_checkpoint()

    @property
    def early_end(self) -> str | None:
        """The reason why the run ends before its last step."""
        return self._validation.early_end if self.state.step < self.plan.total_steps else None

    @property
    def _proof_timeout(self) -> float:
        """Seconds for a proof: a worker without samples may be some steps behind the others."""
        return _STEPS_BEHIND * self.assigner.durations.compute_limit("train")
