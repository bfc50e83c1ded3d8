"""Preferences learned from a fine-tuned adapter on: the run, its resume, and other adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trainer.small_model import write_data, write_model
from trainer.config.run import load_config
from trainer.run.composition import roles
from trainer.run.composition.roles import Placement
from trainer.system.errors import InputError, RefusedError

pytestmark = pytest.mark.long
ALONE = Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None)


def run(output: Path, model: Path, data: Path, settings: dict[str, Any]) -> list[Any]:
    """Train, and return the lines of its metrics."""
    given = {"method": "lora", "lora.lora_rank": 4, "model.path": str(model)}
    given |= {"data.train": str(data), "output": str(output), "optimizer.scheduler": "constant"}
    given |= {"optimizer.warmup_ratio": 0, "optimizer.learning_rate": 0.01}
    config = load_config(
        None, {**given, "training.batch_size": 4, "checkpoint.every": 1, **settings}
    )
    assert roles.run_local(config, "run", ALONE) == 0
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_it_begins_at_the_reference_and_resumes(tmp_path: Path) -> None:
    model = write_model(tmp_path / "base", write_data(tmp_path / "rows.jsonl"))
    texts, pairs = tmp_path / "texts.jsonl", tmp_path / "pairs.jsonl"
    texts.write_text("".join(json.dumps({"text": f"ls -l {n}"}) + "\n" for n in range(8)))
    answers = ({"prompt": f"{n}?", "chosen": f" {n}.", "rejected": f" {n}!"} for n in range(8))
    pairs.write_text("".join(json.dumps(each) + "\n" for each in answers))
    for name, steps in (("tuned", 3), ("other", 2)):
        run(tmp_path / name, model, texts, {"task": "causal-lm", "training.max_steps": steps})

    dpo: dict[str, Any] = {"task": "dpo", "model.adapter": str(tmp_path / "tuned")}
    dpo |= {"data.validation": str(pairs), "training.evaluate_every": 1}
    whole = run(tmp_path / "whole", model, pairs, {**dpo, "training.max_steps": 4})
    first = next(line for line in whole if line.get("loss") is not None)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-7), "policy and reference are one"
    margins = [line["reward_margin"] for line in whole if line.get("reward_margin") is not None]
    assert len(margins) >= 4
    assert margins[-1] > margins[0] > 0

    run(tmp_path / "half", model, pairs, {**dpo, "training.max_steps": 2})
    other = {**dpo, "model.adapter": str(tmp_path / "other"), "training.max_steps": 4}
    with pytest.raises((InputError, RefusedError), match="model"):
        run(tmp_path / "half", model, pairs, other)
    run(tmp_path / "half", model, pairs, {**dpo, "training.max_steps": 4})
    one, two = (
        load_file(tmp_path / name / "checkpoints/step-000004/adapter_model.safetensors")
        for name in ("whole", "half")
    )
    assert one.keys() == two.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, two[name])
