"""The choices of `exchange.codec: auto`, from what steps took."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.exchange.exact_problem import join_request
from trainer.config.codec import FREE
from trainer.config.run import load_config
from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.policies.auto_codec import CodecChoice
from trainer.exchange.protocol.actions import Emit, Step
from trainer.exchange.protocol.members import Member
from trainer.exchange.protocol.messages import SHARED_MEMORY
from trainer.exchange.protocol.schedule import StepPlan
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.planning.exchange_choice import element_bytes

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

    def __init__(
        self,
        wire: float,
        *,
        transport: str = "TLS",
        codec: str = "auto",
        schedule: str = "steps",
        total: int = 1000,
        **rounds: int,
    ) -> None:
        self.wire, self.done = wire, 0
        settings = {"exchange.codec": codec, "exchange.schedule": schedule}
        settings |= {f"exchange.{name}": value for name, value in rounds.items()}
        exchange = load_config("quickstart", settings).exchange
        plan = StepPlan(total, 1, 1).with_outer_steps(exchange.rounds)
        self.outbox = Outbox()
        self.choice = CodecChoice(exchange, LAYERS, plan, self.outbox.emit)
        self.members = [
            Member(rank, rank, 0, join_request(rank, transport=each), 0.0)
            for rank, each in enumerate((SHARED_MEMORY, transport))
        ]
        self.events: list[dict[str, Any]] = []

    def steps(self, number: int, *, stalls: int = 0) -> list[str]:
        """Take steps, of which the first few wait for ten seconds; return the codecs taken."""
        taken: list[str] = []
        for step in range(number):
            taken.append(self.choice.codec)
            wire = self.wire * element_bytes(self.choice.codec) / 4
            exposed = max(wire - BACKWARD, 0.01 * wire) + (10 if step < stalls else 0)
            self.done += 1
            event = Step(
                step=self.done,
                epoch=0,
                generation=0,
                loss=1.0,
                learning_rate=1e-3,
                grad_norm=1.0,
                seconds=COMPUTE + exposed,
                tokens_per_second=1.0,
                sample_ranges=[],
                exchange_ms=1e3 * (exposed + min(wire, BACKWARD)),
                exchange_exposed_ms=1e3 * exposed,
            )
            self.choice.record_step(event, self.members)
            self.events += [
                each.event for each in self.outbox.take_actions() if isinstance(each, Emit)
            ]
        return taken


def test_a_step_that_hides_its_exchange_stays_at_bf16():
    run = Run(wire=1.0)
    assert set(run.steps(200)) == {"bf16"}
    assert run.events == []


def test_a_slow_link_takes_int8_once_it_is_measured():
    run = Run(wire=4.0)
    taken = run.steps(100)
    assert taken == ["bf16"] * 13 + ["int8"] * 87
    assert run.events == [
        {
            "event": "codec",
            "codec": "int8",
            "step_ms": 1000.0,
            "exposed_ms": pytest.approx({"bf16": 1500.0, "int8": 515.6}, abs=0.1),
        }
    ]


def test_a_link_that_is_fast_again_goes_back_after_two_windows():
    run = Run(wire=4.0)
    run.steps(40)
    run.wire = 0.9
    taken = run.steps(60)
    assert taken.index("bf16") > 20
    assert taken == sorted(taken, key=FREE[::-1].index)
    assert [event["codec"] for event in run.events] == ["int8", "bf16"]


def test_stalls_of_a_few_steps_change_nothing():
    run = Run(wire=1.0)
    run.steps(3)
    for _ in range(5):
        assert set(run.steps(10, stalls=4)) == {"bf16"}


@pytest.mark.parametrize("transport", [SHARED_MEMORY, ""])
def test_workers_in_memory_need_neither_codec_nor_rounds(transport: str):
    run = Run(wire=100.0, transport=transport)
    assert set(run.steps(100)) == {"bf16"}
    assert run.events == []


def test_a_codec_that_was_named_stays():
    run = Run(wire=4.0, codec="bf16")
    assert set(run.steps(60)) == {"bf16"}
    assert run.events == []


@pytest.mark.parametrize(("first", "events"), [(14, 0), (15, 1)])
def test_a_codec_that_no_step_would_take_is_not_chosen(first: int, events: int):
    """After 13 steps the next one is under way: a choice holds from the 15th on."""
    run = Run(wire=4.0, schedule="rounds", rounds_after=first, inner_steps=5)
    run.steps(13)
    assert len(run.events) == events


def test_rounds_take_int8_of_the_codecs_that_auto_has():
    run = Run(wire=0.1, schedule="rounds", rounds_after=40, inner_steps=5)
    steps = (0, 39, 40, 99)
    assert [run.choice.is_bf16(step) for step in steps] == [True, True, False, False]
    assert [run.choice.find_codec(step) for step in steps] == ["bf16", "bf16", "int8", "int8"]
