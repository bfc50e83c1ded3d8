"""A conversation in progress: its participants, turns, and current decisions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from meetings.issue import Issue, Option, held_out, part
from meetings.minutes import ActionItem
from meetings.texts import ASIDES, DUES, PHRASES


@dataclass
class TaskAssignment:
    """A task with its owner."""

    owner: str
    task: str
    due: int | None
    """A place in `DUES`."""
    option: Option | None
    """What it belongs to; None if it is needed in any case."""

    def item(self) -> ActionItem:
        """Return it for the minutes."""
        return ActionItem(self.owner, self.task, None if self.due is None else DUES[self.due])


@dataclass
class IssueOutcome:
    """The current outcome of one issue."""

    issue: Issue
    chosen: Option | None = None
    rejected: Option | None = None
    """Another option that was talked about."""
    revised: Option | None = None
    """A decision that no longer stands."""
    assignments: list[TaskAssignment] = field(default_factory=list[TaskAssignment])


class Conversation:
    """The turns of one meeting; the first participant chairs it."""

    def __init__(self, rng: random.Random, validation: bool, names: list[str]) -> None:
        self.rng, self.validation, self.names = rng, validation, names
        self.turns: list[tuple[str, str]] = []
        self.outcomes: list[IssueOutcome] = []
        self._used: set[str] = set()

    @property
    def chair(self) -> str:
        """The name of the participant who leads the meeting."""
        return self.names[0]

    def someone(self, *excluded: str) -> str:
        """Return a participant who is not one of these, if there is one."""
        left = [name for name in self.names if name not in excluded]
        return self.rng.choice(left or self.names)

    def say(self, name: str, text: str) -> None:
        """Add a turn; two in a row by one person become one."""
        if self.turns and self.turns[-1][0] == name:
            self.turns[-1] = name, f"{self.turns[-1][1]} {text}"
        else:
            self.turns.append((name, text))

    def phrase(self, kind: str, /, **values: str) -> str:
        """Return a phrase with its values, one that this meeting has not had if possible.

        Args:
            kind: a key of `PHRASES`.
        """
        available = part(PHRASES[kind], self.validation)
        text = self.rng.choice([each for each in available if each not in self._used] or available)
        self._used.add(text)
        return fill(text, **values)

    def speak(self, name: str, kind: str, /, **values: str) -> None:
        """Let a participant say a phrase of this kind."""
        self.say(name, self.phrase(kind, **values))

    def nod(self, chance: float) -> None:
        """Let a participant show with a word or two that they listen."""
        if self.rng.random() < chance:
            self.speak(self.someone(self.turns[-1][0]), "nod")

    def digress(self) -> None:
        """Let two people make small talk."""
        exchanges = [a for number, a in enumerate(ASIDES) if held_out(number) == self.validation]
        unused = [exchange for exchange in exchanges if exchange[0] not in self._used]
        if not unused:
            return
        exchange = self.rng.choice(unused)
        self._used.add(exchange[0])
        first = self.someone(self.turns[-1][0] if self.turns else "")
        pair = first, self.someone(first)
        for number, text in enumerate(exchange):
            self.say(pair[number % 2], text)


def fill(text: str, /, **values: str) -> str:
    """Replace the braces of a phrase; `{Name}` is the value of `name` with a capital."""
    capitals = {name.capitalize(): capital(value) for name, value in values.items()}
    return text.format(**values, **capitals)


def capital(text: str) -> str:
    """Return a text with a capital at its start."""
    return text[:1].upper() + text[1:]


def listed(parts: list[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
