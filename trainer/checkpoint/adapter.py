"""A LoRA adapter as PEFT writes it: its settings, its tensors, and the base that it belongs to.

Every setting is used or refused by name, and every tensor has a place or is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.adapter_folder import find_adapter, find_tokenizer
from trainer.checkpoint.module_patterns import values_by_pattern
from trainer.checkpoint.reader import RUN_FILE, RunProgress, read_progress
from trainer.model.class_names import read_class_names
from trainer.model.expert_parameters import AdaptedParameter
from trainer.model.families import find_family
from trainer.model.files import resolve_model, weights_digest
from trainer.model.formats import find_adapter_conversion, template_files
from trainer.model.header_layout import read_stored
from trainer.model.hf_export import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    BASE_DIGEST,
    CLASSIFIER_CONFIG,
    TOKENIZER_FILE,
)
from trainer.model.initialization import read_tensor
from trainer.model.safetensors_headers import (
    TensorHeader,
    read_config,
    read_file_headers,
    read_headers,
    read_metadata,
    read_object,
)
from trainer.model.tensor_names import language_name
from trainer.system.errors import InputError
from trainer.system.key_table import KeyTable, UnknownKeys
from trainer.system.storage import atomic_folder

PREFIX = "base_model.model."
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.model")
_MERGE = "is not read; merge it with PEFT (merge_and_unload) and give the merged model"
ADAPTER_KEYS = KeyTable(
    "adapter_config.json",
    used=frozenset(
        {
            "alpha_pattern",
            "base_model_name_or_path",
            "init_lora_weights",
            "lora_alpha",
            "lora_bias",
            "modules_to_save",
            "peft_type",
            "r",
            "rank_pattern",
            "target_modules",
            "target_parameters",
            "task_type",
            "trainable_token_indices",
            "use_dora",
            "use_rslora",
        }
    ),
    harmless=frozenset(
        {
            # The tensors say which modules have an adapter, and which biases were trained; the
            # family says how its linears are stored.
            "bias",
            "exclude_modules",
            "fan_in_fan_out",
            "layers_pattern",
            "layers_to_transform",
            # These count in training alone.
            "auto_mapping",
            "corda_config",
            "ensure_weight_tying",
            "eva_config",
            "inference_mode",
            "loftq_config",
            "lora_dropout",
            "lora_ga_config",
            "megatron_core",
            "peft_version",
            "qalora_group_size",
            "revision",
            "runtime_config",
        }
    ),
    refused=dict.fromkeys(
        (
            "alora_invocation_tokens",
            "arrow_config",
            "kasa_config",
            "layer_replication",
            "megatron_config",
            "monteclora_config",
            "use_bdlora",
            "use_qalora",
            "velora_config",
        ),
        _MERGE,
    ),
)
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base's own weights unchanged."""
_TASKS = {"SEQ_CLS": "classify", "CAUSAL_LM": "causal-lm"}
_LORA = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A\.weight|B\.weight|B\.bias|magnitude_vector(\.weight)?)"
)
_TOKENS = ".token_adapter.trainable_tokens_delta"


@dataclass(frozen=True)
class LoraPair:
    """The change to one linear: W + scale B A, and with a magnitude DoRA (arXiv:2402.09353)."""

    scale: float
    down: TensorHeader
    """A, `[r, in]`."""
    up: TensorHeader
    """B, `[out, r]`."""
    bias: TensorHeader | None = None
    """Bias of B, `[out]`."""
    magnitude: TensorHeader | None = None
    """The norm of each row of the result, `[out]`."""

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        return self.down.shape[0]

    def apply_to(self, weight: np.ndarray) -> np.ndarray:
        """Return the changed weight, fp32 `[out, in]`."""
        delta = np.float32(self.scale) * (read_tensor(self.up) @ read_tensor(self.down))
        changed = weight + delta
        if self.magnitude is not None:
            norms = np.linalg.norm(changed, axis=1, keepdims=True)
            changed *= read_tensor(self.magnitude).reshape(-1, 1) / norms
        return changed


