"""A replica whose model, loss and metrics are a script's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.config.run import RunConfig
from trainer.planning.replica import check_script_fits
from trainer.replica.backend import BackendRequest, Opener, UnusableError, find_cuda_device
from trainer.replica.base import EvalResult, OnBlock, Replica, StepResult
from trainer.replica.script import checks
from trainer.replica.script.user_script import ScriptFaultError, UserScript
from trainer.replica.torch.device import available_bytes
from trainer.replica.torch.gradient_stream import GradientStream
from trainer.replica.torch.model import flatten_parameters, trainable_parameters, write_weights
from trainer.replica.torch.precision import make_autocast
from trainer.system.backends import BACKENDS, Backend, RequestedBackend
from trainer.system.errors import DoesNotFitError

_Result = TypeVar("_Result")


class ScriptReplica:
    """A Replica of `trainer.replica.base`; samples are indices.

    Opening it computes the loss of four samples, together and in two halves.

    Args:
        device: `cpu` or `cuda:N`.

    Raises:
        InputError: the script's loss is no sum over its samples, draws random numbers or changes
            buffers, or is otherwise not as needed.
    """

    def __init__(self, script: UserScript, config: RunConfig, device: str) -> None:
        self.layout, self.device = script.layout, device
        self._script, self._device = script, torch.device(device)
        self._model = script.model.to(self._device)
        self._weights = flatten_parameters(self._model, self.layout, self._device)
        self._autocast = make_autocast(config, self._device)
        self._divisor, self.limit = 0, 4
        self._check_start()
        micro = config.training.micro_batch_size
        self.limit = config.training.batch_size if micro == "auto" else micro
        """Samples of a micro-batch; halved without memory."""
        parameters = dict(trainable_parameters(self._model))
        self._gradients = GradientStream(self.layout, parameters, self._device)
        self._random = checks.read_random_state(self._device)

    def write_trainable(self, flat: np.ndarray) -> None:
        """Take the trainable weights, fp32 `[layout.size]`; see `Replica.write_trainable`."""
        self._weights = write_weights(self._model, self.layout, self._weights, flat)

    def forward_backward(
        self, batch: Sequence[Any], on_block: OnBlock, alpha: float | None = None
    ) -> StepResult:
        """Run one shard; see `Replica.forward_backward`."""
        assert alpha is None, "a script has no teacher"
        began = time.monotonic()

        def attempt() -> float:
            self._gradients.restart()
            self._divisor, losses = 0, list[Tensor]()
            for samples, is_last in self._micro_batches(self._script.train, batch):
                loss, divisor = self._compute_loss(samples)
                self._divisor += divisor
                losses.append(loss.detach().double())
                with self._script.report_faults("the gradient of loss"):
                    if is_last:
                        if checks.read_random_state(self._device) != self._random:
                            checks.refuse_draws(self._model)
                        self._gradients.mark_backward(last=True)
                    loss.backward()
            return float(sum(losses))

        with self._gradients.stream_step(on_block):
            total = self._run_within_memory(attempt, len(batch))
        return StepResult(total, self._divisor, len(batch), time.monotonic() - began)

    def weigh(self, _batch: Sequence[Any]) -> int:
        """Return what a mean over the shard at work divides by, once its last forward is done."""
        return self._divisor

    def evaluate(self, batch: Sequence[Any]) -> EvalResult:
        """Run only the forward pass, in eval mode; see `Replica.evaluate`."""

        def attempt() -> EvalResult:
            results: list[EvalResult] = []
            for samples, _ in self._micro_batches(self._script.validation, batch):
                loss, divisor = self._compute_loss(samples)
                figures = self._compute_figures(samples)
                results.append(EvalResult(float(loss), divisor, None, figures=figures))
            return EvalResult.sum_parts(results)

        training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            with torch.no_grad():
                return self._run_within_memory(attempt, len(batch))
        finally:
            for module in training:  # each by itself: a script may have others in eval mode
                module.training = True

    def answer(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: frozenset[int]
    ) -> list[list[int]]:
        """Refuse: a script answers no prompts, and its run asks none."""
        raise NotImplementedError

    def _compute_loss(self, samples: Any) -> tuple[Tensor, int]:
        with self._script.report_faults("loss"), self._autocast:
            return checks.check_loss(self._script.functions.loss(self._model, samples))

    def _compute_figures(self, samples: Any) -> dict[str, float]:
        metrics = getattr(self._script.functions, "metrics", None)
        with self._script.report_faults("metrics"), self._autocast:
            return checks.check_figures(metrics(self._model, samples)) if metrics else {}

    def _micro_batches(
        self, values: Sequence[Any], batch: Sequence[int]
    ) -> Iterator[tuple[Any, bool]]:
        """Yield collated micro-batches on the device, and whether each is the last."""
        collate = getattr(self._script.functions, "collate", list)
        for start in range(0, len(batch), self.limit):
            with self._script.report_faults("dataset"):
                samples = [values[index] for index in batch[start : start + self.limit]]
            with self._script.report_faults("collate"):
                samples = _move_tensors(collate(samples), self._device)
            yield samples, start + self.limit >= len(batch)

    def _run_within_memory(self, attempt: Callable[[], _Result], samples: int) -> _Result:
        """Return `attempt()`, with smaller micro-batches each time that memory runs out."""
        while True:
            try:
                return attempt()
            except DoesNotFitError:
                self.limit = min(self.limit, samples) // 2
                if not self.limit:
                    raise
            torch.cuda.empty_cache()

    def _check_start(self) -> None:
        """Compute four samples together and in two halves: the run counts on their sum."""
        train, model = self._script.train, self._model
        four = [0, 1 % len(train), -2 % len(train), len(train) - 1]
        loosely = self._script.has_local_buffers
        buffers = {name: each.clone() for name, each in model.named_buffers()}
        model.zero_grad()
        before = {
            name: (each, each._version, checks.sum_bits(each))
            for name, each in trainable_parameters(model)
        }
        drawn = checks.read_random_state(self._device, whole=True)
        sums: list[tuple[float, int]] = []
        for part in (four, four[:2], four[2:]):
            for samples, _ in self._micro_batches(train, part):
                loss, divisor = self._compute_loss(samples)
                sums.append((loss.item(), divisor))
        with self._script.report_faults("loss"), torch.no_grad():
            for name, buffer in model.named_buffers():
                if not loosely and not torch.equal(buffer, buffers[name]):
                    raise ScriptFaultError(
                        f"changes the buffer {name}, which no worker shares: use a layer without"
                        " running statistics, such as GroupNorm, or write"
                        ' buffers = "local" if each worker may have its own'
                    )
                buffer.copy_(buffers[name])
            after = dict(trainable_parameters(model))
            for name, (parameter, version, bits) in before.items():
                changed = after.get(name) is not parameter or parameter._version != version
                changed = changed or checks.sum_bits(parameter) != bits  # by .data
                if changed or parameter.grad is not None:
                    raise ScriptFaultError(
                        f"changes the parameter {name} or its gradient: leave backward() and what"
                        " is trained to the run"
                    )
            if checks.read_random_state(self._device, whole=True) != drawn:
                checks.refuse_draws(model)
            checks.check_sum(*sums, loosely=loosely)
        if self._script.validation:
            self.evaluate([0])


def script_openers(script: UserScript) -> dict[RequestedBackend, Opener]:
    """Return what opens a script's replica on each backend."""

    def open_backend(backend: Backend, request: BackendRequest) -> Replica:
        if not BACKENDS[backend].has_torch:
            raise UnusableError("a script computes with torch")
        if request.threads is not None:
            torch.set_num_threads(request.threads)
        device = find_cuda_device(request.gpu) if backend == "cuda" else "cpu"
        tensors = (*script.model.parameters(), *script.model.buffers())
        check_script_fits(
            *(script.layout, request.config.exchange),
            *(available_bytes(torch.device(device)), device),
            weights=sum(each.nbytes for each in tensors) if backend == "cuda" else 0,
            coordinates=request.coordinates,
        )
        return ScriptReplica(script, request.config, device)

    return {backend: partial(open_backend, backend) for backend in BACKENDS}


def _move_tensors(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors, and what else has a `to`, on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if hasattr(value, "to"):  # such as transformers' BatchEncoding
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _move_tensors(part, device) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_move_tensors(part, device) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value
