"""What a run needs of its hosts, whatever is trained: trainer, devices, folders, port."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from launcher.plan import LaunchPlan
from launcher.preflight import Finding, Probe

MODULES = ("torch", "transformers", "peft", "safetensors", "tokenizers")
_MIB = 1 << 20
_GIB = 1 << 30
_LEAST_STATE_SPACE = 64 * _MIB
_CUDA_DEADLINE = 60.0
"""Seconds: torch's CUDA libraries are gigabytes, read for the first time from a slow disk."""
_CUDA_PROBE = """
import torch
if torch.version.cuda is None:
    raise SystemExit("this torch was built without CUDA")
try:
    for index in range(torch.cuda.device_count()):
        torch.ones(64, 64, device=f"cuda:{index}").sum().item()
except RuntimeError as error:
    raise SystemExit(str(error).splitlines()[0])
print(torch.cuda.device_count())
"""
_NO_CUDA = (
    "install torch for CUDA (here: make setup TORCH=cuda), or take the CPU: "
    "-e 'motley_devices=[{backend: cpu}]'"
)


def host_probes(
    plan: LaunchPlan, state_folder: Path, problems: Mapping[str, tuple[str, ...]]
) -> list[Probe]:
    """Return the probes of every host of a plan; `problems` are its unusable devices, by host."""
    probes: list[Probe] = []
    for host in plan.hosts:
        program = next(p.argv[0] for p in plan.processes if p.host == host.name)
        own = host.trainer_command is None
        workers = [worker for worker in plan.workers if worker.host == host.name]
        used = [worker.device for worker in workers]
        bad = problems.get(host.name, ())
        probes += [
            Probe("trainer", host.name, partial(check_trainer, program, own)),
            Probe("devices", host.name, partial(check_devices, used, bad)),
            Probe("state", host.name, partial(check_folder, state_folder, _LEAST_STATE_SPACE)),
        ]
        cards = sorted({worker.device for worker in workers if worker.backend == "cuda"})
        if cards and not bad:
            python = sys.executable if own else python_beside(program)
            ask = partial(check_cuda, python, cards)
            probes.append(Probe("cuda", host.name, ask, _CUDA_DEADLINE))
    head = plan.coordinator.host
    probes.append(Probe("port", head, partial(check_port, plan.bind_address, plan.port)))
    return probes


def check_trainer(program: str, own: bool) -> Finding:
    """Whether the trainer can be started; `own` is this installation's."""
    if shutil.which(program) is None:
        return Finding("fail", f"{program} is not an executable file", "install the trainer there")
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None] if own else []
    if missing:
        return Finding(
            "fail", f"not installed: {', '.join(missing)}", "pip install 'motley[trainer]'"
        )
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Finding("ok", f"Python {version}, {program}" if own else program)


def check_devices(devices: Sequence[str], problems: Sequence[str]) -> Finding:
    """Whether every device answers; one that is there but unusable refuses the start."""
    if problems:
        return Finding(
            "fail",
            "; ".join(problems),
            "repair its driver, or list the devices to use: -e 'motley_devices=[{backend: cpu}]'",
        )
    counts = {device: devices.count(device) for device in devices}
    texts = [f"{count} x {device}" if count > 1 else device for device, count in counts.items()]
    return Finding("ok", ", ".join(texts) or "coordinator only")


def check_cuda(python: str | None, cards: Sequence[str]) -> Finding:
    """Whether torch, as the trainer has it, computes on every planned card.

    The driver may know a card that this build of torch has no CUDA or no kernels for.
    """
    if python is None:
        return Finding("warn", "not checked: there is no Python beside the trainer's program")
    try:
        done = subprocess.run(
            [python, "-c", _CUDA_PROBE],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(cards)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CUDA_DEADLINE - 1,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("fail", f"torch does not answer within {_CUDA_DEADLINE - 1:.0f} s", _NO_CUDA)
    except OSError as error:
        return Finding("fail", f"{python}: {error.strerror}", "install the trainer there")
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"{python} ended with {done.returncode}"]
        return Finding("fail", said[-1], _NO_CUDA)
    seen = done.stdout.strip()
    if seen != str(len(cards)):
        planned = ", ".join(cards)
        return Finding("fail", f"torch sees {seen} of {len(cards)} cards ({planned})", _NO_CUDA)
    return Finding("ok", f"torch computes on {seen} of {len(cards)} cards")


def python_beside(program: str) -> str | None:
    """Return the Python of the environment that a program lies in; None when there is none."""
    found = shutil.which(program)
    return None if found is None else shutil.which(str(Path(found).with_name("python")))


def check_port(address: str, port: int) -> Finding:
    """Whether the coordinator can listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return Finding(
                    "fail",
                    f"port {port} on {address} is in use{_listener(port)}",
                    f"end that, or take another: -e motley_port={port + 1}",
                )
            if error.errno == errno.EADDRNOTAVAIL:
                return Finding(
                    "fail",
                    f"{address} is no address of this host",
                    "set motley_bind_address to one of `ip address`",
                )
            return Finding("fail", f"port {port} on {address}: {error.strerror}")
    return Finding("ok", f"{port} on {address} is free")


def check_folder(folder: Path, least: int) -> Finding:
    """Whether a folder, or the place where it will be made, is writable and has `least` bytes."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return Finding("fail", f"{place} is not a folder", "choose another place")
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding("fail", f"{place} is not writable", "choose another place, or its owner")
    free = shutil.disk_usage(place).free
    if free < least:
        return Finding(
            "fail",
            f"{place} has {free // _MIB} MiB left, {least // _MIB} are needed",
            "free some space, or choose another place",
        )
    return Finding("ok", f"{folder}, {free / _GIB:.1f} GiB free")


def _listener(port: int) -> str:
    """Return ` by NAME (pid N)` for whoever listens there; empty when that cannot be seen."""
    import psutil

    try:
        for entry in psutil.net_connections("tcp"):
            here = bool(entry.laddr) and entry.laddr[1] == port
            if here and entry.status == psutil.CONN_LISTEN and entry.pid:
                return f" by {psutil.Process(entry.pid).name()} (pid {entry.pid})"
    except (psutil.Error, OSError):
        pass
    return ""
