"""The demo's corpus: a part of this machine's Python standard library, as JSON Lines.

Usage: python scripts/demo_distill_data.py OUTPUT

The same library gives the same files: which of its modules are taken, and which of those only
serve validation, is decided by the digests of their names. Writes `teacher.jsonl`, which has five
times the text of `student.jsonl` and begins with it, and `validation.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = {"dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests"}
PIECE = 500  # characters: about 180 tokens
SIZES = {"validation": 80_000, "student": 320_000, "rest": 1_200_000}  # characters


def modules() -> list[Path]:
    """Return the library's sources in an order that mixes its packages."""
    root = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    chosen = (name for name in names if not LEFT_OUT.intersection(name.parts))
    return [
        root / name
        for name in sorted(chosen, key=lambda name: hashlib.sha256(bytes(name)).digest())
        if (root / name).stat().st_size < 100_000  # none should be a tenth of everything
    ]


def pieces(text: str) -> Iterator[str]:
    """Cut a text between lines, into what a small model reads at once."""
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > PIECE:
            yield piece
            piece = ""
        piece += line[:PIECE]
    yield piece


def main() -> None:
    """Write the three files."""
    output = Path(sys.argv[1])
    output.mkdir(parents=True)
    sources = iter(modules())
    parts: dict[str, list[str]] = {}
    for part, size in SIZES.items():
        taken = parts[part] = []
        while sum(map(len, taken)) < size and (path := next(sources, None)):
            taken += [
                piece for piece in pieces(path.read_text("utf-8", "replace")) if piece.strip()
            ]
        # Mixed, since a student reads them in this order and its steps should resemble each other.
        taken.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    parts["teacher"] = parts["student"] + parts.pop("rest")
    for part, texts in parts.items():
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (output / f"{part}.jsonl").write_text("".join(lines))
        print(f"{part:10}  {len(texts):,} pieces, {sum(map(len, texts)):,} characters")


if __name__ == "__main__":
    main()
