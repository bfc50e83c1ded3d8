"""A family of shell steps: the same commands in a sound and in a defective form."""

from __future__ import annotations

from dataclasses import dataclass

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


def held_out(index: int) -> bool:
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

    def templates(self, label: int, validation: bool) -> list[Template]:
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
            if held_out(number + shift) == validation
        ]
