"""Marks inside a conversation, by which its turns are found in a template's rendering.

They are noncharacters of Unicode, for internal use: no text has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.turns import REASONING
from trainer.system.errors import InputError

Span = tuple[int, int]
Turn = dict[str, Any]
"""A turn as a template sees it."""

FORGED, FORGED_END = "\ufdd0", "\ufdd1"
"""Around plain text that looks like a special token."""
_HERE, SEEN = "\ufdd2", "\ufdd5"
"""Around the number at the end of an assistant's turn, and inside another."""
END_MARK = re.compile(f"{_HERE}([0-9]+){_HERE}")
RESERVED = re.compile("[\ufdd0-\ufdef]")


def compile_alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of some texts; of none it finds nothing."""
    longest = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


class ConversationError(InputError):
    """The chat template cannot express a conversation."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text; spans are `begin, end` in characters, in their order."""

    text: str
    learned: list[Span]
    """The assistant's turns, each with the markup that ends it."""
    literal: list[Span]
    """Plain text that looks like a special token."""
    lost: str | None = None
    """The first words that the template left out, if that is accepted."""


def mark_special_tokens(value: Any, special: re.Pattern[str]) -> Any:
    """Return a JSON value with marks around text that looks like a special token.

    Raises:
        ConversationError: it holds a noncharacter.
    """
    if isinstance(value, dict):
        return {key: mark_special_tokens(each, special) for key, each in value.items()}
    if isinstance(value, list):
        return [mark_special_tokens(each, special) for each in value]
    if not isinstance(value, str):
        return value
    if found := RESERVED.search(value):
        raise ConversationError(f"it contains U+{ord(found[0]):04X}, which is not a character")
    return special.sub(f"{FORGED}\\g<0>{FORGED_END}", value)


def insert_end_mark(turn: Turn, number: int) -> Turn:
    """Return an assistant's turn with its number as a mark inside its last text."""
    mark = f"{_HERE}{number}{_HERE}"
    *calls, last = turn.get("tool_calls") or [{}]
    call = last.get("function", last)
    if isinstance(call.get("name"), str):
        call = {**call, "name": f"{call['name']}{mark}"}
        last = {**last, "function": call} if "function" in last else call
        return {**turn, "tool_calls": [*calls, last]}
    keys = ("content",) if (turn.get("content") or "").strip() else REASONING
    texts = {key: text for key in keys if (text := turn.get(key, "")).strip()}
    if not texts:
        raise ConversationError("an assistant's turn has neither text nor the name of a tool")
    for key, text in texts.items():
        bare = text.rstrip()  # a template may trim
        texts[key] = f"{bare}{mark}{text[len(bare) :]}"
    return {**turn, **texts}


def insert_mark(turn: Turn) -> Turn:
    """Return a turn with a mark in the middle of its text, where no template compares it."""
    text = turn["content"]
    return {**turn, "content": f"{text[: len(text) // 2]}{SEEN}{text[len(text) // 2 :]}"}


def find_generated_spans(
    text: str, text_ends: dict[int, int], targets: Sequence[int]
) -> dict[int, list[Span]]:
    """Return the parts of each turn that a template marks as generated.

    Args:
        said: where the last text of each assistant's turn ends.
        targets: the turns that are learned; only these count.
    """
    from trainer.data.template_sandbox import LEARNED, LEARNED_END

    spans: dict[int, list[Span]] = {}
    part = f"{LEARNED}[^{LEARNED_END}]*{LEARNED_END}"
    for match in re.finditer(f"(?:{part})+", text):  # some mark a turn in several parts
        begin, end = match.span()
        near = [number for number, place in text_ends.items() if begin <= place <= end]
        if not near:  # a part of the turn before or after it
            before = [number for number, place in text_ends.items() if place < begin]
            after = [number for number, place in text_ends.items() if place > end]
            near = [*before[-1:], *after[:1]]
        if len({number in targets for number in near}) > 1:
            raise ConversationError(
                "the chat template marks learned turns and context together as generated; give all"
                " turns of the line one 'weight'"
            )
        for number in near:
            spans.setdefault(number, []).append((begin, end))
    if not spans.keys() & set(targets):
        raise ConversationError("the chat template marks nothing as generated")
    return spans


def strip_marks(rendered: str, learned: list[Span]) -> RenderedChat:
    """Remove the marks from a rendering; `learned` counts the characters of `rendered`."""
    if not RESERVED.search(rendered):
        return RenderedChat(rendered, learned, [])
    text: list[str] = []
    literal: list[Span] = []
    opened = 0
    where: list[int] = []  # each character of `rendered`: its place in the text
    for character in rendered:
        where.append(len(text))
        if character == FORGED:
            opened = len(text)
        elif character == FORGED_END:
            literal.append((opened, len(text)))
        elif not RESERVED.match(character):
            text.append(character)
    where.append(len(text))
    spans = [(where[begin], where[end]) for begin, end in learned]
    return RenderedChat("".join(text), spans, literal)
