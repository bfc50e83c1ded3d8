"""Where an answer begins: after its prompt, or before the reasoning that only a prompt opens."""

from __future__ import annotations

import re
from itertools import takewhile

from trainer.data.chat_marks import FORGED, FORGED_END, Turn

_TAG = re.compile(r"<[^<>\s]*>")
_REASONING = re.compile(
    r"(?:<(?P<name>[^<>/\s]*(?i:think|thought|reason)[^<>/\s]*)>|<\|channel>thought)"
    r"\s*(?P<closed><[^<>\s]+>\s*)?\Z"
)
"""A reasoning that a prompt opens, and perhaps closes, as its last part."""
_CLOSED = re.compile(r"<([^<>/\s]*(?i:think|thought|reason)[^<>/\s]*)>.*?</\1>", re.DOTALL)
_ONE_TAG = re.compile(r"\s*<[^<>/\s]+>\s*")


def find_answer_start(asked: str, text: str) -> int | None:
    """Return where an answer begins in a conversation; None if its prompt is another text.

    That is after the prompt, or before the reasoning that the prompt alone opens.
    """
    if text.startswith(asked):
        return len(asked)
    common = len(find_common_prefix(asked, text, _TAG))
    opener = _REASONING.search(asked)
    if opener is not None and not asked[common : opener.start()].strip():
        return min(common, opener.start())
    return common if _ONE_TAG.fullmatch(asked, common) else None


def find_end(text: str) -> str:
    """Return the last characters of a text, without white space, by which it is recognised."""
    return "".join(text.split())[-8:]


def find_moved_start(
    asked: str,
    asking: str,
    text: str,
    markup: re.Pattern[str],
    bounds: tuple[int, int],
    closing: str,
) -> tuple[int, str] | None:
    """Return where an answer begins in a conversation that has another text before it.

    That is after the markup that ends its prompt, behind the end of the turn before, or in the one
    place with markup that only asks. The second value is what the prompt opens and the conversation
    lacks. None if it is unclear.

    Args:
        asked: its prompt, which ends with a token of `markup` and perhaps a word.
        asking: what the template has added to ask.
        bounds: it begins after the first, and its last text ends at the second.
        closing: the last characters of the turn before it.
    """
    tokens = list(markup.finditer(asked))
    if not tokens:
        return None
    begin = tokens[-1].start() if not markup.match(asking) else len(asked) - len(asking)
    header = asked[begin:]
    opener = _REASONING.search(header)
    core = header[: opener.start()] if opener and opener.start() else header
    floor, text_end = bounds
    agreed: dict[int, str] = {}
    place = text.find(core, floor)
    while 0 <= place <= text_end - len(core):
        pairs = zip(
            *(reversed("".join(t.split())) for t in (asked[:begin], text[:place])), strict=False
        )
        same = takewhile(lambda pair: pair[0] == pair[1], pairs)
        agreed[place] = "".join(one for one, _ in same)[::-1]
        place = text.find(core, place + 1)
    best = [n for n, part in agreed.items() if len(part) == max(map(len, agreed.values()))]
    if len(best) != 1 or (
        closing not in agreed[best[0]] and (agreed.keys() != {*best} or core not in asking)
    ):
        return None
    length = find_answer_start(header, text[best[0] :])
    if length is None or best[0] + length > text_end:
        return None
    return best[0] + length, header[length:]


def has_same_text(asked: str, text: str) -> bool:
    """Return whether two texts differ in white space and closed reasonings alone."""
    one, other = ("".join(_CLOSED.sub("", each).split()) for each in (asked, text))
    return one == other


def has_same_ending(one: str, other: str, markup: re.Pattern[str]) -> bool:
    """Return whether both texts end with the same token of the markup, or else the same line."""
    one, other = one.rstrip(), other.rstrip()
    tokens = [found for found in markup.finditer(one) if found.end() == len(one)]
    return other.endswith(tokens[0][0] if tokens else one.rpartition("\n")[2])


def find_common_prefix(one: str, other: str, markup: re.Pattern[str]) -> str:
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


def find_continued_answer(turn: Turn, opened: str, written: str) -> str | None:
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