@dataclass(frozen=True)
class ParameterPair:
    """The change to a parameter of experts or of a router: scale B A for each expert's weight."""

    target: AdaptedParameter
    rank: int
    scale: float
    down: TensorHeader
    """A of all experts, `[r * experts, in]`."""
    up: TensorHeader
    """B of all experts, `[out, r * experts]`."""

    def expert_delta(self, expert: int) -> np.ndarray:
        """Return what is added to an expert's weight, fp32 `[out, in]`."""
        count = self.target.experts
        down = read_tensor(self.down).reshape(count, self.rank, -1)[expert]
        up = read_tensor(self.up).reshape(-1, self.rank, count)[:, :, expert]
        return np.float32(self.scale) * (up @ down)

    def stacked_delta(self) -> np.ndarray:
        """Return what is added to the parameter that holds all experts, or to a router's."""
        deltas = np.stack([self.expert_delta(expert) for expert in range(self.target.experts)])
        return deltas.swapaxes(1, 2) if self.target.transposed else deltas


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter and its base."""

    path: Path
    base_dir: Path
    task: str
    tree: Mapping[str, Any]
    """adapter_config.json."""
    headers: Mapping[str, TensorHeader]
    """All of its tensors, by their names in the file."""
    pairs: Mapping[str, LoraPair]
    """By the module's name in the base, such as `model.layers.0.self_attn.q_proj`."""
    saved: Mapping[str, TensorHeader]
    """Whole tensors that replace the base's, by their names there."""
    tokens: Mapping[str, tuple[tuple[int, ...], TensorHeader]]
    """Rows that replace an embedding's: their numbers and values, by the module's name."""
    parameters: Mapping[str, ParameterPair] = field(default_factory=dict[str, ParameterPair])
    """By the parameter's name in the base, such as `model.layers.0.mlp.experts.down_proj`."""
    progress: RunProgress | None = None
    """Where its run stood, for a checkpoint."""

    @property
    def tokenizer_dir(self) -> Path:
        """The folder of the tokenizer that it was trained with."""
        return find_tokenizer(self.base_dir, self.path)

    @property
    def num_classes(self) -> int | None:
        """The classes of a classifier."""
        return self.saved["score.weight"].shape[0] if self.task == "classify" else None

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of a classifier's classes: beside the adapter, else its base's."""
        if self.task != "classify":
            return None
        beside = self.path / CLASSIFIER_CONFIG
        tree = read_object(beside) if beside.is_file() else read_config(self.base_dir)
        names = tuple(read_class_names(tree))
        return names if len(names) == self.num_classes else None


def open_adapter(path: Path, base: str | None = None) -> tuple[Adapter, list[str]]:
    """Return an adapter, and lines on what of it is not used or differs.

    Args:
        base: the base model, if it is not at the adapter's stored path.

    Raises:
        InputError: the folder holds none, a setting or tensor cannot be used, or the base is
            missing or another one.
        StorageError: a checkpoint is damaged.
    """
    found = find_adapter(path)
    if found is None:
        raise InputError(f"{path}: is a full model, there is no adapter to merge")
    path, progress = found, None
    if (path / RUN_FILE).is_file():  # a checkpoint; a user's own folder may be edited
        atomic_folder.verify_folder(path)
        progress = read_progress(path)
    where = path / ADAPTER_CONFIG
    tree, unknown = _read_settings(where), UnknownKeys(ADAPTER_KEYS)
    unknown.add(tree)
    lines = [f"{where}: {line}"] if (line := unknown.report()) else []
    if not (path / ADAPTER_FILE).exists() and (other := find_adapter_conversion(path)):
        raise InputError(f"{path}: {other}")
    headers = read_file_headers(path / ADAPTER_FILE)
    named = tree.get("base_model_name_or_path")
    if not base and not isinstance(named, str):
        raise InputError(f"{where}: names no base model; give it with --base")
    parameters = tree.get("target_parameters")
    base_dir = resolve_model(base or str(named)) if parameters else where
    targets = _map_targets(where, parameters, base_dir) if parameters else {}
    pairs, experts, saved, tokens = _locate_tensors(path / ADAPTER_FILE, tree, headers, targets)
    task = _TASKS[tree["task_type"]]
    if task == "classify" and "score.weight" not in saved:
        raise InputError(f"{path / ADAPTER_FILE}: has no score.weight, so no classifier")
    base_dir = resolve_model(base or str(named))
    lines += _compare_base(path, base, named, base_dir)
    beside = [*template_files(path).values()]
    beside += [name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if beside and not (path / TOKENIZER_FILE).is_file():
        lines.append(
            f"{path}: {' and '.join(beside)} are not used without a {TOKENIZER_FILE} beside them:"
            " the base's tokenizer is used; save the adapter's own there (save_pretrained)"
        )
    found = Adapter(path, base_dir, task, tree, headers, pairs, saved, tokens, experts, progress)
    return found, lines


def _map_targets(where: Path, names: Any, base_dir: Path) -> dict[str, AdaptedParameter]:
    """Return the parameters that `target_parameters` names, by the modules of their adapters.

    Raises:
        InputError: one is no parameter of experts or routers.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{where}: target_parameters must be a list of names, got {names!r}")
    tree = read_config(base_dir)
    if find_family(tree, str(base_dir / "config.json")).code != "transformers":
        raise InputError(
            f"{where}: target_parameters is read for experts alone, which {base_dir} has not;"
            " merge it with PEFT (merge_and_unload) and give the merged model"
        )
    stored = read_stored(base_dir, read_headers(base_dir))
    return {target.module: target for _, target in stored.find_named_parameters(names)}


