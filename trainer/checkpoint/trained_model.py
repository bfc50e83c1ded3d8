"""Load a trained model from an output folder, a checkpoint, an adapter or a full model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from trainer.checkpoint.adapter import (
    PREFIX,
    Adapter,
    ParameterPair,
    find_adapter,
    open_adapter,
)
from trainer.checkpoint.merge_lora import merged_files
from trainer.checkpoint.reader import RUN_FILE, RunProgress, find_checkpoint, read_progress
from trainer.config.data import LostText
from trainer.config.lora import LoraSettings
from trainer.config.run import RunConfig, load_config
from trainer.model.architecture import fit_length
from trainer.model.class_names import read_class_names
from trainer.model.expert_parameters import FUSED, converted_targets
from trainer.model.families import find_family
from trainer.model.files import resolve_model, weights_digest
from trainer.model.formats import gguf_file
from trainer.model.hf_export import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    MODEL_CONFIG,
    tokenizer_files,
)
from trainer.model.initialization import initial_weights, read_tensor
from trainer.model.layout import GradientLayout, TensorSlot, build_layout, stored_name
from trainer.model.safetensors_headers import read_config, read_headers
from trainer.model.tensor_names import language_name
from trainer.system.errors import InputError
from trainer.system.process.slow_log import log_if_slow
from trainer.system.regular_file import read_file
from trainer.system.storage import atomic_folder
from trainer.system.storage.cache_folder import ensure_entry

if TYPE_CHECKING:
    from trainer.data.encoder import Encoder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, ready for a replica."""

    path: Path
    """Where the weights were found, as messages name it; of a GGUF file the file."""
    config: RunConfig
    base_dir: Path
    """The model that a replica loads; for a full model its own folder."""
    layout: GradientLayout
    weights: np.ndarray | None
    """fp32 `[layout.size]`; None: a full model, whose replica reads them from `base_dir`."""
    progress: RunProgress | None = None
    """Where its run stood, for a checkpoint."""
    adapter_tokenizer: Path | None = None
    """The folder of an adapter with a tokenizer of its own."""

    @property
    def tokenizer_dir(self) -> Path:
        """The folder of the tokenizer that it was trained with."""
        return self.adapter_tokenizer or self.base_dir

    def open_encoder(self, today: str | None = None) -> Encoder:
        """Return the model's tokenizer with its layout of samples.

        Args:
            today: the date for its chat template; None: `data.date`.

        Raises:
            InputError: it cannot be used.
        """
        from trainer.data.encoder import Encoder  # not to copy or merge weights

        data = self.config.data
        return Encoder(self.tokenizer_dir, data.lost_text, today or data.date, self.base_dir)


def load_trained(
    path: Path,
    base: str | None = None,
    max_seq_len: int | None = None,
    lost_text: LostText | None = None,
) -> TrainedModel:
    """Return what an output folder (its best checkpoint), checkpoint, adapter or model holds.

    An adapter that is more than LoRA on the linears that Motley trains is merged into the cache.

    Args:
        base: the base model of an adapter, if it is not at the adapter's stored path.
        max_seq_len: tokens of a sample; None takes the run's own, else 512 or what the base knows.

        lost_text: see `data.lost_text`; None takes the run's own, else refuse.

    Raises:
        InputError: the folder holds none of them, or its base is missing or differs.
        StorageError: a checkpoint is damaged.
    """
    trained = _load_model(path, base, max_seq_len)
    if lost_text is None:
        return trained
    return replace(trained, config=trained.config.with_settings({"data.lost_text": lost_text}))


def _load_model(path: Path, base: str | None, max_seq_len: int | None) -> TrainedModel:
    if gguf_file(path) is not None:
        return replace(_load_model(resolve_model(str(path)), base, max_seq_len), path=path)
    if find_adapter(path) is not None:
        adapter, lines = open_adapter(path, base)
        for line in lines:
            log.warning("%s", line)
        return _load_adapter(adapter, max_seq_len)
    if not any((path / name).is_file() for name in (MODEL_CONFIG, RUN_FILE)):
        path = find_checkpoint(path)
    progress: RunProgress | None = None
    if (path / RUN_FILE).is_file():  # a checkpoint; a user's own model folder may be edited
        atomic_folder.verify_folder(path)
        progress = read_progress(path)
    run = progress.config if progress is not None else {}
    return replace(_load_plain_model(path, run, max_seq_len), progress=progress)


