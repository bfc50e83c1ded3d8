"""How many layers of a frozen base stay in memory."""

from __future__ import annotations

import pytest

from trainer.planning.resident_layers import (
    HEAD_STREAMED,
    choose_resident,
    describe_residents,
    list_residents,
    resolve_resident,
    stream_head,
    streamed_layers,
)


@pytest.mark.parametrize("room", range(14))
def test_as_many_layers_stay_as_fit(room: int) -> None:
    """All need 10, without room for two layers on their way, 4 and each resident layer 1."""
    found = choose_resident(
        lambda resident: (resident, 10 if resident is None else 4 + resident),
        8,
        lambda planned: planned[1] <= room,
    )
    assert found[0] == (None if room >= 10 else max(0, min(7, room - 4)))


@pytest.mark.parametrize(("room", "found"), [(4, 0), (3, HEAD_STREAMED), (1, HEAD_STREAMED)])
def test_the_head_goes_after_the_last_layer(room: int, found: int) -> None:
    sizes = {0: 4, HEAD_STREAMED: 2}
    assert stream_head(0, lambda resident: resident, sizes.__getitem__, room) == found
    assert stream_head(0, lambda resident: resident, lambda _: 4, room) == 0, "it would not help"
    text = describe_residents(HEAD_STREAMED, 64)
    assert text == "0 of 64 layers resident, 64 streamed with the head"
    assert list_residents([{"rank": 0, "device": "cpu", "backend_reason": text}]) == [
        f"worker 0 on cpu: {text}"
    ]
    assert len(streamed_layers(64, HEAD_STREAMED)) == 64


def test_each_worker_that_reads_layers_has_a_line() -> None:
    reason = f"no GPU was found (cuda: none); {describe_residents(12, 64)}"
    reports = [
        {"rank": 2, "device": "cpu", "backend_reason": reason},
        {"rank": 0, "device": "cuda:0", "backend_reason": ""},
        {"rank": 1, "device": "cpu", "backend_reason": describe_residents(0, 64)},
    ]
    assert list_residents(reports) == [
        "worker 1 on cpu: 0 of 64 layers resident, 64 streamed",
        "worker 2 on cpu: 12 of 64 layers resident, 52 streamed",
    ]


def test_layers_that_stay_lie_between_those_that_are_read() -> None:
    assert sorted(streamed_layers(8, 4)) == [0, 2, 4, 6]
    assert sorted(streamed_layers(5, 0)) == [0, 1, 2, 3, 4]
    for layers in (2, 7, 30):
        assert not streamed_layers(layers, None)
        for resident in range(layers + 2):
            assert len(streamed_layers(layers, resident)) == max(0, layers - resident)


def test_a_setting_counts_until_another_number_is_chosen() -> None:
    assert resolve_resident(3, 8, None) == 3
    assert resolve_resident(8, 8, None) is None
    for word in ("auto", "all"):
        assert resolve_resident(word, 8, None) is None
    assert resolve_resident("auto", 8, 0) == 0
