"""Layers and embedding of a family that the table does not list, by the names in its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from trainer.model.header_layout import read_stored
from trainer.model.safetensors_headers import read_headers
from trainer.model.tensor_names import stored_family
from trainer.system.errors import InputError

_LAYERS = ("backbone.layers.0.mixer.in_proj", "backbone.layers.1.mixer.in_proj")
_TABLE = "backbone.embeddings"


def write(folder: Path, names: tuple[str, ...], **changes: Any) -> Path:
    """Write a model of matrices `[8, 4]` under these names."""
    tree = {"model_type": "newer", "vocab_size": 8, "num_hidden_layers": 2, **changes}
    (folder / "config.json").write_text(json.dumps(tree))
    weights = {f"{name}.weight": np.zeros((8, 4), dtype=np.float32) for name in names}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("prefix", "changes"),
    [
        ("backbone", {}),
        ("model.decoder", {"num_hidden_layers": None, "decoder_layers": 2}),
        ("roberta.encoder", {"num_hidden_layers": None, "layers_block_type": ["moe", "mlp"]}),
    ],
)
def test_layers_and_embedding_are_found(
    tmp_path: Path, prefix: str, changes: dict[str, Any]
) -> None:
    names = tuple(name.replace("backbone", prefix) for name in (*_LAYERS, _TABLE))
    folder = write(tmp_path, (*names, "lm_head"), **changes)
    stored = read_stored(folder, read_headers(folder))
    backbone = prefix.partition(".")[0]
    assert stored.layer_module(1) == f"{prefix}.layers.1"
    assert list(stored.iter_linears(1)) == [("mixer.in_proj", 4, 8)]
    assert stored.family.backbone == backbone
    table = f"{backbone}.{stored.family.embedding}"
    assert table == f"{prefix}.embeddings"
    assert {*stored.rest} == {"lm_head.weight", f"{table}.weight"}


@pytest.mark.parametrize(
    ("names", "changes", "reason"),
    [
        (_LAYERS, {"num_hidden_layers": "2"}, "num_hidden_layers must be a positive integer"),
        (_LAYERS, {"num_hidden_layers": None}, "must be a positive integer, got None"),
        (_LAYERS, {"num_hidden_layers": 3}, "3 layers lie in no single list .*in backbone.layers"),
        ((_TABLE,), {}, "2 layers lie in no single list of modules, but in none"),
        (
            (*_LAYERS, "backbone.others.0.a", "backbone.others.1.a"),
            {},
            "but in backbone.layers, backbone.others$",
        ),
    ],
)
def test_what_is_not_one_list_is_refused(
    tmp_path: Path, names: tuple[str, ...], changes: dict[str, Any], reason: str
) -> None:
    folder = write(tmp_path, names, **changes)
    with pytest.raises(InputError, match=reason):
        read_stored(folder, read_headers(folder))


def test_of_two_matrices_with_a_row_for_each_token_none_is_the_embedding(tmp_path: Path) -> None:
    folder = write(tmp_path, (*_LAYERS, _TABLE, "backbone.other"))
    assert stored_family(folder, read_headers(folder)).embedding == "embed_tokens"
