"""A folder of teacher logits as an agent sees it: what the trainer wrote, read without it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.agent.checks.logits_folder import check_logits, logits_content
from tests.trainer.tiny_logits import SCHEMES, tiny_description, tiny_folder
from trainer.config.run import load_config
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.student.distributed_dataset import content_digest


@pytest.fixture
def logits(tmp_path: Path) -> LogitsFolder:
    return tiny_folder(tmp_path / "logits", tiny_description(SCHEMES["topk"]))


def test_a_whole_folder(logits: LogitsFolder) -> None:
    finding = check_logits(logits.path)
    assert (finding.status, finding.remedy) == ("ok", "")
    assert finding.detail == f"{logits.path}, 3 shards of a teacher's logits"


def _remove_manifest(shard: Path) -> None:
    (shard / "manifest.json").unlink()


def _tear_manifest(shard: Path) -> None:
    (shard / "manifest.json").write_text('{"files": []}')


def _remove_scores(shard: Path) -> None:
    (shard / "logits.parquet").unlink()


def _cut_scores(shard: Path) -> None:
    scores = (shard / "logits.parquet").read_bytes()
    (shard / "logits.parquet").write_bytes(scores[:-1])


@pytest.mark.parametrize(
    "damage", [shutil.rmtree, _remove_manifest, _tear_manifest, _remove_scores, _cut_scores]
)
def test_what_the_trainer_would_miss_is_missed(
    logits: LogitsFolder, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    damage(logits.shard_path(1))
    assert logits.list_missing() == [1]
    finding = check_logits(logits.path)
    assert finding.status == "fail"
    assert finding.detail.endswith("1 of 3 shards are missing or damaged, such as shard-00001")
    assert "launch sync inputs" in finding.remedy
    assert logits_content(logits.path, tmp_path) == {}


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"shards": [{}]}', '{"shards": [{"number": null}]}']
)
def test_a_description_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "dataset.json").write_text(text)
    finding = check_logits(tmp_path)
    assert finding.status == "fail"
    assert finding.detail == f"{tmp_path / 'dataset.json'}: not a description of shards"
    assert logits_content(tmp_path, tmp_path) == {}


def test_an_absent_folder_and_one_without_a_description(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        finding = check_logits(folder)
        assert finding.status == "fail"
        assert finding.detail == f"{folder / 'dataset.json'}: no such file or directory"
        assert "trainer distill teacher" in finding.remedy


def test_folders_are_equal_as_the_trainer_finds_them(logits: LogitsFolder, tmp_path: Path) -> None:
    """Also where heartbeats and requests differ: they are no part of what is learned."""
    content = logits_content(logits.path, tmp_path / "state")
    assert set(content) == {"dataset.json", "shard-00000", "shard-00001", "shard-00002"}
    copy = LogitsFolder(shutil.copytree(logits.path, tmp_path / "copy"))
    copy.request_shard(0, "looks odd")
    assert content_digest(copy) == content_digest(logits)
    assert logits_content(copy.path, tmp_path / "state") == content

    description = tiny_description(SCHEMES["topk"])
    others = {
        "redrawn": replace(description, seed=8),
        "retaught": replace(description, teacher=replace(description.teacher, digest="u" * 64)),
    }
    for name, other in others.items():
        folder = tiny_folder(tmp_path / name, other)
        assert content_digest(folder) != content_digest(logits)
        assert logits_content(folder.path, tmp_path / "state") != content

    other_shard = tmp_path / "redrawn" / "shard-00001"
    shutil.copytree(other_shard, copy.shard_path(1), dirs_exist_ok=True)
    assert content_digest(copy) != content_digest(logits)
    changed = logits_content(copy.path, tmp_path / "state")
    assert {name for name in content if content[name] != changed[name]} == {"shard-00001"}


def test_an_agent_needs_neither_torch_nor_pyarrow(logits: LogitsFolder, tmp_path: Path) -> None:
    given = {"task": "causal-lm", "model.path": "m", "data.train": str(logits.path)}
    config = load_config(None, {**given, "distillation.alpha": 0.7})
    questions = {
        "training_data": {"config": config.model_dump(mode="json")},
        "logits_content": {"path": str(logits.path), "state_folder": str(tmp_path / "state")},
    }
    code = (
        "import sys\n"
        "from launcher.agent.operations import perform_operation\n"
        f"for name, arguments in {questions!r}.items():\n"
        "    assert perform_operation(name, arguments), name\n"
        "assert not {'torch', 'pyarrow', 'trainer.distill.logits'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
