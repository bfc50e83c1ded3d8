from pathlib import Path

import pytest
import yaml

from trainer.config.run import (
    MEMBERS_MAY_DIFFER,
    RunConfig,
    list_presets,
    load_config,
    setting_keys,
)
from trainer.config.training import TrainingConfig
from trainer.system.errors import InputError


def config(**overrides: object) -> RunConfig:
    base = {"num_classes": 5, "model.path": "model", "data.train": "train.jsonl"}
    return load_config(None, base | overrides)


def test_yaml_round_trip():
    original = config(**{"exchange.split": (1.0, 2.0), "training.micro_batch_size": 4})
    assert load_config(None, yaml.safe_load(original.to_yaml())) == original


def test_a_file_and_the_flags_over_it(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "num_classes: 3\nmodel: {path: m}\ndata: {train: t, validation: v}\n"
        "optimizer: {learning_rate: 5e-5}\n"
    )
    loaded = load_config(path, {"training.epochs": 7, "data.validation": None})
    assert (loaded.training.epochs, loaded.optimizer.learning_rate) == (7, 5e-5)
    assert loaded.data.validation is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.epoch": 1}, "training.epoch: unknown key (allowed: epochs, max_steps, "),
        ({"training.epochs": 0}, "training.epochs: input should be greater than 0; got 0"),
        ({"training.epochs": "x"}, "training.epochs: input should be a valid integer"),
        (
            {"task": "x"},
            "task: input should be 'classify', 'causal-lm', 'dpo' or 'script'; got 'x'",
        ),
        ({"lora.target_modules": ["q proj"]}, "lora.target_modules.0: string should match"),
        ({"lora.target_modules": []}, "lora.target_modules: "),
        ({"exchange.split": "fast"}, "exchange.split: input should be 'measured' or 'equal', or"),
        ({"training.micro_batch_size": "all"}, "training.micro_batch_size: "),
        ({"training": 3}, "training: a mapping of settings is needed (epochs, "),
        ({"training.epochs": 10**12}, "training.epochs: input should be less than or equal to"),
        (
            {"training.max_steps": 10**15},
            "training.max_steps: input should be less than or equal to",
        ),
        (
            {"training.batch_size": 10**9},
            "training.batch_size: input should be less than or equal to",
        ),
        ({"lora.lora_alpha": 10**12}, "lora.lora_alpha: input should be less than or equal to"),
        ({"optimizer.learning_rate": 1e30}, "optimizer.learning_rate: input should be less than"),
        ({"exchange.lost_after": 1e18}, "exchange.lost_after: input should be less than or equal"),
        ({"exchange.heartbeat": 1e-12}, "exchange.heartbeat: input should be greater than or eq"),
        (
            {"exchange.inner_steps": 10**12},
            "exchange.inner_steps: input should be less than or equal",
        ),
        ({"training.max_steps": True}, "training.max_steps: a number is needed; YAML reads yes"),
        ({"optimizer.beta1": False}, "optimizer.beta1: a number is needed"),
        ({"exchange.split": [True, 1]}, "exchange.split: a number is needed"),
        ({"training.seed": 2**60}, "training.seed: input should be at most 9,007,199,254,740,992"),
        ({"optimizer.learning_rate": "1e400"}, "optimizer.learning_rate: input should be a finite"),
        ({"exchange.heartbeat": float("nan")}, "exchange.heartbeat: input should be a finite"),
        ({"output": None}, "output: must not be null"),
        ({"training.epochs": None}, "training.epochs: must not be null"),
        ({"budget.hosts": 3}, "budget.hosts: a list is needed; got 3"),
        ({"name": "no spaces"}, "name: "),
        ({"trainng.epochs": 8}, "trainng: unknown key (allowed: name, task, "),
        ({"lora.target_modules": "all-linear"}, "lora.target_modules: all linears are the default"),
        (
            {"lora.target_modules": "q_prj"},
            "lora.target_modules: a list is needed, such as [q_proj]; got 'q_prj'",
        ),
        ({"distillation.beta": 1}, "distillation.beta: unknown key (allowed: alpha, alpha_final, "),
        ({"distillation.alpha": 2}, "distillation.alpha: input should be less than or equal to 1"),
        ({"exchange.lost_after": 0.6}, "exchange: lost_after must be more than twice heartbeat"),
        (
            {"task": "causal-lm"},
            "config: num_classes and class_names are only allowed when task is classify",
        ),
        ({"training.class_weights": [1]}, "config: training.class_weights must be"),
        (
            {"training.early_stopping_patience": 2},
            "config: training.early_stopping_patience counts",
        ),
        ({"training.sample_prompts": "a.jsonl"}, "config: training.sample_prompts needs another"),
        ({"method": "full", "model.quantization": "nf4"}, "config: method full needs"),
        ({"training.pack": True}, "config: training.pack needs task causal-lm"),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_path(overrides: dict, message: str):
    with pytest.raises(InputError) as caught:
        config(**overrides)
    text = str(caught.value)
    assert f"flags: {message}" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "training.gradient_accumulation_steps",
            "did you mean: training.batch_size; a batch is that of a whole step over all devices:"
            " per-device batch size x 8 x devices",
        ),
        ("lora.lora_dropout", "; adapters have no dropout: which numbers it drops would depend"),
        ("training.neftune_noise_alpha", "; embeddings get no noise: which numbers it adds would"),
        ("exchange.sum_on_host", "; workers of one host no longer send one gradient: leave it out"),
    ],
)
def test_what_other_trainers_and_earlier_versions_have_is_explained(key: str, message: str):
    with pytest.raises(InputError) as caught:
        config(**{key: 8})
    assert message in str(caught.value)


