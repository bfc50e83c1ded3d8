"""A model of transformers, for cases that `decoder.py` does not support.

These are the harness, and rarer rotations and activations.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from trainer.config.run import RunConfig
from trainer.model.config_keys import CONFIG_KEYS, is_dropout
from trainer.model.families import find_family, logits_settings, text_config
from trainer.model.layout import adapted_experts, adapted_modules
from trainer.model.safetensors_headers import read_config, read_headers
from trainer.model.tensor_names import LANGUAGE_KEYS, is_ignored, is_tied
from trainer.planning.model_config import read_shape
from trainer.planning.resident_layers import HEAD_STREAMED, streamed_layers
from trainer.replica.torch.model import prepare_for_training, report_load_errors, train_whole
from trainer.replica.torch.precision import compute_dtype, make_autocast
from trainer.replica.torch.published_weights import PublishedWeights
from trainer.replica.torch.residence import reads_rows
from trainer.replica.torch.unlisted_family import check_class, find_class, report_unreached
from trainer.system.errors import InputError
from trainer.system.key_table import UnknownKeys

log = logging.getLogger(__name__)

_HEADS = ("score", "lm_head")


def load_published(
    model_dir: Path, config: RunConfig, device: torch.device, resident: int | None = None
) -> nn.Module:
    """Return the same as `load_model`, computed by transformers' own code.

    Raises:
        InputError: the weights cannot be loaded.
    """
    full = config.method == "full"
    modules = () if full else adapted_modules(model_dir, config)
    experts = [] if full else adapted_experts(model_dir, config)
    dtype = torch.float32 if full else getattr(torch, config.model.dtype)
    model: Any = load_base(
        model_dir,
        dtype,
        device,
        resident,
        nf4=compute_dtype(config, device) if config.model.quantization == "nf4" else None,
        classes=config.num_classes,
        reads_rows=reads_rows(config, resident, tied=read_shape(model_dir).tied),
    )
    _say_unknown(model_dir, model.config)
    family = find_family(stored := read_config(model_dir), str(model_dir))
    if not family.listed:
        model.train()
        check_class(
            model,
            model_dir,
            modules,
            logits_settings(stored),
            make_autocast(config, device),
            transposed=family.transposed,
        )
    prepare_for_training(model, model_dir, config, device, modules, experts)
    if not family.listed:
        report_unreached(model, model_dir, make_autocast(config, device))
    if not full:
        train_whole(model, config.lora.modules_to_save)
    elif config.freezes_full(resident):
        model.requires_grad_(False)
    return model


def load_base(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    resident: int | None,
    *,
    nf4: torch.dtype | None = None,
    classes: int | None = None,
    reads_rows: bool,
) -> nn.Module:
    """Return a model as its files have it, of a class of transformers, without dropout.

    Args:
        resident: as of `load_model`.
        nf4: the dtype of products whose weights are quantised to NF4; None quantises nothing.
        classes: of a classifier; None: a language model.
        reads_rows: where layers are read at each use, so are the rows of the embedding.

    Raises:
        InputError: the weights are incomplete or cannot be loaded.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # It reports on stderr that an optional kernel package is missing.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    settings: dict[str, Any] = {}
    taken = None
    if resident is not None or (nf4 is not None and read_shape(model_dir).experts > 1):
        streamed = streamed_layers(read_shape(model_dir).layers, resident)
        taken = PublishedWeights(
            model_dir,
            dtype,
            device,
            nf4,
            streamed,
            reads_rows=reads_rows,
            reads_head=resident == HEAD_STREAMED and classes is None,
        )
    if nf4 is not None:
        settings["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=nf4,
            bnb_4bit_use_double_quant=False,
            llm_int8_skip_modules=list(_HEADS),
        )
    family = find_family(stored := read_config(model_dir), str(model_dir))
    unlisted = None if family.listed else find_class(stored, model_dir)
    with report_load_errors(model_dir, device, nf4=nf4 is not None):
        tree = transformers.AutoConfig.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
        tree = tree.get_text_config()
        if family.inside:
            settings["key_mapping"] = LANGUAGE_KEYS
            tree.tie_word_embeddings = is_tied(stored, family, read_headers(model_dir))
        for key in filter(is_dropout, vars(tree)):
            setattr(tree, key, 0.0)
        if classes is not None:
            tree.num_labels = classes
        auto: Any = (
            transformers.AutoModelForCausalLM
            if classes is None
            else transformers.AutoModelForSequenceClassification
        )
        kind = unlisted or auto._model_mapping[type(tree)]
        model, found = (taken.make_class(kind) if taken else kind).from_pretrained(
            model_dir,
            config=tree,
            output_loading_info=True,
            dtype=dtype,
            device_map={"": device},
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **settings,
        )
        if (nf4 is not None or taken is not None) and device.type == "cpu":
            # One tensor that is still of the file, such as a norm, would keep in memory what was
            # read of it for all others (`loader.py`); and a file that is cut must not fault.
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        if taken is not None:
            taken.fill_model(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # a padding token that texts contain is trained too
    _check_complete(found, model_dir, classes, set() if taken is None else taken.names)
    if tree.tie_word_embeddings:
        model.tie_weights()  # transformers does not if the file has a head of its own
    return model


def _say_unknown(model_dir: Path, loaded: Any) -> None:
    """Log the keys of config.json that the class does not know (F-IN-001).

    Args:
        loaded: the class's object, in which such keys are attributes all the same.
    """
    tree = text_config(read_config(model_dir))
    known = frozenset(type(loaded)().to_dict()) | {key for key in tree if key not in vars(loaded)}
    used = (known | CONFIG_KEYS.used) - CONFIG_KEYS.harmless
    unknown = UnknownKeys(replace(CONFIG_KEYS, used=used, refused={}))
    unknown.add(tree)
    if (line := unknown.report()) is not None:
        log.warning("%s", line)


def _check_complete(
    found: Mapping[str, Any], model_dir: Path, classes: int | None, taken: Collection[str]
) -> None:
    """Refuse weights that transformers would draw at random or leave out.

    Args:
        taken: parameters that the model does not have from transformers.

    Raises:
        InputError: names the first tensor.
    """
    if missing := sorted(name for name in found["missing_keys"] if not name.startswith("score.")):
        raise InputError(f"{model_dir}: {missing[0]} is missing from the weights")
    heads = _HEADS if classes is not None else ("score",)
    family = find_family(read_config(model_dir), str(model_dir))
    left_out = {name for name in read_headers(model_dir) if is_ignored(name, family)}
    unexpected = found["unexpected_keys"] - left_out - set(taken)
    if other := sorted(name for name in unexpected if not name.startswith(heads)):
        raise InputError(f"{model_dir}: {other[0]} is stored, and no part of the model")
