"""Any text in Markdown, shown as it is: no markup, HTML, link or mention, and no end of its line.

For both programs. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from trainer.system.commandline.sanitize import sanitize_text


def escape_markdown(text: str) -> str:
    """Return a text for a paragraph, a heading or a cell."""
    text = re.sub(r"([\\`*_\[\]|~])", r"\\\1", sanitize_text(text))
    return re.sub(r"[&<>@#]|:(?=//)|(?<=www)\.", lambda found: f"&#{ord(found[0])};", text)


def code_span(text: str) -> str:
    """Return a text as code within a line, behind backquotes more than any in it."""
    text = sanitize_text(text)
    mark = _choose_backquotes(text, 1)
    edge = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{mark}{edge}{text}{edge}{mark}"


def code_block(lines: Iterable[str], language: str = "sh") -> str:
    """Return lines as a block of code, behind a fence longer than any in it."""
    text = "\n".join(map(sanitize_text, lines))
    fence = _choose_backquotes(text, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def _choose_backquotes(text: str, least: int) -> str:
    return "`" * (1 + max([least - 1, *(len(found) for found in re.findall(r"`+", text))]))
