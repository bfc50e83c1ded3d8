"""A training cluster on the test bed, and its operator, who runs recipes and `launch`."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests import ROOT
from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.nfs import AUTOFS, install_client
from tests.testbed.plan import Plan
from tests.testbed.processes import Completed
from trainer.tracking.metrics import read_metrics

PROGRAMS = Path(sys.executable).parent
RECIPE = "recipes/gpu-training.yml"
STATE = "/var/lib/motley"
PATIENCE = 120.0
"""Seconds that anything may take before a test gives up: three torch workers share two cores."""
T = TypeVar("T")


class Operator:
    """Somebody's laptop in the lab: an inventory, a state folder of their own, and a checkout."""

    def __init__(self, lab: Lab, folder: Path, inventory: Path, checkout: Path = ROOT) -> None:
        self.lab = lab
        self.folder = folder
        self.inventory = inventory
        self.checkout = checkout
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = {
            "MOTLEY_INVENTORY": str(inventory),
            "MOTLEY_STATE_DIR": str(folder / "state"),
            "HOME": str(folder),
            "NO_COLOR": "1",
            "COLUMNS": "160",
            "PYTHONPATH": str(checkout),
        }

    def launch(self, *arguments: str, check: bool = True, timeout: float = 600) -> Completed:
        """Run `launch`; stdout is data, stderr what is said."""
        command = [str(PROGRAMS / "launch"), *arguments]
        done = self.lab.run(
            command, cwd=self.checkout, env=self.environment, timeout=timeout, check=False
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stderr}\n{done.stdout}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `launch` and leave it running."""
        program = [str(PROGRAMS / "launch"), *arguments]
        command = self.lab.command(program, cwd=self.checkout, env=self.environment)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        """Return what `launch ... --json` prints."""
        return json.loads(self.launch(*arguments, "--json").stdout)

    def status(self) -> dict[str, Any]:
        """Return `launch status --json`."""
        return self.json("status")

    def play(self, *arguments: str) -> Completed:
        """Run a recipe from the root of the checkout."""
        program = [sys.executable, "-m", "ansible", "playbook", "-i", str(self.inventory)]
        path = {"PYTHONPATH": str(self.checkout)}
        done = self.lab.run(
            [*program, *arguments], cwd=self.checkout, env=path, timeout=1500, check=False
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done


class Cluster:
    """Three Debian 12 hosts: head coordinates, w2 has the share, all of them train."""

    def __init__(self, lab: Lab, folder: Path, checkout: Path = ROOT) -> None:
        self.lab = lab
        addresses = lab.free_addresses(3)
        volumes = {STATE: "400M"}
        plans = [
            Plan(name=name, ip=ip, nspawn=[AUTOFS], volumes=volumes if name == "head" else {})
            for name, ip in zip(("head", "w1", "w2"), addresses, strict=True)
        ]
        self.head, self.w1, self.w2 = self.hosts = lab.add_hosts(plans)
        for host in (self.head, self.w1):
            install_client(host)
        inventory = lab.write_inventory(
            folder / "hosts.yml",
            {
                "motley_devices": [{"backend": "cpu", "threads": 1}],
                "motley_share_folder": "/srv/motley",
                "share_server": "w2",
                "share_protocols": [3, 4],
            },
            {"head": {"motley_coordinator": True}},
            hosts=self.hosts,
        )
        self.folder = folder
        self.operator = Operator(lab, folder / "laptop", inventory, checkout)

    def another_operator(self, name: str, checkout: Path = ROOT) -> Operator:
        """Return somebody else's laptop; of a name that there is: that one, with this checkout."""
        return Operator(self.lab, self.folder / name, self.operator.inventory, checkout)

    def push_inputs(self) -> None:
        """Make a small model and data on the laptop and bring them to every host."""
        data, model = self.folder / "data", self.folder / "model"
        trainer = str(PROGRAMS / "trainer")
        sizes = ["--hidden-size", "64", "--layers", "2", "--heads", "4", "--kv-heads", "2"]
        sizes += ["--head-dim", "16", "--intermediate-size", "128", "--vocab-size", "512"]
        counts = ["--count", "512", "--validation-count", "64"]
        for command in (
            [trainer, "generate-data", "shell-safety", "-o", str(data), *counts],
            [trainer, "init-model", "--data", str(data / "train.jsonl"), "-o", str(model), *sizes],
        ):
            path = {**os.environ, "PYTHONPATH": str(self.operator.checkout)}
            subprocess.run(command, check=True, capture_output=True, text=True, env=path)
        self.operator.launch("sync", "inputs", str(data), str(model))

    def close(self) -> None:
        """Remove the hosts."""
        for host in self.hosts:
            host.remove()


