"""Real data: descriptions of Debian's packages with their archive sections, and mails.

    python -m tests.real.data FOLDER

writes `train.jsonl`, 400 questions as conversations, and `validation.jsonl`, 40 others.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.real.packages import SPAM_ASSASSIN, PackageUnavailableError

QUESTION = "In which section of the archive is this package? "
SECTIONS = 10
"""The largest sections; each has the same number of rows."""


@dataclass(frozen=True)
class Described:
    """A package's description in one line, and its section."""

    text: str
    section: str

    @property
    def conversation(self) -> dict[str, Any]:
        """A question and its answer, as a line of data."""
        return {
            "messages": [
                {"role": "user", "content": QUESTION + self.text},
                {"role": "assistant", "content": self.section},
            ]
        }

    @property
    def labelled(self) -> dict[str, str]:
        """A line of data for a classifier; the label is a word."""
        return {"input": self.text, "label": self.section}


def described(count: int) -> list[Described]:
    """Return so many packages of this Debian's lists, mixed; the same lists give the same ones.

    Raises:
        PackageUnavailableError: there is no `apt-cache`, or it has no lists.
    """
    try:
        dump = ["apt-cache", "dumpavail"]
        text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        text = ""
    sections: dict[str, set[str]] = {}
    for record in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Section|Description): (.+)$", record, re.MULTILINE))
        if len(fields) == 3 and "/" not in fields["Section"]:
            sections.setdefault(fields["Section"], set()).add(fields["Description"])
    names = sorted(sections, key=lambda name: (-len(sections[name]), name))[:SECTIONS]
    each = -(-count // SECTIONS)
    if not names or len(sections[names[-1]]) < each:
        raise PackageUnavailableError("no Debian package lists (apt-get update)")
    rows = [
        Described(text, name)
        for name in names
        for text in random.Random(7).sample(sorted(sections[name]), each)
    ]
    random.Random(8).shuffle(rows)
    return rows[:count]


def mails(count: int) -> list[dict[str, Any]]:
    """Return so many mails' subjects as labelled lines, 0 ham and 1 spam in turn.

    Raises:
        PackageUnavailableError: npm does not have them.
    """
    folder = SPAM_ASSASSIN.folder() / "package" / "data"
    kinds = [sorted((folder / name).glob("*.txt")) for name in ("easy-ham-1", "spam-1")]
    rows: list[dict[str, Any]] = []
    for pair in zip(*kinds, strict=False):
        for label, path in enumerate(pair):
            subject = re.search(rb"^Subject: (.+)$", path.read_bytes(), re.MULTILINE)
            if subject:
                rows.append({"input": subject[1].decode(errors="replace").strip(), "label": label})
    return rows[:count]


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write a JSON Lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def main() -> None:
    """Write the conversations of the demo and the benchmark."""
    folder = Path(sys.argv[1])
    rows = [row.conversation for row in described(440)]
    write_lines(folder / "train.jsonl", rows[:400])
    write_lines(folder / "validation.jsonl", rows[400:])


if __name__ == "__main__":
    main()