def test_a_section_in_short(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: base\ndata: a.jsonl\nnum_classes: 2\n"
        "training:\ndistillation: null\nexchange: null\n"
    )
    given = {"model.dtype": "bfloat16", "data": "b.jsonl", "lora": None, "exchange.hash_every": 3}
    found = load_config(path, given)
    assert (found.model.path, found.model.dtype) == ("base", "bfloat16")
    assert (found.data.train, found.training.epochs, found.lora.lora_rank) == ("b.jsonl", 1, 16)
    assert found.distillation is None
    assert found.exchange.hash_every == 3


def test_yaml_of_any_editor_and_keys_that_occur_twice(tmp_path: Path):
    path = tmp_path / "run.yaml"
    least = "model: m\ndata: t\nnum_classes: 2\n"
    text = f"\ufeff{least}optimizer: {{learning_rate: 2e-4}}\n".replace("\n", "\r\n")
    path.write_bytes(text.encode())
    assert load_config(path).optimizer.learning_rate == 2e-4
    for lines, message in (
        ("training: {seed: 1}\ntraining: {seed: 3}", r"5:1: .*the key 'training' occurs twice"),
        ("training: {seed: 4, seed: 2}", r"4:21: .*the key 'seed' occurs twice"),
        ("name: no", "name: .*; got False"),
    ):
        path.write_text(f"{least}{lines}\n")
        with pytest.raises(InputError, match=message):
            load_config(path)


def test_a_preset_with_data_of_ones_own_has_no_validation_of_others():
    assert load_config("quickstart", {"model.path": "mine"}).data.validation is not None
    assert load_config("quickstart", {"data.train": "mine.jsonl"}).data.validation is None
    given = {"data": "mine.jsonl", "data.validation": "v.jsonl"}
    assert load_config("quickstart", given).data.validation == "v.jsonl"
    section = {"data": {"train": "mine.jsonl", "validation": "v.jsonl"}}
    assert load_config("quickstart", section).data.validation == "v.jsonl"
    assert load_config("quickstart", section | {"data.validation": None}).data.validation is None
    part = {"data": {"train": "mine.jsonl", "validation_fraction": 0.1}}
    assert load_config("quickstart", part).training.evaluate_every > 0
    assert load_config("quickstart", given).training.evaluate_every == 140
    assert load_config("quickstart", {"data": "mine.jsonl"}).training.evaluate_every == 0
    with pytest.raises(InputError, match=r"evaluate_every 9: used only with data\.val"):
        load_config("quickstart", {"data": "mine.jsonl", "training.evaluate_every": 9})


