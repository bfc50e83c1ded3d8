"""What a data file says of the run that is meant."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.config.defaults import infer


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        ([{"input": "a", "label": n} for n in (0, 4, 2)], {"task": "classify", "num_classes": 5}),
        ([{"input": "a", "label": 0}], {"task": "classify", "num_classes": 2}),
        ([{"text": "a"}], {"task": "causal-lm"}),
        ([{"messages": []}, {"label": 3}], {"task": "causal-lm"}),
        ([{"input": "a", "label": "safe"}], {"task": "causal-lm"}),
        ([], {}),
    ],
)
def test_the_task_follows_from_the_data(
    tmp_path: Path, lines: list[Any], settings: dict[str, Any]
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\ufeff"[: len(lines)] + "\n\n".join(map(json.dumps, lines)) + "\n")
    assert infer(str(path)) == settings


def test_what_cannot_be_read_is_left_to_its_reader(tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(b'{"input": "a", "label": 2}\n\xff{"torn\n')
    assert infer(str(torn)) == {"task": "classify", "num_classes": 3}
    for path in (tmp_path, tmp_path / "absent"):
        assert infer(str(path)) == {}
