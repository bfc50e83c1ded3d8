"""Prompts as a model continues them, and its answers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data.chat_marks import ConversationError
from trainer.data.encoder import Encoder
from trainer.data.samples import columns_of_run, read_prompts
from trainer.data.shapes import Sample
from trainer.data.turns import ChatMessage
from trainer.model.architecture import read_vocabulary
from trainer.system.errors import InputError

MOST_TOKENS = 7000
"""Limit for all prompts together, and for all answers: each must fit a control message."""


def encode_prompts(encoder: Encoder, model_dir: Path, samples: Sequence[Sample]) -> list[list[int]]:
    """Return the tokens of texts and conversations to continue.

    Raises:
        InputError: the chat template cannot express one, or one has no token, or one that the model
            does not know; names its place.
    """
    prompts: list[list[int]] = []
    known = read_vocabulary(model_dir)
    for number, sample in enumerate(samples, start=1):
        place = f"{sample.source}{sample.line}" if sample.source else f"prompt {number}"
        try:
            prompt = encoder.encode_prompt(sample)
        except ConversationError as error:
            raise InputError(f"{place}: {error}") from None
        if not prompt:
            raise InputError(f"{place}: has no token to continue")
        if max(prompt) >= known:
            raise InputError(
                f"{model_dir}: the tokenizer gives token {max(prompt)} of {place}, the model has"
                f" {known}"
            )
        prompts.append(prompt)
    return prompts


def turns_before(sample: Sample) -> str | tuple[ChatMessage, ...]:
    """Return what of a prompt's record precedes its answer, as `Encoder.prompt` reads it.

    Args:
        sample: of `read_prompts`.

    Raises:
        InputError: it has tools or calls of them, which rows of turns do not express.
    """
    if not sample.messages:
        return sample.prompt or sample.text
    if sample.tools or any(message.more for message in sample.messages):
        raise InputError(
            f"{sample.source}{sample.line}: has tools or other keys of turns; give prompts of text"
            " alone"
        )
    turns = sample.messages
    return turns[:-1] if turns[-1].role == "assistant" else turns


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
        for sample, tokens in zip(self._samples, self.tokens, strict=True):
            if len(tokens) + new_tokens > max_seq_len:
                raise InputError(
                    f"{sample.source}{sample.line}: a prompt of {len(tokens)} tokens and"
                    f" training.sample_tokens {new_tokens} exceed data.max_seq_len {max_seq_len};"
                    " shorten it, or ask for fewer"
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
        stream = self._encoder.answer_stream(sample, self.tokens[number])
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
