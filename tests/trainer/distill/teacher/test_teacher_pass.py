"""A teacher's pass: what is whole is left alone, everything else is scored, once."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.small_teacher import (
    SCHEMES,
    load,
    teach,
    wish,
    write_corpus,
    write_teacher,
    write_trimmed,
)
from tests.waiting import wait_for
from trainer.config.data import TEMPLATE_DATE
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.heartbeat import TeacherWatch
from trainer.distill.logits.scores import Scheme
from trainer.distill.logits.shard_folder import verify_shards
from trainer.distill.teacher.assignment import assign_request
from trainer.distill.teacher.run import TeacherRun
from trainer.distill.teacher.scoring import Teacher
from trainer.distill.teacher.windows import WindowCutter
from trainer.distill.tokenizer.vocabulary import Vocabulary
from trainer.system.errors import InputError, InUseError, RefusedError
from trainer.system.process.interruption import Interrupted, Interruption
from trainer.system.storage.lease import acquire_lease


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("teacher")
    corpus = write_corpus(folder / "texts.jsonl")
    return write_teacher(folder / "model", corpus), corpus


@pytest.fixture(scope="module")
def complete(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that one teacher has completed; tests copy it."""
    output = tmp_path_factory.mktemp("complete") / "logits"
    teach(wish(*files, output))
    return output


@pytest.fixture
def folder(complete: Path, tmp_path: Path) -> Path:
    return shutil.copytree(complete, tmp_path / "logits")


def shards(folder: Path) -> dict[str, tuple[str, int]]:
    """Return content and time of every shard's file."""
    return {
        path.parent.name: (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.glob("shard-*/logits.parquet"))
    }


def contents(folder: Path) -> dict[str, str]:
    return {name: digest for name, (digest, _) in shards(folder).items()}


def state(folder: Path) -> tuple[str, str | None]:
    (status,) = TeacherWatch(LogitsFolder(folder)).list_teachers()
    return status.state.state, status.state.reason


def test_a_pass_covers_the_corpus_once(complete: Path) -> None:
    logits = LogitsFolder(complete)
    assert len(logits.description.shards) > 3
    assert {verdict.state for verdict in verify_shards(logits)} == {"whole"}
    assert not logits.list_missing()
    assert state(complete) == ("done", None)


def test_what_is_whole_is_left_alone_and_no_model_is_loaded(
    files: tuple[Path, Path], folder: Path
) -> None:
    before = shards(folder)

    def never() -> Teacher:
        raise AssertionError("the model was loaded")

    teach(wish(*files, folder), open_teacher=never)
    assert shards(folder) == before
    assert state(folder) == ("done", None)


def test_a_shard_that_is_deleted_cut_or_flipped_is_scored_again_to_the_same_bytes(
    files: tuple[Path, Path], folder: Path
) -> None:
    before = shards(folder)
    shutil.rmtree(folder / "shard-00000")
    flipped = folder / "shard-00001" / "logits.parquet"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    cut = folder / "shard-00002" / "logits.parquet"
    cut.write_bytes(cut.read_bytes()[:-100])
    teach(wish(*files, folder))
    after = shards(folder)
    assert contents(folder) == {name: digest for name, (digest, _) in before.items()}
    again = {name for name in after if after[name] != before[name]}
    assert again == {"shard-00000", "shard-00001", "shard-00002"}


