"""A CUDA device of which torch is made to believe that it is there: `with inserted() as card:`.

A tensor on it says `cuda:0` and has its values on the CPU, which computes with them. Like a real
device it

- refuses an operation on tensors of both devices;
- copies to page-locked memory later: until the host has waited for it, that memory holds NaN, and
  for ever if the copy's stream had not waited for what computes the values;
  What the copy's own stream copies back from there later is as it should be;
- copies from it later, too: until a stream or the host has waited for it, memory of the device
  holds NaN, and for ever if the copy's stream had not waited for what uses that memory; page-locked
  memory that is copied again before the host has waited is refused;
- makes the host wait, which `Card.waits` counts, where `torch.cuda.set_sync_debug_mode` would warn:
  for values that the host asks for, for results whose size depends on values, for copies that are
  not `non_blocking`; and where an event or a stream is waited for.

torch must have been loaded after `library.py`'s library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # it looks through torch.cuda when it is imported
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretend_cuda.waits import Waits

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
_ASK = {
    *("_local_scalar_dense", "allclose", "equal", "is_nonzero"),
    *("nonzero", "masked_select", "_unique2", "unique_dim", "bincount"),
}
"""Operations that return to the host, and those whose result has a size that depends on values."""
_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that take indices from the host too, for which it waits."""


class OnCard(torch.Tensor):
    """A tensor on the device."""

    values: Tensor
    """On the CPU."""

    @staticmethod
    def __new__(cls, values: Tensor) -> OnCard:
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.values = values
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.tolist:
            return args[0].cpu().tolist()
        if func == torch.Tensor.new_tensor:
            return torch.tensor(args[1], dtype=args[0].dtype, device=DEVICE)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__:  # pyright: ignore[reportAttributeAccessIssue]
            args[0].values = args[1].values
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert Card.inserted is not None, f"{func}: the card is gone"
        return Card.inserted.__torch_dispatch__(func, types, args, kwargs)


