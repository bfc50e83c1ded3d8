"""Write an adapter into its base: W + scale B A, as an ordinary model folder. Torch-free.

Tensors pass one at a time, so a model larger than memory can be merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.adapter import Adapter
from trainer.checkpoint.generation_file import generation_file
from trainer.config.run import RunConfig, load_config
from trainer.model.expert_parameters import find_expert_slice
from trainer.model.families import BIASED_BY, text_config
from trainer.model.hf_export import (
    MODEL_CONFIG,
    MODEL_FILE,
    companion_files,
    encode_values,
    iter_file,
    safetensors_header,
)
from trainer.model.initialization import read_tensor
from trainer.model.safetensors_headers import TensorHeader, read_config, read_headers
from trainer.model.tensor_names import is_ignored, is_tied, language_name, stored_family
from trainer.system.errors import InputError
from trainer.system.storage.cache_folder import Files
from trainer.system.storage.new_folder import check_new, write_new

_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HEAD = "lm_head"
_MERGE_IT = "merge it with PEFT (merge_and_unload) and give the merged model"


def merge_adapter(adapter: Adapter, output: Path) -> Path:
    """Write base and adapter as one model and return its folder; it appears whole or not at all.

    Each weight keeps the base's dtype, and a new one takes that of the embedding.

    Raises:
        InputError: `output` already holds something, or a tensor has no place in the base.
        StorageError: the write failed.
    """
    check_new(output)
    return write_new(output, merged_files(adapter))


def describe_left_out(adapter: Adapter) -> str | None:
    """Return the line on a base that also sees or hears, of which merging writes no such part."""
    tree = read_config(adapter.base_dir)
    if text_config(tree) is tree:
        return None
    return (
        f"{adapter.base_dir}: the merged model is its language model alone, without the parts that"
        " see or hear; to keep them, open the adapter on the whole model with PEFT"
    )


def merged_files(adapter: Adapter, dtype: str | None = None) -> Files:
    """Return the files of the merged model.

    Args:
        dtype: F32 for what the merged weights are exactly; None keeps the base's.

    Raises:
        InputError: a tensor of the adapter has no place in the base.
    """
    merged = _MergedModel(adapter, dtype)
    files: Files = {}
    found = companion_files(merged.config, adapter.base_dir, adapter.tokenizer_dir)
    if adapter.task == "causal-lm":
        found |= generation_file(adapter.base_dir, adapter.tokenizer_dir)
    for name, content in found.items():
        if name == MODEL_CONFIG:
            assert isinstance(content, bytes)
            tree = {**json.loads(content), **merged.changes}
            content = (json.dumps(tree, indent=2) + "\n").encode()
        files[name] = iter_file(content) if isinstance(content, Path) else [content]
    return {**files, MODEL_FILE: merged.iter_chunks()}


class _MergedModel:
    """The tensors of the merged model, computed as they are written."""

    def __init__(self, adapter: Adapter, dtype: str | None) -> None:
        self._adapter, self._dtype_of_all = adapter, dtype
        self.config = _full_config(adapter)
        tree = read_config(adapter.base_dir)
        headers = read_headers(adapter.base_dir)
        family = stored_family(adapter.base_dir, headers)
        self._family = family
        self._transposed = family.transposed
        self._embedding = f"{family.backbone}.{family.embedding}"
        self._table = f"{self._embedding}.weight"
        bare = any(name.startswith(f"{family.layers}.") for name in headers)
        self._base: dict[str, TensorHeader] = {}
        for name, header in headers.items():
            if is_ignored(name, family):
                continue
            name = language_name(name)
            if bare and not name.startswith((f"{_HEAD}.", "score.")):
                name = f"{family.backbone}.{name}"
            self._base[family.parameter_name(name)] = header
        self._tied = is_tied(tree, family, headers)
        self.changes: dict[str, Any] = {}
        if self._tied:
            self._base.pop(f"{_HEAD}.weight", None)  # the embedding counts
            self._untie_head()
        if adapter.task == "classify":
            self._base.pop(f"{_HEAD}.weight", None)
        self._shapes = {name: header.shape for name, header in self._base.items()}
        self._take_saved(() if family.biased else family.keys)
        self.dtype = self._find_dtype(self._table)
        self.changes["dtype"] = _TORCH_NAMES[self.dtype]

    def _untie_head(self) -> None:
        """Give a tied model the head that its adapter trained apart, or leave it tied."""
        adapter = self._adapter
        if any(name in adapter.pairs for name in (self._embedding, _HEAD)):
            raise InputError(
                f"{adapter.path}: has LoRA on an embedding that is also the head of"
                f" {adapter.base_dir}; {_MERGE_IT}"
            )
        apart = {f"{name}.weight" for name in (self._embedding, _HEAD)} & adapter.saved.keys()
        together = adapter.tree.get("ensure_weight_tying") and len(apart) == 1
        # PEFT ties the rows of both if their numbers are the same.
        rows = {name: adapter.tokens.get(name, ((),))[0] for name in (self._embedding, _HEAD)}
        own_rows = _HEAD in adapter.tokens and rows[_HEAD] != rows[self._embedding]
        if adapter.task == "causal-lm" and (own_rows or (apart and not together)):
            self._base[f"{_HEAD}.weight"] = self._base[self._table]
            self.changes["tie_word_embeddings"] = False

    def _take_saved(self, keys: tuple[str, ...]) -> None:
        """Check that every tensor of the adapter has a place; add the biases that it brings."""
        adapter = self._adapter
        where = f"{adapter.path}: "
        if adapter.task == "classify":
            hidden = self._shapes[self._table][1]
            self._shapes["score.weight"] = (adapter.saved["score.weight"].shape[0], hidden)
        for module, pair in adapter.pairs.items():
            expected = (pair.up.shape[0], pair.down.shape[1])
            weight = self._shapes.get(f"{module}.weight")
            weight = weight and (weight[::-1] if self._transposed else weight)
            if weight != expected or pair.up.shape[1] != pair.rank:
                held = "no such linear" if weight is None else list(weight)
                raise InputError(
                    f"{where}lora_A and lora_B of {module} make {list(expected)}, which does not"
                    f" fit {adapter.base_dir} ({held})"
                )
            for vector in (pair.bias, pair.magnitude):
                if vector is not None and np.prod(vector.shape) != expected[0]:
                    raise InputError(f"{where}a vector of {module} does not fit its linear")
            if pair.bias is not None and f"{module}.bias" not in self._shapes:
                self._add_biases(module, keys)
        self._resize_vocabulary()
        for name, header in adapter.saved.items():
            if self._shapes.get(name) != header.shape:
                held = self._shapes.get(name)
                raise InputError(
                    f"{where}the tensor {name} {list(header.shape)} does not fit"
                    f" {adapter.base_dir} ({'no such tensor' if held is None else list(held)})"
                )
        for module, (rows, header) in adapter.tokens.items():
            table = self._shapes.get(f"{module}.weight")
            tied = module == _HEAD and table is None and self._tied  # its rows are the embedding's
            if not tied and (table is None or header.shape != (len(rows), table[1])):
                raise InputError(f"{where}the rows of {module} do not fit {adapter.base_dir}")
            if table is not None and not all(0 <= row < table[0] for row in rows):
                raise InputError(f"{where}trainable_token_indices go beyond {module}'s {table[0]}")

    def _resize_vocabulary(self) -> None:
        """Take the number of tokens from tables that the adapter saved whole.

        Its embedding was resized, for tokens of its own (axolotl, TRL's `setup_chat_format`).
        """
        adapter, held = self._adapter, self._shapes[self._table]
        names = [name for name in (self._table, f"{_HEAD}.weight") if name in self._shapes]
        found = {name: adapter.saved[name].shape for name in names if name in adapter.saved}
        rows = {shape[0] for shape in found.values() if len(shape) == 2 and shape[1] == held[1]}
        if not rows - {held[0]}:
            return
        if len(rows) > 1 or len(found) < len(names):
            sizes = ", ".join(f"{name} {list(self._shapes[name])}" for name in names)
            raise InputError(
                f"{adapter.path}: its vocabulary has {max(rows)} tokens, {adapter.base_dir} has"
                f" {held[0]} ({sizes}), and it does not contain all of these tables; resize the"
                " base first (resize_token_embeddings, save_pretrained) and give it with --base"
            )
        self._shapes.update(found)
        self.changes["vocab_size"] = rows.pop()

    def _add_biases(self, module: str, keys: tuple[str, ...]) -> None:
        """Give all linears of a kind a bias, which is zero where the adapter has none."""
        linear = module.rpartition(".")[2]
        key = next((k for k, names in BIASED_BY.items() if linear in names and k in keys), None)
        if key is None:
            raise InputError(
                f"{self._adapter.path}: has lora_bias for {module}, which has no bias in"
                f" {self._adapter.base_dir}; {_MERGE_IT}"
            )
        self.changes[key] = True
        for name in list(self._base):
            part, _, kind = name.rpartition(".")
            if kind == "weight" and part.rpartition(".")[2] in BIASED_BY[key]:
                self._shapes.setdefault(f"{part}.bias", (self._shapes[name][0],))

    def iter_chunks(self) -> Iterator[bytes | memoryview]:
        """Yield a safetensors file."""
        dtypes = {name: self._find_dtype(name) for name in self._shapes}
        yield safetensors_header(self._shapes, {"format": "pt"}, dtypes)
        for name, dtype in dtypes.items():
            yield encode_values(self._merge_tensor(name), dtype)

    def _merge_tensor(self, name: str) -> np.ndarray:
        """Return a merged tensor in fp32, which holds F16 and BF16 exactly."""
        adapter, stored = self._adapter, self._base.get(name)
        module, _, kind = name.rpartition(".")
        if name in adapter.saved:
            values = read_tensor(adapter.saved[name])
        elif stored is None:
            values = np.zeros(self._shapes[name], np.float32)
        else:
            values = read_tensor(stored)
        pair = adapter.pairs.get(module)
        if pair is not None and kind == "weight":
            transposed = self._transposed
            values = pair.apply_to(values.T).T if transposed else pair.apply_to(values)
        if (place := find_expert_slice(self._family, name)) is not None:
            expert = adapter.parameters.get(place.parameter)
            if expert is not None:
                first = place.part * len(values)
                values = values + expert.expert_delta(place.expert)[first : first + len(values)]
        elif (expert := adapter.parameters.get(name)) is not None:
            values = values + expert.stacked_delta().reshape(values.shape)
        if pair is not None and kind == "bias" and pair.bias is not None:
            values = values + np.float32(pair.scale) * read_tensor(pair.bias)
        if kind == "weight" and module in adapter.tokens:
            rows, header = adapter.tokens[module]
            values = values.copy()
            values[list(rows)] = read_tensor(header)
        return values

    def _find_dtype(self, name: str) -> str:
        if self._dtype_of_all is not None:
            return self._dtype_of_all
        stored = self._base.get(name)
        if stored is None or name == "score.weight":
            return self._base[self._table].dtype
        return stored.dtype


def _full_config(adapter: Adapter) -> RunConfig:
    settings: dict[str, Any] = {
        "task": adapter.task,
        "method": "full",
        "model.path": str(adapter.base_dir),
        "data.train": "none",
    }
    if adapter.num_classes is not None:
        settings["num_classes"] = adapter.num_classes
    if adapter.class_names is not None:
        settings["class_names"] = adapter.class_names
    return load_config(None, settings)
