"""Write an adapter into its base: W + (alpha / r) B A, as an ordinary model folder. Torch-free.

Tensors pass one at a time, so a model larger than memory can be merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from trainer.checkpoint.trained_model import Trained
from trainer.model.families import family_of
from trainer.model.hf_export import (
    MODEL_CONFIG,
    MODEL_FILE,
    companions,
    encode,
    file_pieces,
    safetensors_header,
)
from trainer.model.initialization import read_tensor
from trainer.model.layout import build_layout, stored_name
from trainer.model.safetensors_headers import TensorHeader, read_config, read_headers
from trainer.system.errors import InputError
from trainer.system.storage.new_folder import check_new, write_new

_PEFT_PREFIX = "base_model.model."
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def merge(trained: Trained, output: Path) -> Path:
    """Write base and adapter as one model and return its folder; it appears whole or not at all.

    Each weight keeps the base's dtype, and a new head takes that of the embedding.

    Raises:
        InputError: there is no adapter to merge, or `output` already holds something.
        StorageError: the write failed.
    """
    if trained.config.method != "lora":
        raise InputError(f"{trained.path}: is a full model, there is no adapter to merge")
    check_new(output)
    plan = _Merged(trained)
    files: dict[str, Iterable[bytes | memoryview]] = {}
    for name, content in companions(plan.config, trained.base_dir).items():
        if name == MODEL_CONFIG:
            assert isinstance(content, bytes)
            tree = {**json.loads(content), "dtype": _TORCH_NAMES[plan.dtype]}
            content = (json.dumps(tree, indent=2) + "\n").encode()
        files[name] = file_pieces(content) if isinstance(content, Path) else [content]
    return write_new(output, {**files, MODEL_FILE: plan.pieces()})


class _Merged:
    """The tensors of the merged model, computed as they are written."""

    def __init__(self, trained: Trained) -> None:
        model = trained.config.model.model_copy(update={"quantization": "none"})
        self.config = trained.config.model_copy(update={"method": "full", "model": model})
        self._headers = read_headers(trained.base_dir)
        self._scale = np.float32(trained.config.lora.lora_alpha / trained.config.lora.lora_rank)
        self._slots = list(build_layout(trained.base_dir, self.config).tensors())
        self._trained = {
            slot.name: trained.weights[slot.start : slot.stop].reshape(slot.shape)
            for slot in trained.layout.tensors()
        }
        family = family_of(read_config(trained.base_dir), str(trained.base_dir))
        self._transposed = family.transposed
        self.dtype = self._stored(f"{family.backbone}.{family.embedding}.weight").dtype

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield a safetensors file."""
        shapes = {slot.name: slot.shape for slot in self._slots}
        dtypes = {name: self._dtype(name) for name in shapes}
        yield safetensors_header(shapes, {"format": "pt"}, dtypes)
        for slot in self._slots:
            yield encode(self._values(slot.name), self._dtype(slot.name))

    def _values(self, name: str) -> np.ndarray:
        """Return a merged tensor in fp32, which holds F16 and BF16 exactly."""
        head = self._trained.get(_PEFT_PREFIX + name)
        if head is not None:
            return head
        values = read_tensor(self._stored(name))
        stem = _PEFT_PREFIX + name.removesuffix(".weight")
        down = self._trained.get(f"{stem}.lora_A.weight")
        if name.endswith(".weight") and down is not None:
            product = self._trained[f"{stem}.lora_B.weight"] @ down
            values = values + self._scale * (product.T if self._transposed else product)
        return values

    def _stored(self, name: str) -> TensorHeader:
        stored = stored_name(self._headers, name)
        assert stored is not None, f"the layout was built on {name}"
        return self._headers[stored]

    def _dtype(self, name: str) -> str:
        return self.dtype if _PEFT_PREFIX + name in self._trained else self._stored(name).dtype
