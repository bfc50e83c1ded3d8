"""How many layers of a frozen base stay in memory."""

from __future__ import annotations

import pytest

from trainer.planning.replica import choose_resident


@pytest.mark.parametrize("room", range(14))
def test_as_many_layers_stay_as_fit(room: int) -> None:
    """All need 10, without room for two layers on their way, 4 and each resident layer 1."""
    found = choose_resident(
        lambda resident: (resident, 10 if resident is None else 4 + resident),
        8,
        lambda planned: planned[1] <= room,
    )
    assert found[0] == (None if room >= 10 else max(0, min(7, room - 4)))
