"""The steps of scripts by family, and the sound text around them (`steps.json`).

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

from trainer.data.shell_safety.family import CLASSES, Family, held_out


@dataclass(frozen=True, slots=True)
class Scaffold:
    """Texts of one kind; every third one is for validation."""

    name: str
    texts: tuple[str, ...]

    def templates(self, validation: bool) -> list[tuple[str, str]]:
        """Return the ids and texts of one split."""
        return [
            (f"scaffold-{self.name}/{number}", text)
            for number, text in enumerate(self.texts)
            if held_out(number) == validation
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