class Card(TorchDispatchMode):
    """The device; while it is entered, tensors can be on it."""

    inserted: Card | None = None

    def __init__(self) -> None:
        super().__init__()
        self.waits = Waits()
        self.default = self.stream = Stream(self)
        """What work is given to; `stream` is the current one."""
        self._pinned: dict[int, Tensor] = {}
        self._uses: dict[int, int] = {}
        """The last work of the default stream that had memory of the device, by its address."""
        self._leaving: dict[int, _Copy] = {}
        """The last copy from page-locked memory, by its address."""
        self._thread = get_ident()

    def note(self) -> None:
        """Count a wait of the thread that gives work out."""
        if get_ident() == self._thread:
            self.waits.note()

    def wait(self) -> None:
        """Let the host wait for all that the current stream was given."""
        self.note()
        self.stream.land()

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Give work to another stream."""
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls this again with its local part
        if func is aten._to_copy.default:
            return self._moved(*args, **kwargs)
        if func is aten.copy_.default:
            return self._copied(*args, **kwargs)
        if kwargs.get("pin_memory"):
            return self.pinned(func(*args, **{**kwargs, "pin_memory": False}))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = [x for x in tensors if isinstance(x, OnCard)]
        device = kwargs.get("device")
        if here:
            self._check(func.overloadpacket.__name__, args, kwargs, tensors)
        if device is not None and device.type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        found = func(*tree_map(_values, args), **tree_map(_values, kwargs))
        if not here if device is None else device.type != "cuda":
            return found
        self._launch(*here)
        given = {id(x.values): x for x in here}  # what works in place returns what it got

        def placed(x: Any) -> Any:
            return given[id(x)] if id(x) in given else OnCard(x)

        return tree_map(lambda x: placed(x) if isinstance(x, Tensor) else x, found)

    def _launch(self, *used: Any) -> None:
        """Give the current stream work with tensors."""
        self.stream.launched += 1
        if self.stream is self.default:
            given = [_values(x) for x in used if isinstance(x, OnCard)]
            here = [values for values in given if type(values) is Tensor]  # or yet to be gathered
            self._uses |= {_address(values): self.stream.launched for values in here}

    def _check(self, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Any]) -> None:
        """Refuse tensors of both devices, and let the host wait if it has to."""
        if name in _INDEX:
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype == torch.bool or not isinstance(x, OnCard) for x in indices):
                self.wait()
            tensors = [args[0], *args[2:3]]
        # A number on the host goes along with the call.
        if any(x.ndim and not isinstance(x, OnCard) for x in tensors if isinstance(x, Tensor)):
            raise RuntimeError(
                f"{name}: Expected all tensors to be on the same device: cuda:0 and cpu"
            )
        if name in _ASK or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait()

    def _moved(
        self,
        source: Tensor,
        *,
        device: torch.device | None = None,
        non_blocking: bool = False,
        pin_memory: object = None,
        **settings: Any,
    ) -> Tensor:
        """Return a copy of another dtype or on another device."""
        was_here = isinstance(source, OnCard)
        comes = not was_here and device is not None and device.type == "cuda"
        values = self.stream.read_memory(source) if comes else _values(source)
        made = aten._to_copy.default(values, **settings)
        if was_here if device is None else device.type == "cuda":
            if not was_here and not non_blocking:
                self.wait()
            self._launch(source)
            return OnCard(made)
        if was_here:  # torch page-locks the copy's memory if it is not to wait
            self._bring(made, made.clone(), later=non_blocking)
        return made

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy into a tensor."""
        to, of = _values(target), _values(source)
        pinned = type(source) is Tensor and _address(source) in self._pinned
        if isinstance(target, OnCard) and non_blocking and pinned:
            self._send(to, of)
            return target
        if isinstance(source, OnCard) and not isinstance(target, OnCard):
            pinned = _address(to) in self._pinned
            self._bring(to, of, later=non_blocking and pinned)
            return target
        if isinstance(target, OnCard):
            # DDP gets a bucket's values back from a collective, and copies them to themselves.
            comes = not isinstance(source, OnCard) and to.data_ptr() != of.data_ptr()
            if comes and source.ndim and not non_blocking:
                self.wait()
            self._launch(target, source)
        to.copy_(of)
        return target

    def _bring(self, to: Tensor, of: Tensor, *, later: bool) -> None:
        """Copy to the host, now or when it has waited for the current stream."""
        copy = _Copy(to, of if self.stream.knows_all() else _spoiled(of.clone()))
        if later:
            _spoiled(to)
            self.stream.copies.append(copy)
        else:
            self.wait()
            copy.land()

    def _send(self, to: Tensor, of: Tensor) -> None:
        """Copy from page-locked memory when the current stream has been waited for."""
        last = self._leaving.get(_address(of))
        if last is not None and not last.seen:
            raise RuntimeError("page-locked memory was filled before the host waited for its copy")
        unused = self.stream.knows(self._uses.get(_address(to), 0))
        copy = _Copy(to, of if unused else _spoiled(of.clone()), to_device=True)
        _spoiled(to)
        self._leaving[_address(of)] = copy
        self.stream.copies = [copy for copy in self.stream.copies if not copy.seen]
        self.stream.copies.append(copy)

    def pinned(self, memory: Tensor) -> Tensor:
        """Return memory as page-locked, with nothing in it yet."""
        self._pinned[_address(memory)] = memory  # which keeps its address
        return _spoiled(memory)


class _Copy:
    """To the host, or from it; it arrives when one has waited."""

    def __init__(self, to: Tensor, of: Tensor, *, to_device: bool = False) -> None:
        self._to, self._of, self._to_device = to, of, to_device
        self._landed = self.seen = False
        """`seen`: the host has waited for it."""

    def land(self) -> None:
        """Arrive, and the host knows it."""
        self._arrive()
        self.seen = True

    def read(self, memory: Tensor) -> Tensor | None:
        """Return what memory of the host will hold; None if the copy is not to it."""
        if self._landed or self._to_device or _address(self._to) != _address(memory):
            return None
        return self._of.as_strided(memory.size(), memory.stride(), memory.storage_offset())

    def land_on_device(self) -> None:
        """Arrive for a stream that waits; memory of the host is not the device's to read."""
        if self._to_device:
            self._arrive()

    def _arrive(self) -> None:
        if not self._landed:
            self._to.copy_(self._of)
        self._landed = True


