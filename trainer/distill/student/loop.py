"""The loop of a student: one step reads from top to bottom in `Student.run`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.config.run import RunConfig
from trainer.data.metrics import mean_loss
from trainer.data.soft_targets import compute_alpha
from trainer.data.tokens import Dataset, Encoded
from trainer.distill.logits.stream import Position
from trainer.distill.student.on_policy import OnPolicy
from trainer.distill.student.optimizer import StudentOptimizer
from trainer.distill.student.prefetch import Batch, BatchPrefetcher
from trainer.exchange.coordinator.prompt_generation import PromptSet
from trainer.exchange.protocol.actions import Save, Step
from trainer.exchange.protocol.schedule import StepPlan
from trainer.optimizer.learning_rate import compute_learning_rate
from trainer.replica.base import EvalResult, StepResult
from trainer.replica.torch.replica import TorchReplica
from trainer.system.errors import NonFiniteError, TrainerError
from trainer.system.process.stop_signals import StopRequest

if TYPE_CHECKING:
    from trainer.tracking.run_recorder import RunRecorder

_PORTION = 64
"""Validation samples between two checks for a stop."""


@dataclass(kw_only=True)
class Student:
    """A model that learns from a folder of logits; `stop` ends it after the current step."""

    config: RunConfig
    plan: StepPlan
    replica: TorchReplica
    optimizer: StudentOptimizer
    feed: BatchPrefetcher
    own: OnPolicy | None
    """Its own answers, of `distillation.on_policy`."""
    recorder: RunRecorder
    validation: Dataset | None
    questions: PromptSet | None
    stop: StopRequest
    step: int
    """Applied updates."""
    position: Position
    """The stream's position after the last of them."""
    generation: int
    """The number of earlier starts of the run."""
    _saved: int = field(init=False)

    def __post_init__(self) -> None:
        self._saved = self.step

    def run(self) -> str:
        """Train until the run is over or stopped, and return how it ended.

        Raises:
            NonFiniteError: NaN or Inf in a loss or gradient; the last checkpoint stays.
            UnreachableError, InputError, StorageError: the teacher was lost, or the folder cannot
                be read; the progress is saved.
        """
        try:
            if not self.step:
                self._answer_if_due()
            while not self.is_done:
                began = time.monotonic()
                batch = self.feed.take_batch(self._emit_event)
                waited = time.monotonic() - began
                own = (
                    self.own.take_samples(self.step, self._emit_event) if self.own and batch else []
                )
                if batch is None or own is None:
                    break
                self._train_step(batch, own, waited + (self.own.waited if self.own else 0.0))
                self._after_step()
                if failure := self.recorder.failure:
                    raise failure
        except NonFiniteError:
            raise
        except TrainerError:
            self._save_once()
            raise
        finally:
            self.feed.close()
        self._save_once()
        done = self.recorder.early.stop_reason or "all steps are done"
        return done if self.is_done else self.stop.reason

    @property
    def is_done(self) -> bool:
        """Whether all steps are done, or no more are worth it."""
        return self.step >= self.plan.total_steps or self.recorder.early.stop_reason is not None

    def _train_step(self, batch: Batch, own: Sequence[Encoded], waited: float) -> None:
        """Forward, backward and update over one batch, and answers of the student's own."""
        # 1. What the step takes.
        began, number = time.monotonic(), self.step + 1
        objective = self.config.distillation
        assert objective is not None
        alpha = compute_alpha(objective, number, self.plan.total_steps)
        rate = compute_learning_rate(self.step, self.plan.total_steps, self.config.optimizer)
        # 2. Forward and backward.
        result, answers = self.replica.accumulate_with(batch.samples, alpha, own)
        loss_sum, weight = result.loss_sum + answers.loss_sum, result.weight + answers.weight
        if not math.isfinite(loss_sum):
            documents = sorted(set(batch.documents))
            what = f"a loss that is not finite in one of the documents {documents}"
            raise NonFiniteError.at_step(number, what + (" or of its own answers" if own else ""))
        # 3. The update; from here on the step counts, and its windows are behind the run.
        norm = self.optimizer.apply(number, rate, weight)
        self.step, self.position = number, batch.behind
        # 4. The record.
        seconds = time.monotonic() - began
        at, tokens = self.plan.find_samples(number - 1), result.tokens + answers.tokens

        def divide_or_none(total: float | None, of: StepResult = result) -> float | None:
            return None if total is None or not of.weight else mean_loss(total, of.weight)

        self.recorder.log_step(
            Step(
                step=number,
                epoch=at.epoch,
                generation=self.generation,
                loss=mean_loss(loss_sum, weight),
                ce=divide_or_none(result.loss_sum if result.ce_sum is None else result.ce_sum),
                kl=divide_or_none(result.kl_sum),
                on_policy_kl=divide_or_none(answers.kl_sum, answers),
                alpha=alpha,
                learning_rate=rate,
                grad_norm=norm,
                seconds=seconds,
                teacher_wait_seconds=waited,
                generation_seconds=self.own.wrote if self.own else None,
                tokens_per_second=tokens / seconds,
                worker_tokens_per_second={0: tokens / seconds},
                sample_ranges=[[0, at.start, at.stop]],
            )
        )

    def _after_step(self) -> None:
        """Validate and save if that is due."""
        every = self.config.training.evaluate_every
        due = self.step == self.plan.total_steps or (every > 0 and self.step % every == 0)
        scores = (
            self._evaluate_samples(self.validation) if due and self.validation is not None else None
        )
        if scores is not None:
            self.recorder.emit({"event": "validation", "at_step": self.step, **scores})
            self._save_once(scores)
        elif self.step % self.config.checkpoint.every == 0:
            self._save_once()
        self._answer_if_due()

    def _answer_if_due(self) -> None:
        """Answer the prompts if that is due."""
        asked = self.questions
        last = self.step if self.is_done else self.plan.total_steps
        if asked is None or not asked.is_due(self.step, last):
            return
        made = self.replica.answer(asked.prompts, asked.new_tokens, asked.stop)
        self.recorder.emit(
            {"event": "answers", "at_step": self.step, "answers": asked.make_records(made)}
        )

    def _evaluate_samples(self, samples: Dataset) -> dict[str, Any] | None:
        """Return the scores of all samples, None if stopped meanwhile."""
        parts: list[EvalResult] = []
        for start in range(0, len(samples), _PORTION):
            if self.stop:
                return None
            portion = range(start, min(start + _PORTION, len(samples)))
            parts.append(self.replica.evaluate([samples[index] for index in portion]))
        return EvalResult.sum_parts(parts).compute_scores()

    def _save_once(self, scores: dict[str, Any] | None = None) -> None:
        """Save the current step in the background, unless it was saved."""
        if self.step == self._saved:
            return
        self._saved = self.step
        snapshot = self.optimizer.snapshot(self.step)
        stream = asdict(self.position) | ({"iterations": self.own.run} if self.own else {})
        self.recorder.save(Save(snapshot, self.generation, scores, stream))

    def _emit_event(self, event: str, message: str) -> None:
        self.recorder.emit({"event": event, "reason": message.removeprefix("waits ")})
