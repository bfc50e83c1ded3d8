"""A student's own answers, round by round, and its teachers' scores of them.

LOGITS/on-policy/RUN/             a folder of logits (dataset.json, shard-00000/, ...)
LOGITS/on-policy/RUN/answers/     a folder of answers, which the student writes

Shard N of the one holds the scores of shard N of the other. How many there will be is not known
ahead, so both descriptions have no plan: the answers that are there are the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainer.distill.answers.answer import Answer
from trainer.distill.answers.folder import AnswersFolder
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.description import CorpusInfo, Description, ShardPlan
from trainer.distill.logits.scores import Window
from trainer.distill.logits.shard_folder import list_matching
from trainer.system.errors import StorageError

ON_POLICY, ANSWERS = "on-policy", "answers"


class RoundAnswers(AnswersFolder):
    """Rounds of as many answers as the description's `samples`, numbered over all rounds."""

    @property
    def plans(self) -> Sequence[ShardPlan]:
        """See `ShardFolder`: those of the rounds that were written."""
        names = (name.removeprefix("shard-") for name in list_matching(self.path, "shard-*"))
        numbers = sorted(int(name) for name in names if name.isdecimal())
        return [self.shard_plan(number) for number in numbers if self.has_shard(number)]

    def shard_plan(self, number: int) -> ShardPlan:
        """See `ShardFolder`."""
        there = self.description
        return ShardPlan(
            number=number,
            first_document=number * there.samples,
            stop_document=(number + 1) * there.samples,
            windows=there.samples,
            tokens=there.samples * there.max_new_tokens,
        )

    def _find_faults(self, plan: ShardPlan, items: Sequence[Answer]) -> list[str]:
        documents = [answer.document for answer in items]
        wanted = range(plan.first_document, plan.stop_document)
        return [] if documents == [*wanted] else [f"its answers are {documents}, not {wanted}"]


class RoundsFolder(LogitsFolder):
    """The scores of a run's answers, a shard for each round."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.answers = RoundAnswers(path / ANSWERS)
        self._plans: dict[int, ShardPlan] = {}

    @property
    def teachers(self) -> Path:
        """See `ShardFolder`: the teachers of the corpus score the answers, too."""
        return LogitsFolder(self.path.parent.parent).teachers

    @property
    def plans(self) -> Sequence[ShardPlan]:
        """See `ShardFolder`; where answers are damaged, with the most tokens that they can have."""
        found: list[ShardPlan] = []
        for plan in self.answers.plans:
            try:
                found.append(self.shard_plan(plan.number))
            except StorageError:
                found.append(plan)
        return found

    def shard_plan(self, number: int) -> ShardPlan:
        """See `ShardFolder`; raises StorageError if the answers are missing or damaged."""
        if number not in self._plans:
            self.plan_scores(number, self.answers.read_shard(number))
        return self._plans[number]

    def plan_scores(self, number: int, answers: Sequence[Answer]) -> ShardPlan:
        """Return the plan of the scores of a round's answers."""
        tokens = sum(len(answer.tokens) for answer in answers)
        self._plans[number] = replace(self.answers.shard_plan(number), tokens=tokens)
        return self._plans[number]

    def _decode_shard(self, plan: ShardPlan, content: bytes) -> Sequence[Window]:
        """Return the windows, which must be scores of the answers that are there."""
        windows = super()._decode_shard(plan, content)
        for window, answer in zip(windows, self.answers.read_shard(plan.number), strict=True):
            if not np.array_equal(window.tokens, answer.tokens):
                raise ValueError(f"its tokens of answer {answer.document} are not the student's")
        return windows


def rounds_description(teachers: Description, run: str) -> Description:
    """Return the description of the scores of a run's answers.

    Args:
        teachers: of the folder of logits, whose teachers score them.
    """
    return replace(teachers, corpus=CorpusInfo(digest=run, documents=0), shards=())


def find_rounds(logits: Path) -> list[RoundsFolder]:
    """Return the folders of all runs whose students write answers beside a folder of logits."""
    folder = logits / ON_POLICY
    found = [RoundsFolder(folder / run) for run in list_matching(folder, "*")]
    return [rounds for rounds in found if rounds.is_described]
