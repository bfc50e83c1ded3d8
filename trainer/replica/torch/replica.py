"""The torch replica: full, LoRA or LoRA on NF4, on the CPU or one CUDA device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.config.run import RunConfig
from trainer.data.metrics import name_rewards
from trainer.model.families import logits_settings
from trainer.model.layout import GradientLayout, read_headers
from trainer.model.safetensors_headers import read_config
from trainer.planning.model_config import read_shape
from trainer.planning.replica import (
    busy_tokens,
    check_fits,
    fits_device,
    peak_bytes,
    plan_memory,
    suggest_smaller,
)
from trainer.planning.resident_layers import describe_residents
from trainer.replica.base import EvalResult, OnBlock, StepResult
from trainer.replica.continuation import Until
from trainer.replica.sampling import Sampling
from trainer.replica.torch import objective
from trainer.replica.torch.batch import MicroBatch
from trainer.replica.torch.decoder import Decoder
from trainer.replica.torch.device import available_bytes, spare_memory, usable_device
from trainer.replica.torch.generator import make_generator
from trainer.replica.torch.gradient_stream import GradientStream
from trainer.replica.torch.kd_loss import KDWeights, Sums
from trainer.replica.torch.layer_major import choose_order
from trainer.replica.torch.loader import load_model
from trainer.replica.torch.model import (
    compile_layers,
    flatten_parameters,
    freeze_a,
    trainable_parameters,
    write_weights,
)
from trainer.replica.torch.precision import SCALE_OF_SUM, LossScale, make_autocast
from trainer.replica.torch.preference import enter_reference, pair_losses, sum_likelihoods
from trainer.replica.torch.processors import Processors, SpeedWatch
from trainer.replica.torch.recomputation import import_checkpoint, needs_recomputation
from trainer.replica.torch.residence import plan_residents
from trainer.replica.torch.shard_split import ShardSplit
from trainer.replica.torch.streaming import StreamedHead
from trainer.system.errors import is_out_of_memory

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

log = logging.getLogger(__name__)

_BATCH = 32
"""The most prompts that are continued together."""
_SHORT = 16
"""Tokens of the shortest samples that a refusal advises."""
_Result = TypeVar("_Result")
_Part = tuple[Sequence["Encoded"], KDWeights | None]
"""Samples of a step, and how they learn from a teacher."""


class TorchReplica:
    """A Replica of `trainer.replica.base`.

    Weights are undefined until the first `write_trainable`, except where a full model `evaluates`.

    Args:
        device: `cpu` or `cuda:N`.
        threads: intra-op threads of torch in this process; None takes, at every step, as many of
            torch's default as there are otherwise idle processors.
        moments: a caller that uses `weights` and `gradient` keeps the optimizer's moments itself.
        coordinates: the process is the run's coordinator too.
        evaluates: nothing is trained.
        reference: fp32 `[layout.size]` that task `dpo` compares with; None: the base alone.

    Raises:
        InputError: the device is missing, or the model cannot be loaded or does not fit.
    """

    def __init__(
        self,
        model_dir: Path,
        config: RunConfig,
        layout: GradientLayout,
        device: str = "cpu",
        threads: int | None = None,
        *,
        moments: bool = False,
        coordinates: bool = False,
        evaluates: bool = False,
        reference: np.ndarray | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self._config = config
        self._model_dir = model_dir
        self._device = usable_device(device)
        cuda = self._device.type == "cuda"
        self._processors = self._watch = None
        if threads is not None:
            torch.set_num_threads(threads)
        elif not cuda:
            self._processors = Processors(torch.get_num_threads())
        if not cuda:
            self._watch = SpeedWatch()
        plan = partial(
            plan_memory,
            read_shape(model_dir),
            read_headers(model_dir),
            layout,
            config=config,
            accelerator=cuda,
            moments=moments,
            coordinates=coordinates,
            evaluates=evaluates,
        )
        free = available_bytes(self._device)

        def count_kept_bytes() -> int:
            whole, tokens = plan(recompute=False), busy_tokens(config, accelerator=cuda)
            return whole.fixed + tokens * whole.per_token

        recompute = needs_recomputation(config, self._device, count_kept_bytes, free)
        if recompute and not cuda:
            import_checkpoint()
            free = available_bytes(self._device)
        self._plan = plan_residents(
            model_dir,
            config,
            device,
            lambda some: plan(recompute=recompute, resident=some),
            free,
            evaluates=evaluates,
        )
        resident = self._plan.resident
        short = config.data.model_copy(update={"max_seq_len": _SHORT})
        short = config.model_copy(update={"data": short})
        shortest = plan(config=short, recompute=recompute, resident=resident)
        smaller = suggest_smaller(
            config,
            resident,
            recompute=recompute,
            evaluates=evaluates,
            shorter=fits_device(shortest, free, _SHORT),
        )
        check_fits(self._plan, free, device, smaller)
        spare_memory(self._device, peak_bytes(self._plan, config), free)
        model = load_model(model_dir, config, self._device, resident=resident)
        freeze_a(model, model_dir, config)
        self._model: Any = model
        head = getattr(model, "lm_head", None)
        self._head = head if isinstance(head, StreamedHead) else None
        if self._head is not None:
            self._head.logit_chunks = self._plan.logit_chunks
        if config.freezes_full(resident):
            self._weights = torch.empty(0)  # nothing of it trains
        else:
            self._weights = flatten_parameters(model, layout, self._device)
        self._reference = None
        if reference is not None:
            self._reference = torch.tensor(reference, device=self._device)
        self._gradients: GradientStream | None = None
        self._autocast = make_autocast(config, self._device)
        weights = config.training.class_weights
        made = None if weights is None else torch.tensor(weights, device=self._device).float()
        self._class_loss = made, config.training.label_smoothing
        self._logits = logits_settings(read_config(model_dir))
        self._scale = LossScale(config, self._device, SCALE_OF_SUM)
        self.split = ShardSplit(config, self._plan, self._device)
        """The sizes of micro-batches and groups."""
        self._run_layers = choose_order(
            model, model_dir, self._autocast, recompute=recompute, in_groups=resident is not None
        )

    def compile_layers(self) -> None:
        """Compile the layers by torch.compile: the first steps wait for it, later ones are faster.

        It pays off on CUDA, where micro-batches of few shapes (`training.pack`) avoid
        recompilation.
        """
        compile_layers(self._model)

    def write_trainable(self, flat: np.ndarray) -> None:
        """Take the trainable weights, fp32 `[layout.size]`; see `Replica.write_trainable`."""
        assert flat.dtype == np.float32, f"weights are fp32, got {flat.dtype}"
        assert flat.shape == (self.layout.size,), f"{flat.shape} is not ({self.layout.size},)"
        self._weights = write_weights(self._model, self.layout, self._weights, flat)

    @property
    def residents(self) -> str:
        """How many layers of the base stay in memory, in words; empty if all do."""
        kept = self._plan.resident
        return "" if kept is None else describe_residents(kept, read_shape(self._model_dir).layers)

    @property
    def weights(self) -> Tensor:
        """The trainable weights, fp32 `[layout.size]` on the device; parameters are views of it.

        On a CPU another tensor after each `write_trainable` of another array.
        """
        return self._weights

    @property
    def gradient(self) -> Tensor:
        """The sum of `accumulate`, fp32 `[layout.size]` on the device."""
        return self._open_stream().flat

    def accumulate(self, batch: Sequence[Encoded], alpha: float | None = None) -> StepResult:
        """Sum the gradient over a batch into `gradient`, which is cleared first.

        For callers that update `weights` in place: only the loss leaves the device.
        """
        return self.accumulate_with(batch, alpha, ())[0]

    def accumulate_with(
        self, batch: Sequence[Encoded], alpha: float | None, own: Sequence[Encoded]
    ) -> tuple[StepResult, StepResult]:
        """Do the same over a batch and a student's own answers; return the result of each.

        The answers' loss is T^2 D alone, with the divergence of `distillation.on_policy`: their
        tokens are no targets of a cross-entropy.
        """
        start = time.monotonic()
        parts = [(batch, self._loss_weights(batch, alpha)), (own, self._own_mix() if own else None)]
        self._choose_threads()
        sums, weights = self._within_memory(lambda: self._train_parts(parts))
        first, second = self._make_results(parts, sums, weights, start)
        return first, second

    def forward_backward(
        self, batch: Sequence[Encoded], on_block: OnBlock, alpha: float | None = None
    ) -> StepResult:
        """Run one shard; see `Replica.forward_backward`."""
        start, parts = time.monotonic(), [(batch, self._loss_weights(batch, alpha))]
        self._choose_threads()
        with self._open_stream().stream_step(on_block):
            sums, weights = self._within_memory(lambda: self._train_parts(parts))
        return self._make_results(parts, sums, weights, start)[0]

    def evaluate(self, batch: Sequence[Encoded]) -> EvalResult:
        """Run only the forward pass; see `Replica.evaluate`.

        The model stays in train mode: without dropout that is the same, and bitsandbytes repacks
        NF4 weights in eval mode.
        """
        self._choose_threads()
        with torch.no_grad():
            return self._within_memory(lambda: self._score_batch(batch))

    def answer(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: frozenset[int]
    ) -> list[list[int]]:
        """Return the likeliest new tokens of each prompt; see `Replica.answer`."""
        return self.generate(prompts, max_new_tokens=new_tokens, sampling=Sampling(), stop=stop)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int] = frozenset(),
        until: Until | None = None,
    ) -> list[list[int]]:
        """Return new tokens of each prompt by the present weights; see `TorchGenerator`."""
        self._choose_threads()
        made = make_generator(
            self._model, self._model_dir, self._config, self._device, batch=_BATCH
        )
        # transformers drops the cache of a model in train mode that recomputes activations.
        is_ours = isinstance(self._model, Decoder)
        self._model.train(is_ours)
        try:
            return made.generate(
                prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, until=until
            )
        finally:
            self._model.train()

    def _choose_threads(self) -> None:
        if self._processors is not None:
            torch.set_num_threads(self._processors.count_threads())

    def _make_results(
        self, parts: Sequence[_Part], sums: Tensor, weights: Sequence[int], start: float
    ) -> list[StepResult]:
        """Return the result of each part, after waiting for the device once."""
        totals = sums.tolist()
        seconds = time.monotonic() - start
        tokens = [sum(sample.tokens for sample in batch) for batch, _ in parts]
        if self._watch is not None and (line := self._watch.observe(sum(tokens), seconds)):
            log.warning("%s", line)
        return [
            StepResult(loss, weight, size, seconds)
            if mix is None
            else StepResult(loss, weight, size, seconds, ce_sum=ce, kl_sum=kl)
            for (_, mix), (loss, ce, kl), weight, size in zip(
                parts, totals, weights, tokens, strict=True
            )
        ]

    def _open_stream(self) -> GradientStream:
        if self._gradients is None:  # an evaluation does not need its memory
            parameters = dict(trainable_parameters(self._model))
            self._gradients = GradientStream(self.layout, parameters, self._device)
        return self._gradients

    def _loss_weights(
        self, batch: Sequence[Encoded], alpha: float | None = None
    ) -> KDWeights | None:
        """Return the weights of soft targets; None if there are none, or their weight is 0."""
        settings = self._config.distillation
        if settings is None or not batch or batch[0].soft is None:
            return None
        alpha = settings.alpha if alpha is None else alpha
        return KDWeights(alpha, settings.temperature, settings.divergence) if alpha else None

    def _own_mix(self) -> KDWeights:
        """Return the weights of a student's own answers."""
        settings = self._config.distillation
        assert settings is not None
        own = settings.on_policy
        assert own is not None
        return KDWeights(1.0, settings.temperature, own.divergence, own.beta)

    def _train_parts(self, parts: Sequence[_Part]) -> tuple[Tensor, list[int]]:
        """Return `Sums` `[P, 3]` and weights of P parts; the gradients of all go to the stream.

        With a loss scale they are final, and leave, when all of them are known to be finite.
        """
        gradients = self._open_stream()
        final = max(number for number, (batch, _) in enumerate(parts) if batch or not number)
        while True:
            gradients.restart()
            sums = torch.zeros(len(parts), 3, dtype=torch.float64, device=self._device)
            weights, scale = [0] * len(parts), self._scale.value
            for number, (batch, mix) in enumerate(parts):
                leaves = number == final and not self._scale.on
                for group, is_last in self.split.iterate_groups(batch, soft=mix is not None):
                    for micro in self._run_group(group, last=leaves and is_last):
                        found, count, _ = self._compute_loss(micro, mix, *self._class_loss)
                        (found.loss * scale if self._scale.on else found.loss).backward()
                        sums[number] += torch.stack([part.detach() for part in found])
                        weights[number] += count
            if self._scale.unscale_gradients([gradients.flat], sums):
                if of_classes := self._config.training.class_weights:
                    batch = parts[0][0]
                    weights[0] = sum(of_classes[int(sample.labels)] for sample in batch)
                return sums, weights

    def _score_batch(self, batch: Sequence[Encoded]) -> EvalResult:
        classes = self._config.num_classes
        cells = torch.zeros((classes or 0) ** 2, dtype=torch.int64, device=self._device)
        rewards = torch.zeros(3, dtype=torch.float64, device=self._device)
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        weight = 0
        groups = self.split.iterate_groups(batch)
        for micro in (one for group, _ in groups for one in self._run_group(group)):
            found, count, logits = self._compute_loss(micro, None)
            sums += torch.stack(found)
            weight += count
            if classes is not None and logits is not None:
                objective.count_cells(cells, micro.labels, logits)
            elif logits is not None:
                rewards += torch.stack([*logits.sum(1), (logits[0] > logits[1]).sum()])
        if self._config.task == "dpo":
            return EvalResult(float(sums[1]), weight, None, name_rewards(*rewards.tolist()))
        confusion = None if classes is None else cells.view(classes, classes).tolist()
        return EvalResult(float(sums[1]), weight, confusion)

    def _within_memory(self, attempt: Callable[[], _Result]) -> _Result:
        """Return `attempt()`, with less at once each time that memory runs out.

        Fewer chunks of logits to a read of the head come before smaller micro-batches.
        """
        while True:
            try:
                return attempt()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the handler: its traceback keeps the activations alive.
            if self._head is not None and self._head.logit_chunks > 1:
                self._head.logit_chunks //= 2
            else:
                self.split.shrink_limits()
            torch.cuda.empty_cache()

    def _compute_loss(
        self,
        micro: MicroBatch,
        mix: KDWeights | None,
        weights: Tensor | None = None,
        smoothing: float = 0.0,
    ) -> tuple[Sums, int, Tensor | None]:
        """Return the summed losses, the number of targets, and the logits of a classifier.

        In place of logits pairs have their rewards `[2, P]`.
        """
        if self._config.task == "classify":
            loss, logits = objective.classification_loss(
                self._model, micro, self._autocast, weights, smoothing
            )
            return Sums(loss, loss, torch.zeros_like(loss)), len(logits), logits
        if self._config.task == "dpo":
            beta = self._config.dpo.beta
            loss, rewards = pair_losses(self._model, micro, self._autocast, beta, self._logits)
            return Sums(loss, loss, torch.zeros_like(loss)), rewards.shape[1], rewards
        found = objective.language_loss(self._model, micro, self._autocast, mix, shape=self._logits)
        return *found, None

    def _run_group(
        self, group: Sequence[MicroBatch], *, last: bool = False
    ) -> Iterator[MicroBatch]:
        """Return the micro-batches of a group for their losses: in which order layers run is done.

        Args:
            last: no other group has a backward.
        """

        def mark_backward(is_last: bool) -> None:
            if last:
                self._open_stream().mark_backward(last=is_last)

        if self._config.task == "dpo":
            with enter_reference(self._model, self._weights, self._reference):
                known = [
                    sum_likelihoods(self._model, micro, self._autocast, self._logits)
                    for micro in self._run_layers(group, mark_backward)
                ]
            pairs = zip(group, known, strict=True)
            group = [replace(micro, reference=each) for micro, each in pairs]
        return self._run_layers(group, mark_backward)
