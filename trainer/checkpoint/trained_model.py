"""Load a trained model from an output folder, a checkpoint, an adapter or a full model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.reader import RUN_FILE, RunProgress, find_checkpoint, read_progress
from trainer.config.run import RunConfig, load
from trainer.model.architecture import fit_length
from trainer.model.class_names import read_class_names
from trainer.model.files import resolve_model
from trainer.model.formats import gguf_file
from trainer.model.hf_export import ADAPTER_CONFIG, ADAPTER_FILE, CLASSIFIER_CONFIG, MODEL_CONFIG
from trainer.model.initialization import initial_weights, read_tensor
from trainer.model.layout import GradientLayout, build_layout, stored_name
from trainer.model.safetensors_headers import read_config, read_file_headers, read_headers
from trainer.system.errors import InputError
from trainer.system.storage import atomic_folder


@dataclass(frozen=True)
class Trained:
    """A trained model, ready for a replica."""

    path: Path
    """Where the weights were found."""
    config: RunConfig
    base_dir: Path
    """The model that a replica loads; for a full model its own folder."""
    layout: GradientLayout
    weights: np.ndarray
    """fp32 `[layout.size]`."""
    progress: RunProgress | None = None
    """Where its run stood, for a checkpoint."""


def load_trained(path: Path, base: str | None = None, max_seq_len: int | None = None) -> Trained:
    """Return what an output folder (its best checkpoint), checkpoint, adapter or model holds.

    Args:
        base: the base model of an adapter, if it is not at the adapter's stored path.
        max_seq_len: tokens of a sample; None takes the run's own, else 512 or what the base knows.

    Raises:
        InputError: the folder holds none of them, or its base is missing or differs.
        StorageError: a checkpoint is damaged.
    """
    if gguf_file(path) is not None:
        path = resolve_model(str(path))
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    if not any((path / name).is_file() for name in (ADAPTER_CONFIG, MODEL_CONFIG, RUN_FILE)):
        path = find_checkpoint(path)
    progress: RunProgress | None = None
    if (path / RUN_FILE).is_file():  # a checkpoint; a user's own model folder may be edited
        atomic_folder.verify(path)
        progress = read_progress(path)
    run = progress.config if progress is not None else {}
    length = max_seq_len or (run.get("data") or {}).get("max_seq_len")
    adapter = (path / ADAPTER_CONFIG).is_file()
    trained = _adapter(path, base, run, length) if adapter else _model(path, run, length)
    return replace(trained, progress=progress)


def _adapter(path: Path, base: str | None, run: dict[str, Any], length: int | None) -> Trained:
    tree = _object(path / ADAPTER_CONFIG)
    headers = read_file_headers(path / ADAPTER_FILE)
    task = {"SEQ_CLS": "classify", "CAUSAL_LM": "causal-lm"}.get(str(tree.get("task_type")))
    where = path / ADAPTER_CONFIG
    if tree.get("peft_type") != "LORA" or task is None:
        raise InputError(f"{where}: only LoRA adapters of SEQ_CLS or CAUSAL_LM can be read")
    for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern"):
        if tree.get(key):
            raise InputError(f"{where}: {key} is not supported")
    settings: dict[str, Any] = {
        "task": task,
        "method": "lora",
        "model.path": base or tree.get("base_model_name_or_path"),
        "data.train": "none",
        "data.max_seq_len": length,
        "data.lost_text": (run.get("data") or {}).get("lost_text"),
        "lora.lora_rank": tree.get("r"),
        "lora.lora_alpha": tree.get("lora_alpha"),
        "lora.target_modules": tree.get("target_modules"),
    }
    for key in ("dtype", "quantization"):
        settings[f"model.{key}"] = (run.get("model") or {}).get(key)
    if task == "classify":
        head = headers.get("base_model.model.score.weight")
        if head is None:
            raise InputError(f"{path / ADAPTER_FILE}: has no score.weight, so no classifier")
        settings["num_classes"] = head.shape[0]
    config = _config(path, settings)
    base_dir = resolve_model(config.model.path)
    if task == "classify":
        with_names = path / CLASSIFIER_CONFIG
        tree = _object(with_names) if with_names.is_file() else read_config(base_dir)
        names = read_class_names(tree)
        if len(names) == config.num_classes:
            config = config.with_settings({"class_names": names})
    config = fit_length(config, base_dir)
    layout = build_layout(base_dir, config)
    weights = np.empty(layout.size, dtype=np.float32)
    for slot in layout.tensors():
        header = headers.get(slot.name)
        if header is None or header.shape != slot.shape:
            raise InputError(f"{path / ADAPTER_FILE}: {slot.name} does not fit {base_dir}")
        weights[slot.start : slot.stop] = read_tensor(header).reshape(-1)
    return Trained(path, config, base_dir, layout, weights)


def _model(path: Path, run: dict[str, Any], length: int | None) -> Trained:
    headers = read_headers(path)
    head = stored_name(headers, "score.weight")
    names = str(read_config(path).get("architectures"))
    if head is None and "ForSequenceClassification" in names:
        raise InputError(
            f"{path}: config.json describes a classifier, but the weights lack score.weight"
        )
    config = _config(
        path,
        {
            "task": "causal-lm" if head is None else "classify",
            "method": "full",
            "num_classes": None if head is None else headers[head].shape[0],
            "class_names": (head and read_class_names(read_config(path))) or None,
            "model.path": str(path),
            "data.train": "none",
            "data.max_seq_len": length,
            "data.lost_text": (run.get("data") or {}).get("lost_text"),
        },
    )
    config = fit_length(config, path)
    layout = build_layout(path, config)
    return Trained(path, config, path, layout, initial_weights(layout, path, config))


def _config(path: Path, settings: dict[str, Any]) -> RunConfig:
    try:
        return load(None, {key: value for key, value in settings.items() if value is not None})
    except InputError as error:
        reason = str(error).removeprefix("flags: ")
        raise InputError(f"{path}: cannot be read as a trained model: {reason}") from None


def _object(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError):
        raise InputError(f"{path}: cannot be read as JSON") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: not a JSON object")
    return tree  # pyright: ignore[reportUnknownVariableType]
