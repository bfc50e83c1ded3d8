"""A deterministic generator of shell scripts in five shell-safety classes.

| label | class             | the script                                                     |
|-------|-------------------|----------------------------------------------------------------|
| 0     | safe              | has none of the defects below                                  |
| 1     | needs-quoting     | leaves an expansion open to word splitting and globbing        |
| 2     | non-deterministic | writes or decides by a clock, an id, a random draw or a race   |
| 3     | non-idempotent    | fails on a second run, or changes what the first one left      |
| 4     | unsafe            | can destroy, run or reveal more than intended                  |

If several apply the highest label counts; a generated script has at most one defect. A script
consists of steps from families (`steps.json`), all in their sound form except the one
that gives the label, between comments and messages that name the same commands. So order,
quoting and context decide, not words. Train and validation share no template: validation has
each step in a context that training never combines it with, and other comments.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainer.data.shell_safety.family import (
    CLASSES,
    FAMILIES,
    NOISE,
    SAFE,
    SETTINGS,
    TITLES,
    Scaffold,
)
from trainer.data.shell_safety.words import Names

Split = Literal["train", "validation"]
_BY_DEFECT = {
    label: [family for family in FAMILIES if family.defect == label]
    for label in range(1, len(CLASSES))
}
_BASH_ONLY = re.compile(r"\[\[|\(\(|pipefail|RANDOM|BASHPID|\[@\]|=\(|\blocal\b|\bERR\b|<\(")


@dataclass(frozen=True, slots=True)
class Script:
    """One generated script."""

    text: str
    label: int
    templates: tuple[str, ...]
    """Ids of all its templates."""


def generate(split: Split, count: int, seed: int) -> list[Script]:
    """Return `count` different scripts; classes are balanced to within one, order is mixed."""
    return list(_iter_scripts(split, count, seed))


def _iter_scripts(split: Split, count: int, seed: int) -> Iterator[Script]:
    rng = random.Random(f"shell-safety/{split}/{seed}")  # noqa: S311 - data, not secrets
    labels = [index % len(CLASSES) for index in range(count)]
    rng.shuffle(labels)
    seen: set[str] = set()
    for label in labels:
        script = _draw_script(rng, label, split == "validation")
        while script.text in seen:
            script = _draw_script(rng, label, split == "validation")
        seen.add(script.text)
        yield script


def _draw_script(rng: random.Random, label: int, validation: bool) -> Script:
    """Draw one script: 1 or 2 steps about different defects, at most one of them defective."""
    names = Names(rng)
    used: list[str] = []

    def draw_text(scaffold: Scaffold) -> str:
        template, text = rng.choice(scaffold.list_templates(validation))
        used.append(template)
        return names.fill_placeholders(text)

    defects = rng.sample(sorted(_BY_DEFECT), rng.choice((1, 2, 2)))
    if label != SAFE and label not in defects:
        defects[rng.randrange(len(defects))] = label
    head: list[str] = []
    if rng.random() < 0.4:
        head.append(draw_text(TITLES))
    if rng.random() < 0.5:
        head.append(draw_text(SETTINGS))
    if rng.random() < 0.2:
        head.append(draw_text(NOISE))
    body: list[str] = []
    for defect in defects:
        family = rng.choice(_BY_DEFECT[defect])
        template = rng.choice(
            family.list_templates(defect if defect == label else SAFE, validation)
        )
        used.append(template.id)
        body.append(names.render_step(template))
        if rng.random() < 0.2:
            body.append(draw_text(NOISE))
    text = "\n".join(head + body)
    shells = ["#!/bin/bash", "#!/usr/bin/env bash"]
    if not _BASH_ONLY.search(text):
        shells.append("#!/bin/sh")
    return Script(f"{rng.choice(shells)}\n{text}\n", label, tuple(used))
