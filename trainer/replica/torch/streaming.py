"""Products with frozen weights that are in memory only while their layer has its turn.

`F.linear` saves its weight for backward, and so would keep every layer that it has seen. This one
saves where the weight comes from and reads it again; operations and bits are `F.linear`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.safetensors_headers import TensorHeader
from trainer.planning.stored_layers import split_head
from trainer.planning.vulkan_buffers import NF4_BLOCK
from trainer.replica.torch.linear import import_bitsandbytes, packed_nf4_linear
from trainer.replica.weights.frozen_weights import FrozenWeights
from trainer.replica.weights.layer_feed import SLOTS, LayerFeed
from trainer.replica.weights.nf4_file import ABSMAX
from trainer.replica.weights.stored_file import StoredTable

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class DeviceSlots:
    """A `LayerFeed` into page-locked memory, whose slots have a copy each on the device.

    Copies have a stream of their own. Computing waits for the copy of its layer, a copy until the
    layer that was in its slot has been computed, and the reading thread until the copy has left
    page-locked memory. The host, which gives out work ahead of the device, waits for reads alone.
    """

    def __init__(self, weights: FrozenWeights, device: torch.device) -> None:
        size = weights.span_bytes
        self._hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(SLOTS)]
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._layers: list[int | None] = [None] * SLOTS
        self._weights, self._device = weights, device
        self._stream = torch.cuda.Stream(device)
        # What had the slots' memory before may still be computed.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)]
        self._computed = [torch.cuda.Event() for _ in range(SLOTS)]
        self._held: int | None = None
        memory = [host.numpy().data for host in self._hosts]
        self.feed = LayerFeed(weights, memory, self._wait_until_copied)
        """Reads the layers."""

    def get_tensor(self, layer: int, name: str, following: int | None) -> Tensor:
        """Return a weight's bytes on the device, u8, until another layer is asked for.

        Args:
            following: the layer after this one.
        """
        slot = self.feed.hold(layer, following)
        if self._held != slot or self._layers[slot] != layer:
            self._take(slot, layer)
        start, stop = self._weights.span(layer, name)
        return self._slots[slot][start:stop]

    def _take(self, slot: int, layer: int) -> None:
        """Give the layer that was held back to the copies, and copy this one if necessary."""
        computing = torch.cuda.current_stream(self._device)
        if self._held is not None:
            self._computed[self._held].record(computing)
        self._held = slot
        if self._layers[slot] == layer:
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed[slot])
            self._slots[slot].copy_(self._hosts[slot], non_blocking=True)
            self._copied[slot].record(self._stream)
        computing.wait_event(self._copied[slot])
        self._layers[slot] = layer

    def _wait_until_copied(self, slot: int) -> None:
        self._copied[slot].synchronize()


class LayerStream:
    """The layers of a model that are read while a pass uses them.

    Their order is a pass's: up, and down again if it has a backward. Which layer follows is seen
    from the way that the pass goes, so recomputed and generating passes need no word of their own.
    A layer that comes unexpected is read when it is asked for.

    Args:
        dtype: of the weights in products; files may have another one.
        device: of the products.
        nf4: the dtype of products with weights in NF4; None: they are as they are stored.
        codes: opens these weights.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        nf4: torch.dtype | None = None,
        codes: AbstractContextManager[dict[str, TensorHeader]] | None = None,
    ) -> None:
        self.dtype, self._device, self._nf4 = dtype, device, nf4
        self._opened = ExitStack()  # a file that no cache keeps goes with the model
        self.codes = {} if codes is None else self._opened.enter_context(codes)
        """Every linear's in NF4, those of layers that stay, too."""
        self._tensors: dict[int, dict[str, TensorHeader]] = {}
        self._feed: LayerFeed | None = None
        self._slots: DeviceSlots | None = None
        self._order: list[int] = []
        self._place = 0

    def add_weight(self, layer: int, name: str, header: TensorHeader) -> None:
        """Read a weight with its layer, from the first product on."""
        assert self._feed is None, "the first product has fixed what is read"
        tensors = self._tensors.setdefault(layer, {})
        if self._nf4 is None:
            tensors[name] = header
        else:
            tensors |= {part: self.codes[part] for part in (name, name + ABSMAX)}

    def linear(
        self,
        layer: int,
        header: TensorHeader,
        name: str,
        bias: Tensor | None,
        *,
        transposed: bool = False,
    ) -> nn.Module:
        """Return the product with the weight `name` of a layer; see `StreamedLinear`."""
        self.add_weight(layer, name, header)
        if self._nf4 is None:
            return StreamedLinear(self, layer, name, header, bias, transposed=transposed)
        assert not transposed, "blocks of NF4 would be others"
        return StreamedNF4Linear(self, layer, name, header, bias, self._nf4)

    def resident_linear(self, name: str, shape: tuple[int, ...], bias: Tensor | None) -> nn.Module:
        """Return the product with the weight `name`, in NF4, of a layer that stays."""
        assert self._nf4 is not None
        codes, absmax = (
            torch.from_numpy(
                np.fromfile(part.file, np.uint8, part.end - part.begin, offset=part.begin)
            ).to(self._device)
            for part in (self.codes[name], self.codes[name + ABSMAX])
        )
        scales = absmax.view(torch.float32)
        return packed_nf4_linear(codes, scales, shape, self.dtype, bias, self._nf4)

    @property
    def feed(self) -> LayerFeed:
        """The reader of the layers; opened at its first use."""
        if self._feed is None:
            weights = FrozenWeights(self._tensors)
            if self._device.type == "cuda":
                self._slots = DeviceSlots(weights, self._device)
            self._feed = LayerFeed(weights) if self._slots is None else self._slots.feed
            self._order = sorted(self._tensors)
        return self._feed

    def read(self, layer: int, name: str, *, trains: bool) -> Tensor:
        """Return stored bytes, u8, which nothing may refer to when another layer is used.

        Args:
            trains: a backward follows the pass.
        """
        feed = self.feed
        following = self._following_layer(layer, trains=trains)
        if self._slots is not None:
            return self._slots.get_tensor(layer, name, following)
        feed.hold(layer, following)
        return torch.from_numpy(feed.tensor(layer, name))

    def _following_layer(self, layer: int, *, trains: bool) -> int | None:
        """Return the layer after this one; None while it goes on, and where there is no other."""
        place, last = self._order.index(layer), len(self._order) - 1
        if place == self._place and place not in (0, last):
            return None
        falls, self._place = place < self._place, place
        if not last:
            return None
        if place == last:
            return self._order[last - 1 if trains else 0]
        return self._order[place - 1 if falls and place else place + 1]


