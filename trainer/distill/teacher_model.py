"""A transformers model that only reads: logits of given tokens, a few positions at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from trainer.errors import InputError
from trainer.memory import LOGIT_ELEMENTS

log = logging.getLogger(__name__)


class TeacherModel:
    """Any causal language model of transformers, on the CPU or one CUDA device.

    Weights stored in `dtype` are mapped from the file on the CPU, so that processes share them and
    a model may be larger than the memory that is free.

    Args:
        device: `cpu` or `cuda:N`.

    Raises:
        InputError: the model cannot be loaded, or its head has another size than its config says.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self._model = _load(model_dir, dtype, self.device)
        self.vocab_size: int = self._model.config.vocab_size
        self._head_alone = self._is_head_alone()
        if not self._head_alone:
            log.info("the logits of %s are more than a product with its head", model_dir)

    @torch.no_grad()
    def prefill(self, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
        """Yield the logits of every token but the first of each window, some rows at a time.

        Args:
            batch: teacher token ids of windows, `[T]` each.

        Yields:
            `[n, vocab_size]`, valid until the next; all together are the positions 1 to T - 1 of
            the first window, then those of the next one.
        """
        lengths = torch.tensor([len(tokens) for tokens in batch])
        ids = torch.zeros((len(batch), int(lengths.max())), dtype=torch.int64)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.from_numpy(tokens)
        # Causal attention never looks right, so padding there needs no mask.
        is_read = (torch.arange(ids.shape[1]) < lengths[:, None] - 1).to(self.device)
        ids = ids.to(self.device)
        if not self._head_alone:
            yield from self._model(ids, use_cache=False).logits[is_read].split(self.rows)
            return
        head = self._model.get_output_embeddings()
        hidden = self._model.base_model(ids, use_cache=False).last_hidden_state
        for part in hidden[is_read].split(self.rows):
            yield head(part)

    @property
    def rows(self) -> int:
        """Positions whose logits exist at once."""
        elements = LOGIT_ELEMENTS * (1 if self.device.type == "cpu" else 8)
        return max(1, elements // self.vocab_size)

    @torch.no_grad()
    def _is_head_alone(self) -> bool:
        """Whether the head on the last hidden states gives the model's very own logits.

        Some models scale or cap what their head gives. One short forward tells, since its weights
        may have to come from a disk.
        """
        seen: list[Tensor] = []
        hook = self._model.base_model.register_forward_hook(
            lambda *call: seen.append(call[-1].last_hidden_state)
        )
        probe = torch.arange(8, device=self.device)[None] % self.vocab_size
        logits = self._model(probe, use_cache=False).logits
        hook.remove()
        if logits.shape[-1] != self.vocab_size:
            raise InputError(
                f"{self._model.name_or_path}: gives {logits.shape[-1]} logits, its config.json"
                f" says vocab_size {self.vocab_size}"
            )
        head = self._model.get_output_embeddings()
        return head is not None and torch.equal(head(seen[0]), logits)


def _load(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=dtype,
            device_map={"": device},
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise InputError(f"{model_dir}: the model does not fit on {device}") from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{model_dir}: cannot be loaded: {reason}") from None
    return model.eval()
