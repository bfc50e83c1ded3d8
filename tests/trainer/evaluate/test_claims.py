"""Claims: one holder at a time, whoever dies, stalls or comes back."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.trainer.clock import Clock
from trainer.evaluate.claims import Claims

DIGEST = "d" * 64


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Callable[[str], Claims]:
    def claims(name: str) -> Claims:
        made = Claims(tmp_path / "evaluations" / "claims", name, 10.0, clock)
        made.look()
        return made

    return claims


def listen(claims: Claims, clock: Clock, seconds: float) -> None:
    """Look every two seconds."""
    for _ in range(round(seconds / 2)):
        clock.now += 2
        claims.look()


def test_of_many_that_want_it_one_gets_it(make: Callable[[str], Claims]) -> None:
    runners = [make(str(number)) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for digest in (f"{number:064x}" for number in range(50)):
            taken = list(pool.map(lambda runner, digest=digest: runner.take(digest), runners))
            assert sum(claim is not None for claim in taken) == 1


def test_a_result_is_delivered_once_and_read_by_all(make: Callable[[str], Claims]) -> None:
    first, second = make("first"), make("second")
    claim = first.take(DIGEST)
    assert claim is not None
    assert second.look()[DIGEST].state == "held"
    assert claim.deliver({"loss": 1.5})
    assert not claim.deliver({"loss": 2.5})
    for runner in (first, second):
        head = runner.look()[DIGEST]
        assert (head.state, head.record) == ("done", {"loss": 1.5})
        assert runner.take(DIGEST) is None


def test_what_is_given_back_can_be_taken_at_once(make: Callable[[str], Claims]) -> None:
    first, second = make("first"), make("second")
    claim = first.take(DIGEST)
    assert claim is not None
    claim.release()
    second.look()
    again = second.take(DIGEST)
    assert again is not None
    assert not claim.deliver({})
    assert again.deliver({"by": "second"})


def test_a_silent_claim_expires_and_its_holder_comes_too_late(
    make: Callable[[str], Claims], clock: Clock
) -> None:
    first, others = make("first"), [make("second"), make("third")]
    stalled = first.take(DIGEST)
    assert stalled is not None
    for other in others:
        other.look()
    for _ in range(4):
        clock.now += 2
        for other in others:
            other.look()
            assert other.take(DIGEST) is None
    clock.now += 2
    for other in others:
        other.look()
    taken = [other.take(DIGEST) for other in others]
    assert sum(claim is not None for claim in taken) == 1
    assert not stalled.deliver({"by": "first"})
    stalled.release()  # changes nothing for the new holder
    assert next(filter(None, taken)).deliver({"by": "other"})
    assert first.look()[DIGEST].record == {"by": "other"}


def test_signs_of_life_keep_a_claim(
    tmp_path: Path, make: Callable[[str], Claims], clock: Clock
) -> None:
    claim = Claims(tmp_path / "evaluations" / "claims", "quick", 0.06).take(DIGEST)
    assert claim is not None
    other = make("other")
    path = tmp_path / "evaluations" / "claims" / f"{DIGEST}.0"
    with ExitStack() as kept:
        kept.callback(claim.keep())
        for _ in range(12):
            size = path.stat().st_size
            while path.stat().st_size == size:
                time.sleep(0.005)
            clock.now += 2
            other.look()
            assert other.take(DIGEST) is None
    assert claim.deliver({})


def test_an_unreachable_folder_declares_no_runner_dead(
    tmp_path: Path, make: Callable[[str], Claims], clock: Clock
) -> None:
    assert make("first").take(DIGEST)
    other = make("other")
    listen(other, clock, 8)
    folder = tmp_path / "evaluations"
    aside = folder.rename(tmp_path / "away")
    listen(other, clock, 4)
    assert other.look() == {}
    aside.rename(folder)
    listen(other, clock, 10)
    assert other.take(DIGEST) is None
    listen(other, clock, 2)
    assert other.take(DIGEST) is not None


@pytest.mark.parametrize("content", ["", '{"schema": "motley.cl', "[]", '{"schema": 1}'])
def test_a_half_written_claim_is_held_and_expires(
    tmp_path: Path, make: Callable[[str], Claims], clock: Clock, content: str
) -> None:
    folder = tmp_path / "evaluations" / "claims"
    folder.mkdir(parents=True)
    (folder / f"{DIGEST}.3").write_text(content)
    runner = make("runner")
    assert runner.take(DIGEST) is None
    listen(runner, clock, 10)
    claim = runner.take(DIGEST)
    assert claim is not None
    assert (folder / f"{DIGEST}.4").is_file()


def test_nothing_is_created_where_the_output_is_away(tmp_path: Path, clock: Clock) -> None:
    claims = Claims(tmp_path / "away" / "evaluations" / "claims", "runner", 10.0, clock)
    assert claims.look() == {}
    with pytest.raises(FileNotFoundError):
        claims.take(DIGEST)
    assert not (tmp_path / "away").exists()


@pytest.mark.parametrize("links", [True, False], ids=["links", "no hard links"])
def test_a_full_disk_keeps_the_result_for_another_attempt(
    tmp_path: Path, make: Callable[[str], Claims], monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", has_no_links)
    runner, folder = make("runner"), tmp_path / "evaluations" / "claims"
    folder.mkdir(parents=True)

    def is_full(attempt: Callable[[], object]) -> None:
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                attempt()
        assert {path: path.read_bytes() for path in folder.iterdir()} == before

    is_full(lambda: runner.take(DIGEST))
    assert runner.look() == {}
    claim = runner.take(DIGEST)
    assert claim is not None
    is_full(lambda: claim.deliver({"loss": 1.5}))
    assert claim.deliver({"loss": 1.5})
    assert runner.look()[DIGEST].record == {"loss": 1.5}


def has_no_links(*_: object) -> None:
    """Stand for a link on exFAT."""
    raise OSError(errno.EPERM, "Operation not permitted")


def full(_: int) -> None:
    """Stand for a disk that reports at the sync that it is full."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_killed_runner_wrote_aside_is_no_claim(
    tmp_path: Path, make: Callable[[str], Claims]
) -> None:
    folder = tmp_path / "evaluations" / "claims"
    folder.mkdir(parents=True)
    (folder / f".{DIGEST}.0.5f3a9c01").write_text("{")
    runner = make("runner")
    assert runner.look() == {}
    assert runner.take(DIGEST) is not None


def asks_twice(source: Path, target: Path, link: Callable[..., None] = os.link) -> None:
    """Stand for an NFS client whose server answered too late: its second request finds a link."""
    link(source, target)
    link(source, target)


@pytest.mark.parametrize("link", [has_no_links, asks_twice])
def test_one_runner_gets_it_whatever_a_link_does(
    make: Callable[[str], Claims], monkeypatch: pytest.MonkeyPatch, link: Callable[..., None]
) -> None:
    monkeypatch.setattr(os, "link", link)
    first, second = make("first"), make("second")
    claim = first.take(DIGEST)
    assert claim is not None
    assert second.take(DIGEST) is None
    assert claim.deliver({"loss": 1.5})
    assert not claim.deliver({"loss": 2.5})
    assert second.look()[DIGEST].record == {"loss": 1.5}
