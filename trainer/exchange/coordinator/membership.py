"""The coordinator: the state machine that keeps all replicas of a run equal.

Sans-IO: `add_connection`, `receive_frame`, `remove_connection`, `tick` and `stop` take an event and
the time, and return actions for a shell to carry out; no sockets, no clock, no threads. This file
keeps the members and the phase of the run, `training.py` runs the tasks. The message flow is drawn
in docs/protocol.md.
"""

from __future__ import annotations

import math
from typing import Literal

from trainer.config.run import RunConfig
from trainer.exchange.coordinator.joiners import Joiners
from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.coordinator.pending_connections import (
    JOIN_REQUEST_TIMEOUT,
    PendingConnections,
)
from trainer.exchange.coordinator.prompt_generation import PromptSet
from trainer.exchange.coordinator.training import Training
from trainer.exchange.coordinator.validation import Score
from trainer.exchange.protocol import messages
from trainer.exchange.protocol.actions import Action, Finish, Send
from trainer.exchange.protocol.members import Certified, Job, Member, Membership, RefusalError
from trainer.exchange.protocol.schedule import StepPlan
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.model.layout import GradientLayout
from trainer.optimizer.adamw import TrainState
from trainer.optimizer.early_stopping import EarlyStopping
from trainer.system.errors import (
    GradientError,
    NonFiniteError,
    ProtocolError,
    TrainerError,
    UnprovedError,
    UnreachableError,
)

Phase = Literal["waiting", "running", "finishing", "over"]

RESUME_PATIENCE = 15.0
"""Seconds that a resumed run waits for all of its workers before it goes on with those here."""
STOP_PATIENCE = 10.0
"""Seconds that a stop waits for the step under way, and for the last proofs of equal weights."""
_WORK = (MessageType.SHARD_RESULT, MessageType.PARTIAL_SHARD)