def _compare_base(path: Path, base: str | None, named: Any, base_dir: Path) -> list[str]:
    """Compare the base with the one that the adapter was trained on.

    Raises:
        InputError: its weights are others.
    """
    trained_on = read_metadata(path / ADAPTER_FILE).get(BASE_DIGEST)
    if trained_on is not None and trained_on != weights_digest(base_dir):
        raise InputError(
            f"{path}: was trained on another base than {base or named}: the weights differ; give"
            f" its own base with --base (its name then: {named})"
        )
    if trained_on is None and base and Path(str(named)).name != Path(base).name:
        return [f"{path}: names {named} as its base, {base} is used; they are not compared"]
    return []


def _read_settings(where: Path) -> dict[str, Any]:
    tree = read_object(where)
    if tree.get("peft_type") != "LORA" or tree.get("task_type") not in _TASKS:
        raise InputError(f"{where}: only LoRA adapters of SEQ_CLS or CAUSAL_LM can be read")
    # PEFT writes every key, and null, false or nothing where it is not used.
    if refusal := ADAPTER_KEYS.explain_refusal(key for key, value in tree.items() if value):
        raise InputError(f"{where}: {refusal}")
    if tree.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise InputError(
            f"{where}: init_lora_weights {tree['init_lora_weights']!r} changed the base's own"
            " weights; convert the adapter with PEFT (save_pretrained with"
            " path_initial_model_for_weight_conversion)"
        )
    for key in ("r", "lora_alpha"):
        if type(tree.get(key)) not in (int, float) or tree[key] <= 0:
            raise InputError(f"{where}: {key} must be a number above zero, got {tree.get(key)!r}")
    return tree


