"""How the work of a matrix product is divided among threads, and which way a device takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from trainer.replica.wgpu.array import Kind
from trainer.replica.wgpu.graph import Graph
from trainer.replica.wgpu.kernels.source import source

if TYPE_CHECKING:
    from trainer.replica.wgpu.device import Device

LANES = 8
"""Threads of a `shared` workgroup; they must be one subgroup."""


@dataclass(frozen=True)
class Variant:
    """A thread keeps `rows` x `columns` sums; a workgroup is `down` x `across` threads."""

    kind: Literal["direct", "shared", "tiled"]
    """Where operands are read from: `direct` from memory; `shared` too, but a by the lanes of a
    subgroup in turn, each for all of them; `tiled` from a copy in workgroup memory."""
    rows: int
    columns: int
    down: int = 1
    across: int = 8
    depth: int = 4
    """k of one step; for `tiled` of a tile in workgroup memory."""
    splits: int = 1
    """Threads that divide the k of the same sums, which are added in order (`direct`)."""

    def __post_init__(self) -> None:
        assert self.columns % 4 == 0, self
        assert self.depth % 4 == 0, self
        assert self.depth == 4 or self.kind == "tiled", self
        assert self.splits == 1 or (self.kind == "direct" and self.down == 1), self
        assert self.kind != "tiled" or self.rows % 4 == 0, self
        assert self.kind != "shared" or (self.threads == LANES and self.rows % LANES == 0), self

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the result that one workgroup computes."""
        return self.rows * self.down, self.columns * self.across

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.down * self.across * self.splits

    @property
    def name(self) -> str:
        """What tables call it."""
        name = f"{self.kind} {self.rows}x{self.columns} {self.down}x{self.across}"
        name += f" k{self.depth}" if self.kind == "tiled" else ""
        return name + (f" /{self.splits}" if self.splits > 1 else "")


@dataclass(frozen=True)
class Product:
    """What a choice of variant depends on."""

    trans_a: bool
    trans_b: bool
    kind_b: Kind
    m: int
    n: int
    k: int

    @property
    def form(self) -> str:
        """Which operands are transposed, as BLAS says it: NN, NT, TN or TT."""
        return f"{'NT'[self.trans_a]}{'NT'[self.trans_b]}"

    @property
    def key(self) -> str:
        """Its class: products that take the same variant. Sizes count by the next power of two."""
        m, n, k = (1 << (size - 1).bit_length() for size in (self.m, self.n, self.k))
        return f"{self.form} {self.kind_b} {m}x{n}x{k}"


# On CPUs loads are dear and registers spill to the cache: large tiles, no workgroup memory.
DIRECT = Variant("direct", 16, 8)
DIRECT_ROW = Variant("direct", 1, 4)
SHARED = Variant("shared", 32, 4)
SHARED_LOW = Variant("shared", 8, 4)
# On GPUs 4x4 registers and 64 threads do well on all vendors' chips (llama.cpp, PR 22241).
TILED = Variant("tiled", 4, 4, down=8, across=8, depth=8)
TILED_DEEP = Variant("tiled", 4, 4, down=8, across=8, depth=32)
TILED_LARGE = Variant("tiled", 8, 8, down=8, across=8, depth=16)
SPLIT = Variant("direct", 4, 4, across=8, splits=8)
SPLIT_ROW = Variant("direct", 1, 4, across=4, splits=16)
ALL = (
    *(DIRECT, DIRECT_ROW, SHARED, SHARED_LOW),
    *(TILED, TILED_DEEP, TILED_LARGE, SPLIT, SPLIT_ROW),
)

_FEW = 64
"""Workgroups below which a GPU is not filled."""


class Variants:
    """Which variant a device takes: the tuned one, else a sensible one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.tuned: dict[str, Variant] = {}
        """By the key of a product."""

    def choose(self, product: Product) -> Variant:
        """Return the variant for a product."""
        return self.tuned.get(product.key) or self.default(product)

    def default(self, product: Product) -> Variant:
        """Return what an untuned device takes."""
        if self._device.adapter.software:
            if product.m < 4:
                return DIRECT_ROW
            if not self.sharing:
                return DIRECT
            return SHARED if product.m > 2 * SHARED_LOW.rows else SHARED_LOW
        if product.m < 4:
            return SPLIT_ROW
        rows, columns = TILED.tile
        groups = -(-product.m // rows) * -(-product.n // columns)
        if groups < _FEW and product.k >= 256:
            return SPLIT
        return TILED if product.kind_b == "f32" else TILED_DEEP

    def candidates(self, product: Product) -> list[Variant]:
        """Return the variants worth timing for a product."""
        if product.m < 4:
            return [DIRECT_ROW, SPLIT_ROW]
        if self._device.adapter.software:
            return [DIRECT, *([SHARED, SHARED_LOW] if self.sharing else [])]
        deep = TILED if product.kind_b == "f32" else TILED_DEEP
        return [deep, TILED_LARGE, SPLIT, DIRECT]

    def usable(self) -> list[Variant]:
        """Return the variants that this device can run."""
        return [variant for variant in ALL if variant.kind != "shared" or self.sharing]

    @cached_property
    def sharing(self) -> bool:
        """Whether 8 threads are one subgroup here, numbered as in the workgroup."""
        if "subgroup" not in self._device.handle.features:
            return False
        sizes = self._device.array((LANES,), "u32")
        graph = Graph(self._device)
        graph.add("lanes", source("lanes"), [sizes], b"", (1, 1, 1))
        graph.run()
        smallest = int(self._device.read(sizes).min())
        assert sizes.buffer is not None
        self._device.release(sizes.buffer)
        return smallest >= LANES
