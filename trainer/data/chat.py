r"""How a conversation is laid out as tokens, and which of them are learned.

The format is chosen by the special tokens that a tokenizer has, so no template language runs:

- `<|im_start|>`, `<|im_end|>`: ChatML (Qwen), `<|im_start|>ROLE\nTEXT<|im_end|>\n`
- `<|start_header_id|>`, `<|end_header_id|>`, `<|eot_id|>`: Llama 3, header, blank line, TEXT,
  `<|eot_id|>`
- none of these: `ROLE: TEXT\n`

Only what an assistant says is a target, with the token that ends its turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.data.shapes import Message


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation; `markup` may hold special tokens, a person's text may not."""

    text: str
    markup: bool
    target: bool


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Markup around a turn's text; `{role}` is filled in."""

    required: tuple[str, ...]
    before: str
    end: str
    """Ends the turn, learned when the assistant speaks."""
    after: str


FORMATS = (
    ChatFormat(("<|im_start|>", "<|im_end|>"), "<|im_start|>{role}\n", "<|im_end|>", "\n"),
    ChatFormat(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "",
    ),
    ChatFormat((), "{role}: ", "\n", ""),
)


def chat_format(special_tokens: frozenset[str]) -> ChatFormat:
    """Return the first format whose special tokens the tokenizer has."""
    return next(form for form in FORMATS if special_tokens.issuperset(form.required))


def pieces(messages: tuple[Message, ...], form: ChatFormat) -> Iterator[Piece]:
    """Yield the conversation from its first turn to its last."""
    for message in messages:
        spoken = message.role == "assistant"
        yield Piece(form.before.format(role=message.role), markup=True, target=False)
        yield Piece(message.content, markup=False, target=spoken)
        yield Piece(form.end, markup=True, target=spoken)
        if form.after:
            yield Piece(form.after, markup=True, target=False)