def _load_adapter(adapter: Adapter, max_seq_len: int | None) -> TrainedModel:
    progress, path = adapter.progress, adapter.path
    run = progress.config if progress is not None else {}
    linears = {module.rpartition(".")[2] for module in adapter.pairs}
    rank = max((pair.rank for pair in adapter.pairs.values()), default=1)
    family = find_family(read_config(adapter.base_dir), str(adapter.base_dir))
    fused = [name for name, to in converted_targets(family).items() if to == FUSED]
    experts = set(adapter.parameters)
    for name, pair in adapter.parameters.items():
        if fused and pair.target.fused and pair.rank == 2 * rank:
            linears.update(fused)
            experts.remove(name)
    alpha = adapter.tree["lora_alpha"]
    alpha = alpha if type(alpha) is int else rank
    settings: dict[str, Any] = {
        "task": adapter.task,
        "method": "lora",
        "num_classes": adapter.num_classes,
        "class_names": adapter.class_names,
        "model.path": str(adapter.base_dir),
        "lora.lora_rank": rank,
        "lora.lora_alpha": alpha,
        "lora.use_rslora": bool(adapter.tree.get("use_rslora")),
        "lora.target_modules": sorted(linears),
        "lora.target_parameters": sorted(experts) or None,
        **_data_settings(run, max_seq_len),
    }
    for key in ("dtype", "quantization"):
        settings[f"model.{key}"] = (run.get("model") or {}).get(key)
    layout = None
    plain = all(pair.bias is None and pair.magnitude is None for pair in adapter.pairs.values())
    if plain and adapter.pairs and adapter.saved.keys() <= {"score.weight"} and not adapter.tokens:
        config = fit_length(_config(path, settings), adapter.base_dir)
        with suppress(InputError):  # merging says what does not fit
            layout = build_layout(adapter.base_dir, config)
    if layout is None or not _has_slots(layout, adapter):
        return replace(_load_merged(adapter, run, max_seq_len), progress=progress, path=path)
    weights = np.zeros(layout.size, dtype=np.float32)
    _copy_adapter(weights, layout, adapter, config.lora)
    return TrainedModel(
        path, config, adapter.base_dir, layout, weights, progress, adapter.tokenizer_dir
    )


def starting_weights(layout: GradientLayout, model_dir: Path, config: RunConfig) -> np.ndarray:
    """Return the weights before a run's first step, fp32 `[layout.size]`.

    They are the factors of `model.adapter`, if it is given, and `initial_weights` besides.

    Raises:
        InputError: the adapter cannot be read, is another base's, or has what does not train here.
    """
    weights = initial_weights(layout, model_dir, config)
    if config.model.adapter is None:
        return weights
    adapter, lines = open_adapter(Path(config.model.adapter), str(model_dir))
    for line in lines:
        log.warning("%s", line)
    plain = all(pair.bias is None and pair.magnitude is None for pair in adapter.pairs.values())
    if not plain or adapter.tokens or not _has_slots(layout, adapter):
        ranks = sorted({pair.rank for pair in adapter.pairs.values()})
        raise InputError(
            f"model.adapter: {adapter.path} has tensors that this run does not train: it is for"
            f" {adapter.task}, of rank {', '.join(map(str, ranks))}, on"
            f" {', '.join(sorted({name.rpartition('.')[2] for name in adapter.pairs}))}; set task,"
            " lora.lora_rank, lora.target_modules and lora.layers_to_transform so that all are"
            " there, or merge it into the base"
        )
    _copy_adapter(weights, layout, adapter, config.lora)
    return weights