@pytest.mark.parametrize("kind", SCHEMES)
def test_two_halves_make_the_same_folder_as_one_pass(
    files: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    whole, halves = (
        wish(*files, tmp_path / name, scheme=SCHEMES[kind]) for name in ("whole", "halves")
    )
    teach(whole)
    teach(halves, share=(2, 2))
    assert sorted(contents(tmp_path / "halves"))[0] == "shard-00001"
    teach(halves, share=(1, 2))
    assert contents(tmp_path / "halves") == contents(tmp_path / "whole")


def test_another_teacher_corpus_or_tokenizer_is_refused_with_both_hashes(
    files: tuple[Path, Path], folder: Path, tmp_path: Path
) -> None:
    model, corpus = files
    other = tmp_path / "other.jsonl"
    other.write_text(corpus.read_text().replace("x + 3", "x + 4"))
    trimmed = write_trimmed(tmp_path / "trimmed", *files)
    requests = {
        "teacher": wish(write_teacher(tmp_path / "other", corpus, seed=1), corpus, folder),
        "corpus": wish(model, other, folder),
        "tokenizer": wish(model, corpus, folder, tokenizer=trimmed),
    }
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    described = json.loads((folder / "dataset.json").read_text())
    for what, request in requests.items():
        there = described[what]["digest"]
        message = f"{what}.digest is {there} there and [0-9a-f]{{64}} here"
        with pytest.raises(RefusedError, match=message):
            assign_request(request)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_another_date_of_the_chat_template_is_refused(
    files: tuple[Path, Path], folder: Path
) -> None:
    day = "2026-01-31"
    with pytest.raises(
        RefusedError, match=rf"corpus\.date is {TEMPLATE_DATE} there and {day} here"
    ):
        assign_request(wish(*files, folder, date=day))
    assign_request(wish(*files, folder, date=TEMPLATE_DATE))


def test_a_tokenizer_of_another_teacher_is_refused_before_anything_is_written(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    other_data = tmp_path / "other.jsonl"
    text = " ".join(f"word{number}" for number in range(200))
    other_data.write_text(json.dumps({"text": text}) + "\n")
    stranger = write_teacher(tmp_path / "stranger", other_data)
    with pytest.raises(RefusedError, match="is not the teacher's"):
        assign_request(wish(*files, tmp_path / "out", tokenizer=stranger))
    assert not (tmp_path / "out").exists()


def test_windows_beyond_what_the_teacher_knows_are_refused(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="has 2048 positions"):
        assign_request(wish(*files, tmp_path / "out", max_seq_len=2049))


@pytest.fixture(scope="module")
def gpt2(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has 32 positions and calls them otherwise; no 33rd token gets through it."""
    import transformers

    folder = tmp_path_factory.mktemp("gpt2") / "model"
    shape: dict[str, Any] = {"n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    shape["vocab_size"] = 400
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(files[0] / name, folder)
    return folder


def test_windows_fit_a_teacher_with_few_positions(
    gpt2: Path, files: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InputError, match="--max-seq-len 33: the teacher has 32 positions"):
        assign_request(wish(gpt2, files[1], tmp_path / "out", max_seq_len=33))
    assert not (tmp_path / "out").exists()
    caplog.set_level("INFO")
    teach(wish(gpt2, files[1], tmp_path / "out", max_seq_len=None))
    assert "windows of 32 tokens, not 1024: the teacher has no more positions" in caplog.text
    assert LogitsFolder(tmp_path / "out").description.max_seq_len == 32
    folder = LogitsFolder(tmp_path / "out")
    windows = [
        window for plan in folder.description.shards for window in folder.read_shard(plan.number)
    ]
    assert max(len(window.tokens) for window in windows) == 32


def test_a_second_teacher_takes_the_plan_and_does_not_tokenise_the_corpus_again(
    files: tuple[Path, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WindowCutter, "plan_shards", lambda *_: pytest.fail("tokenised again"))
    assign_request(wish(*files, folder))


# The signal may come in the middle of a listing, whose iterator is then closed by the collector.
@pytest.mark.filterwarnings("ignore:unclosed scandir iterator")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_while_the_last_shard_is_written_is_no_failure(
    files: tuple[Path, Path], complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assignment = assign_request(wish(*files, tmp_path / "logits"))
    last = assignment.description.shards[-1].number
    interruption, write = Interruption(), LogitsFolder.write_shard

    def stop_and_write(folder: LogitsFolder, number: int, windows: Any) -> Path:
        if number == last:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            wait_for(lambda: not interruption._open, "the signal is handled")
        return write(folder, number, windows)

    monkeypatch.setattr(LogitsFolder, "write_shard", stop_and_write)
    teacher_run = TeacherRun(
        assignment, lambda: load(assignment), check=interruption.raise_if_interrupted
    )
    with pytest.raises(Interrupted), interruption.handle_signals(), interruption.allow_signals():
        teacher_run.make_shards()
    assert state(tmp_path / "logits")[0] == "done"
    assert contents(tmp_path / "logits") == contents(complete)


def test_progress_counts_what_was_there_and_ends_at_the_whole(
    files: tuple[Path, Path], folder: Path
) -> None:
    shutil.rmtree(folder / "shard-00002")
    seen: list[Any] = []
    teach(wish(*files, folder), on_progress=seen.append)
    last = seen[-1]
    assert seen[0]["shards_done"] == 2
    assert last["shards_done"] == last["shards"]
    assert last["tokens_done"] == last["tokens"] == LogitsFolder(folder).description.tokens
    done = [each["tokens_done"] for each in seen]
    assert done == sorted(done)
    (status,) = TeacherWatch(LogitsFolder(folder)).list_teachers()
    assert (status.state.state, status.state.shards_done) == ("done", last["shards"])


def test_a_trimmed_vocabulary_holds_student_ids_and_counts_the_rest_as_dropped(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    trimmed = write_trimmed(tmp_path / "trimmed", *files)
    assignment = teach(wish(*files, tmp_path / "out", tokenizer=trimmed))
    size = assignment.folder.description.tokenizer.size
    assert size < assignment.folder.description.teacher.tokenizer_size
    windows = assignment.folder.read_shard(0)
    assert max(int(window.scores.ids.max(initial=0)) for window in windows) < size
    assert max(float(window.scores.dropped.max()) for window in windows) > 0
    assert all(np.all(window.scores.dropped <= window.scores.tail + 1e-6) for window in windows)


def test_two_teachers_of_one_part_are_refused_and_a_killed_one_is_replaced(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    request = wish(*files, tmp_path / "logits")
    assignment = assign_request(request)
    held = acquire_lease(assignment.folder.path / "teachers" / "part-1-of-1", "the first")
    with pytest.raises(InUseError, match="part-1-of-1"):
        teach(request)
    assert not [*assignment.folder.path.glob("shard-*")]
    held.release()
    teach(request)
    assert not LogitsFolder(tmp_path / "logits").list_missing()


@pytest.mark.parametrize("documents", ["several", "one"])
def test_a_full_shard_that_cannot_be_written_is_refused_at_the_plan(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: str
) -> None:
    model, corpus = files
    request = wish(
        model, corpus, tmp_path / "logits", scheme=Scheme(kind="full"), shard_bytes=10**6
    )
    vocabulary = Vocabulary.load_map(model, model).size
    if documents == "one":
        request = replace(request, shard_bytes=1)
        monkeypatch.setattr("trainer.distill.teacher.assignment.MOST_ENTRIES", vocabulary)
        message = r"split document \d+, or use topk"
    else:
        monkeypatch.setattr("trainer.distill.teacher.assignment.MOST_ENTRIES", 1000 * vocabulary)
        message = r"give --shard-bytes (\d+), or use topk"
    with pytest.raises(InputError, match=message) as refused:
        assign_request(request)
    assert not (tmp_path / "logits").exists()
    if documents == "several":
        found = re.search(message, str(refused.value))
        assert found is not None
        assign_request(replace(request, shard_bytes=int(found[1])))
