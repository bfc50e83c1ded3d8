"""The minutes of a meeting as text and back: summary, decisions, action items."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_HEADING = re.compile(r"^\W*action items\W*$", re.IGNORECASE)
_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+(?P<owner>[^:]+):\s*(?P<task>.+?)\s*$")
_DUE = re.compile(r"\s*\((?:by (?P<due>[^()]*)|no date)\)\.?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ActionItem:
    """Who does what, by when."""

    owner: str
    task: str
    due: str | None = None
    """As it was said, such as `Friday`; None without a date."""

    def __str__(self) -> str:
        return f"{self.owner}: {self.task} ({f'by {self.due}' if self.due else 'no date'})"


@dataclass(frozen=True, slots=True)
class Minutes:
    """The outcome of a meeting at its end."""

    summary: str
    decisions: Sequence[str]
    action_items: Sequence[ActionItem]

    def __str__(self) -> str:
        return (
            f"Summary:\n{self.summary}\n\nDecisions:\n{_bullets(self.decisions)}\n\n"
            f"Action items:\n{_bullets(self.action_items)}"
        )


@dataclass(frozen=True, slots=True)
class Meeting:
    """A transcript with its minutes."""

    request: str
    """The transcript and the instruction, separated by a blank line."""
    minutes: Minutes

    def as_json(self) -> dict[str, object]:
        """Return a `messages` line; `action_items` is the reference of a score."""
        return {
            "messages": [
                {"role": "user", "content": self.request},
                {"role": "assistant", "content": str(self.minutes)},
            ],
            "action_items": [asdict(item) for item in self.minutes.action_items],
        }


def find_action_items(text: str) -> list[ActionItem]:
    """Return the lines `- OWNER: TASK (by DUE)` below the heading `Action items`."""
    found: list[ActionItem] = []
    below = False
    for line in text.splitlines():
        if _HEADING.match(line):
            below = True
        elif below and (match := _ITEM.match(line)):
            due = _DUE.search(match["task"])
            task = match["task"][: due.start()] if due else match["task"]
            found.append(ActionItem(match["owner"].strip(), task, due["due"] if due else None))
        elif below and line.strip().endswith(":"):
            break  # the next heading
    return found


def _bullets(lines: Sequence[object]) -> str:
    return "\n".join(f"- {line}" for line in lines or ["None."])
