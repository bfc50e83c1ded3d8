"""Text generation on the CPU, one CUDA device, or ranks that share each layer.

The decoder runs with a cache, and what it does not compute transformers runs with its own;
`Sampling` alone chooses the next token, so that all backends draw the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config.run import RunConfig
from trainer.model.families import find_family, logits_settings
from trainer.model.layout import GradientLayout
from trainer.model.safetensors_headers import read_config
from trainer.replica.continuation import Continuation, Until
from trainer.replica.sampling import Sampling
from trainer.replica.torch.cache import KVCache, LayerStore
from trainer.replica.torch.decoder import Decoder
from trainer.replica.torch.kd_loss import shape_logits
from trainer.replica.torch.loader import load_model
from trainer.replica.torch.model import find_backbone, flatten_parameters
from trainer.replica.torch.precision import make_autocast
from trainer.replica.torch.residence import plan_generation
from trainer.system.errors import InputError, is_out_of_memory


def load_generator(
    model_dir: Path,
    config: RunConfig,
    layout: GradientLayout,
    weights: np.ndarray | None,
    device: str = "cpu",
    threads: int | None = None,
    *,
    batch: int = 8,
) -> TorchGenerator:
    """Return a generator on one device.

    Args:
        weights: fp32 `[layout.size]`; None: those of `model_dir`.
        device: `cpu` or `cuda:N`.
        threads: intra-op threads of torch in this process; None: unchanged.
        batch: the most samples that are continued together.

    Raises:
        InputError: the model cannot be loaded, or does not fit.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    place = torch.device(device)
    resident, batch = plan_generation(model_dir, config, layout, place, batch)
    model = load_model(model_dir, config, place, resident=resident)
    if not config.freezes_full(resident):
        flatten_parameters(model, layout, place, weights)
    return make_generator(model, model_dir, config, place, batch=batch)


def make_generator(
    model: Any, model_dir: Path, config: RunConfig, device: torch.device, *, batch: int = 8
) -> TorchGenerator:
    """Return a generator of a loaded model, whose weights may still change."""
    shape = logits_settings(tree := read_config(model_dir))

    def head(hidden: Tensor) -> Tensor:
        logits = model.get_submodule("lm_head")(hidden).float()
        shape_logits(logits, shape)
        return logits

    if find_family(tree, str(model_dir)).recurrent:
        batch = 1  # padding would pass through the state
    return TorchGenerator(model, config, device, batch=batch, head=head)


