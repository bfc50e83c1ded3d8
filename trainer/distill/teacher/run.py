"""A pass over a share of the shards, each once, also after interruptions; a teacher's is one."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from trainer.distill.answers.student_answers import RoundsFolder, find_rounds, rounds_description
from trainer.distill.logits.description import ShardPlan, TeacherInfo
from trainer.distill.logits.heartbeat import INTERVAL, TeacherHeartbeat
from trainer.distill.logits.scores import Window
from trainer.distill.logits.shard_folder import ShardFolder
from trainer.distill.teacher.assignment import Assignment
from trainer.distill.teacher.engines import engine_kind, read_weight_type
from trainer.distill.teacher.progress import Counters, Progress
from trainer.distill.teacher.windows import UnscoredWindow
from trainer.model.files import model_digest
from trainer.system.errors import InputError, InUseError, StorageError
from trainer.system.process.interruption import Interrupted
from trainer.system.storage.lease import SILENCE, Lease, LeaseListener, acquire_lease

if TYPE_CHECKING:  # imports torch and transformers: not needed if all is scored
    from trainer.distill.teacher.scoring import Teacher

log = logging.getLogger(__name__)

POLL = 2.0
"""Seconds between two checks for requests after the pass."""


Items = TypeVar("Items")
Make = Callable[[ShardPlan, Callable[[int], None]], Sequence[Items]]
"""Makes what a shard holds, and calls its second argument with each number of finished tokens."""


class ShardRun(Generic[Items]):
    """Makes the shards of a folder, or each Nth of them.

    Intact shards are kept; missing, damaged and requested ones are made. One thread writes a shard
    while the next one is made.

    Args:
        folder: the shards' folder, which may not be described yet.
        shards: their plans.
        open_maker: loads what makes them and describes the folder; called if the folder is not
            described or there is something to make.
        share: the part's number I, from 1, and how many parts N there are.
        name: of this process's heartbeat; by host and part without one.
        over: called between shards; returns whether no more shards are needed.
        on_progress: called after each batch and each shard with `Progress` as a mapping.
        check: called after each batch; may raise to end the pass.
    """

    def __init__(
        self,
        folder: ShardFolder[Any, Items],
        shards: Sequence[ShardPlan],
        open_maker: Callable[[], Make[Items]],
        *,
        share: tuple[int, int] = (1, 1),
        name: str | None = None,
        over: Callable[[], bool] = lambda: False,
        on_progress: Callable[[Mapping[str, Any]], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._open_maker = folder, open_maker
        self._maker: Make[Items] | None = None
        index, count = share
        self._parts = PartLeases(self._folder.teachers, index, count)
        self._shards, self._share = shards, [*shards[index - 1 :: count]]
        self._name = name or f"{socket.gethostname()}-{index}-of-{count}"
        self._over = over
        self._on_progress, self._check = on_progress, check
        self._tally = Counters(self._share)
        self._writing: tuple[ShardPlan, Future[Path]] | None = None
        self._beaten_at = self._looked_at = -float("inf")

    def make_shards(self, *, stay: bool = False) -> Progress:
        """Make what is missing; with `stay` then wait for students' requests until `over`.

        With `stay` it also makes the shards of parts whose process dies.

        Raises:
            RefusedError: the engine is not admitted, or the folder is another teacher's.
            NonFiniteError: the model computes NaN or Inf.
            StorageError: a shard could not be written; nothing half-written is left.
            InUseError: another teacher scores this part; names its process.
            Interrupted: the pass was stopped; a scored shard is written first.
        """
        # One teacher a part: two would score everything twice, under one heartbeat.
        held, end = [self._parts.take_part(self._name)], Lease.abandon
        try:
            with TeacherHeartbeat(self._folder, self._name) as heartbeat:
                try:
                    self._make_missing(heartbeat, held if stay else None)
                except Interrupted:
                    # Not by the tally: what was written meanwhile is not counted yet.
                    if all(self._folder.has_shard(plan.number) for plan in self._share):
                        heartbeat.report_done()
                    end = Lease.release
                    raise
                heartbeat.report_done()
            if stay or self._parts.count == 1:  # nobody is there, or everybody ends
                end = Lease.release
        finally:
            for lease in held:
                end(lease)
        return self._tally.progress

    def _open_maker(self) -> Make[Items]:
        if self._maker is None:
            self._maker = self._open_maker()
            self._tally.start_clock()
        return self._maker

    def _make_missing(self, heartbeat: TeacherHeartbeat, stay: list[Lease] | None) -> None:
        """Make this part's shards; with `stay`, which takes further leases, go on until `over`."""
        if not self._folder.is_described:
            self._open_maker()
        with ThreadPoolExecutor(1, thread_name_prefix="shards") as writer:
            for plan in self._iterate_due_shards():
                if self._over():
                    break
                self._look_periodically()
                self._make_shard(plan, heartbeat, writer)
            self._finish_writing()
            self._on_progress(asdict(self._tally.progress))
            heartbeat.report_progress(**self._state_figures())
            while stay is not None and not self._over():
                heartbeat.report_progress(**self._state_figures(), state="waiting")
                self._take_over(stay, heartbeat, writer)
                if not self._do_urgent_work():
                    time.sleep(POLL)
                for plan in self._iter_requested():
                    self._make_shard(plan, heartbeat, writer)
                self._finish_writing()

    def _take_over(
        self, held: list[Lease], heartbeat: TeacherHeartbeat, writer: ThreadPoolExecutor
    ) -> None:
        """Make the shards of parts whose process died, which is then as if this one's were more."""
        for part, lease in self._parts.take_abandoned(self._name):
            held.append(lease)
            more = self._shards[part - 1 :: self._parts.count]
            log.info("took over part %d of %d: its process has ended", part, self._parts.count)
            self._share.extend(more)
            for plan in more:
                if self._is_complete_shard(plan):
                    self._tally.count_found(plan)
                elif not self._over():
                    self._make_shard(plan, heartbeat, writer)
            self._finish_writing()

    def _look_periodically(self) -> None:
        """Do what is urgent, if nobody has looked for a while: a shard takes minutes."""
        if time.monotonic() - self._looked_at >= POLL:
            self._do_urgent_work()
            self._looked_at = time.monotonic()

    def _do_urgent_work(self) -> bool:
        """Do what is more urgent than the next batch; return whether there was anything."""
        return False

    def _iterate_due_shards(self) -> Iterator[ShardPlan]:
        """Yield the shards to score, in order, requested ones first."""
        for plan in self._share:
            yield from self._iter_requested()
            if self._is_complete_shard(plan):
                self._tally.count_found(plan)
            else:
                yield plan
        yield from self._iter_requested()

    def _iter_requested(self) -> Iterator[ShardPlan]:
        wanted = set(self._folder.list_requests())
        for plan in self._share:
            if plan.number in wanted and not self._is_complete_shard(plan):
                self._tally.uncount_lost(plan)
                yield plan

    def _is_complete_shard(self, plan: ShardPlan) -> bool:
        """Whether a shard needs no scoring, after checking its bytes."""
        self._check()
        if self._writing is not None and self._writing[0] is plan:
            return True
        if not self._folder.has_shard(plan.number):
            return False
        try:
            self._folder.verify_shard(plan.number)
        except StorageError as error:
            log.warning("%s; it is scored again", error)
            return False
        return True

    def _make_shard(
        self, plan: ShardPlan, heartbeat: TeacherHeartbeat, writer: ThreadPoolExecutor
    ) -> None:
        make = self._open_maker()

        def on_tokens(tokens: int) -> None:
            self._check()
            self._tally.count_tokens(tokens)
            self._show_progress(heartbeat)
            self._look_periodically()

        items = make(plan, on_tokens)
        self._finish_writing()  # at most one shard waits in memory
        self._writing = plan, writer.submit(self._folder.write_shard, plan.number, items)

    def _finish_writing(self) -> None:
        if self._writing is not None:
            plan, written = self._writing
            written.result()
            self._writing = None
            self._tally.count_written(plan)

    def _show_progress(self, heartbeat: TeacherHeartbeat) -> None:
        self._on_progress(asdict(self._tally.progress))
        if time.monotonic() - self._beaten_at >= INTERVAL:
            self._beaten_at = time.monotonic()
            heartbeat.report_progress(**self._state_figures())

    def _state_figures(self) -> dict[str, Any]:
        progress = self._tally.progress
        return {
            "shards_done": progress.shards_done,
            "shards": progress.shards,
            "tokens_per_second": progress.tokens_per_second,
        }


