"""Real teachers in real processes: killed, stopped, doubled, out of disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.real_process import Process
from tests.forked import run
from tests.trainer.small_teacher import write_corpus, write_teacher
from tests.waiting import wait_for
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.shard_folder import verify_shards

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PATIENCE = 250.0
"""Seconds for one process: most of them go into importing torch and transformers."""

SLOWLY = ("--batch-tokens", "64")
"""One window a forward: seconds between the first shard and the last."""
TRAINER = [sys.executable, "-m", "trainer.cli", "distill"]


class Bench:
    """A corpus, a teacher, and the processes that score."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.corpus = write_corpus(folder / "texts.jsonl", 240)
        self.model = write_teacher(folder / "model", self.corpus)
        self.processes: list[Process] = []

    def command(self, output: Path, *options: str) -> list[str]:
        return [
            *(*TRAINER, "teacher", str(self.model), "--data", str(self.corpus)),
            *("--out", str(output), "--max-seq-len", "64", "--shard-bytes", "2000"),
            *("--gpu-backend", "cpu", "--threads", "1", *options),
        ]

    def start(self, name: str, output: Path, *options: str) -> Process:
        process = Process(name, self.command(output, *options), self.folder, {})
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in self.processes:
            process.end()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.end()


def shards(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.parent.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.glob("shard-*/logits.parquet")
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in shards(folder).items()}


def whole_and_once(folder: Path) -> None:
    """The ledger: every window of every document once; and no litter."""
    found = list(verify_shards(LogitsFolder(folder)))
    assert found
    assert {verdict.state for verdict in found} == {"whole"}, found
    assert not list(folder.glob(".tmp-*"))


def beat(folder: Path) -> dict[str, object]:
    (path,) = (folder / "teachers").glob("*.json")
    return json.loads(path.read_bytes())


def test_killed_in_the_middle_of_a_shard_and_started_again(bench: Bench) -> None:
    out = bench.folder / "logits"
    first = bench.start("first", out, *SLOWLY)
    wait_for(lambda: len(shards(out)) >= 2, "two shards", seconds=PATIENCE)
    first.kill()
    written = shards(out)
    assert len(written) < len(LogitsFolder(out).description.shards)
    assert bench.start("second", out).wait(PATIENCE) == 0
    whole_and_once(out)
    assert shards(out).items() >= written.items()


def test_two_teachers_at_once_make_what_one_makes(bench: Bench) -> None:
    one, two = bench.folder / "one", bench.folder / "two"
    halves = [bench.start(f"half-{n}", two, "--workers", f"{n}/2") for n in (1, 2)]
    assert [half.wait(PATIENCE) for half in halves] == [0, 0]
    assert bench.start("one", one).wait(PATIENCE) == 0
    whole_and_once(two)
    assert contents(two) == contents(one)
    assert (two / "dataset.json").read_bytes() == (one / "dataset.json").read_bytes()


@pytest.mark.smoke("distill")
def test_sigterm_ends_it_with_0_and_nothing_half_written(bench: Bench) -> None:
    out = bench.folder / "logits"
    teacher = bench.start("stopped", out, *SLOWLY)
    wait_for(lambda: shards(out), "a shard", seconds=PATIENCE)
    teacher.signal(signal.SIGTERM)
    assert teacher.wait(PATIENCE) == 0
    assert "stopped by SIGTERM" in teacher.text
    assert (beat(out)["state"], beat(out)["reason"]) == ("failed", "stopped by SIGTERM")
    assert not list(out.glob(".tmp-*"))
    written = shards(out)
    assert len(written) < len(LogitsFolder(out).description.shards)
    assert bench.start("again", out).wait(PATIENCE) == 0
    whole_and_once(out)
    assert shards(out).items() >= written.items()


def test_one_that_stays_scores_what_a_student_asks_for(bench: Bench) -> None:
    out = bench.folder / "logits"
    teacher = bench.start("staying", out, "--stay")
    wait_for(lambda: out.exists() and (out / "teachers").exists(), "the folder", seconds=PATIENCE)
    wait_for(lambda: list((out / "teachers").glob("*.json")), "a heartbeat", seconds=PATIENCE)
    wait_for(lambda: beat(out)["state"] == "waiting", "the end of the pass", seconds=PATIENCE)
    before, logits = contents(out), LogitsFolder(out)
    (out / "shard-00001" / "logits.parquet").write_bytes(b"damaged")
    assert logits.quarantine_shard(1, "damaged")
    wait_for(
        lambda: logits.is_complete(1) and not logits.list_requests(), "the shard", seconds=PATIENCE
    )
    assert contents(out) == before
    teacher.signal(signal.SIGTERM)
    assert teacher.wait(PATIENCE) == 0
    assert beat(out)["state"] == "done"


def test_a_full_disk_ends_it_with_6_and_the_next_one_goes_on(bench: Bench) -> None:
    """A disk of its own, small enough, in a mount namespace that ends with the process."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root for a small disk")
    out, copy = bench.folder / "logits", bench.folder / "copy"
    out.mkdir()
    script = (
        f"mount -t tmpfs -o size=300k tmpfs {out} || exit 99\n"
        '"$@"\n'
        "code=$?\n"
        f"cp -a {out} {copy}\n"
        "exit $code"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *bench.command(out)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 6, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("trainer: ")
    assert "No space left on device" in last
    assert not list(copy.glob(".tmp-*"))
    logits = LogitsFolder(copy)
    states = {verdict.state for verdict in verify_shards(logits)}
    assert states == {"whole", "missing"}
    written = shards(copy)
    assert bench.start("elsewhere", copy).wait(PATIENCE) == 0
    whole_and_once(copy)
    assert (
        contents(copy).items() >= {name: content for name, (content, _) in written.items()}.items()
    )


def test_an_audit_tells_the_teacher_from_another_one(bench: Bench) -> None:
    out = bench.folder / "logits"
    assert bench.start("teacher", out).wait(PATIENCE) == 0
    audit = [*TRAINER, "audit", str(out), "--fraction", "0.1", "--gpu-backend", "cpu", "--json"]
    done = run(audit, os.environ)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["mean_kl"] < 1e-3
    assert figures["same_draws"] == 1
    other = write_teacher(bench.folder / "other", bench.corpus, seed=1)
    refused = run([*audit, "--teacher", str(other)], os.environ)
    assert refused.returncode == 4
    assert "is not the teacher of" in refused.stderr