def _locate_tensors(
    file: Path,
    tree: Mapping[str, Any],
    headers: Mapping[str, TensorHeader],
    targets: Mapping[str, AdaptedParameter],
) -> tuple[
    dict[str, LoraPair],
    dict[str, ParameterPair],
    dict[str, TensorHeader],
    dict[str, tuple[tuple[int, ...], TensorHeader]],
]:
    """Return the place of every tensor.

    Args:
        targets: the parameters of experts and routers with an adapter, by its module.

    Raises:
        InputError: names one that has none, or whose counterpart is missing.
    """
    parts: dict[str, dict[str, TensorHeader]] = {}
    saved: dict[str, TensorHeader] = {}
    tokens: dict[str, tuple[tuple[int, ...], TensorHeader]] = {}
    for name, header in headers.items():
        plain = language_name(name.removeprefix(PREFIX))
        if header.dtype not in ("F32", "F16", "BF16"):
            raise InputError(f"{file}: {name} is stored as {header.dtype}, need F32, F16 or BF16")
        if match := _LORA.fullmatch(plain):
            parts.setdefault(match["module"], {})[match["part"].partition(".weight")[0]] = header
        elif plain.endswith(_TOKENS):
            module = plain.removesuffix(_TOKENS)
            tokens[module] = _read_rows(file, name, tree, module), header
        elif name.startswith(PREFIX) and re.fullmatch(r"(?!.*\.lora_).+\.(weight|bias)", plain):
            saved[plain.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = header
        else:
            raise InputError(f"{file}: the tensor {name} {_MERGE}")
    pairs: dict[str, LoraPair] = {}
    experts: dict[str, ParameterPair] = {}
    where = file.with_name(ADAPTER_CONFIG)
    names = {module: targets[module].parameter if module in targets else module for module in parts}
    ranks, alphas = (
        values_by_pattern(tree.get(key), names.values(), f"{where}: {key}")
        for key in ("rank_pattern", "alpha_pattern")
    )
    for module, found in parts.items():
        missing = {"A", "B", *(["magnitude_vector"] if tree.get("use_dora") else [])} - {*found}
        if missing:
            raise InputError(f"{file}: {PREFIX}{module} lacks lora_{min(missing)}")
        if (target := targets.get(module)) is not None:
            rank = found["A"].shape[0] // target.experts
            shapes = found["A"].shape, found["B"].shape
            if shapes != target.factor_shapes(rank):
                raise InputError(
                    f"{file}: lora_A and lora_B of {module}, {shapes[0]} and {shapes[1]}, do not"
                    f" fit {target.experts} experts of {[target.rows, target.columns]}"
                )
            scale = _compute_scale(file, tree, target.parameter, rank, ranks, alphas)
            pair = ParameterPair(target, rank, scale, found["A"], found["B"])
            experts[target.parameter] = pair
            continue
        pairs[module] = LoraPair(
            _compute_scale(file, tree, module, found["A"].shape[0], ranks, alphas),
            found["A"],
            found["B"],
            found.get("B.bias"),
            found.get("magnitude_vector"),
        )
    if not headers:
        raise InputError(f"{file}: contains no tensor")
    wanted = tree.get("target_modules")
    for target in tree.get("target_parameters") or ():
        if not any(f".{name}".endswith(f".{target}") for name in experts):
            raise InputError(f"{file}: contains no tensor for {target} of target_parameters")
    ends = {name.rpartition(".")[2] for name in pairs}
    for target in wanted if isinstance(wanted, list) else ():
        if isinstance(target, str) and target.rpartition(".")[2] not in ends:
            raise InputError(f"{file}: contains no tensor for {target} of target_modules")
    return pairs, experts, saved, tokens


def _read_rows(file: Path, name: str, tree: Mapping[str, Any], module: str) -> tuple[int, ...]:
    """Return the tokens whose rows a tensor holds."""
    given = tree.get("trainable_token_indices")
    if isinstance(given, dict):
        given = next((given[key] for key in given if f".{module}".endswith(f".{key}")), None)
    if not isinstance(given, list) or not all(type(row) is int for row in given):
        raise InputError(f"{file}: {name} has no token numbers in trainable_token_indices")
    return tuple(given)


def _compute_scale(
    file: Path,
    tree: Mapping[str, Any],
    module: str,
    rank: int,
    ranks: Mapping[str, float],
    alphas: Mapping[str, float],
) -> float:
    """Return alpha / r of a module, or alpha / sqrt(r) with `use_rslora` (arXiv:2312.03732)."""
    expected = ranks.get(module, tree["r"])
    if rank != expected:
        raise InputError(
            f"{file}: {PREFIX}{module}.lora_A.weight has rank {rank}, {ADAPTER_CONFIG} says"
            f" {expected}"
        )
    alpha = alphas.get(module, tree["lora_alpha"])
    return alpha / (math.sqrt(rank) if tree.get("use_rslora") else rank)