def check_same_model(model_dir: Path, described: TeacherInfo) -> None:
    """Check that what was loaded is the model that the description names.

    Raises:
        InputError: its files were changed meanwhile.
    """
    if model_digest(model_dir) != described.digest:
        raise InputError(f"{model_dir}: was changed while it was loaded; start again")


class TeacherRun(ShardRun[Window]):
    """Scores an assignment's shards, or each Nth of them; see `ShardRun`.

    Args:
        open_teacher: loads the model.
    """

    def __init__(
        self, assignment: Assignment, open_teacher: Callable[[], Teacher], **options: Any
    ) -> None:
        self._assignment, self._open_teacher = assignment, open_teacher
        self._teacher: Teacher | None = None
        self._strange: set[Path] = set()
        shards = assignment.description.shards
        super().__init__(assignment.folder, shards, self._open_scoring, **options)

    def _open_scoring(self) -> Make[Window]:
        teacher = self._load_teacher()
        cut = self._assignment.windows.cut_shard
        return lambda plan, on_tokens: teacher.score_pieces(cut(plan), on_tokens)

    def _state_figures(self) -> dict[str, Any]:
        device = None if self._teacher is None else self._teacher.engine.place
        return super()._state_figures() | {"device": device}

    def _load_teacher(self) -> Teacher:
        """Load the teacher, whose engine is admitted before it writes the folder's description.

        Raises:
            RefusedError: it is not admitted, or the folder is another teacher's meanwhile.
        """
        if self._teacher is not None:
            return self._teacher
        teacher = self._open_teacher()
        assigned, kl = self._assignment, None
        engine = assigned.description.teacher.engine
        if not engine_kind(engine).facts.is_reference:
            from trainer.distill.teacher.admission import TOKENS, admit_engine

            windows = assigned.first_windows(TOKENS)
            quantization = read_weight_type(assigned.description.teacher).quantization
            kl = admit_engine(
                teacher.engine, engine, assigned.model_dir, windows, quantization=quantization
            )
        check_same_model(assigned.model_dir, assigned.description.teacher)
        assigned.write_description(kl)
        self._teacher = teacher
        return teacher

    def _do_urgent_work(self) -> bool:
        """Score the rounds of answers that students wrote, of which this part has each Nth."""
        scored = False
        for rounds in find_rounds(self._folder.path):
            for plan in self._requested_answers(rounds):
                if self._parts.holds_shard(plan.number) and not rounds.has_shard(plan.number):
                    scored |= self._score_round(rounds, plan.number)
        return scored

    def _requested_answers(self, rounds: RoundsFolder) -> Sequence[ShardPlan]:
        """Return the answers of a student that asks for what this teacher's folder says.

        Why it does not is logged once, and read again each time: a share may be unreachable.
        """
        own = self._folder.description
        try:
            there, plans = rounds.description, rounds.answers.plans
        except InputError as error:
            reason = str(error)
        else:
            if there == rounds_description(own, there.corpus.digest):
                return plans
            reason = f"{rounds.path}: requests scores of another teacher or scheme than this one"
        if rounds.path not in self._strange:
            log.warning("%s; its answers are not scored", reason)
            self._strange.add(rounds.path)
        return ()

    def _score_round(self, rounds: RoundsFolder, number: int) -> bool:
        """Score one round of answers; return whether it was."""
        try:
            answers = rounds.answers.read_shard(number)
        except StorageError as error:
            log.warning("%s; the student writes it again", error)
            rounds.answers.quarantine_shard(number, str(error))
            return False
        self._check()
        teacher = self._load_teacher()
        pieces = [
            UnscoredWindow(
                answer.document,
                0,
                answer.tokens,
                np.arange(len(answer.tokens)) >= answer.prompt_length,
            )
            for answer in answers
        ]
        rounds.plan_scores(number, answers)
        rounds.write_shard(number, teacher.score_pieces(pieces, lambda _: self._check()))
        return True


