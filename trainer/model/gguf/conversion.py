"""Convert a GGUF file to a model folder in the cache.

Weights that a GGUF stores quantised are multiplied out and rounded to bf16; floats stay as they
are. The folder's name has the file's digest, so a changed file is converted again.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from trainer.model.architecture import parse_architecture
from trainer.model.families import FAMILIES
from trainer.model.formats import refuse_pointer
from trainer.model.gguf.description import (
    GGUF_KEYS,
    checked_keys,
    end_tokens,
    find_model_type,
    llama3_scaling,
    model_config,
)
from trainer.model.gguf.source import TYPES_FILE, Source, remember_source, types_text
from trainer.model.gguf.tokenizer import tokenizer_files
from trainer.model.hf_export import MODEL_CONFIG, MODEL_FILE, encode_values, safetensors_header
from trainer.system.errors import InputError, convert_read_errors
from trainer.system.key_table import UnknownKeys
from trainer.system.process.slow_log import log_if_slow
from trainer.system.storage.cache_folder import Files, ensure_entry

if TYPE_CHECKING:
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor

log = logging.getLogger(__name__)

_VERSION = 2
"""Version of this conversion: another one makes another folder of the same file."""
_ROPE = "rope_freqs.weight"


def convert_gguf(path: Path) -> Path:
    """Return the model folder of a GGUF file; the first call on this machine converts it.

    Raises:
        InputError: it is damaged, or no model that is converted.
        StorageError: the cache cannot be written.
    """
    refuse_pointer(path)
    source = Source.open(path)
    with convert_read_errors(path, InputError):
        hasher = blake3(max_threads=blake3.AUTO)
        with log_if_slow(f"hashing {path}"):
            hasher.update_mmap(path)
    digest = hasher.update(f"\0{_VERSION}".encode()).hexdigest()
    folder = ensure_entry(path.stem, digest, lambda: _make_files(source))
    remember_source(folder, source)
    return folder


def _make_files(source: Source) -> Files:
    path = source.path
    reader = _open_reader(path)
    log.info("converting %s, once on this machine", path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    model_type, values = find_model_type(metadata, path), checked_keys(metadata, path)
    unknown = UnknownKeys(GGUF_KEYS)
    unknown.add(values)
    if line := unknown.report():
        log.warning("%s: %s", path, line)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {
        name: tuple(int(size) for size in reversed(tensor.shape))
        for name, tensor in tensors.items()
    }
    config = model_config(model_type, values, shapes, path)
    if (rope := tensors.pop(_ROPE, None)) is not None:
        factors = np.asarray(rope.data, dtype=np.float32).reshape(-1)
        config["rope_parameters"] |= llama3_scaling(factors, config, path)
    weights = _Weights(source, config, tensors, shapes)
    config["dtype"] = weights.dtype
    of_tokenizer = {
        key.removeprefix("tokenizer."): value
        for key, value in values.items()
        if key.startswith("tokenizer.")
    }
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": end_tokens(values),
        "pad_token_id": config["pad_token_id"],
    }
    texts = {
        MODEL_CONFIG: json.dumps(config, indent=2),
        "generation_config.json": json.dumps(generation, indent=2),
        **tokenizer_files(of_tokenizer, path, config["max_position_embeddings"]),
        TYPES_FILE: types_text(weights.types),
    }
    return {
        **{name: [(text + "\n").encode()] for name, text in texts.items()},
        MODEL_FILE: weights.iter_chunks(),
    }


def _open_reader(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InputError(
            f"{path}: is GGUF, and the package that reads it is missing: pip install 'motley[gguf]'"
        ) from None
    try:
        return GGUFReader(path)
    except Exception as error:  # a cut file fails in many ways: ValueError, IndexError, ...
        if unknown := re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error)):
            raise InputError(_undecodable_message(path, f"the type {unknown[1]}")) from None
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InputError(
            f"{path}: damaged or truncated GGUF file ({reason}); download or copy it again"
        ) from None


def _undecodable_message(path: Path, kind: str) -> str:
    return (
        f"{path}: stores weights in {kind}, which the installed gguf package cannot multiply out"
        " (ik_llama.cpp has types of its own); upgrade it, or give the original model folder or a"
        " file of another quantisation"
    )


class _Weights:
    """The model's tensors, multiplied out as they are written."""

    def __init__(
        self,
        source: Source,
        config: Mapping[str, Any],
        tensors: Mapping[str, ReaderTensor],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        path = source.path
        self._source, self._config = source, config
        self.types: Counter[str] = Counter()
        """How many weights of matrices the file stores in each type."""
        self._tensors: dict[str, ReaderTensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        left = dict(tensors)
        for name, (stored, shape) in _map_names(config, path).items():
            tensor = left.pop(stored, None)
            if tensor is None or shapes[stored] != shape:
                held = "is missing" if tensor is None else f"has shape {list(shapes[stored])}"
                raise InputError(f"{path}: {stored} {held}, {list(shape)} is needed")
            self._tensors[name], self._shapes[name] = tensor, shape
            kind = tensor.tensor_type.name
            if len(shape) > 1:
                self.types[kind] += math.prod(shape)
            self._dtypes[name] = kind if kind in ("F32", "F16") else "BF16"
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            causal = config["architectures"][0]
            raise InputError(
                f"{path}: the tensor {min(left)}{more} is not part of a {causal};"
                " give the original model folder"
            )
        names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        self.dtype = names[self._dtypes["model.embed_tokens.weight"]]

    def iter_chunks(self) -> Iterator[bytes | memoryview]:
        """Yield a safetensors file.

        Raises:
            InputError: the GGUF file was replaced meanwhile.
        """
        from gguf.quants import dequantize

        yield safetensors_header(self._shapes, {"format": "pt"}, self._dtypes)
        interleaved = FAMILIES[self._config["model_type"]].gguf_interleaved
        for name, tensor in self._tensors.items():
            try:
                values = dequantize(tensor.data, tensor.tensor_type).reshape(self._shapes[name])
            except NotImplementedError:  # gguf: a type that it knows and cannot dequantise
                kind = tensor.tensor_type.name
                raise InputError(_undecodable_message(self._source.path, kind)) from None
            if interleaved and ".self_attn.q_proj." in name:
                values = _deinterleave_heads(values, self._config["num_attention_heads"])
            elif interleaved and ".self_attn.k_proj." in name:
                values = _deinterleave_heads(values, self._config["num_key_value_heads"])
            yield encode_values(values, self._dtypes[name])
        self._source.check_unchanged()


def _deinterleave_heads(values: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys as transformers has them.

    Rotary embedding turns pairs of rows: neighbours in llama.cpp, row n of both halves of a head in
    transformers.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _map_names(config: Mapping[str, Any], path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the name in the file and the shape of each tensor of the model."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    model = parse_architecture(config, str(path))
    table = (model.vocab_size, model.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for layer in range(model.num_layers):
        for name, shape in model.layer_tensors():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (model.hidden_size,)
    if not model.tied:
        shapes["lm_head.weight"] = table
    own = FAMILIES[config["model_type"]].gguf
    kind = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == own)
    found = get_tensor_name_map(kind, model.num_layers)
    names = {name: found.get_name(name, (".weight", ".bias")) for name in shapes}
    return {name: (str(stored), shapes[name]) for name, stored in names.items()}
