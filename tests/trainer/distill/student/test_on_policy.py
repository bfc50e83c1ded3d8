"""A student that learns from its own answers, beside a teacher that scores them."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.course import Course
from tests.trainer.own_answers import OWN, PROMPTS, course, flip, rounds_of, teaching
from tests.trainer.small_teacher import (
    SIZES,
    load,
    wish,
    write_corpus,
    write_padded,
    write_teacher,
)
from tests.waiting import wait_for
from trainer.config.capabilities import check_capability
from trainer.config.run import load_config as load_config
from trainer.data.encoder import Encoder
from trainer.distill.answers.author import Author
from trainer.distill.answers.shard_loader import open_shards
from trainer.distill.answers.student_answers import (
    ON_POLICY,
    RoundAnswers,
    RoundsFolder,
    find_rounds,
)
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.scores import Scheme
from trainer.distill.logits.shard_folder import verify_shards
from trainer.distill.teacher import run as teacher_run
from trainer.distill.teacher.assignment import assign_request
from trainer.distill.teacher.run import TeacherRun
from trainer.distill.teacher.scoring import Teacher
from trainer.init_model import init_model
from trainer.system import regular_file
from trainer.system.errors import InputError, NonFiniteError, StorageError
from trainer.system.process.stop_signals import StopRequest


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts.jsonl")


@pytest.fixture(scope="module")
def teacher(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher") / "model", corpus, head_scale=10.0)


@pytest.fixture(scope="module")
def student(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_model(corpus, tmp_path_factory.mktemp("student") / "model", SIZES, seed=5)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_run, "POLL", 0.02)


def test_each_answer_is_written_scored_and_learned_once_and_none_is_stale(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = course(tmp_path / "out", student, tmp_path / "logits")
    written: dict[int, int] = {}
    write = Author.write_answers

    def noting(author: Author, places: Any, *more: Any) -> Any:
        steps = len(run.steps()) if (run.output / "metrics.jsonl").exists() else 0
        for place in places:
            assert place.document not in written
            written[place.document] = steps
        return write(author, places, *more)

    monkeypatch.setattr(Author, "write_answers", noting)
    with teaching(teacher, corpus, tmp_path / "logits"):
        assert run.run() == 0
    rounds = rounds_of(tmp_path / "logits")
    # 8 steps of 2 answers, of which 2 steps make a round.
    assert [plan.number for plan in rounds.plans] == [0, 1, 2, 3]
    assert sorted(written) == list(range(16))
    stale = [document // 2 - steps for document, steps in sorted(written.items())]
    assert max(stale) == 3, "the bound is used, and kept"
    assert min(stale) >= 0
    assert [verdict.state for verdict in verify_shards(open_shards(rounds.path))] == ["whole"] * 4
    assert [verdict.state for verdict in verify_shards(rounds.answers)] == ["whole"] * 4
    answers = [each for plan in rounds.plans for each in rounds.answers.read_shard(plan.number)]
    assert sorted(str(each.prompt) for each in answers[:7]) == sorted(PROMPTS), "an epoch of them"
    assert np.all(np.isfinite(run.steps("on_policy_kl")))
    np.testing.assert_array_less(0, run.steps("on_policy_kl"))
    kl, ce, alpha = (np.array(run.steps(key)) for key in ("kl", "ce", "alpha"))
    corpus_loss, own = alpha * kl + (1 - alpha) * ce, np.array(run.steps("on_policy_kl"))
    low, high = np.minimum(corpus_loss, own), np.maximum(corpus_loss, own)
    assert np.all((low - 1e-6 <= run.steps("loss")) & (run.steps("loss") <= high + 1e-6))


def test_the_time_of_its_writing_is_a_figure_of_its_own(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = course(tmp_path / "out", student, tmp_path / "logits")
    spent: dict[int, float] = {}
    write = Author.write_answers

    def timed(*arguments: Any) -> Any:
        steps = len(run.steps()) if (run.output / "metrics.jsonl").exists() else 0
        began = time.monotonic()
        answers = write(*arguments)
        spent[steps] = spent.get(steps, 0.0) + time.monotonic() - began
        return answers

    monkeypatch.setattr(Author, "write_answers", timed)
    began = time.monotonic()
    with teaching(teacher, corpus, tmp_path / "logits"):
        assert run.run() == 0
    wall = time.monotonic() - began
    wrote = run.steps("generation_seconds")
    assert sorted(spent) == [0, 2, 4], "rounds of two steps: two of them ahead, then one by one"
    for step, seconds in enumerate(wrote):
        assert seconds >= spent.get(step, 0.0)
        assert (seconds > 0) == (step in spent)
    assert sum(wrote) + sum(run.steps("teacher_wait_seconds")) + sum(run.steps("seconds")) <= wall


def test_it_learns_to_answer_as_its_teacher(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path
) -> None:
    settings = {f"{OWN}fraction": 1.0, f"{OWN}divergence": "jsd", "training__max_steps": 24}
    run = course(tmp_path / "out", student, tmp_path / "logits", **settings)
    with teaching(teacher, corpus, tmp_path / "logits", data=[]):
        assert run.run() == 0
    kl = np.array(run.steps("on_policy_kl"))
    assert kl[-6:].mean() < 0.8 * kl[:6].mean()
    assert run.steps("loss") == pytest.approx(list(kl))
    assert LogitsFolder(tmp_path / "logits").description.windows == 0


def test_a_student_that_ends_unsaved_goes_on_with_the_rounds_that_it_had_written(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = course(tmp_path / "whole", student, tmp_path / "logits")
    parts = course(tmp_path / "parts", student, tmp_path / "more")
    write = Author.write_answers

    def dying(author: Author, places: Any, *more: Any) -> Any:
        if places[0].document == 12:  # before step 5, after the checkpoint of step 3
            raise NonFiniteError("the end")
        return write(author, places, *more)

    with teaching(teacher, corpus, tmp_path / "logits"):
        assert whole.run() == 0
    with teaching(teacher, corpus, tmp_path / "more"):
        with monkeypatch.context() as patch:
            patch.setattr(Author, "write_answers", dying)
            with pytest.raises(NonFiniteError):
                parts.run()
        assert parts.steps("step") == [1, 2, 3, 4]
        before = _files(rounds_of(tmp_path / "more"))
        assert "answers/shard-00002/answers.parquet" in before
        assert parts.run() == 0
    after = _files(rounds_of(tmp_path / "more"))
    assert {name: after[name] for name in before} == before
    assert parts.steps("step") == list(range(1, 9))
    np.testing.assert_allclose(parts.steps(), whole.steps(), rtol=1e-4)
    np.testing.assert_allclose(parts.steps("on_policy_kl"), whole.steps("on_policy_kl"), rtol=1e-4)


def test_a_student_that_ends_before_its_first_checkpoint_has_the_same_rounds(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = course(tmp_path / "out", student, tmp_path / "logits")
    write = Author.write_answers

    def dying(author: Author, places: Any, *more: Any) -> Any:
        if places[0].document == 8:  # before step 3, after which the first checkpoint comes
            raise NonFiniteError("the end")
        return write(author, places, *more)

    with teaching(teacher, corpus, tmp_path / "logits"):
        with monkeypatch.context() as patch:
            patch.setattr(Author, "write_answers", dying)
            with pytest.raises(NonFiniteError):
                run.run()
        assert run.steps("step") == [1, 2]
        before = _files(rounds_of(tmp_path / "logits"))
        assert run.run() == 0
    after = _files(rounds_of(tmp_path / "logits"))
    assert {name: after[name] for name in before} == before
    assert run.steps("step") == list(range(1, 9))


def test_tokens_that_the_tokenizer_lacks_are_never_written(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path
) -> None:
    """Published models have more rows than tokens; here these would be drawn nearly always."""
    padded = write_padded(tmp_path / "padded", student, 200, scale=2.0)
    size = json.loads((student / "config.json").read_text())["vocab_size"]
    run = course(tmp_path / "out", padded, tmp_path / "logits", training__max_steps=2)
    with teaching(teacher, corpus, tmp_path / "logits"):
        assert run.run() == 0
    answers = rounds_of(tmp_path / "logits").answers.read_shard(0)
    assert max(int(answer.tokens.max()) for answer in answers) < size


def test_answers_are_scored_while_the_corpus_is(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus is one shard, whose batches wait until the answers are scored."""
    settings = {f"{OWN}fraction": 1.0, "training__max_steps": 2}
    run = course(tmp_path / "out", student, tmp_path / "logits", **settings)
    logits = tmp_path / "logits"
    score, order = Teacher.score_pieces, list[str]()

    def slow(teaches: Teacher, pieces: Any, on_tokens: Callable[[int], None]) -> Any:
        def told(tokens: int) -> None:
            if len(pieces) > 20:  # those of the corpus
                wait_for(
                    lambda: find_rounds(logits) and rounds_of(logits).answers.has_shard(0),
                    "the student's answers",
                )
                time.sleep(2 * teacher_run.POLL)
            on_tokens(tokens)

        order.append(f"{len(pieces)} begin")
        found = score(teaches, pieces, told)
        order.append(f"{len(pieces)} end")
        return found

    monkeypatch.setattr(Teacher, "score_pieces", slow)
    with teaching(teacher, corpus, logits, shard_bytes=1 << 20):
        assert run.run() == 0
    windows = LogitsFolder(logits).description.windows
    assert order[:2] == [f"{windows} begin", "10 begin"], "in the middle of the corpus"
    assert order[-1] == f"{windows} end"


