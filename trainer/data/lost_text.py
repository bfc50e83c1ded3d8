"""Text that a chat template leaves out of a turn that is learned.

White space does not count, since templates trim it, and neither do the tags of a reasoning in the
text, which some templates replace by their own markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from trainer.data.turns import REASONING, ChatMessage

SHOWN_CHARACTERS = 60

_TAGS = re.compile(r"</?(?:think|thinking|reasoning)>|\[/?THINK\]")


def find_lost_text(message: ChatMessage, rendered: str) -> str | None:
    """Return the beginning of what is missing; None if nothing is.

    Args:
        message: an assistant's turn.
        rendered: the part of the rendering that is learned for it.
    """
    rest = _remove_whitespace(rendered)
    # Each piece is taken out once it is found; the longest first, as it is in no other.
    for forms in sorted(_iter_text_forms(message), key=lambda forms: -len(forms[0])):
        bare = next((form for form in map(_remove_whitespace, forms) if form in rest), None)
        if bare is None:
            return shorten_text(forms[0])
        rest = rest.replace(bare, "\0", 1)
    return None


def shorten_text(text: str) -> str:
    """Return the first words of a text, in one line."""
    words = " ".join(text.split())
    return words if len(words) <= SHOWN_CHARACTERS else f"{words[:SHOWN_CHARACTERS]}..."


def _iter_text_forms(message: ChatMessage) -> Iterator[list[str]]:
    """Yield the texts of a turn, each in the forms in which a template may write it."""
    yield from ([part] for part in _TAGS.split(message.content) if part.strip())
    found = next((message.more[key] for key in REASONING if key in message.more), "")
    yield from ([part] for part in _TAGS.split(found) if part.strip())
    for each in message.more.get("tool_calls", ()):
        function = each.get("function", each)
        if isinstance(name := function.get("name"), str):
            yield [name]
        for leaf in _iter_leaves(function.get("arguments")):
            yield _list_forms(leaf)


def _iter_leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and values of arguments."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _iter_leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _iter_leaves(each)
    elif value is not None and value != "":
        yield value


def _list_forms(leaf: Any) -> list[str]:
    """Return a leaf as text, and as JSON and Python write it."""
    written = {json.dumps(leaf, ensure_ascii=False), json.dumps(leaf), repr(leaf)}
    quoted = isinstance(leaf, str)
    return [str(leaf), *(form[1:-1] if quoted else form for form in written)]


def _remove_whitespace(text: str) -> str:
    return "".join(text.split())
