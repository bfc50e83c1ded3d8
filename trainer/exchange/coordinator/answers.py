"""Answers to prompts in the course of a run: when they are due, who gives them, their check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.exchange.coordinator.rounds import Round
from trainer.exchange.protocol.messages import Asked, ShardResult
from trainer.system.errors import ProtocolError


@dataclass(frozen=True)
class Questions:
    """The prompts of a run."""

    prompts: Sequence[Sequence[int]]
    """Token ids."""
    stop: frozenset[int]
    """Tokens that end an answer."""
    vocabulary: int
    """Tokens that the model knows."""
    every: int
    """Steps between answers; 0: only before the first step and after the last."""
    new_tokens: int
    """The most of each answer."""
    read: Callable[[int, Sequence[int]], dict[str, Any]]
    """Returns what is logged of the answer to a prompt, by its number."""

    def due(self, step: int, last_step: int) -> bool:
        """Whether the state after `step` updates is to answer."""
        return step in (0, last_step) or (self.every > 0 and step % self.every == 0)

    def asked(self, numbers: range) -> Asked:
        """Return what to ask a worker."""
        prompts = tuple(tuple(self.prompts[number]) for number in numbers)
        return Asked(prompts=prompts, new_tokens=self.new_tokens, stop=tuple(sorted(self.stop)))

    def told(self, made: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Return what is logged of the answers to all prompts, in their order."""
        return [self.read(number, tokens) for number, tokens in enumerate(made)]


class Answers:
    """The state of the answers of a run."""

    def __init__(self, questions: Questions | None) -> None:
        self.questions = questions
        self._last = -1

    def due(self, step: int, last_step: int) -> bool:
        """Whether the state after `step` updates is still to answer."""
        asks = self.questions is not None and self.questions.due(step, last_step)
        return asks and self._last != step

    def check(self, result: ShardResult, size: int) -> None:
        """Refuse a result that does not answer so many prompts.

        Raises:
            ProtocolError: there are more or fewer answers, or one is not of this model.
        """
        assert self.questions is not None
        found, most = result.answers or (), self.questions.new_tokens
        known = self.questions.vocabulary
        if len(found) != size or not all(
            1 <= len(answer) <= most and max(answer) < known for answer in found
        ):
            raise ProtocolError(f"answers that are not those to {size} prompts")

    def done(self, round_: Round) -> list[dict[str, Any]]:
        """Return what is logged of a round that is complete."""
        assert self.questions is not None
        self._last = round_.step
        return self.questions.told(
            [answer for result in round_.counted() for answer in result.answers or ()]
        )
