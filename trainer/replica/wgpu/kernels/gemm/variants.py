"""The division of a matrix product among threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.planning.vulkan_buffers import Kind


@dataclass(frozen=True)
class Variant:
    """A thread keeps `rows` x `columns` sums; a workgroup is `down` x `across` threads."""

    kind: Literal["direct", "tiled"]
    """The source of operands: `direct` is memory, `tiled` is a copy in workgroup memory."""
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
        assert self.kind != "tiled" or self.rows % 4 == self.depth % 8 == 0, self

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
        """Its name in tables."""
        name = f"{self.kind} {self.rows}x{self.columns} {self.down}x{self.across}"
        name += f" k{self.depth}" if self.kind == "tiled" else ""
        return name + (f" /{self.splits}" if self.splits > 1 else "")


@dataclass(frozen=True)
class Product:
    """The properties that determine a variant."""

    trans_a: bool
    trans_b: bool
    kind_b: Kind
    m: int
    n: int
    k: int

    @property
    def form(self) -> str:
        """The transposed operands in BLAS's notation: NN, NT, TN or TT."""
        return f"{'NT'[self.trans_a]}{'NT'[self.trans_b]}"

    @property
    def key(self) -> str:
        """Its class: products with the same variant. Sizes are rounded up to powers of two."""
        m, n, k = (1 << (size - 1).bit_length() for size in (self.m, self.n, self.k))
        return f"{self.form} {self.kind_b} {m}x{n}x{k}"


# Workgroups and their memory are within WebGPU's minimal limits, and no variant depends on the size
# of a subgroup: every device can run all of them.
DIRECT = Variant("direct", 16, 8)
DIRECT_ROW = Variant("direct", 1, 4)
# On GPUs 4x4 registers and 64 threads are good on all vendors' chips (llama.cpp, PR 22241).
TILED = Variant("tiled", 4, 4, down=8, across=8, depth=8)
TILED_DEEP = Variant("tiled", 4, 4, down=8, across=8, depth=32)
TILED_LARGE = Variant("tiled", 8, 8, down=8, across=8, depth=16)
SPLIT = Variant("direct", 4, 4, across=8, splits=8)
SPLIT_ROW = Variant("direct", 1, 4, across=4, splits=16)
ALL = (DIRECT, DIRECT_ROW, TILED, TILED_DEEP, TILED_LARGE, SPLIT, SPLIT_ROW)
