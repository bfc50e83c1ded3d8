"""Layers that are read ahead of their use, by one thread into two slots of memory.

One consumer holds one layer at a time and says which comes next: that one is read beside the
computing, into the other slot. The read is announced only after the consumer holds its own layer,
so that no slot is overwritten while it is used.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from trainer.replica.weights.frozen_weights import FrozenWeights

SLOTS = 2


@dataclass(eq=False)
class _Slot:
    number: int
    memory: memoryview
    layer: int | None = None
    reading: Future[int] = field(default_factory=Future[int])


class LayerFeed:
    """The layers of `FrozenWeights`, one held and one on its way.

    Args:
        slots: memory of `span_bytes` for each slot; None allocates it.
        wait_until_free: called in the reading thread with the number of a slot before a layer is
            read into it: what copies the slot's bytes may still be at it.
    """

    def __init__(
        self,
        weights: FrozenWeights,
        slots: Sequence[memoryview] | None = None,
        wait_until_free: Callable[[int], None] | None = None,
    ) -> None:
        self._weights, self._wait_until_free = weights, wait_until_free
        if slots is None:  # the kernel's own: page-aligned, and given back as a whole
            slots = [memoryview(mmap.mmap(-1, weights.span_bytes)) for _ in range(SLOTS)]
        self._slots = [_Slot(number, memory) for number, memory in enumerate(slots)]
        self.slot_bytes = SLOTS * weights.span_bytes
        """Bytes of memory that all layers pass through."""
        self.reads = 0
        """Layers that were read, or are being read."""
        self._held: _Slot | None = None
        self._views: list[tuple[str, weakref.ref[np.ndarray]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layer-feed")

    def hold(self, layer: int, following: int | None) -> int:
        """Wait until a layer is in memory, and begin to read the one that follows.

        Return the number of the slot that the layer is in.

        The layer that was held before is released.

        Raises:
            InputError: the layer cannot be read.
            RuntimeError: a weight of the layer before is still in use.
        """
        if self._held is None or self._held.layer != layer:
            self._release_held()
            slot = self._find_slot(layer) or self._start_reading(layer)
            try:
                slot.reading.result()
            except BaseException:
                slot.layer = None
                raise
            self._held = slot
        if following is not None and self._find_slot(following) is None:
            self._start_reading(following)
        assert self._held is not None
        return self._held.number

    def tensor(self, layer: int, name: str) -> np.ndarray:
        """Return a weight's bytes, u8; nothing may refer to them when another layer is held.

        Raises:
            RuntimeError: the layer is not the one that is held.
        """
        if self._held is None or self._held.layer != layer:
            raise RuntimeError(f"layer {layer}: {name} is used after the layer's turn")
        start, stop = self._weights.span(layer, name)
        found = np.frombuffer(self._held.memory, np.uint8, stop - start, start)
        # Other arrays and tensors of these bytes refer to this one.
        self._views.append((name, weakref.ref(found)))
        return found

    def close(self) -> None:
        """Join the reading thread and close the files; what is held is let go."""
        self._thread.shutdown(cancel_futures=True)
        self._weights.close()
        self._release_held()

    def _find_slot(self, layer: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.layer == layer), None)

    def _start_reading(self, layer: int) -> _Slot:
        """Begin to read a layer into the slot that is not held."""
        slot = next(slot for slot in self._slots if slot is not self._held)
        slot.layer = layer
        slot.reading = self._thread.submit(self._fill, slot, layer)
        self.reads += 1
        return slot

    def _fill(self, slot: _Slot, layer: int) -> int:
        if self._wait_until_free is not None:
            self._wait_until_free(slot.number)
        return self._weights.read_layer(layer, slot.memory)

    def _release_held(self) -> None:
        held, self._held = self._held, None
        views, self._views = self._views, []
        for name, view in views:
            if view() is not None:
                assert held is not None
                raise RuntimeError(f"layer {held.layer}: {name} is used after the layer's turn")
