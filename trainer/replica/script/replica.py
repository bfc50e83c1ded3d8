"""A replica whose model, loss and metrics are a script's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from trainer.config.run import RunConfig
from trainer.replica.base import EvalResult, OnBlock, StepResult
from trainer.replica.script import checks
from trainer.replica.script.user_script import ScriptFaultError, UserScript
from trainer.replica.torch.gradient_stream import GradientStream
from trainer.replica.torch.model import flatten_parameters, trainable_parameters, write_weights
from trainer.replica.torch.precision import make_autocast
from trainer.system.errors import DoesNotFitError

_Result = TypeVar("_Result")
_MicroBatch = tuple[Any, Tensor, int, bool]
"""Collated samples, their loss, what a mean divides by, and whether no other follows."""


class ScriptReplica:
    """A Replica of `trainer.replica.base`; samples are indices.

    Opening it computes the loss of four samples, together and in two halves.

    Args:
        device: `cpu` or `cuda:N`.
        threads: intra-op threads of torch in this process; None leaves them.

    Raises:
        InputError: the script's loss is no sum over its samples, draws random numbers or changes
            buffers, or is otherwise not as needed.
    """

    def __init__(
        self, script: UserScript, config: RunConfig, device: str, threads: int | None = None
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.layout, self.device = script.layout, device
        self._script, self._device = script, torch.device(device)
        self._autocast = make_autocast(config, self._device)
        self._divisor, self.limit = 0, 4
        with script.report_faults("model"):
            self._model = script.model.to(self._device)
        self._check_start()
        micro = config.training.micro_batch_size
        self.limit = config.training.batch_size if micro == "auto" else micro
        """Samples of a micro-batch; halved without memory."""
        with script.report_faults("model"):
            self._weights = flatten_parameters(self._model, self.layout, self._device)
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
            for _, loss, divisor, is_last in self._iterate_losses(self._script.train, batch):
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
        metrics = self._script.functions.metrics

        def attempt() -> EvalResult:
            results: list[EvalResult] = []
            for samples, loss, divisor, _ in self._iterate_losses(self._script.validation, batch):
                with self._script.report_faults("metrics"), self._autocast:
                    figures = checks.check_figures(metrics(self._model, samples))
                results.append(EvalResult(float(loss), divisor, None, figures))
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

    def _iterate_losses(self, values: Sequence[Any], batch: Sequence[int]) -> Iterator[_MicroBatch]:
        """Compute the loss of each micro-batch of a shard."""
        functions, report_faults = self._script.functions, self._script.report_faults
        for start in range(0, len(batch), self.limit):
            with report_faults("dataset"):
                samples: Any = [values[index] for index in batch[start : start + self.limit]]
            with report_faults("collate"):
                samples = functions.collate(samples)
                if self._device.type != "cpu":
                    samples = tree_map(self._move_value, samples)
            with report_faults("loss"), self._autocast:
                loss, divisor = checks.check_loss(functions.loss(self._model, samples))
            yield samples, loss, divisor, start + self.limit >= len(batch)

    def _move_value(self, value: Any) -> Any:
        """Return a tensor, what else has a `to`, or a mapping of them, on the device."""
        if isinstance(value, Tensor):
            return value.to(self._device, non_blocking=True)
        if hasattr(value, "to"):
            return value.to(self._device)
        return tree_map(self._move_value, {**value}) if isinstance(value, Mapping) else value

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
        model, train = self._model, self._script.train
        is_local = self._script.functions.buffers is not None
        four = [0, 1 % len(train), -2 % len(train), len(train) - 1]
        model.zero_grad()
        before = checks.read_versions(model)
        drawn = checks.read_random_state(self._device, whole=True)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        sums = [
            (loss.item(), divisor)
            for part in (four, four[:2], four[2:])
            for _, loss, divisor, _ in self._iterate_losses(train, part)
        ]
        with self._script.report_faults("loss"):
            after = checks.read_versions(model)
            for name in before:
                if after.get(name) != before[name]:
                    raise ScriptFaultError(
                        f"changes the parameter {name} or its gradient: leave backward() and what"
                        " is trained to the run"
                    )
            for name, buffer in model.named_buffers():
                if not is_local and not torch.equal(buffer, buffers[name]):
                    raise ScriptFaultError(
                        f"changes the buffer {name}, which no worker shares: use a layer without"
                        " running statistics, such as GroupNorm, or write"
                        ' buffers = "local" if each worker may have its own'
                    )
                buffer.data.copy_(buffers[name])
            if checks.read_random_state(self._device, whole=True) != drawn:
                checks.refuse_draws(model)
            checks.check_sum(*sums, loosely=is_local)
        if self._script.validation:
            self.evaluate([0])