def _copy_adapter(
    weights: np.ndarray, layout: GradientLayout, adapter: Adapter, lora: LoraSettings
) -> None:
    """Set what an adapter has in flat weights; other elements stay."""
    experts = {pair.target.module: pair for pair in adapter.parameters.values()}
    for slot in layout.iter_tensors():
        if (values := _slot_values(slot, adapter, experts, lora)) is not None:
            weights[slot.start : slot.stop].reshape(slot.shape)[tuple(map(slice, values.shape))] = (
                values
            )


def _has_slots(layout: GradientLayout, adapter: Adapter) -> bool:
    """Whether every tensor of an adapter has a slot, of its shape up to the rank."""
    slots = {
        language_name(slot.name.removeprefix(PREFIX)): slot.shape for slot in layout.iter_tensors()
    }
    for module, pair in adapter.pairs.items():
        down, up = (slots.get(f"{module}.lora_{part}.weight") for part in "AB")
        if down is None or up is None or pair.rank > down[0]:
            return False
        if (pair.rank, down[1]) != pair.down.shape or (up[0], pair.rank) != pair.up.shape:
            return False
    whole = list(adapter.saved.items())
    for pair in adapter.parameters.values():  # the rows of a lower rank lie between others
        whole.append((f"{pair.target.module}.lora_A.weight", pair.down))
        whole.append((f"{pair.target.module}.lora_B.weight", pair.up))
    return all(slots.get(name) == header.shape for name, header in whole)


def _slot_values(
    slot: TensorSlot, adapter: Adapter, experts: Mapping[str, ParameterPair], lora: LoraSettings
) -> np.ndarray | None:
    """Return the values of a slot; None for a linear that this adapter leaves as it is.

    Modules with another rank or scale than the run's have fewer rows, and a B that makes up for
    the scale.
    """
    name = language_name(slot.name.removeprefix(PREFIX))
    if name in adapter.saved:
        return read_tensor(adapter.saved[name])
    module, _, part = name.removesuffix(".weight").rpartition(".lora_")
    pair = adapter.pairs.get(module) or experts.get(module)
    if pair is None:
        return None
    if part == "A":
        return read_tensor(pair.down)
    up, scale = read_tensor(pair.up), lora.scale
    if module in experts:
        scale = lora.compute_scale(pair.rank, pair.rank // lora.lora_rank)
    return up if pair.scale == scale else up * np.float32(pair.scale / scale)


def _load_merged(adapter: Adapter, run: dict[str, Any], max_seq_len: int | None) -> TrainedModel:
    """Return a full model, merged in fp32 into the cache."""
    hasher = blake3(weights_digest(adapter.base_dir).encode())
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        hasher.update(read_file(adapter.path / name, 1 << 40))
    for name, path in sorted(tokenizer_files(adapter.tokenizer_dir).items()):
        hasher.update(f"\0{name}\0".encode() + blake3(read_file(path)).digest())
    with log_if_slow(f"merging {adapter.path} into {adapter.base_dir}"):
        folder = ensure_entry("merged", hasher.hexdigest(), lambda: merged_files(adapter, "F32"))
    return _load_plain_model(folder, run, max_seq_len)


def _load_plain_model(path: Path, run: dict[str, Any], max_seq_len: int | None) -> TrainedModel:
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
            **_data_settings(run, max_seq_len),
        },
    )
    config = fit_length(config, path)
    return TrainedModel(path, config, path, build_layout(path, config), weights=None)


def _data_settings(run: dict[str, Any], max_seq_len: int | None) -> dict[str, Any]:
    """Return the settings of data with which a run's model is used."""
    data = run.get("data") or {}
    return {
        "data.train": "none",
        "data.max_seq_len": max_seq_len or data.get("max_seq_len"),
        "data.lost_text": data.get("lost_text"),
        "data.date": data.get("date"),
        "data.columns": data.get("columns"),
    }


def _config(path: Path, settings: dict[str, Any]) -> RunConfig:
    try:
        return load_config(
            None, {key: value for key, value in settings.items() if value is not None}
        )
    except InputError as error:
        reason = str(error).removeprefix("flags: ")
        raise InputError(f"{path}: cannot be read as a trained model: {reason}") from None
