"""Frozen weights that a model of transformers takes from files instead of loading.

These are linears and experts of layers that are read at each use; of a model in NF4 those of all
layers. The class is made without them, transformers loads the others, and then they are put in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from trainer.model.expert_parameters import ROUTED
from trainer.model.safetensors_headers import TensorHeader, read_headers
from trainer.model.tensor_names import LANGUAGE_KEYS, stored_family
from trainer.planning.vulkan_buffers import NF4_BLOCK
from trainer.replica.torch.experts import LayerBytes, ResidentLayer, StoredExperts, attach_experts
from trainer.replica.torch.streaming import LayerStream, StreamedEmbedding, StreamedHead
from trainer.replica.weights.nf4_file import ABSMAX, open_quantized
from trainer.system.errors import InputError

_STACKINGS = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
"""How transformers stacks experts: one matrix of each, or several below each other."""


class PublishedWeights:
    """The weights that a model is made without.

    Args:
        dtype: of the base.
        nf4: the dtype of products with weights in NF4; None: they are as they are stored.
        streamed: the layers that are read at each use.
        reads_rows: of the embedding no more is in memory than the rows of a pass.
        reads_head: the head is read in chunks of its rows.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        nf4: torch.dtype | None,
        streamed: frozenset[int],
        *,
        reads_rows: bool,
        reads_head: bool,
    ) -> None:
        self._model_dir, self._dtype, self._device, self._nf4 = model_dir, dtype, device, nf4
        self._streamed, self._reads_rows = streamed, reads_rows and bool(streamed)
        self._reads_head = reads_head
        self._headers = read_headers(model_dir)
        self._family = stored_family(model_dir, self._headers)
        self._stacked: dict[str, list[list[str]]] = {}
        stem = re.escape(f"{self._family.backbone}.{self._family.layers}")
        self._layer = re.compile(rf"{stem}\.(\d+)\.")
        # Blocks of NF4 lie along rows of the product, which Conv1D stores as columns.
        self._kinds = (nn.Linear,) if nf4 is not None else (nn.Linear, Conv1D)
        self._linears: list[str] = []
        self._experts: dict[str, dict[str, nn.Parameter]] = {}
        """Parameters that stack experts, by module and name."""
        self._embedding: tuple[str, str] | None = None
        self._head: tuple[str, str] | None = None
        """Path of the module, and the stored tensor."""
        self.names: dict[str, int] = {}
        """The parameters that the model is made without, with their elements."""

    def make_class(self, base: Any) -> Any:
        """Return a class of transformers whose models lack these weights until `fill_model`."""

        def make_model(model: Any, *args: Any, **kwargs: Any) -> None:
            base.__init__(model, *args, **kwargs)
            self._take_weights(model)

        # transformers looks for what it knows of a class by its name and module.
        known = {"__init__": make_model, "__module__": base.__module__}
        return type(base.__name__, (base,), known)

    def fill_model(self, model: Any) -> None:
        """Put the weights into a loaded model."""
        stream = LayerStream(self._dtype, self._device, self._nf4, self._open_codes())
        for path in self._linears:
            bias: Any = model.get_submodule(path).bias
            _replace_module(model, path, self._make_linear(stream, path, bias))
        for path, parameters in self._experts.items():
            module = model.get_submodule(path)
            source = self._open_experts(stream, path)
            made: dict[str, StoredExperts] = {}
            for name, parameter in parameters.items():
                tensors = self._stacked[f"{path}.{name}"]
                made[name] = StoredExperts(
                    source,
                    self._find_layer(path),
                    tensors,
                    tuple(parameter.shape),
                    transposed=module.is_transposed,
                    stored=self._headers[tensors[0][0]].dtype,
                    dtype=self._dtype,
                    nf4=self._nf4,
                )
            attach_experts(module, made)
        if self._embedding is not None:
            path, name = self._embedding
            own = model.get_submodule(path)
            table = StreamedEmbedding(self._headers[name], name, self._dtype, own)
            _replace_module(model, path, table)
        if self._head is not None:
            path, name = self._head
            bias: Any = model.get_submodule(path).bias
            head = StreamedHead(self._headers[name], name, self._dtype, self._device, bias)
            _replace_module(model, path, head)

    def _take_weights(self, model: Any) -> None:
        """Take the weights out of a model that has not been loaded.

        Raises:
            InputError: a streamed layer's are not in the files by their names, most of it is in
                neither linears nor experts, or NF4 cannot divide rows of experts.
        """
        renamed = LANGUAGE_KEYS if self._family.inside else None
        self._stacked = _map_tensors(model, self._headers, renamed)
        embedding = model.get_input_embeddings()
        modules = {module: path for path, module in model.named_modules()}
        if self._reads_head:
            head = model.get_output_embeddings()
            self._take_head(model, modules.get(head, ""), head)
        for module, path in modules.items():
            kind, name = type(module), f"{path}.weight"
            if module is embedding and self._reads_rows and isinstance(module, nn.Embedding):
                self._take_embedding(path, module)
            elif self._is_taken(path) and kind in self._kinds:
                # A class may use a router's weight itself; it is small, and loaded.
                if ROUTED.isdisjoint(path.split(".")[-2:]) and self._are_stored(
                    {name: module.weight}
                ):
                    self._linears.append(path)
                    _replace_module(model, path, _Absent(module.weight, module.bias))
            elif self._is_taken(path) and hasattr(module, "has_gate"):
                self._take_experts(path, module)
        if self._streamed:
            self._check_left(model)

    def _take_embedding(self, path: str, module: Any) -> None:
        """Take the table out of a module whose class may do more than look up its rows."""
        table: Any = module.weight.detach()
        if (stored := self._find_table(f"{path}.weight", table)) is not None:
            self._embedding = path, stored
            del module.weight
            table._is_hf_initialized = True  # transformers draws no values for it
            module.weight = table

    def _take_head(self, model: Any, path: str, head: Any) -> None:
        """Take the head out; a tied one is the embedding's tensor.

        Raises:
            InputError: it is not a product with a tensor of the files.
        """
        name, tied = f"{path}.weight", dict[str, str](model.all_tied_weights_keys)
        table = tied.pop(name, name)
        stored = self._find_table(table, head.weight) if type(head) is nn.Linear else None
        if stored is None:
            raise InputError(
                f"{self._model_dir}: the head of {type(model).__name__} is no product with one"
                " tensor of its files, and is not read in chunks; use a device with more memory"
            )
        self._head, self.names[name] = (path, stored), head.weight.numel()
        model._tied_weights_keys = model.all_tied_weights_keys = tied
        _replace_module(model, path, _Absent(head.weight, head.bias))

    def _find_table(self, name: str, weight: Tensor) -> str | None:
        """Return the stored tensor of a table `[V, D]`, and note its name; None: there is none."""
        [[stored]] = self._stacked.get(name, [[""]])
        if stored not in self._headers or self._headers[stored].shape != tuple(weight.shape):
            return None
        self.names[name] = weight.numel()
        return stored

    def _check_left(self, model: Any) -> None:
        """Check that of layers that are read little else stays than vectors and routers.

        Raises:
            InputError: it does; names the largest parameter.
        """
        left = {name: each.numel() for name, each in model.named_parameters() if each.dim() > 1}
        sums = [
            sum(count for name, count in counts.items() if self._is_streamed(name))
            for counts in (left, self.names)
        ]
        if 4 * sums[0] > sums[1] or not sums[1]:
            largest = max(filter(self._is_streamed, left), key=left.__getitem__, default="a layer")
            raise InputError(
                f"{self._model_dir}: {largest} is of neither linears nor experts that are read at"
                " each use; keep all layers resident"
            )

    def _is_streamed(self, name: str) -> bool:
        return bool(self._layer.match(name)) and self._find_layer(name) in self._streamed

    def _take_experts(self, path: str, module: Any) -> None:
        """Take the stacked matrices out of a module of experts."""
        parameters = module.named_parameters(recurse=False)
        matrices = {name: each for name, each in parameters if each.dim() == 3}
        if self._are_stored({f"{path}.{name}": each for name, each in matrices.items()}):
            self._experts[path] = matrices
            for name in matrices:
                delattr(module, name)
            module._is_hf_initialized = True  # transformers draws no weights for it

    def _are_stored(self, parameters: Mapping[str, Any]) -> bool:
        """Return whether parameters can be taken from the files, and note their names if so.

        Raises:
            InputError: see `_take_weights`.
        """
        for name, parameter in parameters.items():
            tensors = [part for parts in self._stacked.get(name, ()) for part in parts]
            elements = sum(math.prod(self._headers[part].shape) for part in tensors)
            if elements != parameter.numel():
                if self._streamed:
                    raise InputError(
                        f"{self._model_dir}: {name} has no tensors of its name, so that its layer"
                        " is not read at each use; keep all layers resident"
                    )
                return False
            if self._nf4 is not None and parameter.dim() == 3 and parameter.shape[-1] % NF4_BLOCK:
                raise InputError(
                    f"{self._model_dir}: {name} is {parameter.shape[-1]} wide; nf4 of experts needs"
                    f" a multiple of {NF4_BLOCK}: set quantization none"
                )
        self.names |= {name: each.numel() for name, each in parameters.items()}
        return True

    def _is_taken(self, path: str) -> bool:
        if not self._layer.match(path):
            return False
        return self._nf4 is not None or self._find_layer(path) in self._streamed

    def _find_layer(self, path: str) -> int:
        found = self._layer.match(path)
        assert found is not None
        return int(found[1])

    def _open_codes(self) -> AbstractContextManager[dict[str, TensorHeader]] | None:
        """Return the one file of all linears and experts in NF4; None if they are as stored."""
        if self._nf4 is None:
            return None
        names = filter(self._layer.match, self.names)
        every = (part for name in names for parts in self._stacked[name] for part in parts)
        tensors = {part: self._headers[part] for part in every}
        through_bf16 = self._dtype == torch.bfloat16
        return open_quantized(self._model_dir, tensors, through_bf16=through_bf16)

    def _make_linear(self, stream: LayerStream, path: str, bias: Tensor | None) -> nn.Module:
        name, layer = self._stacked[f"{path}.weight"][0][0], self._find_layer(path)
        header = self._headers[name]
        if layer in self._streamed:
            transposed = self._family.transposed
            return stream.linear(layer, header, name, bias, transposed=transposed)
        return stream.resident_linear(name, header.shape, bias)

    def _open_experts(self, stream: LayerStream, path: str) -> LayerBytes:
        """Return what reads the experts of a module."""
        layer = self._find_layer(path)
        names = [
            part
            for name in self._experts[path]
            for parts in self._stacked[f"{path}.{name}"]
            for part in parts
        ]
        if layer in self._streamed:
            for name in names:
                stream.add_weight(layer, name, self._headers[name])
            return stream
        codes = (part for name in names for part in (name, name + ABSMAX))
        return ResidentLayer(layer, {part: stream.codes[part] for part in codes}, self._device)


