"""What the eval runner makes of damage, pruning, absence, takeovers and signals."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.trainer.saved_run import Probe, Run, claims, runner
from trainer.checkpoint.reader import BEST_EVALUATED, checkpoint_digest
from trainer.evaluate.tasks import TaskOptions, make_tasks
from trainer.system.errors import InputError, StorageError
from trainer.system.process.interruption import Interruption
from trainer.system.storage.atomic_folder import verify_folder


def test_a_damaged_checkpoint_is_named_once_and_left_out(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        run.save(step)
    store = run.output / "checkpoints"
    cut, flipped = (
        store / "step-000002" / "run.json",
        store / "step-000003" / "optimizer.safetensors",
    )
    cut.write_bytes(cut.read_bytes()[:-1])
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    probe = Probe()
    looks = 0

    def look(_: Interruption, seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            run.status("completed")

    monkeypatch.setattr(Interruption, "sleep", look)
    runner(run, probe, once=False).run()
    assert probe.seen == ["step-000001"]
    assert [record["step"] for record in run.records] == [1]
    said = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 2
    assert "step-000002/run.json: has" in said[0]
    assert "step-000003/optimizer.safetensors: it does not match" in said[1]
    assert claims(run).take_claim(checkpoint_digest(flipped.parent)) is not None, (
        "it was given back"
    )


def test_what_was_pruned_before_its_turn_is_recorded_as_skipped(run: Run) -> None:
    for step in (1, 2):
        run.save(step)

    def train_on(_: Path) -> None:
        if not (run.output / "checkpoints" / "step-000005").exists():
            for step in (3, 4, 5):
                run.save(step)

    probe = Probe(train_on)
    runner(run, probe).run()
    assert probe.seen == ["step-000002", "step-000005", "step-000004", "step-000003"]
    states = {record["step"]: (record["state"], record["reason"]) for record in run.records}
    assert states.pop(1) == ("skipped", "removed before it was scored")
    assert set(states.values()) == {("scored", None)}


def test_where_locks_do_not_reach_a_checkpoint_may_vanish(run: Run, data: Path) -> None:
    """What was figured out by then counts; what came to nothing says why, and the next is taken."""
    for step in (1, 2, 3):
        run.save(step)

    def vanish(path: Path) -> None:
        if path.name != "step-000001":
            shutil.rmtree(path)
            raise StorageError(f"{path}: cannot be read")

    (loss,) = make_tasks("loss", TaskOptions(data=[data]))
    runner(run, loss, Probe(vanish)).run()
    records = {record["step"]: record for record in run.records}
    assert [records[step]["state"] for step in (1, 2, 3)] == ["scored"] * 3
    gone = {"error": "the checkpoint was removed while it was read"}
    assert records[3]["tasks"]["probe"] == records[2]["tasks"]["probe"] == gone
    assert records[3]["tasks"]["loss"]["figures"]["loss"] > 0
    assert (run.output / "checkpoints" / BEST_EVALUATED).readlink().name == "step-000001"


@pytest.fixture
def aside(run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the output folder goes to; it is back as soon as the runner waits for it."""
    folder = run.output.with_name("aside")

    def come_back(_: Interruption, seconds: float) -> None:
        folder.rename(run.output)

    monkeypatch.setattr(Interruption, "sleep", come_back)
    return folder


def test_a_folder_that_is_away_is_waited_for(run: Run, aside: Path) -> None:
    run.save(1)

    def go_away(path: Path) -> None:
        if len(probe.seen) == 1:
            run.output.rename(aside)
            verify_folder(path)

    probe = Probe(go_away)
    runner(run, probe).run()
    assert probe.seen == ["step-000001"] * 2
    assert [record["state"] for record in run.records] == ["scored"]


def test_a_result_that_cannot_be_written_yet_is_kept(run: Run, aside: Path) -> None:
    run.save(1)
    probe = Probe(lambda _: run.output.rename(aside))
    runner(run, probe).run()
    assert probe.seen == ["step-000001"]
    assert [record["state"] for record in run.records] == ["scored"]
    assert not aside.exists()


@pytest.fixture
def small_disk(run: Run) -> Iterator[Path]:
    """A file system of 64 KB for the evaluations."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    folder = run.output / "evaluations"
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs root that may mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    ("fault", "when"),
    [("full", "claim"), ("full", "result"), ("Read-only file system", "claim")],
)
def test_a_folder_that_cannot_be_written_for_a_while_is_waited_for(
    run: Run,
    small_disk: Path,
    fault: str,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    run.save(1)
    run.status("completed")
    ballast = small_disk / "ballast"

    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", small_disk], check=True)

    def begin(_: object) -> None:
        if fault == "full":
            with suppress(OSError):
                ballast.write_bytes(bytes(1 << 20))
        else:
            remount("ro")

    def end(_: Interruption, seconds: float) -> None:
        ballast.unlink() if fault == "full" else remount("rw")

    monkeypatch.setattr(Interruption, "sleep", end)
    probe = Probe(begin if when == "result" else lambda _: None)
    once = runner(run, probe, once=False)
    if when == "claim":
        begin(None)
    once.run()
    assert probe.seen == ["step-000001"]
    assert [record["state"] for record in run.records] == ["scored"]
    assert any(
        fault in each.message.replace("No space left on device", "full")
        and each.message.endswith("; waiting")
        for each in caplog.records
    )


def test_what_a_dead_runner_did_not_list_is_listed(run: Run) -> None:
    for step in (1, 2):
        run.save(step)
    runner(run, Probe()).run()
    listed = run.records
    link = run.output / "checkpoints" / BEST_EVALUATED
    (run.output / "evaluations" / "evaluations.jsonl").unlink()
    link.unlink()
    probe = Probe()
    runner(run, probe, name="second").run()
    assert probe.seen == []
    assert sorted(r["step"] for r in run.records) == sorted(r["step"] for r in listed) == [1, 2]
    assert link.readlink().name == "step-000002"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_and_gives_the_claim_back(
    run: Run, number: signal.Signals
) -> None:
    digest = checkpoint_digest(run.save(1))
    before = signal.getsignal(number)

    def interrupted(_: Path) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    began = time.monotonic()
    runner(run, Probe(interrupted), once=False).run()
    assert time.monotonic() - began < 30
    assert claims(run).take_claim(digest) is not None
    assert not (run.output / "evaluations" / "evaluations.jsonl").exists()
    assert signal.getsignal(number) == before


def test_a_signal_that_a_library_swallows_still_ends_it(run: Run) -> None:
    digest = checkpoint_digest(run.save(1))

    def swallowing(_: Path) -> None:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    runner(run, Probe(swallowing), once=False).run()
    assert claims(run).take_claim(digest) is not None


def test_a_base_that_is_missing_here_ends_it_and_leaves_the_checkpoint_to_others(
    run: Run,
) -> None:
    digest = checkpoint_digest(run.save(1))
    with pytest.raises(InputError, match="/nowhere: no such model"):
        runner(run, Probe(), base="/nowhere").run()
    assert claims(run).take_claim(digest) is not None
