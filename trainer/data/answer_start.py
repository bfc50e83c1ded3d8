"""Where an answer begins: after its prompt, or before the reasoning that only a prompt opens."""

from __future__ import annotations

import re

from trainer.data.chat_marks import FORGED, FORGED_END, Turn

_TAG = re.compile(r"<[^<>\s]*>")
_REASONING = re.compile(
    r"(?:<(?P<name>[^<>/\s]*(?i:think|thought|reason)[^<>/\s]*)>|<\|channel>thought)"
    r"\s*(?P<closed><[^<>\s]+>\s*)?\Z"
)
"""A reasoning that a prompt opens, and perhaps closes, as its last part."""
_ONE_TAG = re.compile(r"\s*<[^<>/\s]+>\s*")


def answer_start(asked: str, text: str) -> int | None:
    """Return where an answer begins in a conversation; None if its prompt is another text.

    That is after the prompt, or before the reasoning that the prompt alone opens.
    """
    if text.startswith(asked):
        return len(asked)
    common = len(common_start(asked, text, _TAG))
    opener = _REASONING.search(asked)
    if opener is not None and not asked[common : opener.start()].strip():
        return min(common, opener.start())
    return common if _ONE_TAG.fullmatch(asked, common) else None


def ends_alike(one: str, other: str, markup: re.Pattern[str]) -> bool:
    """Return whether both texts end with the same token of the markup, or else the same line."""
    one, other = one.rstrip(), other.rstrip()
    tokens = [found for found in markup.finditer(one) if found.end() == len(one)]
    return other.endswith(tokens[0][0] if tokens else one.rpartition("\n")[2])


def common_start(one: str, other: str, markup: re.Pattern[str]) -> str:
    """Return what both texts begin with, in whole tokens of the markup."""
    pairs = zip(one, other, strict=False)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    cut = [
        found.start()
        for text in (one, other)
        for found in markup.finditer(text)
        if found.start() < same < found.end()
    ]
    return one[: min(cut, default=same)]


def continued_answer(turn: Turn, opened: str, written: str) -> str | None:
    """Return an answer as it continues a prompt.

    None if it has no reasoning, if the template writes that, and if it is a call.

    Args:
        opened: the end of the prompt, with which it opens a reasoning.
        written: the conversation from there on.
    """
    opener = _REASONING.fullmatch(opened.lstrip())
    name = opener and opener["name"]
    if opener is None or name is None or opener["closed"] or turn.get("tool_calls"):
        return None
    if not re.fullmatch(r"[\w:]+", name) or written.lstrip().startswith(f"<{name}>"):
        return None
    content = (turn.get("content") or "").rstrip()
    # In a text of its own, markup is forged; here it is the reasoning's.
    for tag in (f"<{name}>", f"</{name}>"):
        content = content.replace(f"{FORGED}{tag}{FORGED_END}", tag, 1)
    thought = turn.get("reasoning_content", "")
    if f"</{name}>" in content:
        content = content.lstrip().removeprefix(f"<{name}>")
        return content.removeprefix("\n") if opened.endswith("\n") else content
    if thought.strip():
        return f"{thought.strip()}\n</{name}>\n\n{content.lstrip()}"
    return None