class _Absent(nn.Module):
    """A module whose weight is put in later, with what transformers loads."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight.detach()  # without values: classes draw their own for what is missing
        self.bias = bias


def _map_tensors(
    model: Any, headers: Mapping[str, TensorHeader], renamed: dict[str, str] | None
) -> dict[str, list[list[str]]]:
    """Return the stored tensors of each parameter, by expert and part; of most there is one.

    Parameters that transformers makes of several in another way than stacking have none.

    Args:
        renamed: transformers' `key_mapping`.
    """
    transforms = get_model_conversion_mapping(model, renamed)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings: Any = [each for each in transforms if not isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known, places = model.state_dict(), dict[str, dict[tuple[int, int], str]]()
    for stored in headers:
        name, pattern = rename_source_key(
            stored, renamings, converters, model.base_model_prefix, known
        )
        if pattern is None:
            places[name] = {(0, 0): stored}
            continue
        found = by_pattern[pattern]
        steps = [(type(each), getattr(each, "dim", None)) for each in found.operations]
        numbers = re.findall(r"\.(\d+)\.", stored)
        if steps in _STACKINGS and len(found.target_patterns) == 1 and numbers:
            place = int(numbers[-1]), found.source_patterns.index(pattern)
            places.setdefault(name, {})[place] = stored
    stacked: dict[str, list[list[str]]] = {}
    for name, parts in places.items():
        experts = groupby(sorted(parts), key=lambda place: place[0])
        stacked[name] = [[parts[place] for place in each] for _, each in experts]
    return stacked


def _replace_module(model: nn.Module, path: str, made: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, made)
