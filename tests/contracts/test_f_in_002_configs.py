"""F-IN-002: a run config is data that people share: nothing in one is executed.

Every setting whose value is any text is listed here with what the text is. A new one therefore
fails a test, and so does a path that a stored config may name without the operator's own word.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launcher.runs.records import stored_configs
from tests.trainer.small_model import write_data, write_model
from trainer.config.distill_job import DistillJob
from trainer.config.run import RunConfig

READ, WRITTEN = "a path that is read", "a path that is written"
WORD = "a word that names nothing outside of the data and the model"
SETTINGS = {
    "output": WRITTEN,
    "model.path": READ,
    "model.adapter": READ,
    "data.train": READ,
    "data.validation": READ,
    "training.sample_prompts": READ,
    "checkpoint.folder": WRITTEN,
    "distillation.on_policy.prompts": READ,
    "budget.ledger": "spend.jsonl in any folder; launch replaces it",
    "data.date": "a day, as YYYY-MM-DD",
    "exchange.codec": "the name of a codec",
    "class_names": WORD,
    "data.columns": WORD,
    "budget.hosts.name": WORD,
}
JOB_SETTINGS = {
    "logits": WRITTEN,
    "teacher.model": READ,
    "teacher.data": READ,
    "teacher.tokenizer": READ,
    "teacher.columns": WORD,
    "student.model": READ,
    "student.config": READ,
    "student.output": WRITTEN,
    "student.validation": READ,
    "student.columns": WORD,
    "student.checkpoint.folder": WRITTEN,
    "student.training.sample_prompts": READ,
    "student.distillation.on_policy.prompts": READ,
    "evaluation.tasks": "names of tasks; lm-eval:NAME is one of the installed ones",
    "evaluation.data": READ,
    "evaluation.columns": WORD,
    "evaluation.prompts": READ,
    "evaluation.problems": READ,
    "teacher.date": SETTINGS["data.date"],
    "budget.ledger": SETTINGS["budget.ledger"],
    "budget.hosts.name": WORD,
}


def parts(annotation: Any) -> Iterator[Any]:
    """Yield what an annotation is made of; a text with a pattern is none of any text."""
    if get_origin(annotation) is Annotated:
        kind, *rules = get_args(annotation)
        if not any(map(has_pattern, rules)):
            yield from parts(kind)
    elif isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from parts(part)


def has_pattern(rule: Any) -> bool:
    if isinstance(rule, FieldInfo):
        return any(map(has_pattern, rule.metadata))
    # One that any text with a letter has, as of a class's name, is none.
    return getattr(rule, "pattern", None) not in (None, r"\S")


def texts(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of the settings that take any text."""
    for name, field in kind.model_fields.items():
        if any(map(has_pattern, field.metadata)):
            continue
        for part in {*parts(field.annotation)}:
            if part is str:
                yield prefix + name
            elif isinstance(part, type) and issubclass(part, BaseModel):
                yield from texts(part, f"{prefix}{name}.")


@pytest.mark.parametrize(("kind", "known"), [(RunConfig, SETTINGS), (DistillJob, JOB_SETTINGS)])
def test_every_setting_that_takes_any_text_is_known(
    kind: type[BaseModel], known: dict[str, str]
) -> None:
    assert sorted(texts(kind)) == sorted(known)


def test_a_stored_config_names_no_path_without_the_operators_word() -> None:
    for known, asked in (
        (SETTINGS, stored_configs.RUN_PATHS),
        (JOB_SETTINGS, stored_configs.JOB_PATHS),
    ):
        paths = {key for key, what in known.items() if what in (READ, WRITTEN)}
        assert paths == set(asked)


def files_of(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_a_hostile_config_executes_nothing_and_writes_into_its_folders_alone(
    tmp_path: Path,
) -> None:
    """Texts that a shell, YAML or a template would run, wherever a setting takes any."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".profile").write_text("no line end")
    hostile = f"$(touch {home}/pwned)`touch {home}/pwned`'; touch {home}/pwned #"
    odd = tmp_path / "$(touch pwned) `touch pwned`; touch pwned # {{ 7*7 }}"
    odd.mkdir()
    data = write_data(odd / "train.jsonl")
    model = write_model(odd / "model", data)
    tree = {
        "num_classes": 3,
        "class_names": [hostile, "{{ 7*7 }}", "!!python/object/apply:os.system [id]"],
        "output": str(odd / "output"),
        "model": {"path": str(model)},
        "data": {"train": str(data)},
        "training": {"max_steps": 2, "batch_size": 4},
        "checkpoint": {"folder": str(odd / "checkpoints")},
        "budget": {"currency": "EUR", "hosts": [{"name": hostile, "price_hour": 1.0}]},
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(tree))
    before = files_of(home)
    environment = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment["MOTLEY_CACHE"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "trainer", "finetune", "--config", str(config)]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files_of(home) == before
    made = {path.name for path in odd.iterdir()}
    assert made == {"train.jsonl", "model", "output", "checkpoints"}
    made = {path.name for path in tmp_path.iterdir()} - {"cache"}
    assert made == {"home", "run.yaml", odd.name}
