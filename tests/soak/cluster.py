"""The cluster under soak: a coordinator and three workers, started by `launch cluster up`.

Each has a host of its own in the inventory, all of them this machine; between a worker and the
coordinator lies a proxy on a loopback address of its own. Checkpoints and the hosts' state folders
lie on the small disk.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.session.processes import (
    RUN_VARIABLE,
    ProcessIdentity,
    find_run,
    identify_process,
    send_signal,
)
from launcher.session.spec import FINAL_PHASES, log_name
from tests.cluster.proxy import FaultProxy
from tests.ports import free_port
from tests.soak.clock import Clocks
from tests.soak.launch import JOIN_DEADLINE
from tests.soak.schedule import COORDINATOR, WORKERS
from tests.trainer.small_model import WORDS, write_model

SAMPLES, BATCH, CLASSES = 512, 16, 3
"""`BATCH`: samples of a step, or of all workers' inner steps at a time."""
INNER_STEPS = 4
EXCHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"codec": "int8"},
    "rounds": {"codec": "int8", "schedule": "rounds", "inner_steps": INNER_STEPS},
}
"""What a soak's workers send each other: gradients as they are, in int8, or rounds in int8."""
KEEP_LAST = 3
LINK_DELAY = 0.004
"""Seconds for every piece on a worker's link: steps take as long as on a home network, and the
cores have room for what faults cost."""
_DEADLINE = 300.0


class LaunchError(Exception):
    """`launch` did not do what it was asked for."""


@dataclass(frozen=True)
class Pair:
    """A supervisor and what it keeps, as they live now."""

    supervisor: ProcessIdentity | None
    child: ProcessIdentity | None


