"""What data and model say of the run that is meant."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.small_model import SIZES, write_data, write_hollow_weights, write_model
from trainer.config.run import RunConfig, load_config
from trainer.init_model import init_model
from trainer.planning.defaults import derive_settings, format_table, provisional_settings
from trainer.planning.workers import Room
from trainer.system.errors import InputError

GIB = 1 << 30


def test_what_cannot_be_read_is_left_to_its_reader(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        assert follow(None, path) == {}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("defaults")
    write_model(folder / "model", write_data(folder / "labels.jsonl", 400))
    return folder


def follow(model: Path | None, data: Path, *rooms: Room, **given: object) -> dict[str, Any]:
    """Return what `derive_settings` settles beside the settings that are `given`."""
    paths = {"model.path": str(model), "data.train": str(data)}
    flags = {key.replace("__", "."): value for key, value in given.items()}
    config = load_config(None, paths | provisional_settings(flags) | flags)
    return {part.key: part.value for part in derive_settings(config, flags, model, rooms)}


def test_a_classifier(home: Path) -> None:
    assert follow(home / "model", home / "labels.jsonl", Room(GIB, "cpu")) == {
        "task": "classify",
        "num_classes": 3,
        "data.validation_fraction": 0.1,
        "data.max_seq_len": 64,
        "training.batch_size": 8,
        "training.epochs": 3,
        "training.evaluate_every": 45,
        "lora.lora_rank": 16,
        "lora.lora_alpha": 32,
        "optimizer.learning_rate": 1e-3,
    }


def test_what_was_given_is_left_alone(home: Path) -> None:
    given: dict[str, Any] = {
        "task": "causal-lm",
        "data__validation": "held-out.jsonl",
        "data__max_seq_len": 48,
        "training__batch_size": 5,
        "training__max_steps": 7,
        "method": "full",
    }
    data = home / "input.jsonl"
    data.write_text("".join(f'{{"input": "echo {n}"}}\n' for n in range(400)))
    found = follow(home / "model", data, **given)
    assert not {key.replace("__", ".") for key in given} & found.keys()
    assert not {"data.validation_fraction", "num_classes", "training.epochs"} & found.keys()
    assert not {key for key in found if key.startswith("lora.")}
    assert found["optimizer.learning_rate"] < 1e-3


def test_classes_alone_make_a_classifier(home: Path) -> None:
    found = follow(home / "model", home / "labels.jsonl", num_classes=7)
    assert (found["task"], "num_classes" in found) == ("classify", False)
    paths = {"model.path": str(home / "model"), "data.train": str(home / "labels.jsonl")}
    config = load_config(None, paths | {"num_classes": 7})
    why = {
        part.key: part.why
        for part in derive_settings(config, {"num_classes": 7}, home / "model", ())
    }
    assert why["task"] == "num_classes is given"


@pytest.mark.parametrize("order", [(), ("spam", "ham"), ("ham", "x", "spam")])
def test_words_are_classes_with_names(home: Path, tmp_path: Path, order: tuple[str, ...]) -> None:
    data = tmp_path / "words.jsonl"
    lines = [json.dumps({"text": f"echo {n}", "label": ("spam", "ham")[n % 2]}) for n in range(40)]
    data.write_text("\n".join(lines))
    model = home / "model"
    if order:
        model = shutil.copytree(model, tmp_path / "model")
        tree = json.loads((model / "config.json").read_bytes())
        tree |= {"id2label": {str(n): name for n, name in enumerate(order)}}
        (model / "config.json").write_text(json.dumps(tree))
    names = order or ("ham", "spam")
    found = follow(model, data)
    assert (found["task"], found["num_classes"]) == ("classify", len(names))
    assert found["class_names"] == names
    assert follow(None, data).keys() & {"num_classes", "class_names"} == {"num_classes"}
    if len(names) == 2:
        given = follow(model, data, num_classes=2)
        assert given["class_names"] == names
    with pytest.raises(InputError, match=f"num_classes is 7; set it to {len(names)}"):
        follow(model, data, num_classes=7)
    assert "class_names" not in follow(model, data, class_names=["a", "ham", "spam"])


def test_a_task_that_is_given_needs_no_labels_on_all_lines(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "mixed.jsonl"
    data.write_text('{"text": "a", "label": 1}\n{"text": "b"}\n' * 20)
    with pytest.raises(InputError, match="none in 20 lines"):
        follow(home / "model", data)
    assert "task" not in follow(home / "model", data, task="causal-lm")


def test_no_validation_is_a_choice_too(home: Path) -> None:
    paths = {"model.path": "m", "data.train": str(home / "labels.jsonl"), "num_classes": 3}
    found = derive_settings(load_config(None, paths), {"data.validation"}, home / "model", ())
    assert "data.validation_fraction" not in {part.key for part in found}


@pytest.mark.parametrize(("words", "length"), [(3, 64), (200, 256), (600, 512)])
def test_the_length_is_the_datas_as_far_as_the_model_knows(
    tmp_path: Path, words: int, length: int
) -> None:
    data = tmp_path / "text.jsonl"
    text = json.dumps({"text": " ".join(["word"] * words)})
    data.write_text("\n".join([text] * 50))
    sizes = replace(SIZES, max_position_embeddings=512)
    model = init_model(data, tmp_path / "model", sizes, 0)
    assert follow(model, data)["data.max_seq_len"] == length


def test_one_long_sample_of_many_is_cut(tmp_path: Path) -> None:
    data = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": "word " * (300 if n == 7 else 20)}) for n in range(300)]
    data.write_text("\n".join(lines))
    model = init_model(data, tmp_path / "model", SIZES, 0)
    assert follow(model, data)["data.max_seq_len"] == 64


def test_few_samples_are_all_trained_on(home: Path, tmp_path: Path) -> None:
    found = follow(home / "model", write_data(tmp_path / "data.jsonl", 9))
    assert found["data.validation_fraction"] == 0.0
    assert "training.evaluate_every" not in found


def big_model(folder: Path) -> Path:
    """Write a model of Qwen3-4B's shape; its file has a size, and no bytes on the disk."""
    write_model(folder, write_data(folder.with_suffix(".jsonl")))
    path = folder / "config.json"
    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    sizes |= {"vocab_size": 151936, "max_position_embeddings": 40960}
    path.write_text(json.dumps(json.loads(path.read_bytes()) | sizes))
    return write_hollow_weights(folder)