class Stream:
    """Work in its order. Of another stream's it knows what it has waited for."""

    def __init__(self, card: Card, *_: object, **__: object) -> None:
        self.device, self.launched = DEVICE, 0
        self.copies: list[_Copy] = []
        """On their way."""
        self._card, self._known = card, 0

    @property
    def is_default(self) -> bool:
        return self is self._card.default

    def wait_stream(self, other: Stream) -> None:
        if other is self._card.default:
            self._known = other.launched

    def knows_all(self) -> bool:
        """Return whether it has waited for all work of the default stream."""
        return self.knows(self._card.default.launched)

    def knows(self, work: int) -> bool:
        """Return whether it has waited for so much work of the default stream."""
        return self.is_default or self._known >= work

    def read_memory(self, memory: Tensor) -> Tensor:
        """Return memory of the host as work of this stream finds it: after the copies before."""
        found = (copy.read(memory) for copy in reversed(self.copies))
        return next((values for values in found if values is not None), memory)

    def land(self) -> None:
        while self.copies:
            self.copies.pop(0).land()

    def synchronize(self) -> None:
        with self._card.on(self):
            self._card.wait()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._card)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self._known = max(self._known, event.launched)
        for copy in event.copies:
            copy.land_on_device()


class Event:
    """A place in a stream. It is not yet reached when it is asked for the first time."""

    def __init__(self, card: Card, *_: object, **__: object) -> None:
        self._card, self._asked = card, False
        self.copies: list[_Copy] = []
        self.launched = 0
        """Work of the default stream before it."""

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._card.stream
        self.copies, self._asked = [*stream.copies], False
        self.launched = stream.launched if stream.is_default else 0

    def query(self) -> bool:
        if self._asked:
            self._land()
        self._asked = True
        return all(copy.seen for copy in self.copies)

    def synchronize(self) -> None:
        if not all(copy.seen for copy in self.copies):
            self._card.note()
            self._land()

    def _land(self) -> None:
        for copy in self.copies:
            copy.land()


def _values(x: Any) -> Any:
    return x.values if isinstance(x, OnCard) else x


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _spoiled(memory: Tensor) -> Tensor:
    """Return memory with what is NaN; in bytes, what its bytes may be."""
    if memory.is_floating_point():
        return memory.fill_(float("nan"))
    return memory.fill_(255 if memory.dtype == torch.uint8 else -1)


@contextmanager
def inserted() -> Iterator[Card]:
    """Put the device into this process; what is on it must not be used afterwards."""
    assert Card.inserted is None
    card, memory = Card(), 80 << 30
    device = SimpleNamespace(name="pretended", major=9, minor=0, total_memory=memory)
    nothing = _always(None)
    shown: dict[str, Any] = {
        **dict.fromkeys(
            ("_lazy_init", "set_device", "set_rng_state", "empty_cache", "_sleep"), nothing
        ),
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), _always(True)),
        "device_count": _always(1),
        "current_device": _always(0),
        "memory_reserved": _always(0),
        "mem_get_info": _always((memory, memory)),
        "get_device_properties": _always(device),
        "get_device_capability": _always((9, 0)),
        "get_rng_state": _always(torch.zeros(16, dtype=torch.uint8)),
        "Stream": partial(Stream, card),
        "Event": partial(Event, card),
        "stream": card.on,
        "current_stream": lambda _device=None: card.stream,
        "synchronize": lambda _device=None: card.wait(),
    }
    on_host, subclass = torch.tensor, torch.Tensor._make_subclass

    def page_locked(tensor: Tensor) -> Tensor:
        return card.pinned(tensor.clone()).copy_(tensor)

    def tensor(data: Any, *, device: Any = None, **settings: Any) -> Tensor:
        return on_host(data, **settings).to(device)

    def make_subclass(cls: Any, data: Tensor, *args: Any, **settings: Any) -> Tensor:
        """Return bitsandbytes' parameter as one on the card."""
        if not isinstance(data, OnCard):
            return subclass(cls, data, *args, **settings)
        if not issubclass(cls, OnCard):
            hook = {"__torch_function__": OnCard.__dict__["__torch_function__"]}
            cls = type(cls.__name__, (cls, OnCard), hook)
        return OnCard.__new__(cls, data.values)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in shown.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch.Tensor, "_make_subclass", make_subclass)
        patch.setattr(torch.Tensor, "pin_memory", page_locked)
        # FSDP frees what it gathered by resizing a storage, which is not where the values are.
        for name in ("alloc_storage", "free_storage"):
            patch.setattr(fsdp_param, name, nothing)
        patch.setattr(Card, "inserted", card)
        # The device is this thread's alone, and transformers loads by several.
        patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
        # Backward runs where the card is, in this thread.
        with torch.autograd.set_multithreading_enabled(False), card:
            yield card


def _always(value: Any) -> Any:
    return lambda *_, **__: value
