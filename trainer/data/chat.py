r"""The layout of conversations for tokenizers without a chat template, and the learned tokens.

The format is chosen by the special tokens that a tokenizer has:

- `<|im_start|>`, `<|im_end|>`: ChatML (Qwen), `<|im_start|>ROLE\nTEXT<|im_end|>\n`
- `<|start_header_id|>`, `<|end_header_id|>`, `<|eot_id|>`: Llama 3, header, blank line, TEXT,
  `<|eot_id|>`
- none of these: `ROLE: TEXT\n`

Only the assistant's turns are targets, each with the token that ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.data.chat_marks import ConversationError
from trainer.data.shapes import Sample
from trainer.data.turns import REASONING, ChatMessage


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """A part of a conversation; only `markup` may contain special tokens."""

    text: str
    markup: bool
    target: bool


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Markup around a turn's text; `{role}` is replaced."""

    required: tuple[str, ...]
    before: str
    end: str
    """Ends the turn; learned in the assistant's turns."""
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


def check_plain(sample: Sample) -> None:
    """Check that a conversation is text alone: tools and reasoning need a template.

    Raises:
        ConversationError: it is not.
    """
    if sample.tools or any("tool_calls" in message.more for message in sample.messages):
        raise ConversationError(
            "it has tools, which a tokenizer without a chat template cannot express"
        )
    if any(not turn.more.keys().isdisjoint(REASONING) for turn in sample.messages if turn.target):
        raise ConversationError(
            "it has reasoning apart from the text, which a tokenizer without a chat template"
            " cannot express; write it into the text"
        )


def iter_pieces(messages: tuple[ChatMessage, ...], form: ChatFormat) -> Iterator[ChatPiece]:
    """Yield the conversation from its first turn to its last."""
    for message in messages:
        is_target = message.target
        yield ChatPiece(form.before.format(role=message.role), markup=True, target=False)
        yield ChatPiece(message.content, markup=False, target=is_target)
        yield ChatPiece(form.end, markup=True, target=is_target)
        if form.after:
            yield ChatPiece(form.after, markup=True, target=False)
