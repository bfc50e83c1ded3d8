"""Claims: one holder at a time, whoever dies, stalls or comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.clock import Clock
from tests.waiting import wait_for
from trainer.evaluate.claims import RESULT, Claim, Claims
from trainer.evaluate.results import SCHEMA
from trainer.system.storage.lease_folder import newest_heartbeat

DIGEST = "d" * 64

Make = Callable[[str], Claims]


def record(by: str) -> dict[str, Any]:
    """Return a result that names its runner."""
    return {"schema": SCHEMA, "digest": DIGEST, "runner": by}


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "evaluations" / "claims"


@pytest.fixture
def make(folder: Path, clock: Clock) -> Make:
    return lambda name: Claims(folder, name, 3600.0, clock)


def listen(claims: Claims, clock: Clock, seconds: float) -> Claim | None:
    """Ask for the claim every ten minutes, until it is had."""
    for _ in range(round(seconds / 600)):
        clock.now += 600
        if (claim := claims.take_claim(DIGEST)) is not None:
            return claim
    return None


def test_of_many_that_want_it_one_gets_it(make: Make) -> None:
    runners = [make(str(number)) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for digest in (f"{number:064x}" for number in range(10)):
            taken = list(pool.map(lambda runner, digest=digest: runner.take_claim(digest), runners))
            assert sum(claim is not None for claim in taken) == 1


def test_a_result_is_delivered_and_read_by_all(make: Make) -> None:
    first, second = make("first"), make("second")
    claim = first.take_claim(DIGEST)
    assert claim is not None
    assert second.read_states()[DIGEST].record is None
    assert claim.deliver(record("first"))
    claim.release()
    for runner in (first, second, make("third")):
        assert runner.read_states()[DIGEST].record == record("first")
        assert runner.take_claim(DIGEST) is None


def test_a_result_that_came_after_the_last_look_is_not_computed_again(make: Make) -> None:
    first, second = make("first"), make("second")
    second.read_states()
    claim = first.take_claim(DIGEST)
    assert claim is not None
    claim.deliver(record("first"))
    claim.release()
    assert second.take_claim(DIGEST) is None


def test_what_is_given_back_can_be_taken_at_once(make: Make) -> None:
    first, second = make("first"), make("second")
    claim = first.take_claim(DIGEST)
    assert claim is not None
    claim.release()
    again = second.take_claim(DIGEST)
    assert again is not None
    with pytest.raises(FileNotFoundError):
        claim.deliver(record("first"))  # it no longer looks who has it
    assert again.deliver(record("second"))


def test_a_silent_claim_expires_and_its_holder_comes_too_late(make: Make, clock: Clock) -> None:
    first, others = make("first"), [make("second"), make("third")]
    stalled = first.take_claim(DIGEST)
    assert stalled is not None
    for _ in range(6):
        assert not any(other.take_claim(DIGEST) for other in others)
        clock.now += 600
    taken = [other.take_claim(DIGEST) for other in others]
    assert sum(claim is not None for claim in taken) == 1
    assert not stalled.deliver(record("first"))
    stalled.release()  # changes nothing for the new holder
    assert next(filter(None, taken)).deliver(record("other"))
    assert first.read_states()[DIGEST].record == record("other")


def test_signs_of_life_keep_a_claim(folder: Path, make: Make, clock: Clock) -> None:
    claim = Claims(folder, "quick", 0.06).take_claim(DIGEST)
    assert claim is not None
    other = make("other")
    for _ in range(12):
        sign = newest_heartbeat(folder / DIGEST)
        wait_for(lambda sign=sign: newest_heartbeat(folder / DIGEST) != sign, "a sign of life")
        clock.now += 600
        assert other.take_claim(DIGEST) is None
    assert claim.deliver(record("quick"))


def test_an_unreachable_folder_declares_no_runner_dead(
    tmp_path: Path, make: Make, clock: Clock
) -> None:
    assert make("first").take_claim(DIGEST)
    other, output = make("other"), tmp_path / "evaluations"
    assert listen(other, clock, 3000) is None
    aside = output.rename(tmp_path / "away")
    assert other.read_states() == {}
    clock.now += 1800
    aside.rename(output)
    assert other.take_claim(DIGEST) is None
    assert listen(other, clock, 3000) is None
    assert listen(other, clock, 600) is not None


@pytest.mark.parametrize("content", ["", '{"schema": "motley.ev', "[]", '{"schema": 1}'])
def test_a_damaged_result_is_replaced(folder: Path, make: Make, content: str) -> None:
    (folder / DIGEST).mkdir(parents=True)
    (folder / DIGEST / RESULT).write_text(content)
    runner = make("runner")
    assert runner.read_states()[DIGEST].record is None
    claim = runner.take_claim(DIGEST)
    assert claim is not None
    assert claim.deliver(record("runner"))
    assert runner.read_states()[DIGEST].record == record("runner")


def test_nothing_is_created_where_the_output_is_away(tmp_path: Path, clock: Clock) -> None:
    claims = Claims(tmp_path / "away" / "evaluations" / "claims", "runner", 10.0, clock)
    assert claims.read_states() == {}
    with pytest.raises(FileNotFoundError):
        claims.take_claim(DIGEST)
    assert not (tmp_path / "away").exists()


HOLDER = """
import sys
from pathlib import Path
from tests.trainer.lease_holder import become
from trainer.evaluate.claims import Claims
folder, digest, identity = sys.argv[1:]
if identity:
    become(identity)
claim = Claims(Path(folder), "holder", 1.0).take_claim(digest)
print("held", flush=True)
sys.stdin.readline()
print(claim.deliver({"schema": "motley.evaluation/1", "digest": digest, "runner": "holder"}))
"""


@pytest.mark.cluster
@pytest.mark.parametrize("identity", ["", "another host"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_that_is_killed_or_stopped_is_replaced(
    folder: Path, number: signal.Signals, identity: str
) -> None:
    """On this host and on another one; a stopped one that wakes up finds that it is too late."""
    folder.parent.mkdir()
    command = [sys.executable, "-c", HOLDER, str(folder), DIGEST, identity]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        runner = Claims(folder, "runner", 1.0)
        assert runner.take_claim(DIGEST) is None
        os.kill(holder.pid, number)
        taken: list[Claim] = []
        wait_for(
            lambda: taken.extend(filter(None, [runner.take_claim(DIGEST)])) or taken, "the claim"
        )
        if number == signal.SIGSTOP:
            os.kill(holder.pid, signal.SIGCONT)
            assert holder.communicate("go on\n")[0] == "False\n"
    assert taken[0].deliver(record("runner"))
    assert runner.read_states()[DIGEST].record == record("runner")
    taken[0].release()
