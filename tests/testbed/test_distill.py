"""A distillation on two bare hosts: teacher and evaluator on one, the student on the other.

They know of each other through the share alone: logits go one way, checkpoints the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.nfs import AUTOFS, install_client
from tests.testbed.plan import Plan
from tests.testbed.training import RECIPE, Operator, leftovers, verified
from tests.trainer.small_teacher import write_corpus, write_teacher
from trainer.tracking.metrics import read_metrics

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(2400)]

PATIENCE = 900.0
"""Seconds that anything may take before a test gives up: three torch processes on two cores."""
STEPS = 200
T = TypeVar("T")


class Pair:
    """The RAM box and the GPU box of the reference inventory, without the GPU."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        first, second = lab.free_addresses(2)
        plans = [Plan("intel", first, nspawn=[AUTOFS]), Plan("lambda", second, nspawn=[AUTOFS])]
        self.intel, self.gpu_box = self.hosts = lab.add_hosts(plans)
        install_client(self.gpu_box)
        inventory = lab.write_inventory(
            folder / "hosts.yml",
            {
                "motley_devices": [{"backend": "cpu"}],
                "motley_share_folder": "/srv/motley",
                "share_server": "intel",
                "share_protocols": [3, 4],
            },
            {
                "intel": {
                    "motley_coordinator": True,
                    "motley_teacher": True,
                    "motley_evaluator": True,
                },
                "lambda": {"motley_student": True},
            },
            hosts=self.hosts,
        )
        self.folder = folder
        self.operator = Operator(lab, folder / "laptop", inventory)

    def push_inputs(self) -> Path:
        """Make texts and models on the laptop, bring them to the hosts; return a job."""
        corpus = write_corpus(self.folder / "corpus.jsonl", 400)
        held = write_corpus(self.folder / "held-out.jsonl", 8)
        teacher = write_teacher(self.folder / "teacher", corpus)
        student = write_teacher(self.folder / "student", corpus, seed=1, head_scale=1.0)
        self.operator.launch("sync", "inputs", *map(str, (corpus, held, teacher, student)))
        job = {
            "name": "pair",
            "logits": "pair",
            "teacher": {
                "model": "inputs/teacher",
                "data": ["inputs/corpus.jsonl"],
                "max_seq_len": 64,
                "shard_bytes": 4000,
                "top_k": 8,
                "tail_samples": 4,
            },
            "student": {
                "model": "inputs/student",
                "training": {"batch_size": 32, "epochs": 100, "max_steps": STEPS},
                "checkpoint": {"every": 20, "keep_last": 100},
            },
            "evaluation": {"data": ["inputs/held-out.jsonl"], "every": 1.0},
        }
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(job))
        return path

    def wait(self, ready: Callable[[], T], what: str) -> T:
        """Wait until `ready` returns something true and return it."""
        deadline = time.monotonic() + PATIENCE
        while not (value := ready()):
            if time.monotonic() > deadline:
                done = self.operator.launch("logs", "--tail", "30", check=False)
                raise AssertionError(f"{what}: not within {PATIENCE:g} s\n{done.stdout}")
            time.sleep(1.0)
        return value

    def status(self) -> dict[str, Any]:
        """Return what `launch status` sees in its 3 s; its error when all hosts are too busy."""
        done = self.operator.launch("status", "--json", check=False)
        return json.loads(done.stdout)

    def close(self) -> None:
        """Remove the hosts."""
        for host in self.hosts:
            host.remove()


@pytest.fixture(scope="module")
def pair(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(lab, tmp_path_factory.mktemp("pair"))
    pair.operator.play(RECIPE)
    yield pair
    pair.close()


def trainer(host: Host, *arguments: str) -> str:
    """Run the installed trainer on a host as the run user."""
    command = ["/opt/motley/current/bin/trainer", *arguments]
    return host.exec(command, user="motley", timeout=PATIENCE).stdout


def states(status: dict[str, Any]) -> dict[str, str]:
    """Return the state of each process."""
    return {process["name"]: process["state"] for process in status.get("processes", ())}


def test_a_distillation_over_the_share_that_is_cut_for_half_a_minute(pair: Pair) -> None:
    job = pair.push_inputs()
    checks = pair.operator.json("distill", "doctor", "--config", str(job))["checks"]
    assert [check for check in checks if check["status"] == "fail"] == []
    met = [c["detail"] for c in checks if (c["host"], c["name"]) == ("intel", "logits")]
    assert [detail.endswith("the same as on lambda") for detail in met] == [True]

    begun = pair.operator.json("distill", "up", "--config", str(job))
    print(f"distill up: {begun['timings']}")
    where = {process["name"]: process["host"] for process in begun["processes"]}
    assert where == {"student": "lambda", "teacher-0": "intel", "evaluator-0": "intel"}

    def step() -> int:
        return (pair.status().get("training") or {}).get("step") or 0

    pair.wait(lambda: step() >= 40, "step 40")
    pair.gpu_box.cut()  # share and ssh alike
    time.sleep(30.0)
    pair.wait(lambda: pair.status().get("state") == "unknown", "status tells that nobody knows")
    pair.gpu_box.heal()

    status = pair.wait(
        lambda: tree if (tree := pair.status()).get("state") in ("completed", "failed") else {},
        "the end of the run",
    )
    assert status["state"] == "completed"
    # A teacher may still be at its end when the student has all it needs.
    exited = dict.fromkeys(where, "exited")
    status = pair.wait(
        lambda: tree if (tree := pair.status()) and states(tree) == exited else {},
        "the end of every process",
    )
    attempts = {p["name"]: p["attempt"] for p in status["processes"]}
    print(f"attempts: {attempts}")
    assert (attempts["teacher-0"], attempts["evaluator-0"]) == (1, 1)

    # Every document once, by both hosts' reading of the same bytes.
    ledgers = [trainer(host, "distill", "verify", "/srv/motley/logits/pair") for host in pair.hosts]
    assert ledgers[0] == ledgers[1]
    assert "each exactly once" in ledgers[0]

    copy = pair.folder / "metrics.jsonl"
    copy.write_text(pair.gpu_box.exec(["cat", f"{status['output']}/metrics.jsonl"]).stdout)
    steps = [r["step"] for r in read_metrics(copy) if r["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1))

    # What the student wrote on one host was verified and scored on the other, each once.
    folder = f"/srv/motley/checkpoints/{status['run_id']}"
    kept = verified(pair.intel, folder)
    assert f"step-{STEPS:06d}" in kept
    lines = pair.intel.exec(["cat", f"{folder}/evaluations/evaluations.jsonl"]).stdout.splitlines()
    scored = [json.loads(line)["checkpoint"] for line in lines]
    assert sorted(scored) == sorted(kept)

    assert pair.operator.launch("cluster", "down").stdout == "nothing was running\n"
    assert [leftovers(host) for host in pair.hosts] == [[], []]
