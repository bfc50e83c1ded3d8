"""SmolLM2-135M and data of packages for it; tests/real says where they come from."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.real.data import described, write_lines
from tests.real.packages import SPAM_ASSASSIN

HELD_OUT = 200
_PAGES = Path("/usr/share/man")
_TEXT = 1500
"""Characters of a mail or of a piece of a manual page, of which a row takes the first tokens."""


@dataclass(frozen=True)
class Data:
    """One data set; rows are the same on a machine with the same packages."""

    rows: Callable[[int], list[dict[str, Any]]]
    score: Literal["answers", "accuracy", "tokens"]
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    def write(self, folder: Path, count: int) -> tuple[Path, Path]:
        """Return the files of `count` rows to train on and of those held out."""
        paths = folder / f"train-{count}.jsonl", folder / "held-out.jsonl"
        if not all(path.exists() for path in paths):
            rows = self.rows(count + HELD_OUT)
            assert len(rows) == count + HELD_OUT, f"only {len(rows)} rows"
            write_lines(paths[1], rows[:HELD_OUT])
            write_lines(paths[0], rows[HELD_OUT:])
        return paths


def sections(count: int) -> list[dict[str, Any]]:
    """Return questions for the archive section of a package as conversations."""
    return [row.conversation for row in described(count)]


def mails(count: int) -> list[dict[str, Any]]:
    """Return subjects and beginnings of mails, 0 ham and 1 spam, as many of each."""
    folder = SPAM_ASSASSIN.folder() / "package" / "data"
    rows: list[dict[str, Any]] = []
    for label, kind in enumerate(("easy-ham", "spam")):
        paths = sorted(path for path in folder.glob(f"{kind}-*/*.txt"))
        for path in random.Random(7).sample(paths, -(-count // 2)):
            head, _, body = path.read_bytes().decode(errors="replace").partition("\n\n")
            subject = re.search(r"^Subject: (.+)$", head, re.MULTILINE)
            text = f"{subject[1].strip() if subject else ''}\n{body.strip()[:_TEXT]}".strip()
            rows.append({"input": text or "(empty)", "label": label})
    random.Random(8).shuffle(rows)
    return rows[:count]


def pages(count: int) -> list[dict[str, Any]]:
    """Return pieces of manual pages, without the macros of roff, as texts."""
    pieces: list[str] = []
    for path in sorted(_PAGES.glob("man[1-8]/*.gz")):
        if path.is_symlink():
            continue
        source = gzip.decompress(path.read_bytes()).decode(errors="replace")
        lines = [line for line in source.splitlines() if not line.startswith(("'", '.\\"', ".so"))]
        text = re.sub(r"\\f.|\\&|\\\|", "", "\n".join(lines)).replace("\\-", "-")
        text = re.sub(r"^\.[A-Za-z]+ ?", "", text, flags=re.MULTILINE)
        words = re.sub(r"[ \t]*\n\s*", "\n", text).strip()
        pieces += [words[at : at + _TEXT] for at in range(0, len(words) - _TEXT, _TEXT)]
    chosen = random.Random(7).sample(pieces, min(count, len(pieces)))
    return [{"text": piece} for piece in chosen]


DATA = {
    "sections": Data(sections, "answers", {"task": "causal-lm", "data.max_seq_len": 96}),
    "mails": Data(
        mails, "accuracy", {"task": "classify", "num_classes": 2, "data.max_seq_len": 96}
    ),
    "pages": Data(pages, "tokens", {"task": "causal-lm", "data.max_seq_len": 64}),
}


def cut(model: Path, folder: Path, layers: int) -> Path:
    """Return the model without its middle layers; it is written once.

    Of ten layers, five are the first and five the last: on the sections its loss begins at 18.3,
    that of the first ten at 40.9, of all at 11.4.
    """
    every = layers_of(model)
    if layers >= every:
        return model
    first = layers - layers // 2
    return with_layers(model, folder, [*range(first), *range(every - layers // 2, every)])


def layers_of(model: Path) -> int:
    """Return how many layers a model has."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return config["num_hidden_layers"]


def with_layers(model: Path, folder: Path, olds: Sequence[int]) -> Path:
    """Return the model with these of its layers alone; it is written once."""
    if folder.exists():
        return folder
    from safetensors.torch import load_file, save_file

    new = {old: place for place, old in enumerate(olds)}
    unfinished = unfinished_copy(model, folder)
    tree = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tree["num_hidden_layers"] = len(olds)
    if kinds := tree.get("layer_types"):
        tree["layer_types"] = [kinds[old] for old in olds]
    (unfinished / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    kept: dict[str, Any] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        found = re.search(r"layers\.(\d+)\.", name)
        if found is None:
            kept[name] = tensor
        elif (old := int(found[1])) in new:
            kept[name.replace(found[0], f"layers.{new[old]}.")] = tensor
    save_file(kept, unfinished / "model.safetensors", metadata={"format": "pt"})
    return unfinished.rename(folder)


def unfinished_copy(folder: Path, place: Path) -> Path:
    """Return a new hidden folder beside `place` with the small files of a model or tokenizer."""
    unfinished = place.with_name(f".{place.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for file in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        shutil.copy(file, unfinished)
    (unfinished / "manifest.json").unlink(missing_ok=True)
    return unfinished