class Running:
    """A run on a cluster, watched through what its coordinator writes."""

    def __init__(self, cluster: Cluster, tree: dict[str, Any]) -> None:
        self.cluster = cluster
        self.run_id: str = tree["run_id"]
        self.timings: dict[str, float] = tree.get("timings", {})
        self._output: str = tree["output"]

    @classmethod
    def start(cls, cluster: Cluster, *flags: str) -> Running:
        """Bring a run up on all three hosts."""
        return cls(cluster, cluster.operator.json("cluster", "up", *up_flags(*flags)))

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind of metrics.jsonl on the coordinator's host."""
        copy = self.cluster.folder / f"{self.run_id}.jsonl"
        path = f"{self._output}/metrics.jsonl"
        copy.write_text(self.cluster.head.exec(["cat", path]).stdout)
        return [record for record in read_metrics(copy) if record["kind"] == kind]

    def events(self, name: str, **details: Any) -> list[dict[str, Any]]:
        """Return the events of one name that have these details."""
        return [
            event
            for event in self.records("event")
            if event["event"] == name and all(event.get(k) == v for k, v in details.items())
        ]

    @property
    def step(self) -> int:
        """Steps committed so far."""
        steps = self.records("step")
        return steps[-1]["step"] if steps else 0

    def wait_steps(self, count: int = 3) -> None:
        """Wait until training has gone on by some steps."""
        wanted = self.step + count
        self.wait(lambda: self.step >= wanted, f"step {wanted}")

    def wait_event(self, name: str, since: int = 0, **details: Any) -> dict[str, Any]:
        """Wait for an event beyond the first `since` of its kind; return it."""
        what = f"event {name} {details}"
        return self.wait(lambda: self.events(name, **details)[since:], what)[0]

    def wait_whole(self) -> None:
        """Wait until all three ranks take part in a step."""

        def whole() -> bool:
            steps = self.records("step")
            return bool(steps) and len(steps[-1]["worker_samples"]) == 3

        self.wait(whole, "all three ranks in a step")

    def wait_status(self, **states: str) -> dict[str, Any]:
        """Wait until `status` sees the run running and these processes in these states.

        Not its first answer: it looks for 3 s, and a host whose cores are all taken needs longer.
        """
        wanted = {name.replace("_", "-"): state for name, state in states.items()}

        def seen() -> dict[str, Any]:
            done = self.cluster.operator.launch("status", "--json", check=False)
            tree = json.loads(done.stdout)
            shown = {process["name"]: process["state"] for process in tree.get("processes", [])}
            whole = tree.get("state") == "running" and wanted.items() <= shown.items()
            return tree if whole else {}

        return self.wait(seen, f"status shows {wanted}")

    def wait(self, ready: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
        """Wait until `ready` returns something true and return it."""
        deadline = time.monotonic() + seconds
        while not (value := ready()):
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{self.logs()}"
            time.sleep(0.2)
        return value

    def logs(self) -> str:
        """Return the ends of all logs, for the message of a failure."""
        done = self.cluster.operator.launch("logs", "--tail", "15", check=False)
        events = "\n".join(map(str, self.records("event")[-20:]))
        return f"{done.stdout}{done.stderr}\n{events}"

    def check(self) -> None:
        """Check F-DP-001 by what was recorded, and that no step was committed twice."""
        numbers = [record["step"] for record in self.records("step")]
        assert numbers == sorted(set(numbers))
        assert not self.events("diverged")
        assert self.events("verified")


def up_flags(*flags: str) -> list[str]:
    """Return the flags of a run that goes on until somebody ends it, each in a folder of its own.

    Equal shares: three workers on two cores would else bench each other.
    """
    settings = {
        "exchange.split": "equal",
        "data.validation": "null",
        "data.max_seq_len": "64",
        "method": "full",
        "training.epochs": "100000",
        "training.max_steps": "null",
        "training.batch_size": "12",
        "training.evaluate_every": "0",
        "checkpoint.every": "20",
        "exchange.hash_every": "5",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    paths = ["--preset", "quickstart"]
    paths += ["--model", "inputs/model", "--data", "inputs/data/train.jsonl"]
    paths += ["--output", f"outputs/{secrets.token_hex(4)}"]
    return ["--expect-workers", "3", *paths, *words, *flags]


def leftovers(host: Host) -> list[str]:
    """Return the processes and units of any run that a host still has."""
    found: list[str] = []
    units = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "motley-*@*"]
    found += host.exec(units).stdout.splitlines()
    wants = "/etc/systemd/system/multi-user.target.wants"
    found += host.exec(["find", wants, "-name", "motley-*@*"]).stdout.splitlines()
    listing = host.exec(["ps", "-u", "motley", "-o", "pid=,args="], check=False).stdout
    agents = ("launcher.agent", "sudo")
    found += [line for line in listing.splitlines() if not any(word in line for word in agents)]
    return found


def verified(host: Host, folder: str) -> dict[str, list[str]]:
    """Return the files of each checkpoint below a folder, all checked byte by byte on that host."""
    program = (
        "import json, sys; from pathlib import Path; "
        "from trainer.system.storage.atomic_folder import verify_folder; "
        "steps = sorted(Path(sys.argv[1]).glob('step-*')); "
        "print(json.dumps({step.name: sorted(verify_folder(step)) for step in steps}))"
    )
    command = ["/opt/motley/current/bin/python", "-c", program, folder]
    return json.loads(host.exec(command, user="motley").stdout)
