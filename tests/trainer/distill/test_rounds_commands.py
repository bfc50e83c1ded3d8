"""`trainer distill verify`, `inspect` and `audit` of a student's own answers and their scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.trainer.own_answers import course, flip, rounds_of, teaching
from tests.trainer.small_teacher import SIZES, write_corpus, write_teacher
from trainer.commands.distill.audit import audit
from trainer.commands.distill.inspect import inspect
from trainer.commands.distill.verify import verify
from trainer.distill.teacher import run as teacher_run
from trainer.init_model import init_model
from trainer.system.errors import StorageError


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a teacher's `model` and the `logits` of a run that is over."""
    folder = tmp_path_factory.mktemp("rounds")
    corpus = write_corpus(folder / "texts.jsonl")
    model = write_teacher(folder / "model", corpus, head_scale=10.0)
    student = init_model(corpus, folder / "student", SIZES, seed=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_run, "POLL", 0.02)
        with teaching(model, corpus, folder / "logits"):
            assert course(folder / "out", student, folder / "logits").run() == 0
    return folder


def test_verify_reads_answers_and_names_all_that_is_damaged(done: Path, tmp_path: Path) -> None:
    rounds = rounds_of(Path(shutil.copytree(done / "logits", tmp_path / "logits")))

    def verified(path: Path) -> tuple[str, str]:
        result = CliRunner().invoke(verify, [str(path)])
        assert result.exception is None or isinstance(result.exception, StorageError)
        return result.output, str(result.exception)

    assert "4 of 4 shards are whole" in verified(rounds.path)[0]
    assert "4 of 4 shards are whole: 16 of 16 answers" in verified(rounds.answers.path)[0]
    flip(rounds.answers.shard_path(1) / "answers.parquet")
    flip(rounds.shard_path(3) / "logits.parquet")
    assert "damaged: shard-00001, shard-00003;" in verified(rounds.path)[1]
    assert "damaged: shard-00001;" in verified(rounds.answers.path)[1]
    shutil.rmtree(rounds.shard_path(1))
    assert "damaged: shard-00001, shard-00003;" in verified(rounds.path)[1], "the answers are"
    rounds.answers.quarantine_shard(1, "damaged")
    output, error = verified(rounds.path)
    assert "2 of 3 shards are whole" in output
    assert "damaged: shard-00003;" in error


def test_inspect_and_audit_read_the_scores_of_answers(done: Path) -> None:
    rounds = rounds_of(done / "logits")

    def told(command: Any, *flags: str) -> Any:
        words = [str(rounds.path), "--json", *flags]
        return json.loads(CliRunner().invoke(command, words, catch_exceptions=False).output)

    tokens = sum(plan.tokens for plan in rounds.plans)
    seen = told(inspect)
    assert seen["planned"] == {"shards": 4, "windows": 16, "tokens": tokens}
    assert (seen["found"]["shards"], seen["found"]["windows"]) == (4, 16)
    assert seen["found"]["tokens"] == tokens
    assert seen["found"]["contents"]["positions"] > 16
    assert seen["teachers"], "those of the corpus"
    text = CliRunner().invoke(inspect, [str(rounds.path)], catch_exceptions=False).output
    assert "shards       4 of 4" in text
    assert f"tokens       {tokens:,} of {tokens:,}" in text
    place = ("--gpu-backend", "cpu", "--threads", "1", "--teacher", str(done / "model"))
    found = told(audit, "--fraction", "1", *place)
    assert found["windows"] == 16
    assert found["positions"] == seen["found"]["contents"]["positions"]
    assert abs(found["mean_kl"]) < 1e-4
    assert found["same_draws"] == 1
