"""A student from nothing is an ordinary Hugging Face model with the vocabulary of its tokenizer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.data.documents import Documents
from trainer.distill.student.from_scratch import fresh_config, fresh_model, list_shapes
from trainer.distill.tokenizer.trim import trim_to_size
from trainer.distill.tokenizer.vocabulary import Vocabulary
from trainer.model.architecture import Architecture, parse_architecture
from trainer.system.errors import InputError
from trainer.system.storage.atomic_folder import verify_folder

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 999_999,
    "max_position_embeddings": 128,
    "bos_token_id": 777,
    "eos_token_id": 778,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-untied-biased": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-untied": {"model_type": "qwen3", "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def teacher(model: Path) -> Path:
    return model


@pytest.fixture(scope="module")
def tokenizer(teacher: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trimmed") / "tokenizer"
    trim_to_size(teacher, Documents([data]), 290, output)
    return output


def write_shape(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**SMALL, **changes}))
    return path


def parameters(model: Architecture) -> int:
    layer = sum(math.prod(shape) for _, shape in model.layer_tensors())
    embedding = model.vocab_size * model.hidden_size
    return model.num_layers * layer + embedding * (1 if model.tied else 2) + model.hidden_size


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_loads_it(name: str, tokenizer: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    shape = write_shape(tmp_path / "config.json", **SHAPES[name])
    folder = fresh_model(shape, tokenizer, tmp_path / "student")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )  # pyright: ignore[reportGeneralTypeIssues]  # the stubs miss output_loading_info
    assert not any(report.values()), report
    assert loaded.config.vocab_size == loaded.lm_head.out_features == 290
    config = json.loads((folder / "config.json").read_bytes())
    assert sum(p.numel() for p in loaded.parameters()) == parameters(parse_architecture(config, ""))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == 290
    assert loaded.config.eos_token_id == theirs.eos_token_id
    assert loaded.config.bos_token_id is None
    assert loaded.generation_config.pad_token_id == theirs.pad_token_id
    ids = torch.tensor([theirs("mkdir -p build && ls").input_ids])
    loss = float(loaded(input_ids=ids, labels=ids).loss.detach())
    assert loss == pytest.approx(math.log(290), rel=0.05)  # untrained: guesses among all tokens


def test_its_tokenizer_is_still_known_to_the_teacher(
    teacher: Path, tokenizer: Path, tmp_path: Path
) -> None:
    shape = write_shape(tmp_path / "config.json", model_type="llama")
    folder = fresh_model(shape, tokenizer, tmp_path / "student")
    ours, theirs = Vocabulary.load_map(folder, teacher), Vocabulary.load_map(tokenizer, teacher)
    assert np.array_equal(ours.teacher_ids, theirs.teacher_ids)
    assert verify_folder(folder).keys() > {"model.safetensors", "vocabulary.json", "tokenizer.json"}


def test_the_seed_decides_the_bytes(tokenizer: Path, tmp_path: Path) -> None:
    shape = write_shape(tmp_path / "config.json", model_type="qwen3")
    first, second, other = (
        (fresh_model(shape, tokenizer, tmp_path / name, seed) / "model.safetensors").read_bytes()
        for name, seed in (("first", 3), ("second", 3), ("other", 4))
    )
    assert first == second != other


def test_albor_as_published(tokenizer: Path, tmp_path: Path) -> None:
    """Against paiml/albor: configs/train/pretrain-350m.yaml and docs of albor-base-350m."""
    config = json.loads(list_shapes()["albor-350m"].read_bytes())
    model = parse_architecture(config, "")
    assert model == Architecture(
        model_type="llama",
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=24,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=32768,
        tied=True,
        biased=frozenset(),
        normalised_heads=False,
    )
    assert config["max_position_embeddings"] == 2048
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"]["rope_theta"] == 10000
    assert parameters(model) == 398_509_056  # "398.5M"
    assert 2 + model.num_layers * len(list(model.layer_tensors())) == 218  # "218 tensors"


def test_transformers_counts_as_many_parameters_in_the_shipped_shapes() -> None:
    import torch
    import transformers

    assert list_shapes()
    for path in list_shapes().values():
        tree = json.loads(path.read_bytes())
        config = transformers.AutoConfig.for_model(**tree)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        expected = parameters(parse_architecture(tree, str(path)))
        assert sum(p.numel() for p in model.parameters()) == expected


def test_a_shipped_shape_by_its_name(tokenizer: Path) -> None:
    """Its weights would be 1.5 GB: `fresh_model` draws those of what is read here."""
    model = parse_architecture(fresh_config("albor-350m", tokenizer), "")
    assert parameters(model) == 398_509_056 - (32768 - 290) * 1024


def test_what_cannot_be_a_student(teacher: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    for shape, message in (
        ("albor-9b", r"albor-9b: no such config\.json .* \(shapes: albor-350m\)"),
        (tmp_path / "list.json", "expected an object"),
        (tmp_path / "broken.json", "not JSON"),
        (
            write_shape(tmp_path / "gpt2.json", model_type="gpt2"),
            "layers of gpt2 are computed by transformers' code alone",
        ),
        (write_shape(tmp_path / "no.json", model_type="llama", hidden_size=0), "hidden_size must"),
    ):
        with pytest.raises(InputError, match=message):
            fresh_model(shape, tokenizer, tmp_path / "student")
    with pytest.raises(InputError, match="exists already"):
        fresh_model("albor-350m", tokenizer, teacher)
    assert not (tmp_path / "student").exists()
