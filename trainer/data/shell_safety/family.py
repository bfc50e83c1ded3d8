"""The families of shell steps, and the sound text around them (`steps.json`).

A family has the same commands in a sound and in a defective form.

- needs-quoting: unquoted is sound in an assignment, in `[[ ]]`, in `case` and in arithmetic, so
  only the place of the quotes decides.
- non-deterministic: a clock, a process id or a random number that only reaches a log on stderr, a
  comment or a single quoted string is sound; so is a generator whose seed is set before its use.
- non-idempotent: the check, the flag or the truncation that makes a step repeatable must come
  before it and be about it; the same words also occur too late or about something else.
- unsafe: guards count only if they come first; often the forms differ only in the order of two
  words or lines.

Comments and messages name the commands of all classes, so that their presence is no hint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SAFE = 0
CLASSES = ("safe", "needs-quoting", "non-deterministic", "non-idempotent", "unsafe")
_PARTS = 3

CONTEXTS = {
    "plain": "@step",
    "function": 'main() {\n  @step\n}\nmain "$@"',
    "if": 'if [ -w "@d" ]; then\n  @step\nfi',
    "subshell": "(\n  @step\n)",
    "group": "{\n  @step\n}",
    "for": "for round in @word; do\n  @step\ndone",
}


def is_held_out(index: int) -> bool:
    """Return whether a template is for validation: every third one."""
    return index % _PARTS == _PARTS - 1


@dataclass(frozen=True, slots=True)
class Template:
    """A step of a script; `@word` is replaced by a drawn name (see `words.py`)."""

    id: str
    text: str
    context: str
    """Surrounds the step, which replaces its `@step`."""


@dataclass(frozen=True, slots=True)
class Family:
    """Steps around one command whose defect, if any, is always of the same class."""

    name: str
    defect: int
    sound: tuple[str, ...]
    defective: tuple[str, ...]

    def list_templates(self, label: int, validation: bool) -> list[Template]:
        """Return the templates of one form (`SAFE` or the family's defect) and one split.

        A template is a step in a context. Validation holds out combinations: each step and each
        context occur in training, but never the two together.
        """
        assert label in (SAFE, self.defect)
        form = "sound" if label == SAFE else "defective"
        texts = self.sound if label == SAFE else self.defective
        return [
            Template(f"{self.name}/{form}/{number}/{context}", text, around)
            for number, text in enumerate(texts)
            for shift, (context, around) in enumerate(CONTEXTS.items())
            if is_held_out(number + shift) == validation
        ]


@dataclass(frozen=True, slots=True)
class Scaffold:
    """Texts of one kind; every third one is for validation."""

    name: str
    texts: tuple[str, ...]

    def list_templates(self, validation: bool) -> list[tuple[str, str]]:
        """Return the ids and texts of one split."""
        return [
            (f"scaffold-{self.name}/{number}", text)
            for number, text in enumerate(self.texts)
            if is_held_out(number) == validation
        ]


_TREE = json.loads(Path(__file__).with_name("steps.json").read_text(encoding="utf-8"))
FAMILIES = tuple(
    Family(f"{defect}-{name}", CLASSES.index(defect), tuple(of["sound"]), tuple(of["defective"]))
    for defect, families in _TREE["families"].items()
    for name, of in families.items()
)
TITLES, SETTINGS, NOISE = (
    Scaffold(name, tuple(_TREE["scaffold"][name])) for name in ("titles", "settings", "noise")
)
