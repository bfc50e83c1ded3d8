"""An issue of a meeting, as it is written by hand: what people know, propose and take on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_PARTS = 3


def held_out(index: int) -> bool:
    """Return whether a text is for validation: every third one."""
    return index % _PARTS == _PARTS - 1


def part(texts: Sequence[str], validation: bool) -> list[str]:
    """Return one split of a list of texts."""
    return [text for number, text in enumerate(texts) if held_out(number) == validation]


@dataclass(frozen=True, slots=True)
class Option:
    """Something that can be decided."""

    do: str
    """What: an infinitive without `to`, as in `move the meeting`."""
    pro: str
    """A clause that speaks for it; it can follow `because`."""
    con: str
    """A clause that speaks against it."""
    tasks: tuple[str, ...] = ()
    """What has to be done then: infinitives without `to`."""


@dataclass(frozen=True, slots=True)
class Issue:
    """One point of an agenda; `{name}` in its texts is a number of `numbers`."""

    topic: str
    """A noun phrase with its article."""
    background: str
    """What is the matter, as a clause."""
    report: str
    """The same, as a speaker says it."""
    asked: tuple[tuple[str, str], ...]
    """Questions with their answers."""
    options: tuple[Option, ...]
    tasks: tuple[str, ...]
    """What has to be done whichever option is taken."""
    numbers: dict[str, tuple[int, int, int]] = field(
        default_factory=dict[str, tuple[int, int, int]]
    )
    """Arguments of `randrange`, by name."""


@dataclass(frozen=True, slots=True)
class MeetingSetting:
    """A group of people that meets."""

    name: str
    titles: tuple[str, ...]
    """Of its meetings."""
    roles: tuple[str, ...]
    """The first one's holder chairs the meetings."""
    issues: tuple[Issue, ...]
    """Every third one is for validation."""
