"""Every check of a soak is fed what it must find, and finds it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak import checks
from tests.soak.faults import Injection
from tests.soak.recovery import Recovery
from tests.soak.schedule import Fault
from tests.soak.timeline import Usage

BATCH, SAMPLES = 4, 8


def step(number: int, *samples: list[int]) -> dict[str, Any]:
    first = (number - 1) * BATCH % SAMPLES
    middle = first + 1
    return {
        "step": number,
        "sample_ranges": list(samples) or [[0, first, middle], [2, middle, first + BATCH]],
    }


def test_a_worker_that_went_past_its_link() -> None:
    assert checks.links({"worker-0": 3, "worker-1": 1}).passed
    check = checks.links({"worker-0": 3, "worker-1": 0})
    assert not check.passed
    assert check.detail == "went past its link: worker-1"


def test_a_ledger_in_which_each_sample_counts_once() -> None:
    check = checks.ledger([step(1), step(2), step(3)], SAMPLES, BATCH)
    assert check.passed
    assert "3 steps, 1.5 epochs" in check.detail


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "step 1 is missing"),
        ([step(1), step(3)], "step 2 is missing"),
        ([step(1), step(2), step(2)], "step 3 is missing or comes twice"),
        ([step(1, [0, 0, 3])], "step 1: samples"),
        ([step(1, [0, 0, 4], [1, 3, 4])], "step 1: samples"),
        ([step(1), step(2, [0, 0, 4])], "step 2: samples"),
    ],
)
def test_a_sample_or_step_that_is_lost_or_doubled(steps: list[dict[str, Any]], words: str) -> None:
    check = checks.ledger(steps, SAMPLES, BATCH)
    assert not check.passed
    assert words in check.detail


def verified(at: int, digest: str) -> dict[str, Any]:
    return {"event": "verified", "at_step": at, "digest": digest, "ranks": [0, 1, 2]}


def test_proofs_up_to_the_last_state() -> None:
    assert checks.proofs([verified(8, "a"), verified(9, "b")], 9, "b").passed


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "not one proof"),
        ([verified(8, "a")], "the last proof is of step 8, the last state of step 9"),
        ([verified(9, "a")], "weights a, b"),
        ([{"event": "diverged", "rank": 2}, verified(9, "b")], "rank 2 held other weights"),
    ],
)
def test_a_proof_that_is_missing_or_of_other_weights(events: list[Any], words: str) -> None:
    check = checks.proofs(events, 9, "b")
    assert not check.passed
    assert words in check.detail


def test_a_process_that_was_given_up() -> None:
    assert checks.kept_running([]).passed
    check = checks.kept_running(["worker-1 failed (4): TLS failed"])
    assert (check.passed, check.detail) == (False, "worker-1 failed (4): TLS failed")


def test_down_that_loses_a_step_or_fails() -> None:
    assert checks.saved(40, 40, 0, "").passed
    assert "step 40 committed, step 38 saved" in checks.saved(40, 38, 0, "").detail
    assert not checks.saved(40, 38, 0, "").passed
    assert (
        checks.saved(40, 40, 5, "launch: no answer\n").detail == "ended with 5: launch: no answer"
    )
    assert not checks.saved(40, 40, 5, "").passed


def test_a_loss_that_is_too_far_from_the_undisturbed_one() -> None:
    theirs = [1.0, 0.9, 0.8, 0.7, 0.6]
    near = [value * 1.009 for value in theirs[:4]]
    assert checks.loss(near, theirs, 2).passed
    far = [*near[:2], 0.82, 0.70]
    assert not checks.loss(far, theirs, 2).passed
    assert "epoch 1 of 2" in checks.loss(far, theirs, 2).detail
    assert not checks.loss([float("nan")] * 4, theirs, 2).passed
    assert not checks.loss(near, theirs[:3], 2).passed  # nothing to compare all of it with


def injection(at: float = 10.0, healed: float = 12.0, missed: str = "") -> Injection:
    return Injection(Fault(at, "stop worker", "worker-1", 2.0), at, healed, missed)


def test_faults_that_did_not_happen() -> None:
    done = [injection() for _ in range(9)]
    assert checks.injected([*done, injection(missed="not running")], 10).passed
    check = checks.injected([*done[1:], *[injection(missed="not running")] * 2], 10)
    assert not check.passed
    assert check.detail == "8 of 10; not stop worker: 2"
    assert not checks.injected(done[:5], 10).passed  # it was given up


@pytest.mark.parametrize(
    ("recovery", "words"),
    [
        (Recovery(injection(), None, None, False), "the next step never"),
        (Recovery(injection(), 62.5, None, False), "the next step after 62.5 s"),
        (Recovery(injection(), 3.0, None, True), "never were all workers back"),
    ],
)
def test_a_run_that_does_not_recover(recovery: Recovery, words: str) -> None:
    fine = Recovery(injection(), 2.5, 4.0, True)
    assert checks.recovered([fine]).passed
    check = checks.recovered([fine, recovery])
    assert not check.passed
    assert "stop worker of worker-1 at 10.0 s" in check.detail
    assert words in check.detail


def lived(seconds: int, memory: float = 0.0, descriptors: float = 0.0) -> list[Usage]:
    """Return samples of a process that grows by so much a second, after a start of its own."""
    start = [Usage(at, 2**20 * at, at, at) for at in range(0, 90, 5)]
    grown = range(90, seconds, 5)
    return start + [
        Usage(at, int(500e6 + memory * at), int(20 + descriptors * at), 9) for at in grown
    ]


def test_growth_shows_in_what_lives_long() -> None:
    steady = {("worker-0", 1): lived(600), ("worker-1", 2): lived(200, memory=1e6)}
    assert [check.passed for check in checks.growth(steady)] == [True] * 3
    assert "1 processes lived for long" in checks.growth(steady)[0].detail  # the other died young
    leaks = {**steady, ("coordinator", 3): lived(600, memory=100e3, descriptors=0.1)}
    memory, descriptors, threads = checks.growth(leaks)
    assert not memory.passed
    assert memory.detail.startswith("2 processes lived for long; the most: coordinator (pid 3) +")
    assert not descriptors.passed
    assert threads.passed


def test_files_that_are_left_over() -> None:
    kept = ["output/metrics.jsonl", "disk/checkpoints/step-000040/model.safetensors"]
    assert checks.files(kept, ["torchinductor_me"], 3, 3).passed
    for litter in ("disk/checkpoints/.tmp-step-000060-ab12", "disk/ballast", "x/.state.json.q1"):
        check = checks.files([*kept, litter], [], 3, 3)
        assert (check.passed, check.detail) == (False, litter)
    assert checks.files(kept, ["motley-x1"], 3, 3).detail == "motley-x1"
    assert not checks.files(kept, [], 4, 3).passed
    assert checks.files([*kept, "output/.lease-000003", "disk/.lease-000003"], [], 3, 3).passed
    two = checks.files([*kept, "output/.lease-000003", "output/.lease-000002"], [], 3, 3)
    assert (two.passed, two.detail) == (False, "output/.lease-000002")
    assert checks.files([], list("abcde"), 3, 3).detail == "a, b, c and 2 more"


def test_processes_and_ports_that_are_left() -> None:
    assert checks.processes([], False).passed
    assert checks.processes(["python (pid 7)"], False).detail == "python (pid 7)"
    assert not checks.processes([], True).passed
