"""generation_config.json of a model that learned to chat: text ends where a turn ends.

A base model's file names the end of a text alone. transformers and servers stop at nothing else, so
that the model would go on with the next turn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.model.families import text_config
from trainer.model.hf_export import GENERATION_FILE, MODEL_CONFIG
from trainer.model.safetensors_headers import read_object
from trainer.system.errors import InputError

_OF_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def generation_file(model_dir: Path, tokenizer_dir: Path | None = None) -> dict[str, bytes]:
    """Return the file by its name if it differs from the model's own, else nothing.

    Args:
        tokenizer_dir: whose chat template counts; None: the model's.
    """
    from trainer.data.encoder import Encoder  # not to copy weights

    try:
        stops = Encoder(tokenizer_dir or model_dir, model_dir=model_dir).stops
    except InputError:  # a folder without a tokenizer; what needs one says so
        return {}
    model = text_config(read_object(model_dir / MODEL_CONFIG, optional=True))
    tree: dict[str, Any] = read_object(model_dir / GENERATION_FILE, optional=True)
    named = tree or {key: model[key] for key in _OF_TOKENS if model.get(key) is not None}
    ends = named.get("eos_token_id", model.get("eos_token_id"))
    known = [each for each in (ends if isinstance(ends, list) else [ends]) if each is not None]
    if stops.issubset(known):
        return {}
    tree = {**named, "eos_token_id": [*known, *sorted(stops.difference(known))]}
    return {GENERATION_FILE: (json.dumps(tree, indent=2) + "\n").encode()}