class StreamedLinear(nn.Module):
    """A product with a frozen weight `[out, in]` of a `LayerStream`.

    Args:
        transposed: the file has `[in, out]`, as GPT-2's.
    """

    def __init__(
        self,
        stream: LayerStream,
        layer: int,
        name: str,
        header: TensorHeader,
        bias: Tensor | None,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self._stream, self._layer, self._name, self._header = stream, layer, name, header
        self._transposed = transposed
        self.bias = None if bias is None else nn.Parameter(bias)
        self.out_features, self.in_features = header.shape[::-1] if transposed else header.shape

    @property
    def weight(self) -> Tensor:
        """A copy as the file has it, for classes that use the weight past the product."""
        found = self.fetch_weight(None, trains=torch.is_grad_enabled())
        return (found.t() if self._transposed else found).clone()

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out]`."""
        found: Any = FetchedProduct.apply(x, self, torch.is_grad_enabled())
        return found

    def fetch_weight(self, _dtype: torch.dtype | None, /, *, trains: bool) -> Tensor:
        """Return the weight, which nothing may refer to after the product.

        Args:
            _dtype: of the other factor in forward; None in backward.
            trains: a backward follows the pass.
        """
        raw = self._stream.read(self._layer, self._name, trains=trains)
        found = raw.view(DTYPES[self._header.dtype]).view(self._header.shape)
        return (found.t() if self._transposed else found).to(self._stream.dtype)


class StreamedNF4Linear(StreamedLinear):
    """The same in NF4, with the operations and so the bits of bitsandbytes' linear.

    Codes have the order of the file, and one weight at a time is out of NF4.

    Args:
        compute: dtype of the product.
    """

    def __init__(
        self,
        stream: LayerStream,
        layer: int,
        name: str,
        header: TensorHeader,
        bias: Tensor | None,
        compute: torch.dtype,
    ) -> None:
        super().__init__(stream, layer, name, header, bias)
        self._compute = compute
        if bias is not None:
            self.bias = nn.Parameter(bias.to(compute))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out]`."""
        return super().forward(x.to(self._compute)).to(x.dtype)

    def fetch_weight(self, dtype: torch.dtype | None, /, *, trains: bool) -> Tensor:
        """Return the weight; in backward it passes through the dtype of the base."""
        codes = self._stream.read(self._layer, self._name, trains=trains)
        absmax = self._stream.read(self._layer, self._name + ABSMAX, trains=trains)
        return unpack_nf4(codes, absmax, self._header.shape, dtype or self._stream.dtype)


class StreamedEmbedding(nn.Module):
    """The rows of a frozen table, read for the tokens of a pass.

    Args:
        dtype: of the rows; the file may have another one.
        module: looks up tokens in its `weight`, each by itself; None: nothing but rows is returned.
    """

    def __init__(
        self,
        header: TensorHeader,
        name: str,
        dtype: torch.dtype,
        module: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self._table, self._stored, self._dtype = StoredTable(header, name), header.dtype, dtype
        self._module = module

    def forward(self, ids: Tensor) -> Tensor:
        """Return `[..., D]` of token ids."""
        numbers, places = torch.unique(ids.cpu(), return_inverse=True)
        read = torch.from_numpy(self._table.read_rows(numbers.numpy()))
        rows = read.view(DTYPES[self._stored]).to(self._dtype)
        if self._module is None:
            return rows[places].to(ids.device)
        self._module.weight = rows.to(ids.device)
        return self._module(places.to(ids.device))


class StreamedHead(nn.Module):
    """A frozen head `[V, D]`, read in chunks of its rows: the layers of a stream of its own.

    A bias stays. It is one more column, as of `biased_product`.

    Args:
        dtype: of the base; the file may have another one.
    """

    def __init__(
        self,
        header: TensorHeader,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._stream, self._name, self._stored = LayerStream(dtype, device), name, header.dtype
        self.device = device
        self.out_features, self.in_features = header.shape
        self.bias = None if bias is None else nn.Parameter(bias)
        self.shape = self.out_features, self.in_features + (bias is not None)
        self.weight = torch.empty(header.shape, dtype=dtype, device="meta")
        """Without values: classes ask for its dtype."""
        self.logit_chunks = 1
        """Chunks of logits, held at once, for which the losses read each chunk once a direction."""
        self._chunks = split_head(*self.shape)
        for number, chunk in enumerate(self._chunks):
            self._stream.add_weight(number, name, header.slice_rows(chunk.start, chunk.stop))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., V]`, without a gradient."""
        return torch.cat([self._multiply(x, number) for number in range(len(self._chunks))], -1)

    def _multiply(self, x: Tensor, chunk: int) -> Tensor:
        rows = self._read_rows(chunk, trains=False).to(x.dtype)
        bias = None if self.bias is None else self.bias[self._chunks[chunk]].to(x.dtype)
        return F.linear(x, rows, bias)

    def fetch_rows(self, chunk: int, dtype: torch.dtype, *, trains: bool) -> Tensor:
        """Return a chunk of `split_head`, which nothing may refer to after the product.

        Args:
            trains: chunks are used again from the last to the first.
        """
        rows = self._read_rows(chunk, trains=trains)
        if self.bias is None:
            return rows.to(dtype)
        found = rows.new_empty(len(rows), self.shape[1], dtype=dtype)
        found[:, :-1], found[:, -1] = rows, self.bias[self._chunks[chunk]]
        return found

    def _read_rows(self, chunk: int, *, trains: bool) -> Tensor:
        raw = self._stream.read(chunk, self._name, trains=trains)
        rows = raw.view(DTYPES[self._stored]).view(-1, self.in_features)
        return rows.to(self._stream.dtype)


