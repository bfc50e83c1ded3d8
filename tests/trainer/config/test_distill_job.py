"""A distillation's job: presets, YAML, and what a student gets of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.config.distill_job import DistillJob, list_presets, load_job
from trainer.config.run import load_config as load_run_config
from trainer.system.errors import InputError

LEAST = {"teacher.model": "t", "teacher.data": ["c"], "student.model": "s"}


@pytest.mark.parametrize("name", sorted(list_presets()))
def test_every_preset_loads_and_is_named_after_its_file(name: str) -> None:
    assert load_job(name).name == name


@pytest.mark.parametrize("name", sorted(list_presets()))
def test_yaml_keeps_what_was_set_and_only_that(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "job.yaml"
    copy.write_text(load_job(name).to_yaml())
    assert load_job(copy) == load_job(name)
    assert load_job(copy).student.collect_settings() == load_job(name).student.collect_settings()


def test_what_a_student_gets_is_what_a_run_config_takes() -> None:
    sections: dict[str, Any] = {
        "student.method": "lora",
        "student.lora": {"lora_rank": 4},
        "student.distillation": {"alpha": 0.3, "alpha_final": 0.9},
        "student.optimizer.learning_rate": 2e-4,
        "student.training": {"batch_size": 8, "pack": True},
        "student.checkpoint.every": 5,
    }
    settings = load_job(None, LEAST | sections).student.collect_settings()
    assert settings["lora.lora_rank"] == 4
    config = load_run_config("student", settings)
    assert config.distillation is not None
    assert (config.method, config.distillation.alpha_final) == ("lora", 0.9)
    assert (config.training.pack, config.checkpoint.every) == (True, 5)
    assert load_job(None, LEAST).student.collect_settings() == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"student.model": None, "student.output": "o"},
            "student: give model, or config for a new one",
        ),
        ({"student.model": None, "student.config": "albor-350m"}, "needs a teacher.tokenizer"),
        ({"student.exchange": {}}, "student.exchange: unknown key"),
        ({"teacher.removed_tokens": "tail"}, "removed tokens always counts as tail: leave it out"),
        ({"teacher.data": []}, "teacher.data: "),
        ({"teacher.engine": "vllm"}, "teacher.engine: "),
        (
            {"teacher.engine": "openvino", "teacher.backend": "cuda"},
            "teacher: the engine openvino computes on the CPU",
        ),
        (
            {"teacher.backend": "wgpu"},
            "teacher: the engine torch computes on cpu and cuda, not on wgpu; take the engine wgpu",
        ),
        ({"student.columns": {"text": "a"}}, "columns names keys of validation, which is not"),
        ({"evaluation.columns": {"text": "a"}}, "columns names keys of data and prompts, which"),
        ({"name": "No"}, "name: "),
        ({"teacher.tail_samples": 40000}, "teacher.tail_samples: "),
        ({"teacher.samples": 40000}, "teacher.samples: "),
        ({"teacher.max_seq_len": 1}, "teacher.max_seq_len: "),
        ({"teacher.temperature": 1e300}, "teacher.temperature: "),
        ({"teacher.seed": 10**23}, "teacher.seed: "),
        ({"teacher.top_k": 10**23}, "teacher.top_k: "),
        ({"evaluation.max_new_tokens": 10**9}, "evaluation.max_new_tokens: "),
    ],
)
def test_a_wrong_job_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_job(None, LEAST | settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_such_preset_lists_them() -> None:
    with pytest.raises(InputError, match=f"presets: {', '.join(list_presets())}"):
        load_job("nothing")
    assert isinstance(load_job("albor-350m"), DistillJob)


def test_only_the_operators_own_words_let_code_run(tmp_path: Path) -> None:
    """A file that is shared does not, nor does the stored one of a resumed run."""
    path = tmp_path / "job.yaml"
    own = {"evaluation.run_code": True}
    job = load_job("albor-350m", {**own, "evaluation.problems": "p.jsonl"})
    path.write_text(job.to_yaml())
    with pytest.raises(InputError, match=r"evaluation\.run_code: is not taken from a file"):
        load_job(path)
    assert load_job(path, own) == job
    refused = load_job(path, {"evaluation.run_code": False}).evaluation
    assert refused is not None
    assert not refused.run_code
