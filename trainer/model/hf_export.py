"""Write a checkpoint in the form of Hugging Face libraries, without importing any of them.

`lora` gives a PEFT adapter, `full` a transformers model. The tensors already have the names that
those libraries save, so only the safetensors framing and the JSON files are added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.model.class_names import make_id2label, read_class_names
from trainer.model.families import find_family, text_config
from trainer.model.formats import ADAPTER_CONFIG, lasting_name, template_files
from trainer.model.layout import adapted_experts, adapted_names
from trainer.model.safetensors_headers import read_config, read_headers
from trainer.model.tensor_names import is_tied
from trainer.system.regular_file import open_file, read_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainer.config.run import RunConfig

ADAPTER_FILE = "adapter_model.safetensors"
MODEL_FILE = "model.safetensors"
BASE_DIGEST = "motley.base"
"""In the metadata of `ADAPTER_FILE`: `weights_digest` of the base that it was trained on."""
MODEL_CONFIG = "config.json"
CLASSIFIER_CONFIG = "classifier_config.json"
"""Beside an adapter: config.json of its base as a classifier, with the names of the classes.

Under the name config.json transformers would take the adapter for a whole model.
"""

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"

# What AutoTokenizer may look for, and what generate() needs.
_TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    GENERATION_FILE,
)


def weights_file(config: RunConfig) -> str:
    """Return the name of the file with the trainable weights."""
    return ADAPTER_FILE if config.method == "lora" else MODEL_FILE


def companion_files(
    config: RunConfig, model_dir: Path, tokenizer_dir: Path | None = None
) -> dict[str, bytes | Path]:
    """Return the files beside the weights: their bytes, or the file to copy.

    The tokenizer and its templates are among them, so that a model is used with those that it was
    trained with, whatever becomes of its base's.

    Args:
        tokenizer_dir: the folder of the tokenizer; None: the model's.

    Raises:
        InputError: the model directory has no usable config.json.
    """
    if config.method == "lora":
        files: dict[str, bytes | Path] = {
            ADAPTER_CONFIG: _format_json(adapter_config(config, model_dir))
        }
        if config.task == "classify" and (model_dir / MODEL_CONFIG).is_file():
            files[CLASSIFIER_CONFIG] = _format_json(model_config(config, model_dir))
    else:
        files = {MODEL_CONFIG: _format_json(model_config(config, model_dir))}
    if (model_dir / GENERATION_FILE).is_file():
        files[GENERATION_FILE] = model_dir / GENERATION_FILE
    return {**files, **tokenizer_files(tokenizer_dir or model_dir)}


def tokenizer_files(model_dir: Path) -> dict[str, Path]:
    """Return the files of a model's tokenizer and of `generate()`, by name."""
    names = [name for name in _TOKENIZER_FILES if (model_dir / name).is_file()]
    return {name: model_dir / name for name in (*names, *template_files(model_dir).values())}


def adapter_config(config: RunConfig, model_dir: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json for PEFT's `LoraConfig` (peft 0.21)."""
    classify = config.task == "classify"
    base, modules, transposed = config.model.path, frozenset(config.lora.linears), False
    experts: dict[str, Any] = {}
    if model_dir.is_dir():
        base, modules = lasting_name(base, model_dir), adapted_names(model_dir, config)
        experts = _expert_targets(config, model_dir)
        transposed = find_family(read_config(model_dir), base).transposed
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if classify else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora.lora_rank,
        "lora_alpha": config.lora.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "layers_to_transform": config.lora.layers_to_transform,
        # The head is trained fully; without this PEFT would keep the base's random one.
        "modules_to_save": [*(["score"] if classify else []), *config.lora.modules_to_save] or None,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "use_dora": config.lora.use_dora,
        "use_rslora": config.lora.use_rslora,
        "inference_mode": True,
        **experts,
    }


