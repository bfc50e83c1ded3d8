"""Memory and micro-batch of a replica, counted before anything is loaded (F-HET-002).

The model is recorded without a device: what the recording takes is exactly what a run would.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.config.run import RunConfig
from trainer.errors import InputError
from trainer.model.architecture import Architecture, read_architecture
from trainer.model.layout import GradientLayout
from trainer.model.memory_plan import CPU_TOKENS
from trainer.model.safetensors_headers import read_config
from trainer.replica.microbatch import Limit
from trainer.replica.wgpu.batch import Bucket, padded_length
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import USABLE, Budget, Pool, available, check_fits
from trainer.replica.wgpu.layers.decoder import Decoder, Tensors
from trainer.replica.wgpu.layers.head import Outcome
from trainer.replica.wgpu.recordings import Settings, record
from trainer.replica.wgpu.soft_target_tables import PLANNED_ENTRIES
from trainer.replica.wgpu.weights.loader import take_frozen
from trainer.replica.wgpu.weights.slots import Slots

_TOKENS = 8192
"""Most tokens of an automatic micro-batch: more keep no GPU busier."""
_UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class Plan:
    """How a replica will run."""

    budget: Budget
    limit: Limit
    recompute: bool
    """Layer inputs are kept, the rest is computed twice."""


def plan(
    model_dir: Path,
    config: RunConfig,
    layout: GradientLayout,
    device: Device,
    recompute: bool | None = None,
) -> Plan:
    """Return how a model runs on a device; with `recompute` None, computed twice if it must.

    Raises:
        InputError: one sample does not fit.
    """
    there = available(device.adapter)
    choices = (False, True) if recompute is None else (recompute,)
    for again in choices:
        budget = count(model_dir, config, layout, 1, recompute=again)
        if there is None or budget.total <= there * USABLE:
            break
    else:
        assert there is not None
        check_fits(budget, there, device.adapter.name)
    wanted = config.training.micro_batch_size
    tokens = _bindable(model_dir, config, device)
    if there is not None:
        tokens = min(tokens, _fitting(model_dir, config, layout, there, recompute=again))
    limit = Limit(_UNBOUNDED, tokens) if wanted == "auto" else Limit(wanted, tokens)
    return Plan(budget, limit, again)


def count(
    model_dir: Path, config: RunConfig, layout: GradientLayout, samples: int, *, recompute: bool
) -> Budget:
    """Return the memory of a replica whose micro-batches hold `samples` of the longest samples."""
    pool = Pool(None)
    architecture, slots = read_architecture(model_dir), Slots(layout)
    head_dim, length = architecture.head_dim, padded_length(config.data.max_seq_len)
    tables = (length, head_dim // 2)
    tensors = Tensors(
        take_frozen(architecture, config, pool),
        slots.tensors(slots.arrays(pool, "trainable")),
        slots.tensors(slots.arrays(pool, "gradients")),
        (pool.take(tables, purpose="frozen"), pool.take(tables, purpose="frozen")),
    )
    where = str(model_dir / "config.json")
    decoder = Decoder(architecture, read_config(model_dir), config, tensors, where)
    outcome = Outcome(Array(None, (1,)), Array(None, (1,)), Array(None, (1,), "u32"))
    entries = PLANNED_ENTRIES if config.distillation else 0
    bucket = Bucket(samples, length, config.task == "classify", entries)
    record(decoder, pool, outcome, Settings(bucket, training=True, keep=not recompute))
    return pool.budget()


def _bindable(model_dir: Path, config: RunConfig, device: Device) -> int:
    """Return the most tokens whose widest activation is one argument of a kernel.

    Raises:
        InputError: not even one sample is.
    """
    widest = _widest(read_architecture(model_dir))
    longest = padded_length(config.data.max_seq_len)
    tokens = device.binding_limit // (4 * widest)
    if tokens < longest:
        raise InputError(
            f"{device.adapter.name}: a sample of {longest} tokens exceeds the"
            f" {device.binding_limit >> 20} MiB that a kernel's argument may span; lower"
            " data.max_seq_len"
        )
    return min(tokens, CPU_TOKENS if device.adapter.software else _TOKENS)


def _fitting(
    model_dir: Path, config: RunConfig, layout: GradientLayout, there: int, *, recompute: bool
) -> int:
    """Return the tokens that fit, from the memory of one sample and of two."""
    one, two = (
        count(model_dir, config, layout, samples, recompute=recompute).total for samples in (1, 2)
    )
    samples = 1 + max(0, int(there * USABLE) - one) // max(1, two - one)
    return samples * padded_length(config.data.max_seq_len)


def _widest(architecture: Architecture) -> int:
    """Return the columns of the widest activation."""
    return max(
        architecture.intermediate_size,
        architecture.hidden_size,
        architecture.num_heads * architecture.head_dim,
    )