def test_a_missing_setting_is_named():
    with pytest.raises(InputError, match=r"model: field required \(and 1 more\)"):
        load_config(None, {"num_classes": 5})
    with pytest.raises(InputError, match="num_classes is required when task is classify"):
        load_config(None, {"model.path": "m", "data.train": "t"})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.epoch", "training.epochs"),
        ("training.lr", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("lora.r", "lora.lora_rank"),
        ("trainng.epochs", "training"),
        ("training.num_train_epochs", "training.epochs"),
        ("training.nonsense", None),
    ],
)
def test_an_unknown_key_gets_the_nearest_real_one(key: str, meant: str | None) -> None:
    with pytest.raises(InputError, match="unknown key") as caught:
        load_config("quickstart", {key: 1})
    assert str(caught.value).endswith(f"; did you mean: {meant}" if meant else ")")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: [1", r":1:\d+: not valid YAML"),
        (b"- 1", "a run config is a mapping"),
        (b"", "a run config is a mapping"),
        (b"model: 3", "model: "),
        (b"a: !!python/object:os.system {}", "not valid YAML"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: bytes, message: str):
    path = tmp_path / "run.yaml"
    path.write_bytes(text)
    with pytest.raises(InputError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_no_such_file_lists_the_presets():
    with pytest.raises(
        InputError, match=r"no config file and no preset 'nope' \(presets: .*quickstart"
    ):
        load_config("nope")
    assert "quickstart" in list_presets()


def test_the_agreement_covers_what_changes_the_weights_and_nothing_else():
    base = config()
    same = config(**{"output": "elsewhere", "model.path": "other/place", "checkpoint.every": 7})
    assert same.agreement_digest() == base.agreement_digest()
    for own in ({"training.gradient_checkpointing": "on"}, {"model.resident": "all"}):
        assert config(**own).agreement_digest() == base.agreement_digest()
    for change in (
        {"training.batch_size": 8},
        {"training.seed": 1},
        {"training.precision": "fp16"},
        {"data.max_seq_len": 64},
        {"data.validation_fraction": 0.1},
        {"lora.lora_rank": 8},
        {"exchange.codec": "bf16"},
        {"optimizer.learning_rate": 1.0},
        {"num_classes": 4},
    ):
        assert config(**change).agreement_digest() != base.agreement_digest(), change
        ((key, value),) = change.items()
        (said,) = base.list_changes(config(**change))
        assert said.startswith(f"{key}: ")
        assert said.endswith(f" -> {value}")


@pytest.mark.parametrize("setting", MEMBERS_MAY_DIFFER)
def test_what_members_may_differ_in_exists(setting: str):
    keys = (*setting_keys(), "checkpoint", "parallel", "budget")
    assert setting in keys, "a renamed setting would be compared again without a word"


def test_members_agree_on_a_setting_that_is_in_no_list():
    class LaterTraining(TrainingConfig):
        later: int = 0

    class LaterConfig(RunConfig):
        training: LaterTraining = LaterTraining()

    tree = config().model_dump()
    this, that = (
        LaterConfig.model_validate(tree | {"training": tree["training"] | {"later": later}})
        for later in (0, 1)
    )
    assert this.agreement_digest() != that.agreement_digest()
    assert this.list_changes(that) == ["training.later: 0 -> 1"]


def test_members_agree_on_the_length_and_a_resumed_run_may_change_it():
    base = config()
    for change in ({"training.epochs": 9}, {"training.max_steps": 9}):
        assert config(**change).agreement_digest() != base.agreement_digest()
        assert base.list_changes(config(**change)) == []
    steps = {"training.max_steps": 9}
    assert (
        config(**steps).agreement_digest()
        == config(**steps, **{"training.epochs": 7}).agreement_digest()
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.validation": "v"}, "data: a validation file is given, so validation_fraction"),
        ({"task": "causal-lm", "num_classes": None, "distillation.alpha": 1}, "teacher's logits"),
    ],
)
def test_what_excludes_a_held_out_share(settings: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        config(**{"data.validation_fraction": 0.1, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exchange.codec": "int16"}, "exchange.codec: codec int16: unknown; use one of"),
        ({"exchange.codec": "topk:0.1"}, "codec topk:0.1: unknown; use one of auto, fp32, bf16, "),
        ({"exchange.flush_every": 0}, "exchange.flush_every"),
    ],
)
def test_codecs_that_do_not_suit_are_refused_in_one_line(settings: dict[str, object], message: str):
    with pytest.raises(InputError, match=message) as refused:
        config(**settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("word", "setting"), [("on", "on"), ("off", "off"), ("'on'", "on")])
def test_checkpointing_is_on_or_off_also_without_quotes(
    tmp_path: Path, word: str, setting: str
) -> None:
    """YAML 1.1 reads an unquoted `on` as true."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {path: m}\ndata: {train: t}\nnum_classes: 2\n"
        f"training: {{gradient_checkpointing: {word}}}\n"
    )
    found = load_config(path)
    assert found.training.gradient_checkpointing == setting
    assert found.training.recompute == (setting == "on")
    path.write_text(found.to_yaml())
    assert load_config(path) == found


def test_the_precision_of_a_device() -> None:
    assert config().resolve_precision(accelerator=False) == "fp32"
    assert config().resolve_precision(accelerator=True) == "bf16"
    narrow = {"model.dtype": "bfloat16"}
    assert config(**narrow).resolve_precision(accelerator=False) == "bf16"
    for word in ("bf16", "fp16"):
        fixed = config(**narrow, **{"training.precision": word})
        assert fixed.resolve_precision(accelerator=False) == word
    with pytest.raises(InputError, match="precision fp32 needs"):
        config(**narrow, **{"training.precision": "fp32"})


def test_a_date_is_a_day_with_or_without_quotes(tmp_path: Path) -> None:
    for number, written in enumerate(("2031-02-03", "'2031-02-03'", "20310203", "today", "2031")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(f"task: causal-lm\nmodel: m\ndata: {{train: d, date: {written}}}\n")
        if number < 2:
            assert load_config(path).data.date == "2031-02-03"
        else:
            with pytest.raises(InputError, match=r"data\.date: give a day, such as"):
                load_config(path)
