"""A script that has run: its module, data and functions, checked; errors are one line of it."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from trainer.config.script import Script
from trainer.replica.script.start import Facts, ScriptStart, build_script_layout
from trainer.system.errors import (
    DoesNotFitError,
    InputError,
    TrainerError,
    first_line,
    is_out_of_memory,
)

MODULE = "motley_script"
"""The name under which a script's module is found by its own classes."""
_DIGESTED = 256
"""Samples of a data set that are compared between hosts, at even distances."""


@dataclass(frozen=True, slots=True)
class ScriptSample:
    """One sample of a script's data set, of whatever kind."""

    value: Any
    tokens: int = 1
    """What speeds are counted in: a script's are samples a second."""


@dataclass(frozen=True)
class ScriptDataset:
    """A script's data set."""

    script: Script
    values: Sequence[Any]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> ScriptSample:
        with script_errors(self.script, "dataset"):
            return ScriptSample(self.values[index])


@dataclass(frozen=True)
class OpenedScript:
    """The parts of a run that a script makes."""

    script: Script
    model: nn.Module
    train: ScriptDataset
    validation: ScriptDataset | None
    loss: Callable[[nn.Module, Any], Any]
    collate: Callable[[list[Any]], Any]
    metrics: Callable[[nn.Module, Any], Any] | None
    has_local_buffers: bool
    """Whether each worker keeps buffers of its own."""
    start: ScriptStart


def open_script(script: Script, seed: int) -> OpenedScript:
    """Run a script and check what it makes.

    Args:
        seed: of the random numbers with which it makes its model and its data.

    Raises:
        InputError: the script raises, or lacks or returns something wrong; names its line.
    """
    module = ModuleType(MODULE)
    module.__file__ = str(script.path)
    sys.modules[MODULE] = module
    with script_errors(script, "the script"):
        # Its operator's own command named it, by its digest; no config and no host can.
        exec(compile(script.content, str(script.path), "exec"), module.__dict__)  # noqa: S102
    parts = {name: getattr(module, name, None) for name in ("model", "dataset", "loss")}
    for name, part in parts.items():
        if not callable(part):
            raise InputError(
                f"{script.path}: has no function {name}; a script has model(), dataset(split) and"
                " loss(model, samples)"
            )
    buffers = getattr(module, "buffers", None)
    if buffers not in (None, "local"):
        raise InputError(f"{script.path}: buffers is {buffers!r}; the only value is 'local'")

    def call(name: str, *arguments: Any) -> Any:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        with script_errors(script, name):
            return getattr(module, name)(*arguments)

    model = call("model")
    if not isinstance(model, nn.Module):
        raise InputError(f"{script.path}: model() returned no torch.nn.Module but {_kind(model)}")
    train, validation = call("dataset", "train"), call("dataset", "validation")
    for split, values in (("train", train), ("validation", validation)):
        optional = split == "validation" and values is None
        if not optional and not (hasattr(values, "__len__") and hasattr(values, "__getitem__")):
            raise InputError(
                f"{script.path}: dataset({split!r}) returned {_kind(values)}: a sequence is"
                " needed, with a length and an item at each index"
            )
    if not len(train):
        raise InputError(f"{script.path}: dataset('train') is empty")
    data = ScriptDataset(script, train)
    held_out = ScriptDataset(script, validation) if validation is not None else None
    return OpenedScript(
        script=script,
        model=model,
        train=data,
        validation=held_out,
        loss=module.loss,
        collate=getattr(module, "collate", None) or list,
        metrics=getattr(module, "metrics", None),
        has_local_buffers=buffers == "local",
        start=_start(script, model, data, held_out),
    )


@contextmanager
def script_errors(script: Script, function: str) -> Iterator[None]:
    """Turn what a script raises in the block into one line that names its own line.

    Raises:
        DoesNotFitError: there was no memory for it.
        InputError: anything else.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise DoesNotFitError(
                f"{script.path}: {function}: no memory for it ({first_line(error)}); lower"
                " training.micro_batch_size"
            ) from None
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(script.path)]
        line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
        line = line or (lines[-1] if lines else None)
        where = f"{script.path}:{line}" if line else str(script.path)
        raise InputError(
            f"{where}: {function}: {type(error).__name__}: {first_line(error)}"
        ) from None


def _start(
    script: Script, model: nn.Module, train: ScriptDataset, validation: ScriptDataset | None
) -> ScriptStart:
    trained: dict[str, Tensor] = {}
    frozen = blake3()
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if not parameter.requires_grad:
            _digest(frozen, [name, values])
        elif values.dtype != torch.float32 or not values.numel():
            kind = str(values.dtype).removeprefix("torch.")
            raise InputError(
                f"{script.path}: parameter {name} is {kind} {list(values.shape)}: what is trained"
                " is float32 and not empty; convert it, or set requires_grad to False"
            )
        else:
            trained[name] = values
    if not trained:
        raise InputError(f"{script.path}: model() has no parameter that requires a gradient")
    for name, buffer in model.named_buffers():
        _digest(frozen, [name, buffer])
    flat = torch.cat([values.reshape(-1).cpu() for values in trained.values()]).numpy()
    data = blake3()
    for part in filter(None, (train, validation)):
        count = len(part)
        chosen = sorted({step * count // _DIGESTED for step in range(_DIGESTED)} if count else ())
        _digest(data, [count, [part[index].value for index in chosen]])
    sizes = len(train), len(validation or ())
    facts = Facts(script.digest, frozen.hexdigest(), data.hexdigest(), *sizes)
    shapes = ((name, tuple(values.shape)) for name, values in trained.items())
    return ScriptStart(facts, build_script_layout(shapes), flat)


def _digest(hasher: blake3, value: Any) -> None:
    """Hash a value by its content, framed by its kind; objects of other kinds by what they hold."""
    hasher.update(f"\0{_kind(value)}\0".encode())
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        hasher.update(f"{value.dtype}{list(value.shape)}".encode())
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        hasher.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, bytes):
        hasher.update(len(value).to_bytes(8, "little") + value)
    elif value is None or isinstance(value, str | int | float | complex | np.generic):
        _digest(hasher, repr(value).encode())
    elif isinstance(value, Mapping):
        _digest(hasher, [part for pair in value.items() for part in pair])
    elif isinstance(value, list | tuple):
        hasher.update(len(value).to_bytes(8, "little"))
        for part in value:
            _digest(hasher, part)
    elif hasattr(value, "__dict__"):
        _digest(hasher, vars(value))


def _kind(value: object) -> str:
    return type(value).__name__
