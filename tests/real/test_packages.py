"""What the tier's packages contain."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.real.data import SECTIONS, Described

pytestmark = pytest.mark.real


def test_the_model_is_a_gguf_file(smollm2_gguf: Path) -> None:
    with smollm2_gguf.open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert smollm2_gguf.stat().st_size == 98362432


def test_sections_are_balanced_and_the_descriptions_differ(sections: list[Described]) -> None:
    assert set(Counter(row.section for row in sections).values()) == {440 // SECTIONS}
    assert len({row.text for row in sections}) > 430


def test_every_other_mail_is_spam(subjects: list[dict[str, object]]) -> None:
    assert Counter(row["label"] for row in subjects).keys() == {0, 1}
    assert all(row["input"] for row in subjects)
