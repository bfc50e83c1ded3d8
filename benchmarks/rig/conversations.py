"""Conversations of invented words, for a run whose data has any number of rows."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

WORDS = ["".join(parts) for parts in itertools.product("bdfgklmnprst", "aeiou", "lmnrst")]


def write_conversations(file: Path, rows: int, words: int = 32) -> Path:
    """Write so many conversations of two turns of `words` each; return the file.

    Each has about 350 bytes if it has 32.
    """
    draw = random.Random(rows)
    with file.open("w") as lines:
        for row in range(rows):
            question = f"{row} {' '.join(draw.choices(WORDS, k=words))}"
            answer = " ".join(draw.choices(WORDS, k=words))
            turns = [("user", question), ("assistant", answer)]
            line = {"messages": [{"role": role, "content": text} for role, text in turns]}
            lines.write(json.dumps(line) + "\n")
    return file
