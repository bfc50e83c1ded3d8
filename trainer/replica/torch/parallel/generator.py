"""Text generation by ranks that share each layer, and each the keys and values of its own heads.

All ranks draw every token from the same logits, so they agree without telling each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainer.config.run import RunConfig
from trainer.errors import InputError
from trainer.model.layout import GradientLayout
from trainer.model.safetensors_headers import read_config
from trainer.replica.sampling import Sampling
from trainer.replica.torch.cache import Cache
from trainer.replica.torch.decoder import is_computed_here
from trainer.replica.torch.linear import own
from trainer.replica.torch.loader import load_model
from trainer.replica.torch.model import trainable_parameters
from trainer.replica.torch.parallel import flat
from trainer.replica.torch.parallel.tensor import TensorParallel
from trainer.replica.torch.precision import autocast


class ParallelGenerator:
    """A Generator of `trainer.evaluate.generation`; every rank calls it with the same prompts.

    Args:
        mesh: of `mesh.make_mesh`; all its ranks are in dimension `tensor`.
        weights: fp32 `[layout.size]`.
        batch: the most samples that are continued together.

    Raises:
        InputError: the model cannot be loaded, or not be cut.
    """

    def __init__(
        self,
        model_dir: Path,
        config: RunConfig,
        layout: GradientLayout,
        weights: np.ndarray,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        batch: int = 8,
    ) -> None:
        self._batch, self._device = batch, device
        self._group, self._ranks = mesh.get_group("tensor"), mesh["tensor"].size()
        self.device = str(device) if self._ranks == 1 else f"{self._ranks} x {device.type}"
        tensor = TensorParallel(mesh["tensor"], sequence=False) if self._ranks > 1 else None
        cut = tensor and tensor.cut_layer
        if not is_computed_here(read_config(model_dir)):
            raise InputError(
                f"{model_dir}: its rotation or activation is computed by transformers' code, which"
                " --parallel does not cut; generate without it"
            )
        model: Any = load_model(model_dir, config, device, cut=cut)
        self._vocabulary = len(model.lm_head.weight)
        if tensor is not None:
            tensor.cut_ends(model)
        parameters = dict(trainable_parameters(model))
        flat.scatter(layout, lambda slot: weights[slot.start : slot.stop], parameters)
        self._model = model.requires_grad_(False)
        self._autocast = autocast(config, device)

    @torch.no_grad()
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
        for first in range(0, len(order), self._batch):
            group = order[first : first + self._batch]
            chosen = [prompts[index] for index in group]
            try:
                with self._autocast:
                    tokens = self._continue(chosen, group, max_new_tokens, sampling, stop)
            except torch.OutOfMemoryError:
                raise InputError(
                    f"{self._device}: {len(group)} prompts of up to {len(chosen[0])} tokens with"
                    f" {max_new_tokens} new ones do not fit; ask for fewer"
                ) from None
            made.update(zip(group, tokens, strict=True))
        return [made[index] for index in range(len(prompts))]

    def _continue(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int],
    ) -> list[list[int]]:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        cache = Cache(width + max_new_tokens)
        hidden = self._model.model(ids.to(self._device), cache=cache).last_hidden_state
        hidden = hidden[torch.arange(len(prompts)), lengths.to(self._device) - 1]
        made: list[list[int]] = [[] for _ in prompts]
        running = set(range(len(prompts)))
        for place in range(max_new_tokens):
            tokens = sampling.choose(self._logits(hidden), samples, place)
            for row in tuple(running):
                made[row].append(int(tokens[row]))
                if tokens[row] in stop:
                    running.remove(row)
            if not running or place + 1 == max_new_tokens:
                break
            hidden = self._model.model(
                torch.from_numpy(tokens)[:, None].to(self._device),
                position_ids=(lengths + place)[:, None].to(self._device),
                cache=cache,
            ).last_hidden_state[:, 0]
        return made

    def _logits(self, hidden: Tensor) -> np.ndarray:
        """Return fp32 `[B, V]` of hidden states `[B, D]`, the same bits on all ranks."""
        logits = F.linear(hidden, own(self._model.lm_head.weight)).float()
        if self._ranks > 1:  # the last rank may have fewer
            most = -(-self._vocabulary // self._ranks)
            mine = F.pad(logits, (0, most - logits.shape[1]))
            every = [torch.empty_like(mine) for _ in range(self._ranks)]
            dist.all_gather(every, mine, group=self._group)
            logits = torch.cat(every, 1)[:, : self._vocabulary]
        return logits.cpu().numpy()
