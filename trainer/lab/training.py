"""Experiments on training steps of this machine: mixed precision and gradient checkpointing.

A small decoder of Motley's own learns a text of a Markov chain from random weights. The variants
take turns step by step, each with its own weights from the same start, so that other load on the
machine falls on all alike.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.lab.experiment import Experiment, Formula, Row
from trainer.model.architecture import parse_architecture
from trainer.planning.memory import plan_memory_by_part
from trainer.planning.model_config import parse_shape
from trainer.planning.strategy import FP32, Recompute, Strategy, TrainingSetup
from trainer.replica.torch.decoder import Decoder
from trainer.replica.torch.linear import Linear
from trainer.replica.torch.model import recompute_activations
from trainer.replica.torch.processors import Processors
from trainer.system.malloc import return_free_pages, return_freed_arrays

ROWS, LENGTH, VOCAB = 4, 128, 512
_SIZES = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
}
_ARCHITECTURE = parse_architecture(_SIZES, "the lab's model")
_RATE = 3e-3


@dataclass
class _Variant:
    """A model that trains in one way, and the time and memory of its steps."""

    model: Any
    optimizer: torch.optim.Optimizer
    device: torch.device
    dtype: torch.dtype | None = None
    """Type of autocast; None is fp32."""
    seconds: list[float] = field(default_factory=list[float])
    peaks: list[int] = field(default_factory=list[int])
    losses: list[float] = field(default_factory=list[float])
    skipped: int = 0
    """Steps whose scaled gradient overflowed."""

    def __post_init__(self) -> None:
        scales = self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scales)

    def step(self, batch: Tensor) -> None:
        """Forward, backward and update on token ids `[B, T + 1]`."""
        cast = nullcontext()
        if self.dtype is not None:
            cast = torch.autocast(self.device.type, dtype=self.dtype)
        self.optimizer.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        with PeakMemory(self.device) as peak:
            with cast:
                hidden = self.model.model(batch[:, :-1]).last_hidden_state
                logits = self.model.lm_head(hidden)
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            self.scaler.scale(loss).backward()
            self.losses.append(loss.item())
        self.scaler.step(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - begin)
        if peak.bytes is not None:
            self.peaks.append(peak.bytes)

    def make_row(self, first: _Variant) -> Row:
        """Return the columns that both experiments have; the first step only warms up."""
        own, its = (statistics.median(each.seconds[1:]) for each in (self, first))
        peak = statistics.median(self.peaks[1:]) / 2**20 if self.peaks else None
        return {
            "ms a step": round(1e3 * own, 1),
            "of the first": round(own / its, 2),
            "peak MiB": None if peak is None else round(peak, 1),
            "last loss": round(self.losses[-1], 4),
        }


def compare_precisions(seed: int, steps: int) -> Experiment:
    """Return time, memory and loss of fp32, and of bf16 and fp16 autocast."""
    device = _choose_device()
    dtypes = {
        "fp32": None,
        "bf16 autocast": torch.bfloat16,
        "fp16 autocast, scaled loss": torch.float16,
    }
    variants = {name: _make_variant(seed, device, dtype) for name, dtype in dtypes.items()}
    _train(list(variants.values()), seed, steps)
    first = variants["fp32"]
    return Experiment(
        name="precision",
        title=_format_title("mixed precision", device, steps, seed),
        rows=[
            {"products in": name, **variant.make_row(first), "skipped steps": variant.skipped}
            for name, variant in variants.items()
        ],
        formulas=[
            Formula(
                "weights and updates in fp32, products in 16 bits; the loss times S, the gradient"
                " / S",
                "Micikevicius et al., arXiv:1710.03740",
            ),
            _MEMORY,
        ],
        notes=[
            "bf16 has fp32's range and needs no scale. With fp16, S halves after each overflow, and"
            " that step is skipped.",
            "Whether 16 bits are faster is a matter of the processor: it needs products of that"
            " format in hardware, and large ones.",
        ],
    )


def compare_checkpointing(seed: int, steps: int) -> Experiment:
    """Return time, memory and loss with all activations kept, and with layers computed twice."""
    device = _choose_device()
    kept, recomputed = (_make_variant(seed, device, None) for _ in range(2))
    recompute_activations(recomputed.model)
    _train([kept, recomputed], seed, steps)
    rows: list[tuple[str, _Variant, Recompute]] = [
        ("all activations", kept, "none"),
        ("inputs of layers", recomputed, "full"),
    ]
    return Experiment(
        name="checkpointing",
        title=_format_title("gradient checkpointing", device, steps, seed),
        rows=[
            {"kept": name, **variant.make_row(kept), "planned MiB": _planned_bytes(recompute)}
            for name, variant, recompute in rows
        ],
        formulas=[
            Formula(
                "keep each layer's input, compute the layer again in backward: one forward more, a"
                " third of the products",
                "Chen et al., arXiv:1604.06174",
            ),
            _MEMORY,
            Formula("planned: activations, logits, gradients", "trainer/planning/memory.py"),
        ],
        notes=["The losses are equal: the same operations run, some of them twice."],
    )


_MEMORY = Formula(
    "peak: of forward and backward, gradients too, above what is there before them",
    "the kernel's VmHWM, or torch.cuda.max_memory_allocated",
)


def _format_title(what: str, device: torch.device, steps: int, seed: int) -> str:
    return (
        f"{what}: {_ARCHITECTURE.num_layers} layers of {_ARCHITECTURE.hidden_size},"
        f" {ROWS} x {LENGTH} tokens, {steps} steps on {device}, seed {seed}"
    )


def _choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _RandomWeights:
    """Weights as a small model's begin (`decoder.Stored`): normal, and ones for the norms."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._draw = torch.Generator().manual_seed(seed)
        self._device = device
        self._shapes: dict[str, tuple[int, ...]] = {
            f"model.layers.{layer}.{name}": shape
            for layer in range(_ARCHITECTURE.num_layers)
            for name, shape in _ARCHITECTURE.layer_tensors()
        }
        self._shapes["model.norm.weight"] = (_ARCHITECTURE.hidden_size,)
        self._shapes["model.embed_tokens.weight"] = (VOCAB, _ARCHITECTURE.hidden_size)

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        return (torch.randn(shape, generator=self._draw) * 0.02).to(self._device)

    def embedding(self, name: str) -> nn.Module:
        return nn.Embedding.from_pretrained(self.tensor(name), freeze=False)

    def linear(self, name: str, *, biased: bool) -> nn.Module:
        assert not biased, "the lab's model has no biases"
        return Linear(self.tensor(f"{name}.weight"))


