"""The choice that `exchange.codec: auto` makes, from what steps took."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.exchange.coordinator.codec_choice import CodecChoice
from trainer.exchange.protocol.schedule import StepPlan
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.planning.exchange_choice import FREE, element_bytes

LAYERS = GradientLayout(
    tuple(
        Block(i, f"layers.{i}", 9 * i, 9 * i + 9, (TensorSlot(f"t{i}", (9,), 9 * i),))
        for i in range(40)
    ),
    40,
)
COMPUTE, BACKWARD = 1.0, 0.5
"""Seconds of a step, and of the part of it that hides an exchange."""


class Run:
    """Steps over a wire that takes so many seconds for a gradient in fp32."""

    def __init__(self, wire: float, *, remote: bool = True) -> None:
        self.wire, self.remote = wire, remote
        self.choice = CodecChoice(LAYERS, StepPlan(1000, 1, 1))
        self.changes: list[dict[str, Any]] = []

    def steps(self, number: int, *, stalls: int = 0) -> list[str]:
        """Take steps, of which the first few wait for ten seconds; return the codecs taken."""
        taken: list[str] = []
        for step in range(number):
            taken.append(self.choice.codec)
            wire = self.wire * element_bytes(self.choice.codec) / 4
            exposed = max(wire - BACKWARD, 0.01 * wire) + (10 if step < stalls else 0)
            figures = {
                "seconds": COMPUTE + exposed,
                "exchange_ms": 1e3 * (exposed + min(wire, BACKWARD)),
                "exchange_exposed_ms": 1e3 * exposed,
            }
            if found := self.choice.measured(figures, remote=self.remote):
                self.changes.append(found)
        return taken


def test_a_step_that_hides_its_exchange_stays_at_bf16():
    run = Run(wire=1.0)
    assert set(run.steps(200)) == {"bf16"}
    assert run.changes == []


def test_a_slow_link_takes_int8_once_it_is_measured():
    run = Run(wire=4.0)
    taken = run.steps(100)
    assert taken == ["bf16"] * 13 + ["int8"] * 87
    assert run.changes == [
        {
            "codec": "int8",
            "step_ms": 1000.0,
            "exposed_ms": pytest.approx({
                "bf16": 1500.0, "int8": 515.6, "topk:0.1": 16.2, "topk:0.01": 2.0,
            }, abs=0.1),
        }
    ]  # fmt: skip


def test_a_link_that_is_fast_again_goes_back_after_two_windows():
    run = Run(wire=4.0)
    run.steps(40)
    run.wire = 0.9
    taken = run.steps(60)
    assert taken.index("bf16") > 20
    assert taken == sorted(taken, key=FREE[::-1].index)
    assert [change["codec"] for change in run.changes] == ["int8", "bf16"]


def test_stalls_of_a_few_steps_change_nothing():
    run = Run(wire=1.0)
    run.steps(3)
    for _ in range(5):
        assert set(run.steps(10, stalls=4)) == {"bf16"}


def test_workers_in_shared_memory_need_no_codec():
    assert set(Run(wire=100.0, remote=False).steps(100)) == {"bf16"}
