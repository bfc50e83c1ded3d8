"""What cannot be combined with a ring is refused with the reason, before anything is read."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from click.testing import CliRunner

from trainer.commands.finetune import finetune
from trainer.config.run import RunConfig, load_config
from trainer.system.errors import InputError

RANK = ("--distributed", "--rank", "0", "--master", "127.0.0.1:29500")


def ring(**settings: Any) -> RunConfig:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return load_config("quickstart", {"exchange.topology": "ring", **named})


def test_a_star_is_the_default_and_both_are_the_same_run() -> None:
    star = load_config("quickstart", {})
    assert not star.exchange.is_ring
    assert ring().exchange.is_ring
    assert star.agreement_digest() == ring().agreement_digest(), (
        "a ring's run can continue as a star"
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"exchange__codec": "int8"}, "codec must be fp32 with topology ring"),
        ({"exchange__codec": "bf16"}, "codec must be fp32 with topology ring"),
        ({"exchange__codec": "auto"}, "codec must be fp32 with topology ring"),
        ({"exchange__schedule": "rounds"}, "schedule must be steps with topology ring"),
        ({"exchange__split": [1, 1, 1, 1]}, "split must not be a list with topology ring"),
        ({"parallel__data": "fsdp"}, "needs a whole model on each worker: leave parallel out"),
        (
            {
                "task": "causal-lm",
                "num_classes": None,
                "distillation": {"alpha": 0.5},
            },
            "trains on samples, not on a teacher's logits",
        ),
    ],
)
def test_what_needs_a_star_is_refused_with_the_reason(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason) as error:
        ring(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("world", [1, 3])
def test_a_small_ring_is_refused_with_the_reason(world: int) -> None:
    with pytest.raises(InputError, match=f"{world} workers, and a ring has at least 4: a star of"):
        ring().exchange.check_worker_count(world)
    ring().exchange.check_worker_count(4)
    load_config("quickstart", {}).exchange.check_worker_count(world)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "no worker that joins later, and at least 4 ranks; start them all with `launch"),
        (("--role", "coordinator"), "exchange.topology ring: it has no coordinator"),
        (
            ("--role", "worker", "--coordinator", "127.0.0.1:9000"),
            "exchange.topology ring: it has no coordinator, no worker that joins later",
        ),
        ((*RANK, "--world-size", "3"), "3 workers, and a ring has at least 4"),
        (
            (*RANK, "--world-size", "4", "--gpu-backend", "wgpu"),
            "--gpu-backend wgpu: --distributed runs on cuda or cpu",
        ),
    ],
)
def test_the_trainer_refuses_before_it_reads_anything(
    words: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.commands.finetune.fork_workers", lambda _: None)
    imported = "torch" in sys.modules
    options = ["--config", "quickstart", "--set", "exchange.topology=ring", *words]
    done = CliRunner().invoke(finetune, options)
    assert isinstance(done.exception, InputError)
    assert reason in str(done.exception)
    assert "\n" not in str(done.exception)
    assert ("torch" in sys.modules) == imported
