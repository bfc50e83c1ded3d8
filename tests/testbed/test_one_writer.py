"""Two hosts write one folder of a share: one of them loses, also when it had been the first."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.host import Host
from tests.testbed.processes import wait_until
from tests.testbed.training import PATIENCE, STATE, Cluster, verified

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(900)]

SHARED = "/srv/motley/checkpoints/one-writer"
TRAINER = "/opt/motley/current/bin/trainer"


class Writer:
    """A run on one host that saves its checkpoints on the share, until somebody ends it."""

    def __init__(self, host: Host, log: Path) -> None:
        self.host, self._log = host, log
        settings = {
            "name": "one-writer",
            "task": "classify",
            "num_classes": 5,
            "method": "full",
            "output": f"{STATE}/outputs/one-writer",
            "model": {"path": f"{STATE}/inputs/model"},
            "data": {"train": f"{STATE}/inputs/data/train.jsonl", "max_seq_len": 64},
            "training": {"batch_size": 12, "epochs": 100000},
            "checkpoint": {"every": 5, "folder": SHARED},
        }
        host.exec(["mkdir", "--parents", f"{STATE}/outputs"], user="motley")
        config = f"{STATE}/outputs/one-writer.yaml"
        host.exec(["tee", config], user="motley", input=json.dumps(settings))
        words = ["finetune", "--config", config, "--run-id", "one", "--gpu-backend", "cpu"]
        # Not by runuser, which stops itself when its child is stopped.
        become = ["setpriv", "--reuid=motley", "--regid=motley", "--init-groups"]
        command = host.command([*become, TRAINER, *words, "--threads", "1"])
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        """Its pid as its host counts."""
        shown = self.host.exec(["pgrep", "-u", "motley", "-o", "-f", "bin/trainer.*one-writer"])
        return int(shown.stdout)

    def signal(self, name: str) -> None:
        self.host.exec(["kill", f"-{name}", str(self.pid)])
        if name == "CONT":  # nsenter has stopped itself with its child
            self._process.send_signal(signal.SIGCONT)

    def wait(self) -> int:
        return self._process.wait(PATIENCE)

    def said(self, words: str) -> None:
        wait_until(lambda: words in self.text, PATIENCE, f"{words!r} is not in {self.text}")

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        if self._process.poll() is None:
            self.signal("KILL")
            self._process.wait(30)


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[Writer]]:
    """Yield a list of what is ended afterwards, while the logs in `tmp_path` are still there."""
    del tmp_path
    started: list[Writer] = []
    yield started
    for writer in started:
        writer.end()
        print(f"--- {writer.host.name}\n{writer.text[-2000:]}")


def newest(host: Host) -> int:
    """Return the step of the newest complete checkpoint."""
    shown = host.exec(["readlink", f"{SHARED}/latest"], user="motley", check=False).stdout
    return int(shown.strip().rpartition("-")[2] or 0)


def wait_step(host: Host, step: int) -> None:
    wait_until(lambda: newest(host) >= step, PATIENCE, f"no checkpoint of step {step}")


def test_a_writer_that_was_stopped_and_followed_publishes_nothing(
    cluster: Cluster, writers: list[Writer], tmp_path: Path
) -> None:
    first = Writer(cluster.head, tmp_path / "first.log")
    writers.append(first)
    wait_step(cluster.w1, 5)

    refused = Writer(cluster.w1, tmp_path / "refused.log")
    writers.append(refused)
    assert refused.wait() == 4
    complaint = refused.text.strip().splitlines()[-1]
    assert f"{SHARED}: in use by run one, pid {first.pid} on host head" in complaint
    assert "Traceback" not in refused.text

    first.signal("STOP")
    second = Writer(cluster.w1, tmp_path / "second.log")
    writers.append(second)
    second.said("for its heartbeat")
    before = newest(cluster.w1)
    wait_step(cluster.w1, before + 15)
    first.signal("CONT")
    assert first.wait() == 4
    said = first.text.strip().splitlines()[-1]
    assert f"{SHARED}: taken over by run one, pid {second.pid} on host w1" in said
    assert "Traceback" not in first.text

    wait_step(cluster.head, newest(cluster.w1) + 10)
    files = verified(cluster.w2, SHARED)
    assert f"step-{newest(cluster.w2):06d}" in files
    second.signal("TERM")
    assert second.wait() == 0
