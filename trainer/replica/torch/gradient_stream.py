"""Gradients leave block by block while backward still runs.

Every parameter's `.grad` is a view of one flat tensor, so a block's gradient is a slice of it and
autograd adds micro-batches up in place (the idea of DDP's `gradient_as_bucket_view`,
https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from trainer.model.layout import GradientLayout
from trainer.replica.base import OnBlock


class GradientStream:
    """The flat gradient of a model and the hooks that hand out its blocks.

    Args:
        parameters: trainable parameters by layout name.
    """

    def __init__(
        self, layout: GradientLayout, parameters: Mapping[str, nn.Parameter], device: torch.device
    ) -> None:
        self.flat = torch.zeros(layout.size, dtype=torch.float32, device=device)
        """fp32 `[layout.size]` on the device; sums since `restart`."""
        self._layout = layout
        self._transfer: _PinnedCopies | None = None
        self._on_block: OnBlock | None = None
        self._armed = False
        self._sent = 0
        self._missing: list[int] = []
        self._parameters = parameters
        self._bind_gradients()
        for block in layout.blocks:
            for name, _, _ in block.parameters:
                hook = partial(self._on_gradient_ready, block.index)
                parameters[name].register_post_accumulate_grad_hook(hook)

    @contextmanager
    def stream_step(self, on_block: OnBlock) -> Iterator[None]:
        """Take one shard: blocks go to `on_block`, and those that never became ready at the end."""
        self._on_block, self._sent = on_block, 0
        if self._transfer is None and self.flat.is_cuda:
            self._transfer = _PinnedCopies(self._layout, self.flat)
        try:
            yield
            self._flush_blocks()
        finally:
            self._on_block, self._armed = None, False

    def restart(self) -> None:
        """Begin the shard, or begin it again without memory for it.

        What was sent stays sent, and is the receiver's where it is.
        """
        self._armed = False
        if self._on_block is not None and self._sent and self._transfer is None:
            self.flat = torch.zeros_like(self.flat)
            self._bind_gradients()
        else:
            self.flat.zero_()
        self._missing = [len(block.parameters) for block in self._layout.blocks]

    def mark_backward(self, *, last: bool) -> None:
        """Say whether the next backward is the last one: what it finishes is final then."""
        self._armed = last and self._on_block is not None

    def _bind_gradients(self) -> None:
        """Make the parameters' gradients views of `flat`."""
        for block in self._layout.blocks:
            for name, start, stop in block.parameters:
                parameter = self._parameters[name]
                parameter.grad = self.flat[start:stop].view(parameter.shape)

    def _on_gradient_ready(self, index: int, _parameter: Tensor) -> None:
        if not self._armed:
            return
        self._missing[index] -= 1
        if self._missing[index] == 0:
            self._start_copy(index)
            self._send_ready(
                lambda block: self._transfer is None or self._transfer.has_arrived(block)
            )

    def _flush_blocks(self) -> None:
        """Send the rest; a parameter that the loss did not reach has a gradient of zero."""
        for index, missing in enumerate(self._missing):
            if missing:
                self._start_copy(index)
            self._missing[index] = 0
        self._send_ready(lambda block: self._transfer is None or self._transfer.wait(block))

    def _start_copy(self, index: int) -> None:
        """Begin to copy a block to the host, unless that of a first attempt was sent."""
        if self._transfer is not None and index not in self._layout.send_order[: self._sent]:
            self._transfer.start(index)

    def _send_ready(self, ready: Callable[[int], bool]) -> None:
        order = self._layout.send_order
        while self._sent < len(order):
            index = order[self._sent]
            if self._missing[index] or not ready(index):
                return
            self._sent += 1
            host = self.flat if self._transfer is None else self._transfer.host
            block = self._layout.blocks[index]
            assert self._on_block is not None
            self._on_block(index, host[block.start : block.stop].numpy())


class _PinnedCopies:
    """Copies blocks to page-locked host memory beside the backward, on a stream of its own."""

    def __init__(self, layout: GradientLayout, flat: Tensor) -> None:
        self.host = torch.empty(layout.size, dtype=torch.float32, pin_memory=True)
        self._layout = layout
        self._flat = flat
        self._stream = torch.cuda.Stream(flat.device)
        self._done = [torch.cuda.Event() for _ in layout.blocks]

    def start(self, index: int) -> None:
        block = self._layout.blocks[index]
        self._stream.wait_stream(torch.cuda.current_stream(self._flat.device))
        with torch.cuda.stream(self._stream):
            part = slice(block.start, block.stop)
            self.host[part].copy_(self._flat[part], non_blocking=True)
            self._done[index].record(self._stream)

    def has_arrived(self, index: int) -> bool:
        return self._done[index].query()

    def wait(self, index: int) -> bool:
        self._done[index].synchronize()
        return True
