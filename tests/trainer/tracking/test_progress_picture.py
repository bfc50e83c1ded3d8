"""The curve of a loss, and other parts of a run's picture."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.tracking.progress_picture import draw_chart, share_text


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ((), []),
        ((1.0,), ["▁  1"]),
        ((1.0, 1.0), ["▁▁  1"]),
        ((8.0, 1.0), ["█▁  █ 8  ▁ 1"]),
        (range(16), ["▁▂▃▄▅▆▇█  █ 14.5  ▁ 0.5"]),
    ],
)
def test_a_curve_has_a_scale(values: Any, bars: list[str]) -> None:
    assert draw_chart(list(values), 8) == bars


def test_a_high_curve_has_its_scale_at_top_and_bottom() -> None:
    assert draw_chart([3.0, 2.0, 1.0], 8, 2) == ["█▁   3", "██▁  1"]


@pytest.mark.parametrize(
    ("samples", "of", "text"), [(8, 64, "12 %"), (None, 64, "-"), (0, 64, "-"), (3, 0, "-")]
)
def test_a_share_is_a_part_of_the_samples_in_percent(
    samples: int | None, of: int, text: str
) -> None:
    assert share_text(samples, of) == text
