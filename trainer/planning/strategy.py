"""How one model is spread over devices."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from trainer.config.lora import LINEARS
from trainer.config.parallel import Schedule
from trainer.system.errors import InputError

Data = Literal["ddp", "zero1", "zero2", "fsdp", "diloco", "motley"]
"""Means of data parallelism. `fsdp` is ZeRO-3; `diloco` exchanges every few hundred steps
(arXiv 2311.08105); `motley` is the exchange of this project, over unequal devices."""
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
Recompute = Literal["none", "selective", "full"]
Method = Literal["full", "lora", "qlora"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A combination; its sizes multiply to the number of devices.

    Raises:
        InputError: they do not.
    """

    world: int = 1
    data: Data = "ddp"
    tensor: int = 1
    sequence: bool = False
    """Sequence parallelism beside tensor parallelism (arXiv 2205.05198)."""
    stages: int = 1
    schedule: Schedule = "1f1b"
    microbatches: int = 1
    """Micro-batches of one step; a pipeline has several in flight."""
    codec: str = "auto"
    """Codec of Motley's exchange; `auto`: the first that a step hides."""

    def __post_init__(self) -> None:
        if self.world < 1 or self.world % (self.tensor * self.stages):
            raise InputError(
                f"{self.world} devices do not divide into tensor {self.tensor} x stages"
                f" {self.stages}; choose sizes whose product divides {self.world}"
            )

    @property
    def replicas(self) -> int:
        """Copies of the model: devices by tensor size by stages."""
        return self.world // (self.tensor * self.stages)

    @property
    def chunks(self) -> int:
        """Pieces of the model on each stage: more than one where a schedule interleaves."""
        return 2 if self.schedule in ("interleaved", "zbv") else 1

    @property
    def title(self) -> str:
        """Its usual name, such as `FSDP2 x TP2+SP`."""
        names = {
            "ddp": "DDP",
            "zero1": "ZeRO-1",
            "zero2": "ZeRO-2",
            "fsdp": "FSDP2",
            "diloco": "DiLoCo",
            "motley": "Motley",
        }
        parts = [names[self.data]] if self.replicas > 1 or self.data == "motley" else []
        if self.tensor > 1:
            parts.append(f"TP{self.tensor}" + ("+SP" if self.sequence else ""))
        if self.stages > 1:
            parts.append(f"PP{self.stages} {self.schedule}")
        return " x ".join(parts) or "one device"

    @property
    def key(self) -> str:
        """Its name on a command line, such as `fsdp-tp2-sp`."""
        return (
            self.title.lower()
            .replace("fsdp2", "fsdp")
            .replace(" x ", "-")
            .replace("+", "-")
            .replace(" ", "-")
        )


@dataclass(frozen=True, kw_only=True)
class ElementSizes:
    """Bytes an element."""

    weight: int
    """Bytes of a weight that trains."""
    gradient: int
    optimizer: int
    """Moments, and a fp32 copy of the weights where they are stored smaller."""
    activation: int
    frozen: int = 2
    """Bytes of a frozen weight that is not quantised."""
    copies: int = 0
    """Bytes of a trained weight's copy in the format of the products, which autocast keeps."""


MIXED = ElementSizes(weight=2, gradient=2, optimizer=12, activation=2)
"""16-bit weights beside fp32 ones: 16 bytes a parameter (arXiv 1910.02054, section 3.1)."""
AUTOCAST = ElementSizes(weight=4, gradient=4, optimizer=8, activation=2, copies=2)
"""Products in bf16 or fp16, weights that train in fp32: Motley on an accelerator."""
FP32 = ElementSizes(weight=4, gradient=4, optimizer=8, activation=4, frozen=4)
"""Products in fp32: Motley on a CPU."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The trainable weights, and the samples of a step."""

    method: Method = "full"
    rank: int = 16
    targets: Collection[str] = LINEARS
    experts: bool | None = None
    """Experts have adapters; None: if the family's do by default."""
    frozen_a: bool = False
    """Whether B alone trains in adapters."""
    adapted_layers: int | None = None
    """Layers that have adapters; None: all."""
    dora: bool = False
    """Adapters scale the rows of their linears."""
    whole: Collection[str] = ()
    """The head `lm_head` and the embedding, if they train whole beside adapters."""
    adapters: int | None = None
    """Elements of adapters and a classifier's head by the layout; None: by the targets."""
    length: int = 2048
    """Tokens of a row."""
    rows: int = 1
    """Rows of a micro-batch."""
    recompute: Recompute = "none"
    precision: ElementSizes = AUTOCAST
    packed: bool = False
    """Rows hold several samples and have a mask."""
    on_host: bool = False
    """The device's memory is the host's, where the exchange has vectors of its own."""
    one_queue: bool = False
    """The device copies and computes in turns, and what waits of a group stays on it: Vulkan."""
    coordinates: bool = False
    """The process is the run's coordinator too, as in a run of one process."""
    beside_state: float = 0
    """The exchange's bytes for each trained element beside a worker's state and average, or in a
    run of one process beside its state."""
    classes: int | None = None
    """Classes of a classifier; None for a language model."""
    taught: bool = False
    """Learns from a teacher's logits beside the tokens."""
    compared: bool = False
    """Learns preferences beside a frozen reference, whose forward runs too."""
    resident: int | None = None
    """Layers whose frozen linears stay in memory, the others are read at each use; None: all.
    `HEAD_STREAMED`: none, and neither does a frozen head."""
    evaluates: bool = False
    """Nothing trains: a layer's activations are gone after it."""
    logit_chunks: int = 1
    """Chunks of logits, held at once, for which a head that is read is read once a direction."""
    waiting: int = 0
    """Tokens of the other micro-batches of a group, which runs layer by layer."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.length