class PartLeases:
    """The parts of a folder's shards that a process holds: its own, and those of dead processes.

    A part of which nobody ever began is left to who will, and so is one that was released: its
    process was stopped in order. One that failed, or was done and did not stay, leaves its lease as
    a killed one does, so that another one answers the requests and questions that come for it.

    Args:
        folder: of the leases.
        index: this process's part, from 1.
        count: how many parts there are.
        silence: seconds without a sign of life after which a process is gone.
    """

    def __init__(
        self,
        folder: Path,
        index: int,
        count: int,
        silence: float = SILENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._index, self.count = folder, index, count
        self._silence = silence
        self._held = {index}
        self._listener = LeaseListener(silence, clock)

    def take_part(self, name: str) -> Lease:
        """Take this process's own part.

        Raises:
            InUseError: a living process holds it; names the process.
        """
        return acquire_lease(self._lease_path(self._index), name, silence=self._silence)

    def holds_shard(self, number: int) -> bool:
        """Whether a shard is of a part that this process holds."""
        return number % self.count + 1 in self._held

    def take_abandoned(self, name: str) -> Iterator[tuple[int, Lease]]:
        """Yield further parts with their leases; their processes were silent for long enough.

        Call it now and then: silence counts between two calls that are not far apart.
        """
        for part in range(1, self.count + 1):
            if part in self._held or not self._listener.is_silent(self._lease_path(part)):
                continue
            with suppress(InUseError, StorageError):  # it is back, or another one was faster
                lease = acquire_lease(
                    self._lease_path(part), name, listener=self._listener, silence=self._silence
                )
                self._held.add(part)
                yield part, lease

    def _lease_path(self, part: int) -> Path:
        return self._folder / f"part-{part}-of-{self.count}"