@pytest.mark.parametrize(
    ("rooms", "dtype", "quantization"),
    [
        ((), None, None),
        ((Room(80 * GIB, "cuda"),), None, None),
        ((Room(16 * GIB, "cuda"),), "bfloat16", None),
        ((Room(80 * GIB, "cuda"), Room(8 * GIB, "cuda")), "bfloat16", "nf4"),
        ((Room(300 * GIB, "cpu"),), None, None),
    ],
)
def test_the_weakest_device_decides_how_the_base_is_stored(
    tmp_path: Path, rooms: tuple[Room, ...], dtype: str | None, quantization: str | None
) -> None:
    model = big_model(tmp_path / "model")
    found = follow(model, tmp_path / "model.jsonl", *rooms)
    assert (found.get("model.dtype"), found.get("model.quantization")) == (dtype, quantization)
    assert (found["lora.lora_rank"], found["lora.lora_alpha"]) == (8, 16)
    given = follow(model, tmp_path / "model.jsonl", *rooms, model__quantization="none")
    assert "model.quantization" not in given


def test_a_device_too_small_for_the_length_gets_a_shorter_one(tmp_path: Path) -> None:
    model = big_model(tmp_path / "model")
    data = tmp_path / "long.jsonl"
    data.write_text("\n".join([json.dumps({"text": "word " * 3000})] * 20))
    lengths = [
        follow(model, data, Room(size * GIB // 2, "cuda"))["data.max_seq_len"] for size in (160, 8)
    ]
    assert lengths[0] > lengths[1] >= 128


def test_a_share_of_a_long_file_is_measured(home: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl", 30_000)
    found = follow(home / "model", data)
    assert (found["data.max_seq_len"], found["training.batch_size"]) == (64, 32)
    assert found["training.epochs"] == 2


def test_what_is_settled_holds_and_is_shown(home: Path) -> None:
    paths = {"model.path": str(home / "model"), "data.train": str(home / "labels.jsonl")}
    config = load_config(None, paths | provisional_settings({}))
    found = derive_settings(config, paths, home / "model", ())
    settled = config.with_settings({part.key: part.value for part in found})
    assert (settled.task, settled.num_classes, settled.lora.lora_rank) == ("classify", 3, 16)
    assert load_config(None, settled.model_dump(mode="json")) == settled
    heading, *lines = format_table(found, "out")
    assert heading == "settings by data and model, all of them in out/run.yaml:"
    assert len(lines) == len(found)
    assert lines[1].split(maxsplit=2) == ["num_classes", "3", "every label is below 3"]
    assert format_table([], "out") == []


@pytest.mark.parametrize(
    ("data", "given"),
    [
        ("labels", {"training.evaluate_every": 3, "training.early_stopping_patience": 2}),
        ("labels", {"training.label_smoothing": 0.1, "training.class_weights": [1, 2, 3]}),
    ],
)
def test_a_setting_may_be_of_what_the_data_decides(
    home: Path, data: str, given: dict[str, Any]
) -> None:
    """Held-out data, or a task, that only `derive_settings` knows."""
    given = given | {"model.path": str(home / "model"), "data.train": str(home / f"{data}.jsonl")}
    config = load_config(None, provisional_settings(given) | given)
    found = derive_settings(config, given, home / "model", ())
    settled = config.with_settings({part.key: part.value for part in found})
    assert settled.task == "classify"
    assert settled.data.validation_fraction == 0.1


def test_more_classes_than_there_may_be(home: Path) -> None:
    config = RunConfig.model_validate(
        {"task": "causal-lm", "model": {"path": "m"}, "data": {"train": "d"}}
    )
    with pytest.raises(InputError, match="num_classes: input should be less than or equal to 100"):
        config.with_settings({"task": "classify", "num_classes": 4000})
