"""A conversation with a trained language model, one answer after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date

from trainer.checkpoint.trained_model import TrainedModel
from trainer.data.shapes import Sample
from trainer.data.turns import ChatMessage
from trainer.evaluate.generation import Completion, TextModel
from trainer.model.architecture import read_positions
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.system.errors import InputError

CONTEXT = 4096
"""Tokens of a conversation with a model that knows more; they bound the memory of a device."""


class Conversation:
    """The turns so far, and the model that answers them; its chat template gets today's date.

    Args:
        max_new_tokens: of each answer.
        sampling: each answer has a seed of its own, so that it draws other numbers.
        system: the text of the system's turn; empty for none.

    Raises:
        InputError: the model or its tokenizer cannot be used.
    """

    def __init__(
        self, trained: TrainedModel, max_new_tokens: int, sampling: Sampling, system: str = ""
    ) -> None:
        self.model = TextModel(trained, date.today().isoformat())
        self._context = min(read_positions(trained.base_dir) or CONTEXT, CONTEXT)
        self._most = min(max_new_tokens, self._context - 1)
        self._sampling = sampling
        self._system = [ChatMessage("system", system)] if system else []
        self._turns: list[ChatMessage] = []

    def open_model(self, compute: Compute) -> tuple[str, str]:
        """Load the model; return the device, and why no earlier one was taken.

        Raises:
            InputError: the model cannot be loaded.
        """
        longest = self._context - self._most
        return self.model.open_generator(longest, self._most, compute, batch=1)

    def reset_turns(self) -> None:
        """Forget all turns but the system's."""
        self._turns = []

    def answer_turn(self, text: str, on_text: Callable[[str], bool]) -> Completion:
        """Add a turn of the user, and the model's answer to it.

        Args:
            on_text: called with each new piece of the answer, which may be empty; True ends it.

        Raises:
            InputError: the conversation does not fit, or the chat template cannot express it; the
                turn is not added.
            NonFiniteError: the model computes NaN or Inf.
        """
        asked = [*self._turns, ChatMessage("user", text)]
        sample = Sample("", messages=(*self._system, *asked))
        (prompt,) = self.model.encode([sample])
        room = self._context - len(prompt)
        if room < 1:
            raise InputError(
                f"the conversation has {len(prompt)} tokens, and {self._context} are allowed; "
                "start another with /reset"
            )
        sampling = replace(self._sampling, seed=self._sampling.seed + len(self._turns))
        (answer,) = self.model.complete_prompts(
            [sample], [prompt], min(self._most, room), sampling, lambda _, new: on_text(new)
        )
        self._turns = [*asked, ChatMessage("assistant", answer.text)]
        return answer