class SoakCluster:
    """Everything that one soak runs, below one folder."""

    def __init__(
        self, folder: Path, seed: int, clocks: Clocks | None, exchange: str = "plain"
    ) -> None:
        self.folder = folder
        self._exchange = EXCHANGES[exchange]
        self.output = folder / "output"
        self.disk = folder / "disk"
        self.checkpoints = self.disk / "checkpoints"
        self.temporary = folder / "tmp"
        self.clocks = clocks
        self.run_id = ""
        self._seed = seed
        self.port = free_port()
        self.proxies: dict[str, FaultProxy] = {}
        self._supervisors: list[subprocess.Popen[bytes]] = []
        for path in (self.disk, self.temporary):
            path.mkdir(parents=True, exist_ok=True)

    # What it trains on

    def prepare(self) -> None:
        """Write data, model, run config and inventory."""
        data = _write_data(self.folder / "train.jsonl", self._seed)
        model = write_model(self.folder / "model", data, self._seed)
        tree = self.config(self.output, str(model), str(data))
        tree["checkpoint"]["folder"] = str(self.checkpoints)
        self.run_file.write_text(yaml.safe_dump(tree))
        self._inventory.write_text(json.dumps(self._hosts(), indent=1))
        if self.clocks is not None:
            for name in (COORDINATOR, *WORKERS):
                self.clocks.set(name, 0)

    @property
    def inner_steps(self) -> int:
        """How many steps of the optimizer are one of the run."""
        return self._exchange.get("inner_steps", 1)

    @property
    def samples(self) -> int:
        """How many samples one step of the run, or round, takes."""
        return BATCH * self.inner_steps

    def config(self, output: Path, model: str, data: str) -> dict[str, Any]:
        """Return the run config; the rate stays, for how many steps come is not known.

        Equal shares: measured ones would give such small steps to one worker, and bench the others.
        No shared memory: through it workers of this machine would go past their links.
        """
        return {
            "name": "soak",
            "num_classes": CLASSES,
            "method": "full",
            "output": str(output),
            "model": {"path": model},
            "data": {"train": data, "max_seq_len": 32},
            "optimizer": {"learning_rate": 3e-4, "warmup_ratio": 0.0, "final_ratio": 1.0},
            "training": {"batch_size": BATCH, "epochs": 1_000_000, "seed": self._seed},
            "exchange": {
                "split": "equal",
                "hash_every": 1,
                "heartbeat": 0.3,
                "lost_after": 2.0,
                "step_deadline": 3.0,
                "join_deadline": JOIN_DEADLINE,
                "shared_memory": False,
                **self._exchange,
            },
            "checkpoint": {"every": 20, "keep_last": KEEP_LAST},
        }

    # Up and down

    def up(self) -> None:
        """Open the links and start the run; returns once all workers have joined."""
        for index, name in enumerate(WORKERS):
            proxy = FaultProxy(self.port, listen=(_link_address(index), self.port))
            proxy.delay = LINK_DELAY
            self.proxies[name] = proxy
        flags = ["--config", str(self.run_file), "-n", str(len(WORKERS)), "--json"]
        done = self.launch("cluster", "up", "--inventory", str(self._inventory), *flags)
        if done.returncode != 0:
            raise LaunchError(f"launch cluster up ended with {done.returncode}: {done.stderr}")
        self.run_id = json.loads(done.stdout)["run_id"]

    def down(self) -> subprocess.CompletedProcess[str]:
        """End the run as its operator would."""
        return self.launch("cluster", "down", "--inventory", str(self._inventory))

    def launch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one `launch` command; exit code 124 for one that does not end."""
        command = [sys.executable, "-m", "tests.soak.launch", *arguments]
        try:
            return subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=_DEADLINE
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no end within {_DEADLINE:g} s")

    @property
    def environment(self) -> dict[str, str]:
        """What every process of the soak gets."""
        return os.environ | {
            "MOTLEY_STATE_DIR": str(self.state_folder(COORDINATOR)),
            "TMPDIR": str(self.temporary),
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
        }

    @property
    def run_file(self) -> Path:
        """The run config."""
        return self.folder / "run.yaml"

    @property
    def metrics(self) -> Path:
        """What the coordinator writes a line to for every step and event."""
        return self.output / "metrics.jsonl"

    def state_folder(self, name: str) -> Path:
        """Return where the host of a process keeps its runs."""
        return self.disk / "hosts" / name

    def process_folder(self, name: str) -> Path:
        """Return the folder of spec, state and logs of one process."""
        return self.state_folder(name) / "runs" / self.run_id / "processes" / name

    # Who lives

    def pair(self, name: str) -> Pair:
        """Return supervisor and child of a process, from the kernel: a full disk hides nothing."""
        spec = str(self.process_folder(name) / "spec.json")
        for supervisor in self.living():
            if spec in _command_line(supervisor.pid):
                return Pair(supervisor, _newest_child(supervisor.pid))
        return Pair(None, None)

    def living(self) -> list[ProcessIdentity]:
        """Return everything that carries the run's id."""
        return find_run(self.run_id)

    def restart_supervisor(self, name: str) -> None:
        """Start a supervisor whose spec lies ready, as systemd does with the recipe's units."""
        folder = self.process_folder(name)
        self._supervisors = [one for one in self._supervisors if one.poll() is None]
        with (folder / "supervisor.log").open("ab") as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "launcher.session", str(folder / "spec.json")],
                env=self.environment | {RUN_VARIABLE: self.run_id},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        self._supervisors.append(supervisor)

    def given_up(self) -> list[str]:
        """Return which processes are not kept running any more, and why."""
        found: list[str] = []
        for name in (COORDINATOR, *WORKERS):
            folder = self.process_folder(name)
            state = json.loads((folder / "state.json").read_text())
            if state["state"] in FINAL_PHASES:
                lines = (folder / log_name(state["attempt"])).read_text().splitlines()
                why = lines[-1] if lines else state["message"]
                found.append(f"{name} {state['state']} ({state['exit_code']}): {why}")
            elif self.pair(name).supervisor is None:
                found.append(f"{name}: its supervisor is gone")
        return found

    def end(self) -> None:
        """Leave nothing running, whatever `down` did."""
        if not self.run_id:  # a start that was cut short
            self.launch("cluster", "down", "--all", "--inventory", str(self._inventory))
        for process in self.living() if self.run_id else ():
            send_signal(process, signal.SIGKILL)
        for supervisor in self._supervisors:
            supervisor.wait(30)
        for proxy in self.proxies.values():
            proxy.__exit__()

    def _hosts(self) -> dict[str, Any]:
        here = {"ansible_connection": "local", "motley_port": self.port}
        head = {**here, "motley_coordinator": True, "motley_bind_address": "127.0.0.1"}
        hosts = {"head": {**head, "motley_devices": [], **self._own(COORDINATOR)}}
        for index, name in enumerate(WORKERS):
            devices = [{"backend": "cpu", "threads": 1}]
            link = {"motley_connect_address": _link_address(index), "motley_devices": devices}
            hosts[f"host-{index}"] = {**here, **link, **self._own(name)}
        return {"all": {"hosts": hosts}}

    def _own(self, name: str) -> dict[str, Any]:
        """Return the variables of the host of a process: its state folder, its clock."""
        command = [str(Path(sys.executable).with_name("trainer"))]
        if self.clocks is not None:
            clock = self.clocks.environment(name).items()
            command = ["/usr/bin/env", *(f"{key}={value}" for key, value in clock), *command]
        folder = str(self.state_folder(name))
        return {"motley_state_folder": folder, "motley_trainer_command": command}

    @property
    def _inventory(self) -> Path:
        return self.folder / "hosts.json"


def _link_address(index: int) -> str:
    return f"127.0.0.{index + 2}"


def _newest_child(pid: int) -> ProcessIdentity | None:
    """Return what trains: the older child of a supervisor is the parent that forked it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    living = [child for child in map(identify_process, map(int, children)) if child is not None]
    return max(living, key=lambda child: child.start, default=None)


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _write_data(path: Path, seed: int) -> Path:
    """Write samples whose labels can be learned in part only.

    There are 40 texts; the label of each is a die that falls on one side in 80 of 100 cases. So
    the loss never comes near zero, where one percent of it would be nothing but rounding.
    """
    draw = random.Random(seed)
    texts = [f"{WORDS[index % 5]} # {index // 5}" for index in range(40)]
    with path.open("w") as stream:
        for _ in range(SAMPLES):
            index = draw.randrange(len(texts))
            label = index % CLASSES if draw.random() < 0.7 else draw.randrange(CLASSES)
            stream.write(json.dumps({"input": texts[index], "label": label}) + "\n")
    return path
