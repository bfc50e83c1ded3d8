"""The offset of a clock, from exchanges of which some take long."""

from __future__ import annotations

import pytest

from launcher.hosts.clock_offset import measure_clock_offset


def test_the_quickest_exchange_bounds_the_clock() -> None:
    local = iter([0.0, 1.0, 10.0, 10.1, 20.0, 30.0])
    remote = iter([3.0, 12.05, 26.0])
    measured = measure_clock_offset(lambda: next(remote), lambda: next(local))
    assert measured.offset == pytest.approx(2.0)
    assert measured.uncertainty == pytest.approx(0.05)