def _make_variant(seed: int, device: torch.device, dtype: torch.dtype | None) -> _Variant:
    weights = _RandomWeights(seed, device)
    model = Decoder(_ARCHITECTURE, _SIZES, "the lab's model", weights, None).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    return _Variant(model, optimizer, device, dtype)


def _train(variants: Sequence[_Variant], seed: int, steps: int) -> None:
    processors = Processors(torch.get_num_threads())
    for batch in _iter_batches(seed, steps, variants[0].device):
        torch.set_num_threads(processors.count_threads())
        for variant in variants:
            variant.step(batch)


def _iter_batches(seed: int, steps: int, device: torch.device) -> Iterator[Tensor]:
    """Yield token ids `[B, T + 1]`: nine times in ten a token decides which one follows it."""
    draw = np.random.default_rng(seed)
    follows = draw.permutation(VOCAB)
    for _ in range(steps):
        ids = draw.integers(0, VOCAB, (ROWS, LENGTH + 1))
        surprises = draw.random(ids.shape) < 0.1
        for column in range(1, LENGTH + 1):
            known = follows[ids[:, column - 1]]
            ids[:, column] = np.where(surprises[:, column], ids[:, column], known)
        yield torch.from_numpy(ids).to(device)


def _planned_bytes(recompute: Recompute) -> float:
    training = TrainingSetup(length=LENGTH, rows=ROWS, recompute=recompute, precision=FP32)
    parts = plan_memory_by_part(
        parse_shape(_SIZES, "the lab's model", "lab"), training, Strategy()
    ).bytes_by_part()
    return round(sum(parts[part] for part in ("activations", "logits", "gradients")) / 2**20, 1)


class PeakMemory:
    """The bytes above those at the start that were in use at once; None if unknown here.

    On the CPU it is the kernel's record of this process's resident pages, where it has one (Linux):
    it counts in pages, and sees what other threads take.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return self
        return_freed_arrays()
        return_free_pages()  # else what was freed stays resident, and counts as if it were in use
        try:
            # proc(5): 5 sets the peak back to what is resident now.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return self
        self._before = _read_resident("VmRSS")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is None:
            return
        cuda = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if cuda else _read_resident("VmHWM")
        self.bytes = peak - self._before


def _read_resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {field}"
    return 1024 * int(found[1])
