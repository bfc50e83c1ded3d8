"""An audit finds nothing where nothing is, and another teacher where there is one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.small_teacher import (
    SCHEMES,
    load,
    teach,
    wish,
    write_corpus,
    write_teacher,
    write_trimmed,
)
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.teacher.assignment import Assignment
from trainer.distill.teacher.audit import LIMIT, AuditResult, audit_windows, check_teacher
from trainer.distill.teacher.scoring import Teacher
from trainer.distill.teacher.torch_engine import TorchEngine
from trainer.system.errors import InputError, RefusedError, StorageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a teacher made from it, and its trimmed tokenizer."""
    folder = tmp_path_factory.mktemp("audit")
    corpus = write_corpus(folder / "texts.jsonl")
    write_trimmed(folder / "trimmed", write_teacher(folder / "model", corpus), corpus)
    return folder


@pytest.fixture(scope="module")
def scored(folder: Path) -> dict[str, Assignment]:
    """What the teacher wrote by each scheme."""
    return {kind: score(folder, kind) for kind in SCHEMES}


def score(
    folder: Path, kind: str, values: str = "float32", output: Path | None = None
) -> Assignment:
    return teach(
        wish(
            folder / "model",
            folder / "texts.jsonl",
            output or folder / f"{kind}-{values}",
            tokenizer=folder / "trimmed",
            scheme=SCHEMES[kind],
            values=values,
        )
    )


def disturbed(assignment: Assignment, deviation: float) -> Teacher:
    """Load the teacher with noise of a relative size on its weights."""
    teacher = load(assignment)
    torch.manual_seed(0)
    with torch.no_grad():
        assert isinstance(teacher.engine, TorchEngine)
        for weight in teacher.engine.model.parameters():
            weight += torch.randn_like(weight) * weight.std() * deviation
    return teacher


@pytest.mark.parametrize("kind", ["topk", "full"])
def test_the_same_teacher_says_the_same(scored: dict[str, Assignment], kind: str) -> None:
    found = audit_windows(scored[kind].folder, load(scored[kind], batch_tokens=1), fraction=1)
    description = scored[kind].folder.description
    assert found.windows == description.windows
    pieces = (each for plan in description.shards for each in scored[kind].windows.cut_shard(plan))
    assert found.positions == sum(int(piece.is_scored.sum()) for piece in pieces)
    assert abs(found.mean_kl) < 1e-6
    assert found.max_kl is not None
    assert found.max_kl < 1e-5
    assert found.same_draws == (1 if kind == "topk" else None)
    assert not found.is_another_teacher


def test_scores_of_first_pieces_are_read_but_not_scored_again(
    folder: Path, scored: dict[str, Assignment], tmp_path: Path
) -> None:
    """An earlier version wrote such folders, and may have added more shards."""
    there = scored["topk"].folder
    moved = replace(there.description.scheme, removed_tokens="first-piece")
    old = LogitsFolder(tmp_path / "old")
    old.write_description(replace(there.description, scheme=moved))
    old.write_shard(0, there.read_shard(0))
    assert [len(window.tokens) for window in LogitsFolder(old.path).read_shard(0)]
    with pytest.raises(RefusedError, match="scored with removed_tokens first-piece by an earlier"):
        check_teacher(old, folder / "model", folder / "trimmed")
    with pytest.raises(RefusedError, match=r"scheme\.removed_tokens is first-piece there and tail"):
        score(folder, "topk", output=old.path)


def test_half_precision_on_disk_is_no_difference(folder: Path) -> None:
    assignment = score(folder, "topk", "float16")
    found = audit_windows(assignment.folder, load(assignment), fraction=1)
    assert -1e-5 < found.mean_kl < 1e-4
    assert found.same_draws == 1


