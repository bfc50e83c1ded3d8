"""Generation from prompts during a run: its schedule, its requests, the check of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.exchange.coordinator.task import Task
from trainer.exchange.protocol.messages import GenerationRequest, ShardResult
from trainer.system.errors import ProtocolError


@dataclass(frozen=True)
class PromptSet:
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
    make_record: Callable[[int, Sequence[int]], dict[str, Any]]
    """Returns the log record of the answer to a prompt, by its number."""

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether the state after `step` updates generates answers."""
        return step in (0, last_step) or (self.every > 0 and step % self.every == 0)

    def make_request(self, numbers: range) -> GenerationRequest:
        """Return the request for the prompts of these numbers."""
        prompts = tuple(tuple(self.prompts[number]) for number in numbers)
        return GenerationRequest(
            prompts=prompts, max_new_tokens=self.new_tokens, stop_tokens=tuple(sorted(self.stop))
        )

    def make_records(self, made: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Return the log records of the answers to all prompts, in their order."""
        return [self.make_record(number, tokens) for number, tokens in enumerate(made)]


class GenerationSchedule:
    """Schedule of the generations of a run; remembers the last one."""

    def __init__(self, questions: PromptSet | None) -> None:
        self.questions = questions
        self._last = -1

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether the state after `step` updates has yet to generate answers."""
        asks = self.questions is not None and self.questions.is_due(step, last_step)
        return asks and self._last != step

    def check_answers(self, result: ShardResult, size: int) -> None:
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

    def finish_task(self, task: Task) -> list[dict[str, Any]]:
        """Return the log records of a complete task."""
        assert self.questions is not None
        self._last = task.step
        return self.questions.make_records(
            [answer for result in task.list_results() for answer in result.answers or ()]
        )