def _expert_targets(config: RunConfig, model_dir: Path) -> dict[str, Any]:
    """Return PEFT's settings of adapted experts and routers."""
    found = adapted_experts(model_dir, config)
    if not found:
        return {}
    # By full names, since PEFT does not apply layers_to_transform to parameters.
    keys: dict[str, Any] = {"target_parameters": [target.parameter for target, _ in found]}
    factors = {rank // config.lora.lora_rank for target, rank in found if target.fused} - {1}
    for factor in factors:
        pattern = r".*\.gate_up_proj"
        keys["rank_pattern"] = {pattern: factor * config.lora.lora_rank}
        keys["alpha_pattern"] = {pattern: factor * config.lora.lora_alpha}
    return keys


def model_config(config: RunConfig, model_dir: Path) -> dict[str, Any]:
    """Return the base's config.json with the trained task, classes and fp32."""
    whole = read_config(model_dir)
    tree = dict(text_config(whole))
    family = find_family(tree, str(model_dir))
    if tree != whole:  # the class of all parts ties by a key of its own
        tree["tie_word_embeddings"] = is_tied(whole, family, read_headers(model_dir))
    tree.pop("torch_dtype", None)  # the name before transformers 5
    tree["dtype"] = "float32"
    if config.num_classes is None:
        return {**tree, "architectures": [family.causal]} if family.causal else tree
    base = read_class_names(tree)
    names = config.class_names or (base if len(base) == config.num_classes else ())
    labels = make_id2label(names, config.num_classes)
    return {
        **tree,
        "architectures": [family.classifier],
        "id2label": labels,
        "label2id": {label: int(index) for index, label in labels.items()},
        "problem_type": "single_label_classification",
        # Without one, transformers classifies only batches of one.
        "pad_token_id": _pad_token(model_dir) if (pad := tree.get("pad_token_id")) is None else pad,
    }


def iter_safetensors(
    tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file of fp32 tensors piece by piece, without a copy of them.

    Not `safetensors.numpy.save_file`: that opens the path itself, so the bytes could not be hashed
    in the same pass, and tests could not fail the write.
    """
    for name, array in tensors.items():
        assert array.dtype == np.float32, (name, array.dtype)
    yield safetensors_header({name: array.shape for name, array in tensors.items()}, metadata)
    yield from map(raw_bytes, tensors.values())


def safetensors_header(
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, str],
    dtypes: Mapping[str, str] | None = None,
) -> bytes:
    """Return what such a file begins with; the tensors' bytes follow in this order.

    Args:
        dtypes: F32, F16 or BF16 of each tensor; None for F32.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, shape in shapes.items():
        dtype = "F32" if dtypes is None else dtypes[name]
        span = [offset, offset + (4 if dtype == "F32" else 2) * math.prod(shape)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the first tensor to eight bytes
    return len(text).to_bytes(8, "little") + text


def encode_values(values: NDArray[np.float32], dtype: str) -> memoryview:
    """Return little-endian bytes of F32, F16 or BF16, rounded to nearest even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        carry = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        encoded = ((bits + carry) >> np.uint32(16)).astype("<u2")
    else:
        encoded = np.ascontiguousarray(values, dtype="<f4" if dtype == "F32" else "<f2")
    return encoded.reshape(-1).view(np.uint8).data


def raw_bytes(array: NDArray[np.float32]) -> memoryview:
    """Return an array's bytes as files have them."""
    flat = np.ascontiguousarray(array, dtype="<f4").reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")


def iter_file(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes."""
    with open_file(path) as file:
        while piece := file.read(1024 * 1024):
            yield piece


def _pad_token(model_dir: Path) -> int | None:
    """Return the id of the tokenizer's padding token, if it has one."""
    settings = _read_object(model_dir / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # an older folder, see `TokenizerFolder`
        settings |= _read_object(model_dir / "special_tokens_map.json")
    pad = settings.get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    known = _read_object(model_dir / TOKENIZER_FILE).get("added_tokens") or ()
    return next((entry["id"] for entry in known if entry["content"] == pad), None)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        tree: Any = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _format_json(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()