def test_of_draws_the_divergence_is_estimated_without_bias(scored: dict[str, Assignment]) -> None:
    found = audit_windows(scored["sampled"].folder, load(scored["sampled"]), fraction=1)
    assert 0 < found.standard_error < 0.1
    assert abs(found.mean_kl) < 4 * found.standard_error
    assert found.max_kl is None
    assert found.same_draws == 1
    assert not found.is_another_teacher


def test_every_scheme_sees_the_same_divergence_of_another_teacher(
    scored: dict[str, Assignment],
) -> None:
    """`full` is exact, `topk` sees its buckets alone, and so less; `sampled` estimates."""
    found = {
        kind: audit_windows(each.folder, disturbed(each, 1.0), fraction=1)
        for kind, each in scored.items()
    }
    exact = found["full"].mean_kl
    assert exact > 2 * LIMIT
    assert all(each.is_another_teacher for each in found.values()), found
    assert 0.1 * exact < found["topk"].mean_kl <= exact + 1e-6
    assert abs(found["sampled"].mean_kl - exact) < 4 * found["sampled"].standard_error
    same = found["sampled"].same_draws
    assert same is not None
    assert same < 1


def test_a_sample_is_the_same_each_time_and_another_by_another_seed(
    scored: dict[str, Assignment],
) -> None:
    each = scored["full"]
    teacher = disturbed(each, 0.1)
    first, again, other = (
        audit_windows(each.folder, teacher, fraction=0.2, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first.windows == round(0.2 * each.folder.description.windows)
    least = audit_windows(each.folder, teacher, fraction=0)
    assert least.windows == 1


def test_what_is_not_there_yet_is_not_asked_for(
    scored: dict[str, Assignment], tmp_path: Path
) -> None:
    each = scored["topk"]
    copy = shutil.copytree(each.folder.path, tmp_path / "copy")
    logits = LogitsFolder(copy)
    for shard in logits.description.shards[1:]:
        shutil.rmtree(copy / shard.name)
    found = audit_windows(logits, load(each), fraction=1)
    assert found.windows == logits.description.shards[0].windows
    shutil.rmtree(copy / "shard-00000")
    with pytest.raises(InputError, match="no scored token"):
        audit_windows(logits, load(each), fraction=1)


def test_a_damaged_shard_is_an_error_of_the_storage(
    scored: dict[str, Assignment], tmp_path: Path
) -> None:
    copy = shutil.copytree(scored["topk"].folder.path, tmp_path / "copy")
    for file in copy.glob("shard-*/logits.parquet"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(StorageError, match="it does not match the manifest"):
        audit_windows(LogitsFolder(copy), load(scored["topk"]), fraction=1)


def test_files_of_another_teacher_are_refused_with_both_hashes(
    folder: Path, scored: dict[str, Assignment], tmp_path: Path
) -> None:
    logits = scored["topk"].folder
    vocabulary = check_teacher(logits, folder / "model", folder / "trimmed")
    np.testing.assert_array_equal(vocabulary.teacher_ids, scored["topk"].vocabulary.teacher_ids)
    other = write_teacher(tmp_path / "other", folder / "texts.jsonl", seed=1)
    with pytest.raises(RefusedError, match=f"teacher.*{logits.description.teacher.digest[:16]}"):
        check_teacher(logits, other, folder / "trimmed")
    with pytest.raises(
        RefusedError, match=f"tokenizer.*{logits.description.tokenizer.digest[:16]}"
    ):
        check_teacher(logits, folder / "model", folder / "model")


def test_a_mean_within_its_sampling_error_passes() -> None:
    def found(mean: float, error: float) -> AuditResult:
        return AuditResult(
            windows=1,
            positions=9,
            mean_kl=mean,
            standard_error=error,
            max_kl=None,
            same_draws=1.0,
        )

    assert found(2 * LIMIT, 0.0).is_another_teacher
    assert not found(2 * LIMIT, LIMIT).is_another_teacher
    assert not found(LIMIT / 2, 0.0).is_another_teacher