class Coordinator:
    """One run's state machine; called from one thread, times are monotonic seconds."""

    def __init__(
        self,
        *,
        config: RunConfig,
        job: Job,
        layout: GradientLayout,
        plan: StepPlan,
        validation_samples: int,
        state: TrainState,
        expect_workers: int,
        score: Score,
        now: float,
        generation: int = 0,
        early: EarlyStopping | None = None,
        questions: PromptSet | None = None,
    ) -> None:
        self.phase: Phase = "waiting"
        self.expect_workers = expect_workers
        self.membership = Membership(job, generation)
        self._outbox = Outbox()
        self.training = Training(
            config=config,
            layout=layout,
            plan=plan,
            validation_samples=validation_samples,
            state=state,
            membership=self.membership,
            outbox=self._outbox,
            score=score,
            early=early or EarlyStopping(None),
            questions=questions,
        )
        self._settings = config.exchange
        layout, patience = self.training.policy.wire_layout, config.exchange.join_deadline
        self._joiners = Joiners(self.membership, self._outbox, len(layout.blocks) + 1, patience)
        self._resumed = state.step > 0
        self._pending = PendingConnections(patience)
        self._stop_reason, self._stop_code = "", 0
        self._no_worker_since = now
        self._stop_by = math.inf
        self._last_tick = self._last_heartbeat = now

    # Events

    def add_connection(self, link: int, certified: Certified, now: float) -> list[Action]:
        """Add a new link; `certified` is the result of its certificate's check, if it has one."""
        self._pending.add(link, certified, now)
        return self._outbox.take_actions()

    def receive_frame(self, link: int, frame: Frame, now: float) -> list[Action]:
        """Handle a frame that was received on a link."""
        if self.phase == "over":
            return []
        self.training.apply_update()
        try:
            if link in self._pending:
                self._handle_pending_frame(link, frame, now)
            elif member := self.membership.find_member(link):
                self._handle_member_frame(member, frame, now)
                task = self.training.task
                if frame.type is not MessageType.GRADIENT or (task and task.is_complete):
                    self._advance(now)
        except ProtocolError as error:
            self._expel_link(link, str(error), now)
        except GradientError as error:
            return self.halt(error)
        return self._outbox.take_actions()

    def record_activity(self, link: int, now: float) -> None:
        """Record that bytes were received on a link: the peer lives, also within a long frame."""
        if member := self.membership.find_member(link):
            member.last_received = now

    def remove_connection(self, link: int, reason: str, now: float) -> list[Action]:
        """Remove a link that was closed, or given up by its shell."""
        self._pending.discard(link)
        if (member := self.membership.find_member(link)) and self.phase != "over":
            self._remove_member(member, reason, now)
        return self._outbox.take_actions()

    def tick(self, now: float) -> list[Action]:
        """Check all deadlines; call this several times a heartbeat."""
        if self.phase == "over":
            return []
        self.training.apply_update()
        self._postpone_deadlines(now)
        for link in self._pending.find_silent(now):
            self._expel_link(link, f"no JoinRequest within {JOIN_REQUEST_TIMEOUT:.0f} s", now)
        for member in list(self.membership):
            if now - member.last_received > self._settings.lost_after:
                self._expel_link(member.link, f"silent for {self._settings.lost_after:g} s", now)
        for member, reason in self.training.find_late_members(now):
            self._expel_link(member.link, reason, now)
        for member in self._joiners.find_overdue(now):
            self._expel_link(
                member.link, self.membership.bar_rank(member, self._settings.join_deadline), now
            )
        if now - self._last_heartbeat >= self._settings.heartbeat:
            self._last_heartbeat = now
            for member in self.membership:
                self._outbox.send_heartbeat(member)
        self._check_join_deadline(now)
        self._dismiss_stuck_readers(now)
        self._advance(now)
        return self._outbox.take_actions()

    def stop(self, reason: str, now: float, exit_code: int = 0) -> list[Action]:
        """Save what is committed, give the step that is under way some time, and end in order."""
        if self.phase == "over" or self.training.stopping:
            return []
        self._stop_reason, self._stop_code = reason, exit_code
        self._stop_by = now + STOP_PATIENCE
        self.training.stopping = True
        self._outbox.emit("stopping", reason=reason)
        # First of all: the caller must not wait for a step that takes minutes.
        self.training.save_checkpoint()
        if self.phase in ("waiting", "running") and not (
            self._is_stepping and self.membership.list_ready()
        ):
            self._begin_finish()
        return self._outbox.take_actions()

    def halt(self, error: TrainerError) -> list[Action]:
        """End at once with an error's exit code; what is not saved is lost."""
        if self.phase == "over":
            return []
        cause = {"non_finite": True} if isinstance(error, NonFiniteError) else {}
        self._outbox.emit("halted", reason=str(error), **cause)
        self._end_run(error.exit_code, str(error))
        return self._outbox.take_actions()

    def fail(self, reason: str) -> list[Action]:
        """End after a defect: abandon the current task, and save the last committed state."""
        self._outbox.take_actions()
        self.phase = "over"
        self.training.save_checkpoint()
        for member in self.membership:
            self._outbox.close_link(member.link, reason)
        self._outbox.add(Finish(1, reason))
        return self._outbox.take_actions()

    def apply_update(self, now: float) -> list[Action]:
        """Finish a commit (apply, log, save), unless an event did so before."""
        self.training.apply_update()
        self._advance(now)
        return self._outbox.take_actions()

    # Members

    def _handle_pending_frame(self, link: int, frame: Frame, now: float) -> None:
        """Handle a frame of a worker that has not joined."""
        if frame.type in (MessageType.JOIN_REQUEST, MessageType.HEARTBEAT):
            match messages.parse_message(frame):
                case messages.JoinRequest() as request:
                    return self._handle_join_request(link, request, now)
                case messages.Heartbeat(read_progress=messages.ReadProgress() as reading):
                    return self._pending.record_reading(link, reading, now)
                case _:
                    pass
        raise ProtocolError(f"{frame.type.name} before JoinRequest")

    def _handle_join_request(self, link: int, request: messages.JoinRequest, now: float) -> None:
        certified = self._pending.admit(link, request)
        state = self.training.state
        applicant = Member(link, request.rank or 0, 0, request, now)
        if self.phase == "finishing":
            self._shut_down_link(link, "the run is over", exit_code=0)
            return
        try:
            member = self.membership.admit_worker(link, request, certified, now)
        except RefusalError as refusal:
            refused = messages.JoinRefused(reason=str(refusal)[:1000], retry=refusal.retry)
            self._outbox.send(applicant, refused)
            self._outbox.close_link(link, str(refusal), notified=True)
            self._outbox.emit("refused", rank=request.rank, reason=str(refusal))
            return
        member.step, moments = state.step, state.step > 0
        accepted = messages.JoinAccepted(
            rank=member.rank,
            generation=member.generation,
            step=state.step,
            has_moments=moments,
            heartbeat=self._settings.heartbeat,
            lost_after=self._settings.lost_after,
        )
        self._outbox.send(member, accepted)
        frames = member.delivery.make_state_frames(
            state.take_snapshot(), member.generation, moments
        )
        self._outbox.send_frames(member, frames)
        self.training.send_averages(member)

    def _handle_member_frame(self, member: Member, frame: Frame, now: float) -> None:
        if frame.generation != (due := member.generation):
            raise ProtocolError(f"{frame.type.name} of generation {frame.generation}, not {due}")
        if self.phase == "finishing" and frame.type in (MessageType.GRADIENT, *_WORK):
            return  # what a stop cut short: a validation, or a step that all workers left
        if frame.type is MessageType.GRADIENT:
            self.training.add_gradient(member, frame)
            return
        match messages.parse_message(frame):
            case messages.Heartbeat(read_progress=None):
                pass
            case messages.StateLoaded() as proof:
                member.confirm_state(proof.digest)
            case messages.ShardResult() as result:
                self.training.add_result(member, result, now)
            case messages.PartialShard(shard=shard, samples=samples):
                self.training.accept_partial_shard(member, shard, samples, now)
            case messages.WeightsReport() as report:
                self.training.audit.record_report(member.rank, report)
            case messages.Leave(reason=reason):
                self._expel_link(member.link, reason, now)
            case other:
                raise ProtocolError(f"{other.type.name} is not for the coordinator")

    def _activate_member(self, member: Member, now: float) -> None:
        event, details = self.membership.activate_member(member)
        self._outbox.emit(event, **details)
        self.training.add_member(member, now)
        self._check_join_deadline(now)

    def _expel_link(self, link: int, reason: str, now: float) -> None:
        self._pending.discard(link)
        self._outbox.close_link(link, reason)
        if member := self.membership.find_member(link):
            self._remove_member(member, reason, now)

    def _dismiss_stuck_readers(self, now: float) -> None:
        if self.phase == "over":
            return
        for link, reading, reason in self._pending.find_stuck(now):
            self._outbox.emit("refused", rank=reading.rank, reason=reason)
            self._shut_down_link(link, reason, UnreachableError.exit_code)

    def _shut_down_link(self, link: int, reason: str, exit_code: int) -> None:
        """End a worker that has not joined."""
        self._pending.discard(link)
        end = messages.Shutdown(reason=reason[:1000], exit_code=exit_code)
        self._outbox.add(Send(link, [end.to_frame(0)]))
        self._outbox.close_link(link, reason, notified=True)

    def _remove_member(self, member: Member, reason: str, now: float) -> None:
        self.membership.remove_member(member)
        self._outbox.emit(
            "lost", rank=member.rank, reason=reason, generation=self.membership.generation
        )
        if member.ready and self.phase == "running" and not self.membership.list_ready():
            self._no_worker_since = now
        self.training.remove_member(member, now)

    def _postpone_deadlines(self, now: float) -> None:
        """Postpone all deadlines if this process itself was suspended: it could receive nothing."""
        slept, self._last_tick = now - self._last_tick, now
        if slept <= self._settings.lost_after / 2:
            return
        self._no_worker_since = min(now, self._no_worker_since + slept)
        for member in self.membership:
            member.last_received = min(now, member.last_received + slept)
        self.training.audit.postpone_deadlines(slept)
        if task := self.training.task:
            task.deadline += min(slept, now - task.started)
        self._pending.postpone_deadlines(slept, now)

    # Phases

    def _check_join_deadline(self, now: float) -> None:
        """Start when all members have joined; give up if none has joined in time."""
        ready = [member.rank for member in self.membership.list_ready()]
        waited, patience = now - self._no_worker_since, self._settings.join_deadline
        unmoved = min(waited, now - self._pending.moved)
        gave_up = unmoved > patience and not self._joiners.has_waiting_streams()
        if self.phase == "waiting":
            complete = len(ready) >= self.expect_workers
            if complete or (self._resumed and ready and waited > min(patience, RESUME_PATIENCE)):
                self.phase = "running"
                self.training.begin_task(now)
            elif gave_up:
                missing = ", ".join(str(r) for r in range(self.expect_workers) if r not in ready)
                stuck = self._pending.describe_stuck(ready)
                self._end_run(3, f"rank {missing} did not join within {patience:.0f} s{stuck}")
        elif self.phase == "running" and not ready and gave_up:
            self.training.save_checkpoint()
            self._end_run(
                3, f"no worker was left for {patience:.0f} s: see their logs, then resume"
            )

    def _advance(self, now: float) -> None:
        """Activate members that have caught up, and finish a complete task, or the run."""
        for member in self._joiners.find_caught_up():
            self._activate_member(member, now)
        if self.phase == "running":
            if self.training.stopping or not self._joiners.find_lagging(now):
                self.training.advance(now)
            deserted = self.training.stopping and not self.membership.list_ready()
            given_up = deserted or now >= self._stop_by
            if self.training.is_update_applied and (self.training.task is None or given_up):
                self._begin_finish()
        if self.phase == "finishing" and (
            not self.training.audit.is_pending or now >= self._stop_by
        ):
            self._finish_run()

    @property
    def _is_stepping(self) -> bool:
        """Whether the current task is a training step."""
        return self.training.task is not None and self.training.task.kind == "train"

    def _begin_finish(self) -> None:
        if self._is_stepping:  # only a stop ends before the last step
            step = self.training.state.step + 1
            self._stop_reason += f"; step {step} was not finished in time and is skipped"
        self.phase = "finishing"
        self.training.task = None
        self.training.save_checkpoint()

    def _finish_run(self) -> None:
        """End in order: with 0 when asked to stop, else only if the last state is proved."""
        step = self.training.state.step
        gap = self.training.audit.describe_gap(step)
        if gap and step:
            self._outbox.emit("unverified", at_step=step, reason=gap)
        if gap and not self.training.stopping:
            error = UnprovedError(gap)
            self._end_run(error.exit_code, str(error))
        else:
            reason = self._stop_reason or self.training.early_end or "done"
            self._end_run(self._stop_code, reason, to_workers=0)

    def _end_run(self, exit_code: int, reason: str, to_workers: int | None = None) -> None:
        self.phase = "over"
        self.training.task = None
        worker_code = exit_code if to_workers is None else to_workers
        for member in self.membership:
            shutdown = messages.Shutdown(reason=reason[:1000], exit_code=worker_code)
            self._outbox.send(member, shutdown)
            self._outbox.close_link(member.link, reason, notified=True)
        for link in self._pending.list_readers():
            self._shut_down_link(link, reason, worker_code)
        self._outbox.add(Finish(exit_code, reason))
