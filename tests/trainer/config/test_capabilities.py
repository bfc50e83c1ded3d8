"""Every setting has a place in the table of capabilities, and each refusal says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.capabilities import (
    CONDITIONS,
    ENGINE_TITLES,
    NEEDS_TORCH,
    REFUSALS,
    SUPPORTED_BY_ALL,
    Engine,
    check_backend,
    explain_refusal,
)
from trainer.config.run import SCRIPT, RunConfig, load_config, setting_keys
from trainer.system.errors import InputError

DISTILLS = {"task": "causal-lm", "num_classes": None, "data.validation_fraction": 0.0}
PARALLEL = {"parallel.tensor": 2}
VALUES: dict[str, Any] = {
    "exchange.topology": "ring",
    "exchange.codec": "int8",
    "exchange.schedule": "rounds",
    "exchange.hash_every": 7,
    "exchange.join_deadline": 7.0,
    "exchange.split": [1, 1],
    "exchange.heartbeat": 0.25,
    "exchange.lost_after": 9.0,
    "exchange.step_deadline": 9.0,
    "exchange.alarm_factor": 3.0,
    "exchange.outliers": "halt",
    "exchange.shared_memory": False,
    "checkpoint.sharded": True,
    "parallel.data": "fsdp",
    "parallel.tensor": 2,
    "parallel.pipeline.stages": 2,
    "distillation": {"alpha": 0.5},
    "distillation.on_policy": {"prompts": "prompts.jsonl"},
    "distillation.divergence": "reverse",
    "lora.freeze_a": True,
    "lora.layers_to_transform": [0],
    "lora.use_dora": True,
    "lora.modules_to_save": ["lm_head"],
    "model.path": "elsewhere",
    "model.adapter": "adapter",
    "model.resident": 4,
    "training.label_smoothing": 0.1,
    "training.class_weights": [1, 2],
    "training.sample_prompts": "prompts.jsonl",
    "task": "dpo",
    "method": "lora",
    "num_classes": 2,
    "class_names": ["a", "b"],
    "dpo.beta": 0.2,
    "model.dtype": "bfloat16",
    "model.quantization": "nf4",
    "data.train": "elsewhere.jsonl",
    "data.validation": "held_out.jsonl",
    "data.validation_fraction": 0.1,
    "data.max_seq_len": 7,
    "data.lost_text": "accept",
    "data.date": "2026-01-31",
    "data.columns": {"input": "body"},
    "lora.lora_rank": 2,
    "lora.lora_alpha": 2,
    "lora.target_modules": ["q_proj"],
    "lora.target_parameters": ["experts"],
    "lora.use_rslora": True,
    "training.pack": True,
    "training.precision": "fp16",
    "training.gradient_checkpointing": "on",
    "training.sample_every": 7,
    "training.sample_tokens": 7,
}
"""A value of each refused setting."""
CASES = [(row.setting, engine) for row in REFUSALS for engine in row.engines]


CAUSAL: dict[str, Any] = {"task": "causal-lm", "num_classes": None}
ANSWERS = DISTILLS | {"distillation.on_policy.prompts": "prompts.jsonl"}
CONTEXTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exchange.schedule rounds": ({}, {"exchange.schedule": "rounds"}),
    "method lora": ({"method": "full"}, {}),
    "task dpo": ({}, {"task": "dpo", "num_classes": None}),
    "task classify": (CAUSAL, {"num_classes": 2}),
    "training.sample_prompts": (CAUSAL, CAUSAL | {"training.sample_prompts": "prompts.jsonl"}),
    "data.validation or data.validation_fraction": ({"data.validation": None}, {}),
    "optimizer.scheduler linear, cosine or wsd": ({"optimizer.scheduler": "constant"}, {}),
    "parallel.pipeline.stages 2 or more": ({}, {"parallel.pipeline.stages": 2}),
    "distillation.alpha, alpha_final or on_policy": (
        DISTILLS | {"distillation.alpha": 0.0},
        DISTILLS,
    ),
    "distillation.on_policy.divergence jsd": (
        ANSWERS,
        ANSWERS | {"distillation.on_policy.divergence": "jsd"},
    ),
}
"""Settings with which those of a condition are not used, and are."""
USED = VALUES | {
    "exchange.inner_steps": 7,
    "exchange.rounds_after": 7,
    "exchange.outer_learning_rate": 0.5,
    "exchange.outer_momentum": 0.5,
    "exchange.flush_every": 7,
    "training.evaluate_every": 7,
    "optimizer.final_ratio": 0.5,
    "parallel.pipeline.schedule": "gpipe",
    "parallel.pipeline.microbatches": 8,
    "distillation.temperature": 2.0,
    "distillation.on_policy.beta": 0.2,
}


def script_with(setting: str) -> RunConfig:
    """Return a script's run with a setting, which the whole config's own check would refuse."""
    whole, value = load_config(None, {"task": SCRIPT}), VALUES[setting]
    *sections, name = setting.split(".")
    if not sections:
        return whole.model_copy(update={name: value})
    section = getattr(whole, sections[0]).model_copy(update={name: value})
    return whole.model_copy(update={sections[0]: section})


def config_with(setting: str, engine: Engine) -> RunConfig:
    """Return a run of one process or a star that sets a setting to a value that is refused."""
    if engine == "script":
        return script_with(setting)
    more: dict[str, Any] = {}
    if setting.startswith("distillation"):
        more = DISTILLS
    elif setting == "task":
        more = {"num_classes": None}
    elif setting == "training.sample_prompts":
        more = {"task": "causal-lm", "num_classes": None}
    elif setting == "training.class_weights":
        more = {"num_classes": 2}
    return load_config("quickstart", more | {setting: VALUES[setting]})


def test_every_setting_is_in_the_table_once() -> None:
    """A new setting is followed by all engines, or refused by some of them."""
    refused = {row.setting for row in REFUSALS}
    sections = {key.rpartition(".")[0] for key in setting_keys()}
    assert refused - sections | SUPPORTED_BY_ALL == {*setting_keys()}
    assert not refused & SUPPORTED_BY_ALL
    assert {*VALUES} == refused


@pytest.mark.parametrize(("setting", "engine"), CASES)
def test_a_refusal_is_one_line_that_names_what_is_refused(setting: str, engine: Engine) -> None:
    sentence = explain_refusal(config_with(setting, engine), engine)
    assert sentence
    assert "{" not in sentence
    assert "\n" not in sentence
    teaches = setting == "distillation" and engine != "script"
    named = "teacher" if teaches else setting.split(".")[0]
    assert (named if named in ("teacher", "parallel") else setting.split(".")[-1]) in sentence


@pytest.mark.parametrize("engine", ENGINE_TITLES)
def test_what_is_left_at_its_default_is_refused_by_no_engine(engine: Engine) -> None:
    config = (
        load_config(None, {"task": SCRIPT}) if engine == "script" else load_config("quickstart")
    )
    assert explain_refusal(config, engine) is None


def test_a_config_of_a_script_is_refused_what_a_script_has_itself() -> None:
    with pytest.raises(InputError, match=r"lora\.lora_rank: a script has its own model"):
        load_config(None, {"task": SCRIPT, "lora.lora_rank": 8})
    for key in ("model.path", "data.train"):
        with pytest.raises(InputError, match=f"{key}: a script has its own model"):
            load_config(None, {"task": SCRIPT, key: "elsewhere"})
    for key in ("script", "model.script"):  # no config names what runs
        with pytest.raises(InputError, match=key.rpartition(".")[2]):
            load_config(None, {"task": SCRIPT, key: "train.py"})


@pytest.mark.parametrize(
    ("needs", "setting"), [(row.needs, name) for row in CONDITIONS for name in row.settings]
)
def test_a_setting_that_is_used_only_with_another_one_is_refused_without(
    needs: str, setting: str
) -> None:
    unused, used = CONTEXTS[needs]
    given = {setting: USED[setting]}
    with pytest.raises(InputError) as raised:
        load_config("quickstart", unused | given)
    line = f"config: {setting} {{}}: used only with {needs}; leave it out, or set that"
    assert line.partition("{}")[2] in str(raised.value)
    assert f"config: {setting} " in str(raised.value)
    assert load_config("quickstart", used | given)
    default = load_config(None, {"model.path": "m", "data.train": "d", "num_classes": 2})
    given[setting] = default.flatten_settings().get(setting)
    if given[setting] is not None:  # a file may list all settings
        assert load_config("quickstart", unused | given)


@pytest.mark.parametrize("engine", ENGINE_TITLES)
def test_engines_of_torch_distributed_refuse_vulkan_and_nothing_else(engine: Engine) -> None:
    for backend in ("auto", "cuda", "cpu"):
        check_backend(backend, engine)
    if engine not in NEEDS_TORCH:
        check_backend("wgpu", engine)
        return
    with pytest.raises(InputError, match=r"^--gpu-backend wgpu: .* runs on cuda or cpu$"):
        check_backend("wgpu", engine)