def test_a_folder_that_cannot_be_read_for_a_moment_is_looked_at_again(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = regular_file.open_file
    failures = [OSError(errno.ESTALE, "Stale file handle")] * 3

    def failing(path: Path) -> BufferedReader:
        is_teacher = threading.current_thread() is not threading.main_thread()
        if is_teacher and path.name == "dataset.json" and ON_POLICY in path.parts and failures:
            raise failures.pop()
        return open_file(path)

    monkeypatch.setattr(regular_file, "open_file", failing)
    run = course(tmp_path / "out", student, tmp_path / "logits", training__max_steps=2)
    with teaching(teacher, corpus, tmp_path / "logits"):
        assert run.run() == 0
    assert not failures


def _files(rounds: RoundsFolder) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(rounds.path)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(rounds.path.rglob("*.parquet"))
    }


def test_damaged_answers_and_damaged_scores_are_made_again(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path
) -> None:
    run = course(tmp_path / "out", student, tmp_path / "logits")
    with teaching(teacher, corpus, tmp_path / "logits"):
        run.run_until(3)
        rounds = rounds_of(tmp_path / "logits")
        wait_for(lambda: rounds.has_shard(2), "the scores of round 2")
        flip(rounds.shard_path(1) / "logits.parquet")
        flip(rounds.answers.shard_path(2) / "answers.parquet")
        assert run.run() == 0
    assert run.steps("step") == list(range(1, 9))
    reasons = " ".join(event["reason"] for event in run.events("quarantined"))
    assert "logits.parquet" in reasons
    assert "answers.parquet" in reasons
    rounds = rounds_of(tmp_path / "logits")
    assert [verdict.state for verdict in verify_shards(rounds)] == ["whole"] * 4