class FetchedWeight(Protocol):
    """A weight that is in memory for one product at a time, and what is added to the product."""

    bias: Tensor | None

    def fetch_weight(self, dtype: torch.dtype | None, /, *, trains: bool) -> Tensor:
        """Return the weight; see `StreamedLinear`."""
        ...


def unpack_nf4(codes: Tensor, absmax: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return weights out of NF4, as bitsandbytes unpacks them; codes and absmax are bytes, u8."""
    import_bitsandbytes()
    operation: Any = torch.ops.bitsandbytes.dequantize_4bit
    scales = absmax.view(torch.float32)
    return operation.default(codes.view(-1, 1), scales, NF4_BLOCK, "nf4", shape, dtype)


class FetchedProduct(torch.autograd.Function):
    """`F.linear` with a weight that is fetched for forward, and again for backward."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, linear: FetchedWeight, trains: bool
    ) -> Tensor:
        """Return `[..., out]`."""
        ctx.linear, ctx.dtype = linear, x.dtype
        return F.linear(x, linear.fetch_weight(x.dtype, trains=trains), linear.bias)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient of `x`."""
        weight = ctx.linear.fetch_weight(None, trains=True).to(gradient.dtype)
        slope = torch.mm(gradient.flatten(0, -2), weight)
        return slope.view(*gradient.shape[:-1], -1).to(ctx.dtype), None, None
