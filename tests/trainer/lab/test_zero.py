"""The ZeRO table."""

import pytest

from trainer.lab.zero import compare_zero_stages


def test_the_known_table_of_7b_on_8() -> None:
    rows = compare_zero_stages(7e9, 8).rows
    assert [row["GB"] for row in rows] == pytest.approx([112, 38.5, 26.25, 14])
    assert [row["saved"] for row in rows] == ["0.0 %", "65.6 %", "76.6 %", "87.5 %"]


def test_one_device_saves_nothing() -> None:
    assert {row["saved"] for row in compare_zero_stages(1e9, 1).rows} == {"0.0 %"}
