"""The engines that compute a teacher's forward, as facts: for config, planner and commands.

`distill.teacher.engines` opens them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainer.system.backends import Backend
from trainer.system.errors import InputError

TeacherEngine = Literal["torch", "openvino", "gguf", "wgpu"]
"""The names in the table, as a job's settings take them."""
EXPERTS, RECURRENCE = "a mixture of experts", "recurrent layers"
"""Parts of a model that an engine may refuse."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Static properties of an engine."""

    quantization: str | None
    """The weights' quantization, as the description of a folder of logits names it; `none`: the one
    that is asked for; None: that of the GGUF file, without which the engine cannot be."""
    is_reference: bool = False
    """Whether it computes as transformers does without a proof at each start."""
    backends: tuple[Backend, ...] = ("cpu",)
    """Where it computes."""
    streams_frozen: bool = False
    """Whether it reads layers that do not fit at each forward."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """The parts of models that it does not compute, with the reason."""

    @property
    def reads_gguf(self) -> bool:
        """Whether the weights are those of a GGUF file."""
        return self.quantization is None

    @property
    def is_quantizing(self) -> bool:
        """Whether it quantizes weights itself when it is opened, which takes memory."""
        return self.quantization not in (None, "none")

    @property
    def takes_dtype(self) -> bool:
        """Whether its weights have the type that a job's `dtype` and `quantization` set."""
        return self.quantization == "none"

    def explain_refusal(self, *, experts: bool, recurrent: bool) -> str | None:
        """Return which part of a model is refused and why; None if the model is computed."""
        parts = {EXPERTS: experts, RECURRENCE: recurrent}
        found = [part for part in self.refused if parts[part]]
        return f"refuses {found[0]}, {self.refused[found[0]]}" if found else None


TEACHER_ENGINES: Mapping[str, EngineFacts] = {
    # Transformers' own code, or the decoder that the tests compare with it.
    "torch": EngineFacts(
        quantization="none",
        is_reference=True,
        backends=("cpu", "cuda"),
        streams_frozen=True,
    ),
    "openvino": EngineFacts(
        quantization="int8",
        refused={
            EXPERTS: "which it would not quantise",
            RECURRENCE: "which it cannot export",
        },
    ),
    "gguf": EngineFacts(quantization=None),
    "wgpu": EngineFacts(
        quantization="none",
        backends=("wgpu",),
        streams_frozen=True,
        refused=dict.fromkeys((EXPERTS, RECURRENCE), "which its kernels do not compute"),
    ),
}
"""By name."""
REFERENCE_ENGINE = next(name for name, facts in TEACHER_ENGINES.items() if facts.is_reference)
"""The name of the engine that others are compared with."""


def explain_backend(engine: str, backend: str, gpu: str = "") -> str | None:
    """Return why an engine does not compute where it is asked to; None if it does."""
    known = TEACHER_ENGINES[engine].backends
    if backend in ("auto", *known) and not (gpu and known == ("cpu",)):
        return None
    if known == ("cpu",):
        return f"the engine {engine} computes on the CPU; leave out the backend and the GPU"
    able = next(name for name, facts in TEACHER_ENGINES.items() if backend in facts.backends)
    return (
        f"the engine {engine} computes on {' and '.join(known)}, not on {backend}; take the engine"
        f" {able}, or another backend"
    )


def explain_resident(engine: str, resident: str | int) -> str | None:
    """Return why an engine does not keep the layers that it is asked to; None if it does."""
    if resident == "auto" or TEACHER_ENGINES[engine].streams_frozen:
        return None
    return f"the engine {engine} decides itself which weights stay in memory; leave out resident"


def explain_quantization(engine: str, quantization: str) -> str | None:
    """Return why an engine does not hold weights as it is asked to; None if it does."""
    if quantization == "none" or (facts := TEACHER_ENGINES[engine]).takes_dtype:
        return None
    able = " or ".join(name for name, facts in TEACHER_ENGINES.items() if facts.takes_dtype)
    return (
        f"the engine {engine} holds weights as {facts.quantization or 'their file does'}, not in"
        f" {quantization}; take the engine {able}, or leave out the quantization"
    )


def check_teacher_backend(engine: str, backend: str, gpu: str = "") -> None:
    """Check that an engine computes where it is asked to.

    Raises:
        InputError: it does not.
    """
    if reason := explain_backend(engine, backend, gpu):
        raise InputError(reason)