def test_a_round_that_seems_to_be_missing_for_a_moment_is_not_replaced(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreachable share: newer weights write other answers, of other lengths, to the round."""
    monkeypatch.setattr(Encoder, "stops", property(lambda _: frozenset(range(0, 278, 9))))
    settings = {f"{OWN}max_new_tokens": 16, "optimizer__learning_rate": 0.1}
    run = course(tmp_path / "out", student, tmp_path / "logits", **settings)
    has_shard, hidden = RoundAnswers.has_shard, list[int]()

    def unsure(answers: RoundAnswers, number: int) -> bool:
        in_time = threading.current_thread() is threading.main_thread() and not hidden
        if number == 1 and in_time and has_shard(answers, 2):
            hidden.append(number)
            return False
        return has_shard(answers, number)

    monkeypatch.setattr(RoundAnswers, "has_shard", unsure)
    with teaching(teacher, corpus, tmp_path / "logits"):
        assert run.run() == 0
    assert hidden
    assert run.steps("step") == list(range(1, 9))
    assert not run.events("quarantined")


def test_a_full_disk_under_its_answers_is_waited_for(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = course(tmp_path / "out", student, tmp_path / "logits")
    write, failures = RoundAnswers.write_shard, [StorageError("answers: not written: no space")] * 3

    def failing(answers: RoundAnswers, number: int, *more: Any) -> Path:
        if number == 2 and failures:
            raise failures.pop()
        return write(answers, number, *more)

    monkeypatch.setattr(RoundAnswers, "write_shard", failing)
    with teaching(teacher, corpus, tmp_path / "logits"):
        assert run.run() == 0
        assert not failures
        assert run.steps("step") == list(range(1, 9))
        told = [event["reason"] for event in run.events("waiting")]
        assert "answers: not written: no space; trying again" in told
        failures += [StorageError("answers: not written: no space")] * 1000
        lost = course(tmp_path / "lost", student, tmp_path / "logits")
        with pytest.raises(StorageError, match="no space"):
            lost.run(timeout=0.5)


def test_a_stop_ends_the_writing_of_answers(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stop = course(tmp_path / "out", student, tmp_path / "logits"), StopRequest()
    write = Author.write_answers

    def stopped(author: Author, places: Any, *more: Any) -> Any:
        stop.request("enough")
        return write(author, places, *more)

    monkeypatch.setattr(Author, "write_answers", stopped)
    with teaching(teacher, corpus, tmp_path / "logits"):
        assert run.run(stop) == 0
    assert not rounds_of(tmp_path / "logits").answers.plans


def test_scores_of_other_tokens_are_damage(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path
) -> None:
    settings = {"training__max_steps": 2}
    run = course(tmp_path / "out", student, tmp_path / "logits", **settings)
    with teaching(teacher, corpus, tmp_path / "logits"):
        assert run.run() == 0
    answers = rounds_of(tmp_path / "logits").answers
    there = answers.read_shard(0)
    others = [replace(each, tokens=np.roll(each.tokens, 1)) for each in there]
    shutil.rmtree(answers.shard_path(0))
    answers.write_shard(0, others)
    (verdict,) = verify_shards(rounds_of(tmp_path / "logits"))
    assert verdict.state == "damaged"
    assert "its tokens of answer 0 are not the student's" in str(verdict.reason)


class StopsWaiting(StopRequest):
    """Asks for an end once the student has said that it waits."""

    def __init__(self, run: Course) -> None:
        super().__init__()
        self._run = run

    def __bool__(self) -> bool:
        if (self._run.output / "metrics.jsonl").exists() and self._run.events("waiting"):
            self.request("enough")
        return bool(self.reason)


def test_without_a_teacher_it_ends_and_a_stop_ends_its_wait(
    student: Path, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    """A teacher that did the corpus has ended."""
    assignment = assign_request(wish(teacher, corpus, tmp_path / "logits"))
    TeacherRun(assignment, lambda: load(assignment)).make_shards()
    lost = course(tmp_path / "lost", student, tmp_path / "logits")
    with pytest.raises(InputError, match=r"every teacher is done; .* with --stay"):
        lost.run(timeout=0.1)
    run = course(tmp_path / "out", student, tmp_path / "logits")
    assert run.run(StopsWaiting(run), timeout=600) == 0
    assert not run.steps()


def test_what_makes_no_sense_is_refused_by_name(
    teacher: Path, student: Path, corpus: Path, tmp_path: Path
) -> None:
    def refused(message: str, settings: dict[str, Any], scheme: Scheme | None = None) -> None:
        logits = tmp_path / f"logits-{scheme.kind if scheme else 'topk'}"
        request = wish(teacher, corpus, logits, **({"scheme": scheme} if scheme else {}))
        assignment = assign_request(request)
        assignment.write_description(None)
        with pytest.raises(InputError, match=message):
            course(tmp_path / "out", student, logits, **settings).run(timeout=0.1)

    refused(r"max_new_tokens 70 more than data\.max_seq_len, 64", {f"{OWN}max_new_tokens": 70})
    refused(
        r"more than the windows of its teacher \(--max-seq-len\), 64",
        {f"{OWN}max_new_tokens": 70, "data__max_seq_len": 128},
    )
    drawn = (
        r"on_policy\.divergence reverse: draws \(`sampled`\) give no probabilities; use logits of"
    )
    refused(drawn, {}, Scheme(kind="sampled"))  # forward is not one of its divergences
    whole = {f"{OWN}fraction": 1.0, "training__max_steps": None}
    refused("training.max_steps is required where all samples", whole)
    settings = course(tmp_path / "out", student, tmp_path / "logits-topk").settings
    with pytest.raises(InputError, match=r"on_policy: a run of several workers"):
        check_capability(load_config("student", settings), "exchange")
    with pytest.raises(InputError, match=r"on_policy\.divergence"):
        load_config("student", settings | {"distillation.on_policy.divergence": "forward"})
