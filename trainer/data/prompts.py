"""Prompts as a model continues them, and its answers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data.encoder import Encoder
from trainer.data.samples import columns_of_run, read_prompts
from trainer.data.shapes import Sample
from trainer.data.text_stream import TextStream
from trainer.model.architecture import read_vocabulary
from trainer.system.errors import InputError

MOST_TOKENS = 7000
"""Of all prompts together, and of all answers: each must fit a control message."""


def encode_prompts(encoder: Encoder, model_dir: Path, samples: Sequence[Sample]) -> list[list[int]]:
    """Return the tokens of texts and conversations to continue.

    Raises:
        InputError: one has no token, or one that the model does not know.
    """
    prompts = [encoder.prompt(sample) for sample in samples]
    known = read_vocabulary(model_dir)
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise InputError(f"prompt {number} has no token to continue")
        if max(prompt) >= known:
            raise InputError(
                f"{model_dir}: the tokenizer gives token {max(prompt)} of prompt"
                f" {number}, the model has {known}"
            )
    return prompts


class SamplePrompts:
    """The prompts of `training.sample_prompts`.

    Raises:
        InputError: the file cannot be used, or its prompts are too long or too many.
    """

    def __init__(
        self,
        path: Path,
        columns: Mapping[str, str],
        encoder: Encoder,
        model_dir: Path,
        new_tokens: int,
        max_seq_len: int,
    ) -> None:
        self._encoder = encoder
        self._samples = read_prompts(path, columns_of_run(path, dict(columns)))
        self.tokens = encode_prompts(encoder, model_dir, self._samples)
        self.stop, self.vocabulary = encoder.stops, read_vocabulary(model_dir)
        longest = max(map(len, self.tokens))
        if longest + new_tokens > max_seq_len:
            raise InputError(
                f"{path}: a prompt of {longest} tokens and training.sample_tokens {new_tokens}"
                f" exceed data.max_seq_len {max_seq_len}; shorten it, or ask for fewer"
            )
        most = max(sum(map(len, self.tokens)), new_tokens * len(self.tokens))
        if most > MOST_TOKENS:
            raise InputError(
                f"{path}: {len(self.tokens)} prompts, or their answers of training.sample_tokens"
                f" {new_tokens}, have {most} tokens, of at most {MOST_TOKENS}; give fewer prompts"
            )

    def read(self, number: int, new: Sequence[int]) -> dict[str, Any]:
        """Return what is logged of the answer to a prompt."""
        sample = self._samples[number]
        stream = TextStream(
            self._encoder.tokenizer, self._encoder.next_turn if sample.messages else ""
        )
        stopped = new[-1] in self.stop
        stream.finish(new[:-1] if stopped else new)
        asked = [turn.content for turn in sample.messages if turn.role != "assistant"]
        return {
            "number": number + 1,
            "prompt": asked[-1] if asked else sample.prompt or sample.text,
            "text": stream.text,
            "tokens": len(new),
            "ended": stopped or stream.ended,
        }
