"""Text as one line without effects, for both programs. Standard library only."""

from __future__ import annotations

import re

_COLOURS = re.compile(r"(?:\x1b\[|\x9b)[0-9;:]*m")
_UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f"  # C0 without the tab, DEL, C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # directions, and other line ends
    "\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations and tags, which are invisible
    "\ud800-\udfff]"  # halves of characters, which no encoding takes
)


def sanitize_text(text: str) -> str:
    r"""Return a text as one line without effects: colours are removed, the rest is escaped
    (`\x1b`).

    Tabs stay. A line end is shown as well, since it could forge a line of another process.
    """
    if _UNSAFE.search(text) is None:
        return text
    return _UNSAFE.sub(_escape, _COLOURS.sub("", text))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
