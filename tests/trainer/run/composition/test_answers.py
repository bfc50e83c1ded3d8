"""`training.sample_prompts`: what a run answers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.small_model import write_data, write_model
from trainer.checkpoint.trained_model import load_trained
from trainer.config.run import RunConfig, load_config
from trainer.data.samples import read_prompts
from trainer.evaluate.generation import complete_samples
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.run.composition import roles
from trainer.run.composition.roles import Placement
from trainer.run.inputs import read_inputs
from trainer.system.errors import InputError
from trainer.tracking.metrics import read_metrics

ALONE = Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None)
ASKED = [{"messages": [{"role": "user", "content": "ls -l"}]}, {"text": "rm -rf"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a language model, data and prompts."""
    labelled = write_data(tmp_path / "labelled.jsonl", count=12)
    texts = [json.loads(line)["input"] for line in labelled.read_text().splitlines()]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ASKED))
    write_model(tmp_path / "model", labelled)
    return tmp_path


def config(folder: Path, **settings: Any) -> RunConfig:
    values = {
        "task": "causal-lm",
        "method": "full",
        "model.path": str(folder / "model"),
        "data.train": str(folder / "train.jsonl"),
        "output": str(folder / "out"),
        "training.batch_size": 4,
        "training.sample_prompts": str(folder / "prompts.jsonl"),
        "training.sample_every": 2,
        "training.sample_tokens": 6,
        "optimizer.learning_rate": 1e-2,
    }
    return load_config(
        None, values | {key.replace("__", "."): value for key, value in settings.items()}
    )


def test_a_run_answers_before_between_and_after(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert roles.run_local(config(folder), "run", ALONE) == 0
    metrics = read_metrics(folder / "out/metrics.jsonl")
    answers = [record for record in metrics if record["kind"] == "answer"]
    places = [(record["step"], record["number"]) for record in answers]
    assert places == [(step, number) for step in (0, 2, 3) for number in (1, 2)]
    assert [record["prompt"] for record in answers[:2]] == ["ls -l", "rm -rf"]
    assert [record["text"] for record in answers[:2]] != [record["text"] for record in answers[4:]]
    prompts = read_prompts(folder / "prompts.jsonl")
    compute = Compute("cpu", threads=1)
    for trained, found in ((folder / "model", answers[:2]), (folder / "out", answers[4:])):
        made = complete_samples(load_trained(trained), prompts, 6, Sampling(), compute)
        assert [(each.text, each.tokens, each.ended) for each in made] == [
            (each["text"], each["tokens"], each["ended"]) for each in found
        ]
    lines = [line for line in caplog.messages if " -> " in line]
    assert len(lines) == 6
    assert lines[0].startswith("step 0: ls -l -> ")


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([{"text": ""}], {}, "prompts.jsonl:1: "),
        ([{"text": "rm"}], {"data__max_seq_len": 6}, "exceed data.max_seq_len 6; shorten it"),
        ([{"text": "rm"}] * 70, {"training__sample_tokens": 101}, "have 7070 tokens, of at most"),
    ],
)
def test_prompts_that_cannot_be_asked_are_refused_before_training(
    folder: Path, prompts: list[Any], settings: dict[str, Any], message: str
) -> None:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    with pytest.raises(InputError, match=message):
        read_inputs(config(folder, **settings), "run", print)
    assert read_inputs(config(folder), "run").prompts is None  # no worker needs the file


def test_paths_are_anchored_and_members_need_not_agree(folder: Path) -> None:
    asks = config(folder, training__sample_prompts="prompts.jsonl")
    assert asks.agreement_digest() == config(folder, training__sample_every=5).agreement_digest()
    anchored = asks.anchor_paths(folder, model_on_hub=False)
    assert anchored.training.sample_prompts == str(folder / "prompts.jsonl")