class TorchGenerator:
    """A Generator of `trainer.evaluate.generation`.

    Args:
        model: of `load_model`, with the weights that were trained. It stays in train mode, which
            is the same without dropout, see `TorchReplica.evaluate`.
        batch: the most samples that are continued together.
        ranks: that hold the model together, and call this with the same prompts.
        head: returns logits `[B, V]` of hidden states `[B, D]`, the same bits on all ranks, so
            that they agree on each token without telling each other; None for the model's own.
    """

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        device: torch.device,
        *,
        batch: int = 8,
        ranks: int = 1,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.device = str(device) if ranks == 1 else f"{ranks} x {device.type}"
        self._model, self._device = model, device
        self._ranks = ranks
        self.batch = batch
        """The most samples that are continued together; fewer once memory has run out."""
        self._head = head or model.lm_head
        self.store: LayerStore | None = None
        """Keeps keys and values of some layers; None keeps all here."""
        self._autocast = make_autocast(config, device)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int] = frozenset(),
        until: Until | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt; see `Generator.generate`."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
        made: dict[int, list[int]] = {}
        while order:
            group = order[: self.batch]
            chosen = [prompts[index] for index in group]
            batch = Continuation(group, max_new_tokens, sampling, stop, until)
            try:
                self._generate_batch(chosen, batch, max_new_tokens)
                fits = True
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
            if fits:
                made |= batch.made
                del order[: len(group)]
                continue
            # Outside the handler: its traceback keeps the cache alive.
            torch.cuda.empty_cache()
            if len(group) == 1 or self._ranks > 1:  # the others would go on with as many
                raise InputError(
                    f"{self._device}: {len(group)} prompts of up to {len(chosen[0])} tokens with"
                    f" {max_new_tokens} new ones do not fit; ask for fewer"
                )
            self.batch = len(group) // 2
        return [made[index] for index in range(len(prompts))]

    @torch.no_grad()
    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], batch: Continuation, max_new_tokens: int
    ) -> None:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.zeros((len(prompts), int(lengths.max())), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        lengths, ids = (part.to(self._device, non_blocking=True) for part in (lengths, ids))
        run = self._cached_backbone(lengths, ids.shape[1] + max_new_tokens)
        last = torch.arange(len(prompts), device=self._device), lengths - 1
        with self._autocast:
            hidden = run(ids).last_hidden_state[last]
            places = lengths[:, None]
            while (
                tokens := batch.choose_tokens(self._head(hidden).float().cpu().numpy())
            ) is not None:
                new = torch.from_numpy(tokens)[:, None].to(self._device, non_blocking=True)
                hidden = run(new, position_ids=places).last_hidden_state[:, 0]
                places = places + 1

    def _cached_backbone(self, lengths: Tensor, slots: int) -> Callable[..., Any]:
        """Return what takes prompts `[B, T]`, then a token a row at its place, both `[B, 1]`."""
        if self.store is not None:
            self.store.begin(len(lengths), slots)
        if isinstance(self._model, Decoder):
            return partial(self._model.model, cache=KVCache(slots, self.store))
        return _PublishedBackbone(find_backbone(self._model), lengths, self.store)


class _PublishedBackbone:
    """A backbone of transformers with its cache, in which padding stays behind shorter prompts."""

    def __init__(self, backbone: Any, lengths: Tensor, store: LayerStore | None) -> None:
        from trainer.replica.torch.published_cache import StoredLayers, forget_store

        self._backbone, self._lengths = backbone, lengths
        self._seen = torch.empty(0)
        self._cache: Any = None
        takes = inspect.signature(backbone.forward).parameters
        self._kept = "cache_params" if "cache_params" in takes else "past_key_values"
        """Argument by which its class takes the cache; one of states alone has the first name."""
        self._stored: StoredLayers | None = None
        if store is None:
            forget_store(backbone)
        else:
            self._stored = StoredLayers(backbone, store)
            self._cache = self._stored.cache

    def __call__(self, ids: Tensor, position_ids: Tensor | None = None) -> Any:
        """Return hidden states as `decoder.Backbone` does."""
        if position_ids is None:
            places = torch.arange(ids.shape[1], device=ids.device)
            self._seen = (places < self._lengths[:, None]).long()
        else:
            self._seen = torch.cat((self._seen, torch.ones_like(ids)), 1)
        if self._stored is not None:
            self._stored.places = position_ids
        found = self._run(ids, position_ids)
        if getattr(found, self._kept, None) is None and self._cache is None:
            # Some leave it to the causal model around them; MiniMax takes only one of its own kind.
            import transformers

            self._cache = transformers.DynamicCache(config=self._backbone.config)
            found = self._run(ids, position_ids)
        self._cache = getattr(found, self._kept, None)
        if self._cache is None:
            name = type(self._backbone).__name__
            raise InputError(
                f"{name} keeps nothing of past tokens, without which none is generated"
            )
        return found

    def _run(self, ids: Tensor, position_ids: Tensor | None) -> Any:
        # Without keys nothing is masked, and falcon_mamba would multiply the token by the mask.
        of_states = self._kept == "cache_params" and position_ids is not None
        return self._backbone(
            ids,
            attention_mask=None if of_states else self._seen,
            position_ids=position_ids,
            use_cache=True,
            **{self._kept: self._cache},
        )
