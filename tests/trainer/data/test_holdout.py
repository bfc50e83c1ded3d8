"""A share of a file's samples is held out, alike on every machine; none is trained on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from trainer.data.sample_file import SampleFile
from trainer.data.samples import read_file
from trainer.system.errors import InputError


def read(path: Path, lines: list[dict[str, object]]) -> SampleFile:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_file(path, "classify", 3)


def lines_of(count: int) -> list[dict[str, object]]:
    return [{"input": f"text {number}", "label": number % 3} for number in range(count)]


@pytest.mark.parametrize(("count", "held"), [(2, 1), (10, 1), (100, 10), (1000, 100)])
def test_a_tenth_and_at_least_one(tmp_path: Path, count: int, held: int) -> None:
    whole = read(tmp_path / "data", lines_of(count))
    train, validation = whole.hold_out(0.1)
    assert (len(train.samples), len(validation.samples)) == (count - held, held)
    together = sorted([*train.samples, *validation.samples], key=lambda sample: sample.line)
    assert together == whole.samples
    assert train.path == whole.path


def test_the_order_of_the_lines_does_not_matter(tmp_path: Path) -> None:
    lines = lines_of(200)
    _, validation = read(tmp_path / "data", lines).hold_out(0.1)
    random.Random(1).shuffle(lines)
    _, again = read(tmp_path / "data", lines).hold_out(0.1)
    assert {s.text for s in again.samples} == {s.text for s in validation.samples}


def test_duplicates_stay_together_whatever_their_labels(tmp_path: Path) -> None:
    lines = [{"input": f"text {number % 40}", "label": number % 3} for number in range(200)]
    train, validation = read(tmp_path / "data", lines).hold_out(0.1)
    assert len(validation.samples) == 20  # 4 texts, 5 times each
    assert not {s.text for s in train.samples} & {s.text for s in validation.samples}


def test_one_text_alone_cannot_be_shared_out(tmp_path: Path) -> None:
    whole = read(tmp_path / "data", [{"input": "ls", "label": 0}] * 30)
    with pytest.raises(InputError, match=r"data: has only one distinct sample.*fraction 0"):
        whole.hold_out(0.1)
