"""A student's own answers: written in rounds, scored by its teachers, learned from once.

With E steps in a round, round r is learned from in the steps rE to rE + E - 1. It is written before
step (r - 1)E, while its teachers may still score the round before; so the weights that wrote an
answer are at most 2E - 1 steps old, which `staleness` bounds. This depends on the step alone: a
student that goes on from a checkpoint finds the rounds that it had written, and takes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.config.run import RunConfig
from trainer.data.encoder import IGNORED
from trainer.data.order import permute_epoch
from trainer.data.tokens import Encoded
from trainer.distill.answers.answer import Answer
from trainer.distill.answers.author import AnswerSlot, Author, Generate, Prompts
from trainer.distill.answers.description import AnswersDescription, SamplingParams, prompts_digest
from trainer.distill.answers.student_answers import ON_POLICY, RoundsFolder, rounds_description
from trainer.distill.logits import targets
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.description import CorpusInfo, Description, TeacherInfo
from trainer.distill.logits.scores import Window
from trainer.distill.logits.stream import ShardStream
from trainer.distill.student.prefetch import Tell
from trainer.model.architecture import read_vocabulary
from trainer.model.files import model_digest
from trainer.replica.sampling import Sampling
from trainer.system.errors import InputError, StorageError
from trainer.system.process.stop_signals import StopRequest


def read_own_prompts(
    config: RunConfig, description: Description, model_dir: Path
) -> Prompts | None:
    """Return the prompts of a student that answers, after checking that it can be scored.

    Raises:
        DataError, InputError: the prompts cannot be used or are too long, or the logits keep too
            little for the divergence.
    """
    objective = config.distillation
    if objective is None or objective.on_policy is None:
        return None
    own = objective.on_policy
    prompts = Prompts.read_prompts(Path(own.prompts), config.data.columns, model_dir)
    length, new = len(prompts.tokens[prompts.longest]), own.max_new_tokens
    limits = {
        "data.max_seq_len": config.data.max_seq_len,
        "the windows of its teacher (--max-seq-len)": description.max_seq_len,
    }
    for name, most in limits.items():
        if length + new > most:
            raise InputError(
                f"{own.prompts}: prompt {prompts.longest + 1} has {length} tokens, with"
                f" distillation.on_policy.max_new_tokens {new} more than {name}, {most}; shorten"
                " one of them"
            )
    try:
        choices = ("reverse", "jsd")
        targets.check_targets(description.scheme, objective.temperature, own.divergence, choices)
    except InputError as error:
        raise InputError(f"distillation.on_policy.{error}") from None
    return prompts


class OnPolicy:
    """The rounds of one run.

    Args:
        run: names the run's folder; a run that goes on from a checkpoint has the same.
        generate: continues prompts by the present weights.
        steps: of the run.
        timeout: seconds without a sign of a living teacher, or in which answers cannot be written,
            after which waiting is an error.
        stop: ends a wait, and the writing of answers.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: LogitsFolder,
        model_dir: Path,
        prompts: Prompts,
        generate: Generate,
        *,
        run: str,
        steps: int,
        timeout: float,
        stop: StopRequest,
    ) -> None:
        assert config.distillation is not None
        assert config.distillation.on_policy is not None
        own = config.distillation.on_policy
        self.run, self._config, self._own = run, config, own
        self._each = config.on_policy_answers
        self._last_round = (steps - 1) // own.iteration_steps
        self._prompts, self._stop, self._timeout = prompts, stop, timeout
        sampling = Sampling(temperature=own.temperature, seed=config.training.seed)
        self._author = Author(generate, prompts, sampling, own.max_new_tokens)
        self._rounds = RoundsFolder(folder.path / ON_POLICY / run)
        self._rounds.write_description(rounds_description(folder.description, run))
        self._rounds.answers.write_description(
            _describe_answers(config, folder.description, model_dir, prompts)
        )
        self._on_wait: Callable[[str], None] = lambda _: None
        self._damaged: Callable[[str], None] = lambda _: None
        self._stream = ShardStream(
            self._rounds,
            seed=config.training.seed,
            order=permute_epoch,
            timeout=timeout,
            on_wait=lambda message: self._on_wait(message),
            on_damage=lambda message: self._damaged(message),
            poll=_POLL,
        )
        self._held: tuple[int, list[Encoded]] | None = None
        self.waited = 0.0
        """Seconds that the last `take_samples` waited for scores."""
        self.wrote = 0.0
        """Seconds in which it wrote answers."""
        self._order = lru_cache(2)(
            lambda epoch: permute_epoch(config.training.seed, epoch, len(prompts.tokens))
        )

    def take_samples(self, step: int, tell: Tell) -> list[Encoded] | None:
        """Return the samples of a step, counted from 0; None if the run is to stop.

        Rounds that are due are written first, by the present weights.

        Raises:
            UnreachableError, InputError, StorageError: the teachers are lost, or the folder.
            NonFiniteError: the model computes NaN or Inf.
        """
        own, self.waited, self.wrote = self._own, 0.0, 0.0
        number, place = divmod(step, own.iteration_steps)
        if self._held is None or self._held[0] != number:
            try:
                for due in range(
                    number, min(number + own.prefetched_iterations, self._last_round) + 1
                ):
                    self._read_or_write_answers(due, tell)
                self._held = number, self._read_scored(number, tell)
            except _Stopped:
                return None
        return self._held[1][place * self._each : (place + 1) * self._each]

    def _read_or_write_answers(self, number: int, tell: Tell) -> Sequence[Answer]:
        """Return the answers of a round; they are written if they are not there."""
        there = self._rounds.answers
        if there.has_shard(number):
            try:
                return there.read_shard(number)
            except StorageError as error:
                there.quarantine_shard(number, str(error))
                tell("quarantined", f"{error}; generated again")
        began, plan = time.monotonic(), there.shard_plan(number)
        places = [
            AnswerSlot(document, 0, self._find_prompt(document), document)
            for document in range(plan.first_document, plan.stop_document)
        ]
        answers = self._author.write_answers(places, lambda _: self._look_at_stop())
        kept = self._write_answers(number, answers, tell)
        self._rounds.plan_scores(number, kept)
        self.wrote += time.monotonic() - began
        return kept

    def _write_answers(
        self, number: int, answers: Sequence[Answer], tell: Tell
    ) -> Sequence[Answer]:
        """Write a round and return what is there; a full disk or a lost share is waited for.

        What is there may be older: the round seemed to be missing while its share did not answer.
        """
        there, began, reported = self._rounds.answers, time.monotonic(), False
        while True:
            try:
                there.write_shard(number, answers)
                return there.read_shard(number)
            except StorageError as error:
                if time.monotonic() - began >= self._timeout:
                    raise
                if not reported:
                    tell("waiting", f"{error}; trying again")
                reported = True
            self._look_at_stop()
            time.sleep(_POLL)

    def _look_at_stop(self) -> None:
        if self._stop:
            raise _Stopped

    def _find_prompt(self, document: int) -> int:
        """Return the number of the prompt of an answer, of which each comes once in an epoch."""
        epoch, place = divmod(document, len(self._prompts.tokens))
        return int(self._order(epoch)[place])

    def _read_scored(self, number: int, tell: Tell) -> list[Encoded]:
        """Return a round's samples, once a teacher has scored them."""
        reported: list[str] = []

        def on_wait(message: str) -> None:
            self._look_at_stop()
            if not reported:
                reported.append(message)
                tell("waiting", message)
            if not self._rounds.answers.has_shard(number):  # a teacher found them damaged
                self._read_or_write_answers(number, tell)

        self._on_wait, self._damaged = on_wait, lambda message: tell("quarantined", message)
        self._read_or_write_answers(number, tell)
        began, wrote = time.monotonic(), self.wrote
        windows = self._stream.load_shard(number, patient=True)
        self.waited = time.monotonic() - began - (self.wrote - wrote)
        assert windows is not None, "a patient reader waits"
        answers = self._rounds.answers.read_shard(number)
        return [self._make_sample(*pair) for pair in zip(windows, answers, strict=True)]

    def _make_sample(self, window: Window, answer: Answer) -> Encoded:
        """Return a scored answer, of whose prompt nothing is learned."""
        objective = self._config.distillation
        assert objective is not None
        scheme = self._rounds.description.scheme
        soft = targets.make_targets(
            window.scores, scheme, objective.temperature, self._own.divergence
        )
        labels: NDArray[np.int32] = window.tokens.copy()
        labels[: answer.prompt_length] = IGNORED
        return Encoded(window.tokens, labels, soft)


_POLL = 0.2
"""Seconds between two looks for a round's scores, and two attempts to write answers."""


class _Stopped(Exception):  # noqa: N818 - not an error: the run is to stop
    """Ends a wait, or the writing of answers."""


def _describe_answers(
    config: RunConfig, teachers: Description, model_dir: Path, prompts: Prompts
) -> AnswersDescription:
    assert config.distillation is not None
    assert config.distillation.on_policy is not None
    own = config.distillation.on_policy
    return AnswersDescription(
        teacher=TeacherInfo(
            name=config.name,
            digest=model_digest(model_dir),
            engine="torch",
            quantization=config.model.quantization,
            dtype=config.model.dtype,
            vocab_size=read_vocabulary(model_dir),
            tokenizer_size=teachers.tokenizer.size,
        ),
        tokenizer=teachers.tokenizer,
        corpus=CorpusInfo(digest=prompts_digest(prompts.samples), documents=0),
        samples=config.on_policy_answers * own.iteration_steps,
        max_new_tokens=own.max_new_tokens,
        sampling=SamplingParams(
            temperature=own.temperature, top_k=None, top_p=None, seed=config.training.seed
        ),
        stop_strings=(),
        shards=(),
    )
