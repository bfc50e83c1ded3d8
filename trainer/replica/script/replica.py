"""A replica whose model, loss and metrics are a script's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config.run import RunConfig
from trainer.replica.backend import BackendRequest, Opener, UnusableError, cuda_device
from trainer.replica.base import EvalResult, OnBlock, Replica, StepResult
from trainer.replica.microbatch import MicroBatchLimit
from trainer.replica.script.checks import (
    check_buffers,
    check_figures,
    check_loss,
    check_random_state,
    check_sum,
    read_random_state,
)
from trainer.replica.script.opened import OpenedScript, script_errors
from trainer.replica.script.watchdog import Watchdog
from trainer.replica.torch.gradient_stream import GradientStream
from trainer.replica.torch.model import flatten_parameters, share_weights, trainable_parameters
from trainer.replica.torch.precision import make_autocast
from trainer.system.backends import RequestedBackend
from trainer.system.errors import DoesNotFitError

_Result = TypeVar("_Result")


class ScriptReplica:
    """A Replica of `trainer.replica.base`; samples are `ScriptSample`.

    Opening it computes the loss of four samples, together and in two halves.

    Args:
        device: `cpu` or `cuda:N`.
        threads: intra-op threads of torch in this process; None leaves torch's default.

    Raises:
        InputError: the script's loss is no sum over its samples, draws random numbers or changes
            buffers, or is otherwise not as needed.
    """

    def __init__(
        self,
        opened: OpenedScript,
        config: RunConfig,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        self.layout = opened.start.layout
        self.device = device
        self._divisor = 0
        self._opened, self._script = opened, opened.script
        self._device = torch.device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = opened.model.to(self._device)
        self._weights = flatten_parameters(self._model, self.layout, self._device)
        self._autocast = make_autocast(config, self._device)
        micro = config.training.micro_batch_size
        self.limit = config.training.batch_size if micro == "auto" else micro
        """Samples of a micro-batch; `auto` begins with all, and is halved without memory."""
        self._watchdog = Watchdog(self._script.path, config.exchange.join_deadline)
        self._check_start()
        parameters = dict(trainable_parameters(self._model))
        self._gradients = GradientStream(self.layout, parameters, self._device)
        self._random = read_random_state(self._device)

    def write_trainable(self, flat: np.ndarray) -> None:
        """Take the trainable weights, fp32 `[layout.size]`; see `Replica.write_trainable`."""
        if self._device.type == "cpu" and flat.flags.writeable and flat.flags.c_contiguous:
            self._weights = share_weights(self._model, self.layout, self._weights, flat)
            return
        with torch.no_grad():
            self._weights.copy_(torch.tensor(flat))

    def forward_backward(
        self, batch: Sequence[Any], on_block: OnBlock, alpha: float | None = None
    ) -> StepResult:
        """Run one shard; see `Replica.forward_backward`."""
        assert alpha is None, "a script has no teacher"
        began = time.monotonic()

        def attempt() -> float:
            self._gradients.restart()
            self._divisor, losses = 0, list[Tensor]()
            for samples, is_last in self._micro_batches(batch):
                loss, divisor = self._loss(samples)
                self._divisor += divisor
                losses.append(loss.detach().double())
                if is_last:
                    check_random_state(self._opened, self._device, self._random)
                    self._gradients.mark_last_backward()
                with script_errors(self._script, "the gradient of loss"):
                    loss.backward()
            return float(sum(losses))

        with self._watchdog, self._gradients.stream_step(on_block):
            total = self._within_memory(attempt)
        return StepResult(total, self._divisor, len(batch), time.monotonic() - began)

    def weigh(self, _batch: Sequence[Any]) -> int:
        """Return what a mean over the shard at work divides by, once its last forward is done."""
        return self._divisor

    def evaluate(self, batch: Sequence[Any]) -> EvalResult:
        """Run only the forward pass, in eval mode; see `Replica.evaluate`."""

        def attempt() -> EvalResult:
            results: list[EvalResult] = []
            for samples, _ in self._micro_batches(batch):
                loss, divisor = self._loss(samples)
                results.append(EvalResult(float(loss), divisor, None, figures=self._score(samples)))
            return EvalResult.sum_parts(results)

        with self._watchdog, torch.no_grad(), _eval_mode(self._model):
            return self._within_memory(attempt)

    def answer(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: frozenset[int]
    ) -> list[list[int]]:
        """Refuse: a script answers no prompts, and its run asks none."""
        raise NotImplementedError

    def _loss(self, samples: Any) -> tuple[Tensor, int]:
        with script_errors(self._script, "loss"), self._autocast:
            found = self._opened.loss(self._model, samples)
        return check_loss(self._script, found)

    def _score(self, samples: Any) -> dict[str, float]:
        if self._opened.metrics is None:
            return {}
        with script_errors(self._script, "metrics"), self._autocast:
            found = self._opened.metrics(self._model, samples)
        return check_figures(self._script, found)

    def _micro_batches(self, batch: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield collated micro-batches on the device, and whether each is the last."""
        for start in range(0, len(batch), self.limit):
            part = [sample.value for sample in batch[start : start + self.limit]]
            self._tried = len(part)
            yield self._collate(part), start + self.limit >= len(batch)

    def _collate(self, values: list[Any]) -> Any:
        with script_errors(self._script, "collate"):
            return _on_device(self._opened.collate(values), self._device)

    def _within_memory(self, attempt: Callable[[], _Result]) -> _Result:
        """Return `attempt()`, with smaller micro-batches each time that memory runs out."""
        while True:
            try:
                return attempt()
            except DoesNotFitError:
                smaller = MicroBatchLimit(self.limit, 1).halve_limit(self._tried, 1)
                if smaller is None:
                    raise
            self.limit = smaller.samples
            torch.cuda.empty_cache()

    def _check_start(self) -> None:
        """Compute four samples together and in two halves: the run counts on their sum."""
        train = self._opened.train
        ends = [0, 1 % len(train), -2 % len(train), len(train) - 1]
        samples = [train[index].value for index in ends]
        buffers = {name: each.clone() for name, each in self._model.named_buffers()}
        random = read_random_state(self._device, whole=True)
        sums: list[tuple[float, int]] = []
        with self._watchdog:
            for values in (samples, samples[:2], samples[2:]):
                loss, divisor = self._loss(self._collate(values))
                sums.append((loss.item(), divisor))
                check_buffers(self._opened, buffers)
            if self._opened.validation:
                with torch.no_grad(), _eval_mode(self._model):
                    self._score(self._collate([self._opened.validation[0].value]))
            check_random_state(self._opened, self._device, random)
        check_sum(self._opened, *sums)
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(buffers[name])


def script_openers(opened: OpenedScript) -> dict[RequestedBackend, Opener]:
    """Return what opens a script's replica on each backend."""

    def open_on(device: str, request: BackendRequest) -> Replica:
        return ScriptReplica(opened, request.config, device, request.threads)

    def refuse(_: BackendRequest) -> Replica:
        raise UnusableError("a script computes with torch")

    return {
        "cuda": lambda request: open_on(cuda_device(request.gpu), request),
        "wgpu": refuse,
        "cpu": lambda request: open_on("cpu", request),
    }


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode in the block, and each module back into its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _on_device(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if device.type == "cpu":
        return value
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _on_device(part, device) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_on_device(part, device) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value
