"""The ZeRO table: memory of weights, gradients and optimizer states on each device."""

from __future__ import annotations

from trainer.lab.experiment import Experiment, Formula
from trainer.planning.memory import ZERO, state_bytes
from trainer.planning.strategy import MIXED

_STAGES = (
    ("DDP", "16 P"),
    ("ZeRO-1", "4 P + 12 P / N"),
    ("ZeRO-2", "2 P + 14 P / N"),
    ("ZeRO-3, FSDP", "16 P / N"),
)


def compare_zero_stages(parameters: float, devices: int) -> Experiment:
    """Return the planner's bytes of a full training in mixed precision, for each stage."""
    whole = state_bytes(parameters, 0, devices)
    a_parameter = MIXED.weight + MIXED.gradient + MIXED.optimizer
    rows = [
        {
            "strategy": name,
            "bytes a device": formula,
            "GB": round(state_bytes(parameters, stage, devices) / 1e9, 2),
            "GiB": round(state_bytes(parameters, stage, devices) / 2**30, 2),
            "saved": f"{100 * (1 - state_bytes(parameters, stage, devices) / whole):.1f} %",
        }
        for stage, (name, formula) in enumerate(_STAGES)
    ]
    return Experiment(
        name="zero",
        title=f"ZeRO: {parameters / 1e9:g} billion parameters on {devices} devices",
        rows=rows,
        formulas=[
            Formula(
                f"{a_parameter} = {MIXED.weight} weight + {MIXED.gradient} gradient"
                f" + {MIXED.optimizer} fp32 weight and two moments",
                ZERO,
            ),
            Formula("state_bytes", "trainer/planning/memory.py, as in launch plan"),
        ],
        notes=[
            "Activations, logits and buffers come on top: launch plan counts them.",
            "A table of 448, 224, 112 and 56 GB for 7 billion on 8 is in circulation. It is 64"
            f" bytes a parameter, {64 // a_parameter} times what there is, as if each of the"
            f" {a_parameter} bytes were an fp32 number; and it divides by 2, 4 and 8, where ZeRO-1"
            " and ZeRO-2 keep a part whole.",
        ],
    )
