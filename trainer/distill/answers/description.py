"""The description of a folder of answers, fixed before the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from trainer.data.shapes import Sample
from trainer.data.shards import ANSWERS_SCHEMA
from trainer.distill.answers.answer import Answer
from trainer.distill.logits.description import (
    CorpusInfo,
    Described,
    ShardPlan,
    TeacherInfo,
    TokenizerInfo,
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn, see `replica.sampling.Sampling`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int


@dataclass(frozen=True, kw_only=True)
class AnswersDescription(Described):
    """The contents of a complete folder of answers; a plan's windows are its answers."""

    schema = ANSWERS_SCHEMA
    lines = True  # a stop may be a line end

    teacher: TeacherInfo
    tokenizer: TokenizerInfo
    corpus: CorpusInfo
    """The prompts."""
    samples: int
    """Answers to each prompt."""
    max_new_tokens: int
    sampling: SamplingParams
    stop_strings: tuple[str, ...]
    """Texts that end an answer, beside the model's own end."""
    shards: tuple[ShardPlan, ...]
    """A plan's tokens are the most that its answers can have."""

    @property
    def answers(self) -> int:
        """Answers of all shards."""
        return sum(shard.windows for shard in self.shards)


def prompts_digest(prompts: Sequence[Sample]) -> str:
    """Return the BLAKE3 hex digest over the prompts in their order; where they are from does not
    count."""
    hasher = blake3()
    for sample in prompts:
        hasher.update(sample.digest())
    return hasher.hexdigest()


def plan_shards(
    prompts: int, per_shard: int, samples: int, new_tokens: int
) -> tuple[ShardPlan, ...]:
    """Return the shards of prompts, `per_shard` of them in each."""
    return tuple(
        ShardPlan(
            number=number,
            first_document=first,
            stop_document=(stop := min(first + per_shard, prompts)),
            windows=(stop - first) * samples,
            tokens=(stop - first) * samples * new_tokens,
        )
        for number, first in enumerate(range(0, prompts, per_shard))
    )


def find_answer_faults(
    description: AnswersDescription, plan: ShardPlan, answers: Sequence[Answer]
) -> list[str]:
    """Return what is missing, doubled or out of order in a shard: each answer is there once."""
    wanted = [
        (document, sample)
        for document in range(plan.first_document, plan.stop_document)
        for sample in range(description.samples)
    ]
    found = [(answer.document, answer.sample) for answer in answers]
    if found == wanted:
        return []
    for place in wanted:
        if found.count(place) != 1:
            times = "is missing" if place not in found else "comes twice"
            return [f"answer {place[1]} to prompt {place[0]} {times}"]
    return ["answers are out of order, or of another shard"]
