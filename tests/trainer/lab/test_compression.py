"""The experiments on compressed gradients: known figures, and what the theory says of them."""

from typing import Any

import pytest

from trainer.lab.compression import measure_feedback, top_k
from trainer.system.errors import InputError


def test_the_known_figures_of_top_k() -> None:
    found = top_k(seed=42, parameters=1000, workers=4, density=0.1)
    _, pairs = found.rows
    assert (pairs["elements"], pairs["fewer elements"]) == (100, "90.0 %")
    assert pairs["cosine"] == pytest.approx(0.6573, abs=5e-5)
    assert (pairs["bytes"], pairs["times fewer bytes"]) == (800, 5.0)


@pytest.mark.parametrize("density", [0.5, 0.1, 0.01])
def test_the_expected_cosine_is_that_of_many_values(density: float) -> None:
    found = top_k(seed=1, parameters=200_000, workers=2, density=density)
    expected = float(found.formulas[-1].text.split("= ")[1].split(" ")[0])
    assert found.rows[1]["cosine"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("density", [0.0, -0.1, 0.7, 1e-17, float("nan"), float("inf")])
def test_what_is_no_density_is_refused(density: float) -> None:
    with pytest.raises(InputError, match="not a density"):
        top_k(seed=42, parameters=100, workers=1, density=density)


def test_feedback_brings_back_what_its_absence_loses() -> None:
    rows: Any = measure_feedback(seed=42, parameters=500, workers=2, steps=60).rows
    errors = {(row["codec"], row["error feedback"]): row for row in rows}
    for codec in ("int8", "int4"):
        without = [errors[codec, "no"][f"step {step}"] for step in (1, 10, 30, 60)]
        found = [errors[codec, "yes"][f"step {step}"] for step in (1, 10, 30, 60)]
        assert without[0] == found[0]  # nothing is owed yet
        assert found == sorted(found, reverse=True)
        assert found[-1] < 0.7 * without[-1]
