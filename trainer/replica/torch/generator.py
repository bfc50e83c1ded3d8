"""Text generation through transformers, on the CPU or one CUDA device.

transformers runs the model and its cache; `Sampling` alone chooses the next token, so that all
backends draw the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from trainer.config.run import RunConfig
from trainer.errors import InputError
from trainer.model.layout import GradientLayout
from trainer.replica.sampling import Sampling
from trainer.replica.torch.model import flatten
from trainer.replica.torch.precision import autocast
from trainer.replica.torch.published import load_published


class TorchGenerator:
    """A Generator of `trainer.evaluate.generation`.

    Args:
        weights: fp32 `[layout.size]`.
        device: `cpu` or `cuda:N`.
        threads: intra-op threads of torch in this process; None: unchanged.
        batch: the most samples that are continued together.

    Raises:
        InputError: the model cannot be loaded.
    """

    def __init__(
        self,
        model_dir: Path,
        config: RunConfig,
        layout: GradientLayout,
        weights: np.ndarray,
        device: str = "cpu",
        threads: int | None = None,
        *,
        batch: int = 8,
    ) -> None:
        self.device = device
        self._device = torch.device(device)
        self._batch = batch
        if threads is not None:
            torch.set_num_threads(threads)
        # It stays in train mode, which is the same without dropout, see TorchReplica.evaluate.
        self._model: Any = load_published(model_dir, config, self._device)
        flatten(self._model, layout, self._device).copy_(torch.tensor(weights))
        # Without the folder's settings, such as a repetition penalty.
        self._model.generation_config = transformers.GenerationConfig()
        self._autocast = autocast(config, self._device)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int] = frozenset(),
    ) -> list[list[int]]:
        """Return the new tokens of each prompt; see `Generator.generate`."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
        made: dict[int, list[int]] = {}
        first = 0
        while first < len(order):
            group = order[first : first + self._batch]
            try:
                tokens = self._continue(
                    [prompts[index] for index in group], group, max_new_tokens, sampling, stop
                )
            except torch.OutOfMemoryError:
                tokens = None
            if tokens is not None:
                made.update(zip(group, tokens, strict=True))
                first += len(group)
                continue
            # Outside the handler: its traceback keeps the cache alive.
            torch.cuda.empty_cache()
            if len(group) == 1:
                raise InputError(
                    f"{self.device}: a prompt of {len(prompts[group[0]])} tokens with"
                    f" {max_new_tokens} new ones does not fit; ask for fewer"
                )
            self._batch = len(group) // 2
        return [made[index] for index in range(len(prompts))]

    def _continue(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int],
    ) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # right-aligned: the new tokens follow
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1

        def choose(before: Tensor, logits: Tensor) -> Tensor:
            place = before.shape[1] - width
            tokens = sampling.choose(logits.float().cpu().numpy(), samples, place)
            chosen = torch.from_numpy(tokens).to(logits.device)[:, None]
            return torch.full_like(logits, -torch.inf).scatter(1, chosen, 0.0)

        with torch.no_grad(), self._autocast:
            made: Tensor = self._model.generate(
                ids.to(self._device),
                attention_mask=mask.to(self._device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(stop) or None,
                pad_token_id=0,
                logits_processor=transformers.LogitsProcessorList([choose]),
            )
        return [_until(row, stop) for row in made[:, width:].tolist()]


def _until(tokens: list[int], stop: frozenset[int]) -> list[int]:
    """Return tokens up to the first of `stop`, without the padding after it."""
    ends = (place for place, token in enumerate(tokens) if token in stop)
    return tokens[: next(ends, len(tokens)) + 1]
