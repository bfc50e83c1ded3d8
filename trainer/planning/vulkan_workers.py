"""The memory of workers and teachers on Vulkan devices, from a model's sizes: the engine's plan."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.run import RunConfig, load_config
from trainer.model.architecture import Architecture
from trainer.model.layout import GradientLayout, lay_out_decoder, lay_out_tensors
from trainer.planning.forward import ForwardPlan, ForwardSize
from trainer.planning.memory import MemoryParts, plan_memory_by_part
from trainer.planning.shapes import ModelShape
from trainer.planning.strategy import Strategy, TrainingSetup
from trainer.planning.term import Term, term
from trainer.planning.vulkan import plan_vulkan_memory
from trainer.planning.vulkan_buffers import padded_length

ENGINE = "Motley: trainer/planning/vulkan.py"


def plan_device_memory(
    shape: ModelShape, training: TrainingSetup, strategy: Strategy
) -> MemoryParts:
    """Return the memory of a device, in bytes: on Vulkan what the wgpu engine takes.

    Of a model that the engine does not compute it is what torch would take.
    """
    if not (training.one_queue and shape.is_decoder):
        return plan_memory_by_part(shape, training, strategy)
    size = _plan_bytes(shape, training)

    def make_term(part: str, name: str) -> Term:
        return term(name, "size", ENGINE, size=size[part])

    waits = "waiting" in size
    inputs = make_term("waiting" if waits else "checkpoints", "inputs of layers")
    if waits and training.waiting:
        inputs = replace(inputs, name="activations of micro-batches that wait, and their own")
    return MemoryParts(
        weights=(
            make_term("frozen", "frozen weights"),
            make_term("trainable", "trained weights"),
        ),
        gradients=(make_term("gradients", "gradients"),),
        optimizer=(),
        activations=(inputs, make_term("activations", "activations of layers")),
        logits=(make_term("logits", "a chunk of logits"),),
        buffers=(
            make_term("workspace", "temporary buffers"),
            make_term("input", "a micro-batch's tokens and targets"),
        ),
    )


def plan_vulkan_forward(
    shape: ModelShape, training: TrainingSetup, size: ForwardSize, resident: int | None
) -> ForwardPlan:
    """Return the plan of a teacher of which `resident` layers stay; None: all.

    Args:
        training: of `frozen_setup`.
    """
    rows = max(1, size.tokens // size.length)
    training = replace(training, length=size.length, rows=rows, resident=resident)
    parts = _plan_bytes(shape, training, reads_logits=True)
    weights = parts.pop("frozen")
    return ForwardPlan(weights=weights, passing=0, working=sum(parts.values()), resident=resident)


def _plan_bytes(
    shape: ModelShape, training: TrainingSetup, *, reads_logits: bool = False
) -> dict[str, int]:
    every = replace(training, rows=1, waiting=0, resident=None, evaluates=False)
    # Lists are no key of a cache.
    run = _make_run(shape, replace(every, targets=(*every.targets,), whole=(*every.whole,)))
    return plan_vulkan_memory(
        run.architecture,
        run.layout,
        run.config,
        training.rows,
        recompute=training.recompute == "full",
        evaluates=training.evaluates or reads_logits,
        reads_logits=reads_logits,
        resident=training.resident,
        waiting=training.waiting // training.length * padded_length(training.length),
    )


class _Run(NamedTuple):
    architecture: Architecture
    layout: GradientLayout
    config: RunConfig


@lru_cache(maxsize=32)
def _make_run(shape: ModelShape, training: TrainingSetup) -> _Run:
    """Return a run as the engine's plan takes it; one without adapters has nothing that trains."""
    settings: dict[str, Any] = {
        "task": "causal-lm",
        "method": "lora",
        "model.path": shape.name,
        "model.dtype": "bfloat16" if training.precision.frozen == 2 else "float32",
        "data.train": "none",
        "data.max_seq_len": training.length,
    }
    if training.classes is not None:
        settings |= {"task": "classify", "num_classes": training.classes}
    if training.taught:
        settings["distillation.alpha"] = 0.5
    if training.method == "full":
        settings["method"] = "full"
    else:
        settings |= {
            "model.quantization": "nf4" if training.method == "qlora" else "none",
            "lora.lora_rank": training.rank,
            "lora.target_modules": training.targets,
            "lora.freeze_a": training.frozen_a,
            "lora.use_dora": training.dora,
            "lora.modules_to_save": training.whole,
        }
        if (layers := training.adapted_layers) is not None:
            settings["lora.layers_to_transform"] = [*range(min(layers, shape.layers))]
    config = load_config(None, settings)
    architecture = Architecture(
        model_type="",
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        tied=shape.tied,
        biased=frozenset(shape.biased),
        normalised_heads=shape.normalised_heads,
    )
    if training.adapters == 0:
        return _Run(architecture, lay_out_tensors([]), config)
    return _Run(architecture, lay_out_decoder(Path(shape.name), architecture, config), config)
