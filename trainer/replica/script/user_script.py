"""A script that has run: its module, data and functions, checked; errors are one line of it."""

from __future__ import annotations

import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from trainer.config.script import Script, read_script
from trainer.planning.devices import format_gib
from trainer.planning.replica import USABLE
from trainer.replica.script.start import ScriptFacts, build_script_layout, write_start
from trainer.replica.torch.device import available_bytes
from trainer.system.errors import (
    DoesNotFitError,
    InputError,
    TrainerError,
    UnreachableError,
    first_line,
    is_out_of_memory,
)
from trainer.system.process.native_thread import ExitTimer, exit_from_any_thread

_DIGESTED = 256
"""Samples of a data set that are compared between hosts, at even distances."""
_STATE_BYTES = 16
"""A trained parameter's gradient, the averaged one and two moments, in fp32."""
_TOO_LONG = ": has not returned for {:g} s; make it faster, or raise exchange.join_deadline"


class ScriptFaultError(Exception):
    """A function of a script returned or did something wrong; the message says what."""


class _TimeLimitError(BaseException):
    """A script's function did not return; not for its own `except Exception`."""


class UserScript:
    """A script that has run, and the parts of a run that it makes.

    Args:
        seed: of the random numbers with which it makes its model and its data.
        limit: seconds that each of its functions may take.

    Raises:
        InputError: the script raises, or lacks or returns something wrong; names its line.
        UnreachableError: it does not return.
    """

    def __init__(self, script: Script, seed: int, limit: float) -> None:
        self._script, self._seed, self._limit = script, seed, limit
        signal.signal(signal.SIGALRM, _raise_time_limit)
        self._exit_timer = ExitTimer(UnreachableError.exit_code, 2 * limit)
        """Ends the process if a function hangs in C code, where Python handles no signal."""
        self.functions: Any = ModuleType("motley_script")
        """The module, with what the script defines; its classes find it by that name."""
        optional = {"metrics": lambda _model, _samples: {}, "collate": list, "buffers": None}
        vars(self.functions).update(optional, __file__=str(script.path))
        sys.modules[self.functions.__name__] = self.functions
        with self.report_faults("the script"):
            # Its operator's own command named it, by its digest; no config and no host can.
            self._run_seeded(exec, script.code, vars(self.functions))
            if self.functions.buffers not in (None, "local"):
                raise ScriptFaultError("the only value of buffers is 'local'")
        with self.report_faults("model"):
            self.model: nn.Module = self._run_seeded(self.functions.model)
            if not isinstance(self.model, nn.Module):
                kind = type(self.model).__name__
                raise ScriptFaultError(f"returned no torch.nn.Module but {kind}")
            trained, frozen = _split_tensors(self.model)
            self.layout = build_script_layout(trained)
            self._check_memory()
        data = blake3()
        self.train = self._open_dataset("train", data)
        self.validation = self._open_dataset("validation", data)
        self.facts = ScriptFacts(frozen, data.hexdigest(), len(self.train), len(self.validation))

    @contextmanager
    def report_faults(self, function: str) -> Iterator[None]:
        """Turn what goes wrong in a function of the script into one line that names its line.

        Raises:
            DoesNotFitError: there was no memory for it.
            UnreachableError: it did not return in time.
            InputError: anything else.
        """
        signal.setitimer(signal.ITIMER_REAL, self._limit)
        late = _TOO_LONG.format(2 * self._limit)
        self._exit_timer.start(f"{self._script.path}: {function}{late}")
        try:
            try:
                yield
            finally:
                self._exit_timer.cancel()
                signal.setitimer(signal.ITIMER_REAL, 0)
        except TrainerError:
            raise
        except (Exception, SystemExit, _TimeLimitError) as error:
            path = str(self._script.path)
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == path]
            where = f"{path}:{lines[-1]}: {function}" if lines else f"{path}: {function}"
            if isinstance(error, _TimeLimitError):
                raise UnreachableError(f"{where}{_TOO_LONG.format(self._limit)}") from None
            if is_out_of_memory(error):
                made = function in ("the script", "model", "dataset")
                lower = "" if made else "lower training.micro_batch_size, or "
                line = f"{where}: no memory for it ({first_line(error)}); {lower}make it smaller"
                raise DoesNotFitError(line) from None
            kind = "" if isinstance(error, ScriptFaultError) else f"{type(error).__name__}: "
            raise InputError(f"{where}: {kind}{first_line(error)}") from None

    def read_weights(self) -> np.ndarray:
        """Return the trainable weights, fp32 `[layout.size]`."""
        parts = [self.model.get_parameter(slot.name) for slot in self.layout.iter_tensors()]
        return torch.cat([part.detach().reshape(-1).cpu() for part in parts]).numpy()

    def _check_memory(self) -> None:
        """Refuse a model whose training exceeds the host's memory; activations are not known."""
        needed, free = _STATE_BYTES * self.layout.size, available_bytes(torch.device("cpu"))
        if needed > free * USABLE:
            raise MemoryError(
                f"{self.layout.size:,} trainable parameters need {format_gib(needed)} GiB for"
                f" gradients and state, {format_gib(free)} GiB are free"
            )

    def _run_seeded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)
        torch.manual_seed(self._seed)
        return function(*arguments)

    def _open_dataset(self, split: str, hasher: blake3) -> Sequence[Any]:
        """Return a data set, of which samples at even distances enter a digest."""
        with self.report_faults("dataset"):
            made: Any = self._run_seeded(self.functions.dataset, split)
            values: Any = () if made is None and split == "validation" else made
            if not {"__len__", "__getitem__"} <= {*dir(values)}:
                raise ScriptFaultError(
                    f"{split!r} is {type(values).__name__}: a sequence is needed, with a length"
                    " and an item at each index"
                )
            count = len(values)
            if not count and split == "train":
                raise ScriptFaultError(f"{split!r} is empty")
            for index in sorted({step * count // _DIGESTED for step in range(_DIGESTED) if count}):
                update_digest(hasher, [split, count, values[index]])
            return values


def _raise_time_limit(*_: object) -> NoReturn:
    raise _TimeLimitError


def _split_tensors(model: nn.Module) -> tuple[dict[str, tuple[int, ...]], str]:
    """Return the shapes of trainable parameters, and a digest of all other tensors."""
    trained: dict[str, tuple[int, ...]] = {}
    frozen = blake3()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if not parameter.requires_grad:
            update_digest(frozen, [name, parameter.data])
        elif parameter.dtype != torch.float32 or not parameter.numel():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ScriptFaultError(
                f"parameter {name} is {kind} {list(parameter.shape)}: trained parameters must be "
                "float32 and not empty; convert it, or set requires_grad to False"
            )
        else:
            trained[name] = tuple(parameter.shape)
    if not trained:
        raise ScriptFaultError("has no parameter that requires a gradient")
    return trained, frozen.hexdigest()


def update_digest(hasher: blake3, value: Any) -> None:
    """Hash a value by its content, framed by its kind; objects of other kinds as copies see them.

    Nothing is pickled: what an object would be copied from is hashed.
    """
    hasher.update(f"\0{type(value).__name__}\0".encode())
    match value:
        case Tensor():
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            update_digest(hasher, [str(value.dtype), list(value.shape), flat])
        case np.ndarray() if not value.dtype.hasobject:
            hasher.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        case None | str() | bytes() | int() | float() | complex() | np.generic():
            hasher.update(f"{len(text := repr(value))} {text}".encode())
        case list() | tuple():
            hasher.update(len(value).to_bytes(8, "little"))
            for part in value:
                update_digest(hasher, part)
        case set() | frozenset():
            update_digest(hasher, sorted(map(repr, value)))
        case _ if callable(value) and hasattr(value, "__qualname__"):  # a class or a function
            update_digest(hasher, value.__qualname__)
        case _:
            parts = value.__reduce_ex__(4)
            parts = [list(part) if isinstance(part, Iterator) else part for part in parts]
            update_digest(hasher, parts)


if __name__ == "__main__":  # the child of `run_for_start`
    path, digest, seed, limit, folder = sys.argv[1:]
    code = 0
    try:
        made = UserScript(read_script(Path(path), digest), int(seed), float(limit))
        write_start(made.facts, made.layout, made.read_weights(), Path(folder))
    except TrainerError as error:
        sys.stderr.write(str(error))
        code = error.exit_code
    exit_from_any_thread(code)  # not waiting for threads of the script
