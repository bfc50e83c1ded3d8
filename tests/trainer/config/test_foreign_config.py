"""Configs of other trainers become ours: each key is taken, harmless, or left by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli import run
from trainer.config.foreign_config import PROGRAMS, Program, convert_config, detect_program
from trainer.config.run import load_config
from trainer.system.errors import InputError

AXOLOTL = """
base_model: models/llama
datasets: [{path: train.jsonl, type: alpaca}]
val_set_size: 0.05
output_dir: ./out
adapter: qlora
load_in_4bit: true
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
lora_modules_to_save: [embed_tokens, lm_head]
sequence_len: 1024
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
warmup_steps: 10
weight_decay: 0.0
saves_per_epoch: 1
deepspeed: null
special_tokens: {pad_token: <pad>}
flash_attn: true
"""
FACTORY = """
model_name_or_path: models/qwen
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
additional_target: embed_tokens,lm_head
dataset: identity,alpaca_en_demo
template: qwen3
cutoff_len: 2048
max_samples: 1000
output_dir: saves/qwen
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: linear
warmup_ratio: 0.1
max_steps: 500
bf16: true
"""


def taken(text: str, folder: Path = Path()) -> tuple[Program, dict[str, Any], dict[str, str]]:
    tree = yaml.safe_load(text)
    program = detect_program(tree)
    assert program is not None
    found = convert_config(program, tree, folder)
    return program, found.settings, found.skipped


def test_axolotl() -> None:
    program, settings, left = taken(AXOLOTL)
    assert program.name == "axolotl"
    config = load_config(None, settings)
    assert (config.task, config.method, config.model.quantization) == ("causal-lm", "lora", "nf4")
    assert (config.model.path, config.data.train, config.output) == (
        "models/llama",
        "train.jsonl",
        "./out",
    )
    assert (config.lora.lora_rank, config.lora.lora_alpha) == (8, 16)
    assert config.lora.target_modules == ("q_proj", "v_proj")
    assert config.lora.modules_to_save == ("embed_tokens", "lm_head")
    assert (config.data.max_seq_len, config.data.validation_fraction) == (1024, 0.05)
    training = config.training
    assert (training.batch_size, training.micro_batch_size, training.epochs) == (8, "auto", 3)
    assert (training.pack, training.gradient_checkpointing) == (True, "on")
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (2e-4, 0.0)
    assert list(left) == ["lora_dropout", "warmup_steps", "special_tokens", "flash_attn"]
    assert left["flash_attn"] == "is not known"


@pytest.mark.parametrize("method", ["stage: sft", "finetuning_type: full"])
def test_what_a_run_would_not_use_is_not_taken(method: str) -> None:
    """Programs keep keys of what is off; a run config that has them is refused."""
    lines = (method, "lora_rank: 4", "pref_beta: 0.2", "eval_steps: 7")
    text = "\n".join(("model_name_or_path: m", *lines, "lr_scheduler_type: constant"))
    config = load_config(None, taken(text)[1] | {"data.train": "d.jsonl"})
    assert (config.dpo.beta, config.training.evaluate_every) == (0.1, 0)
    kept = load_config(None, taken(f"{text}\nval_size: 0.1")[1] | {"data.train": "d.jsonl"})
    assert kept.training.evaluate_every == 7


def test_llama_factory() -> None:
    program, settings, left = taken(FACTORY)
    assert program.name == "LLaMA-Factory"
    config = load_config(None, settings | {"data.train": "d.jsonl"})
    assert (config.method, config.lora.lora_rank, config.data.max_seq_len) == ("lora", 8, 2048)
    assert config.lora.modules_to_save == ("embed_tokens", "lm_head")
    assert (config.training.batch_size, config.training.epochs) == (8, 3)
    assert (config.training.max_steps, config.training.precision) == (500, "bf16")
    assert (config.optimizer.scheduler, config.optimizer.final_ratio) == ("linear", 0)
    assert list(left) == ["dataset", "template", "max_samples"]


MAPPED = {"instruction": "q", "output": "a"}


@pytest.mark.parametrize(
    ("entry", "columns"),
    [
        ({}, {}),
        ({"columns": {"prompt": "q", "response": "a"}}, MAPPED),
        ({"columns": {"prompt": "instruction", "response": "output"}}, {}),
        ({"formatting": "sharegpt"}, {}),
        (
            {"formatting": "sharegpt", "columns": {"messages": "chat", "system": "rules"}},
            {"conversations": "chat", "system": "rules"},
        ),
        (
            {
                "formatting": "sharegpt",
                "columns": {"messages": "messages"},
                "tags": {
                    "role_tag": "role",
                    "content_tag": "content",
                    "user_tag": "user",
                    "assistant_tag": "assistant",
                },
            },
            {},
        ),
        (
            {"formatting": "sharegpt", "tags": {"role_tag": "who"}},
            "turns tagged who, value, human, gpt are not read",
        ),
        ({"columns": {"prompt": "q", "images": "i"}}, "has a column of images, which is not read"),
        ({"ranking": True}, "'ranking' is of preference training"),
        ({"ranking": False}, {}),
        ({"hf_hub_url": "a/b"}, "'hf_hub_url' is not on this machine"),
        ({"num_samples": 3}, "'num_samples' takes a part of the data"),
        ({"colour": 1}, "'colour' is not known"),
        ({"columns": 3}, "dataset_info.json: is not described there"),
        ({"formatting": "sharegpt", "tags": "openai"}, "dataset_info.json: is not described there"),
        ({"file_name": "gone.json"}, "there is no"),
    ],
)
@pytest.mark.parametrize("home", ["data", "."])
def test_a_data_set_that_dataset_info_describes(
    tmp_path: Path, entry: dict[str, Any], columns: dict[str, str] | str, home: str
) -> None:
    """Its file and columns are taken; what is read in another way is named."""
    folder = tmp_path / home
    folder.mkdir(exist_ok=True)
    (folder / "mine.json").write_text("[]")
    info = {"alpaca_en_demo": {"file_name": "mine.json", **entry}}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent="\t"))
    text = FACTORY.replace("identity,", "")
    _, settings, left = taken(text, tmp_path)
    if isinstance(columns, str):
        assert columns in left["dataset"]
        assert "data.train" not in settings
        return
    assert "dataset" not in left
    config = load_config(None, settings)
    assert (config.data.train, config.data.columns) == (str(folder / "mine.json"), columns)
    _, settings, _ = taken(f"{text}eval_dataset: alpaca_en_demo\n", tmp_path)
    assert settings["data.validation"] == settings["data.train"]


def test_a_data_set_for_pretraining_is_text(tmp_path: Path) -> None:
    info = {
        "a": {"file_name": "a.json", "columns": {"prompt": "body"}},
        "b": {"file_name": "a.json"},
    }
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    for name, column in (("a", "body"), ("b", "instruction")):
        tree = f"model_name_or_path: m\nstage: pt\ndataset: {name}\n"
        assert taken(tree, tmp_path)[1]["data.columns"] == {"text": column}
    _, settings, left = taken(f"{tree}eval_dataset: a\n", tmp_path)
    assert "has other columns" in left["eval_dataset"]
    assert "data.validation" not in settings
    (tmp_path / "dataset_info.json").write_text("[")
    assert "is not described there" in taken(tree, tmp_path)[2]["dataset"]


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("adapter: llama-adapter", "adapter"),
        ("load_in_8bit: true", "load_in_8bit"),
        ("lora_target_modules: [embed_tokens]", "lora_target_modules"),
        ("datasets: [{path: a}, {path: b}]", "datasets"),
        ("datasets: [{path: a, split: 'train[:10%]'}]", "datasets"),
        ("optimizer: lion_pytorch", "optimizer"),
        ("lr_scheduler: rex", "lr_scheduler"),
        ("val_set_size: 200", "val_set_size"),
        ("train_on_inputs: true", "train_on_inputs"),
        ("bf16: full", "bf16"),
        ("eval_steps: 0.2", "eval_steps"),
        ("micro_batch_size: auto", "micro_batch_size"),
        ("report_to: [wandb, swanlab]", "report_to"),
        ("report_to: {}", "report_to"),
    ],
)
def test_a_value_without_a_counterpart_is_left_by_its_name(lines: str, key: str) -> None:
    _, settings, left = taken(f"base_model: m\n{lines}\n")
    assert list(left) == [key]
    _, without, _ = taken("base_model: m\n")
    key_of_ours = {
        "micro_batch_size": {"training.batch_size"},
        "lr_scheduler": {"optimizer.scheduler", "optimizer.final_ratio"},
    }
    assert {key: without[key] for key in settings} == settings
    assert without.keys() - settings.keys() <= key_of_ours.get(key, set())


@pytest.mark.parametrize(
    ("given", "trackers"),
    [
        ("none", ()),
        ("[]", ()),
        ("all", ("tensorboard",)),
        ("wandb", ("wandb",)),
        ("[tensorboard, mlflow]", ("tensorboard", "mlflow")),
    ],
)
def test_trackers_are_those_of_report_to(given: str, trackers: tuple[str, ...]) -> None:
    for text in (AXOLOTL, FACTORY):
        _, settings, left = taken(f"{text}report_to: {given}\n")
        assert "report_to" not in left
        assert load_config(None, settings | {"data.train": "d.jsonl"}).tracking == trackers


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_key_of_a_table(program: Program) -> None:
    signs = dict.fromkeys(program.signatures[0], "m")
    for key in program.keys.refused:
        found = convert_config(program, signs | {key: True}, Path())
        assert key in found.skipped
        assert key not in convert_config(program, signs | {key: False}, Path()).skipped
    assert convert_config(program, signs | {"nope": 1}, Path()).skipped["nope"] == "is not known"
    assert not {
        key
        for key in program.keys.harmless
        if key in convert_config(program, {key: 1}, Path()).skipped
    }


def test_the_command_writes_a_config_and_lists_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ax.yml").write_text(AXOLOTL)
    with pytest.raises(InputError, match=r"ax\.yml: is a config of axolotl; .* --from ax\.yml"):
        load_config("ax.yml")
    assert run(["init", "--from", "ax.yml"]) == 0
    said = capsys.readouterr().out
    assert "not converted: lora_dropout: 0.05: adapters have no dropout" in said
    text = Path("run.yaml").read_text()
    assert "#   special_tokens: change the vocabulary" in text
    assert load_config("run.yaml") == load_config(None, taken(AXOLOTL)[1])
    assert run(["init", "other.yaml", "--from", "ax.yml", "--model", "mine"]) == 0
    assert load_config("other.yaml").model.path == "mine"
    Path("lf.yml").write_text(FACTORY)
    assert run(["init", "lf.yaml", "--from", "lf.yml"]) == 0
    assert load_config("lf.yaml").data.train == "train.jsonl"
    capsys.readouterr()
    assert run(["init", "more.yaml", "--from", "run.yaml"]) == 2
    assert "run.yaml: not a config of axolotl or LLaMA-Factory" in capsys.readouterr().err
    assert not Path("more.yaml").exists()


@pytest.mark.parametrize(
    "text",
    [
        FACTORY.replace("stage: sft", "stage: dpo\npref_beta: 0.3\npref_loss: sigmoid"),
        f"{AXOLOTL}rl: dpo\nrl_beta: 0.3\n".replace("sample_packing: true", ""),
    ],
)
def test_preferences(text: str) -> None:
    _, settings, left = taken(text)
    assert (
        "trains a table whole"
        in left[next(key for key in left if "target" in key or "save" in key)]
    )
    config = load_config(None, settings | {"data.train": "d.jsonl"})
    assert (config.task, config.dpo.beta) == ("dpo", 0.3)
    assert not {"rl", "stage", "pref_beta", "rl_beta", "pref_loss"} & left.keys()
    other = text.replace("rl: dpo", "rl: kto").replace("stage: dpo", "stage: kto")
    assert {"rl", "stage"} & taken(other)[2].keys()


@pytest.mark.parametrize(
    ("path", "train"),
    [
        ("mhenrichsen/alpaca_2k_test", "hf://datasets/mhenrichsen/alpaca_2k_test"),
        ("data/train.jsonl", "data/train.jsonl"),
        ("data/here", "data/here"),
        ("./data/other", "./data/other"),
        ("train", "train"),
        ("hf://datasets/a/b", "hf://datasets/a/b"),
    ],
)
def test_a_path_of_axolotl_is_of_the_hub_unless_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, train: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data/here").mkdir(parents=True)
    for datasets in (f"[{{path: {path}, type: alpaca}}]", f"[{path}]", path):
        assert taken(f"base_model: m\ndatasets: {datasets}\n")[1]["data.train"] == train


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        ("lora_target_modules: all-linear", {}),
        ("lora_target_modules: [all-linear]", {}),
        ("lora_target_linear: true\nlora_target_modules: [q_proj]", {}),
        ("lora_target_modules: [qkv_proj]", {"lora.target_modules": ["qkv_proj"]}),
        ("lora_target_modules: 'q_proj, v_proj'", {"lora.target_modules": ["q_proj", "v_proj"]}),
        (
            "lora_target_parameters: mlp.experts.down_proj",
            {"lora.target_parameters": ["mlp.experts.down_proj"]},
        ),
        ("load_in_4bit: false\nload_in_8bit: false", {}),
    ],
)
def test_what_gets_adapters(lines: str, settings: dict[str, Any]) -> None:
    base = "base_model: m\nadapter: lora\n"
    _, found, left = taken(base + lines)
    assert not left
    assert found == taken(base)[1] | settings


def test_a_config_is_written_even_if_it_is_refused_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ax.yml").write_text(
        "base_model: m\nadapter: lora\nrl: dpo\nsample_packing: true\nlearning_rate: 1e-4\n"
    )
    assert run(["init", "--from", "ax.yml"]) == 0
    reason = "change this first: config: training.pack needs task causal-lm"
    assert reason in capsys.readouterr().out
    text = Path("run.yaml").read_text()
    assert reason in text
    assert "# Not set there, so axolotl's defaults apply: weight_decay 0.0, " in text
    with pytest.raises(InputError, match=r"training\.pack needs task causal-lm"):
        load_config("run.yaml")
    Path("run.yaml").write_text(text.replace("pack: true", "pack: false"))
    assert load_config("run.yaml").task == "dpo"


@pytest.mark.parametrize("epochs", ["0.5", "0", "x"])
def test_parts_of_an_epoch_are_left(epochs: str) -> None:
    _, settings, left = taken(f"base_model: m\nnum_epochs: {epochs}\n")
    assert "not a whole number of epochs; set training.max_steps" in left["num_epochs"]
    assert "training.epochs" not in settings
