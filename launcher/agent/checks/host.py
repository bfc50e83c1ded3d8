"""Checks of a host for every kind of run: trainer, devices, folders, port."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.agent.checks.finding import Finding
from launcher.agent.operation import check
from launcher.inventory.facts import machine
from launcher.inventory.facts.devices import run_command

MODULES = ("torch", "transformers", "peft", "safetensors", "tokenizers")
"""Packages that the trainer of a worker imports."""
COORDINATOR_MODULES = ("safetensors", "tokenizers", "blake3")
"""Packages that the trainer of a coordinator imports."""
_MIB = 1 << 20
_GIB = 1 << 30
CUDA_DEADLINE = 60.0
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
    "install torch for CUDA (here: make setup TORCH=cuda), or use the CPU: "
    "-e 'motley_devices=[{backend: cpu}]'"
)


@check("trainer")
def check_trainer(
    program: str, own: bool, trains: bool = True, imports: Sequence[str] = ()
) -> Finding:
    """Whether the trainer can be started.

    Args:
        own: it is this installation's.
        trains: it is to be a worker, not a coordinator alone.
        imports: packages of the run's script.
    """
    if shutil.which(program) is None:
        return Finding("fail", f"{program} is not an executable file", "install the trainer there")
    needed = MODULES if trains else COORDINATOR_MODULES
    missing = [name for name in needed if importlib.util.find_spec(name) is None] if own else []
    if missing:
        extra = "trainer" if trains else "coordinator"
        return Finding(
            "fail", f"not installed: {', '.join(missing)}", f"pip install 'motley[{extra}]'"
        )
    if own and (missing := [name for name in imports if importlib.util.find_spec(name) is None]):
        detail = f"the script imports {', '.join(missing)}, which is not installed"
        return Finding("fail", detail, f"install it for {sys.executable}")
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Finding("ok", f"Python {version}, {program}" if own else program)


def check_devices(
    devices: Sequence[str], problems: Sequence[str], spare: Sequence[str] = ()
) -> Finding:
    """Whether every device answers; a present but unusable device prevents the start.

    Args:
        spare: further usable devices of the host, which an inventory may list.
    """
    if problems:
        return Finding(
            "fail",
            "; ".join(problems),
            "repair its driver, or list the devices to use: -e 'motley_devices=[{backend: cpu}]'",
        )
    counts = {device: devices.count(device) for device in devices}
    texts = [f"{count} x {device}" if count > 1 else device for device, count in counts.items()]
    also = f"; not used: {', '.join(spare)}" if spare else ""
    return Finding("ok", f"{', '.join(texts) or 'coordinator only'}{also}")


def check_cuda(python: str | None, cards: Sequence[str]) -> Finding:
    """Whether torch, as the trainer has it, computes on every planned card.

    The driver may support a card for which this build of torch has no CUDA or no kernels.
    """
    if python is None:
        detail = "not checked: no Python next to the trainer's program"
        return Finding("warn", detail, "install the trainer there")
    try:
        done = subprocess.run(
            [python, "-P", "-c", _CUDA_PROBE],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(cards)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CUDA_DEADLINE - 1,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("fail", f"torch does not answer within {CUDA_DEADLINE - 1:.0f} s", _NO_CUDA)
    except OSError as error:
        return Finding("fail", f"{python}: {error.strerror}", "install the trainer there")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"{python} ended with {done.returncode}"]
        return Finding("fail", lines[-1], _NO_CUDA)
    seen = done.stdout.strip()
    if seen != str(len(cards)):
        planned = ", ".join(cards)
        return Finding("fail", f"torch sees {seen} of {len(cards)} cards ({planned})", _NO_CUDA)
    return Finding("ok", f"torch computes on {seen} of {len(cards)} cards")


def find_python(program: str) -> str | None:
    """Return the Python of the environment that a program lies in; None when there is none."""
    found = shutil.which(program)
    return None if found is None else shutil.which(str(Path(found).with_name("python")))


@check("cuda", deadline=CUDA_DEADLINE)
def check_trainer_cuda(program: str, own: bool, cards: Sequence[str]) -> Finding:
    """Query the Python of a trainer; for this installation's trainer that is this process."""
    return check_cuda(sys.executable if own else find_python(program), cards)


@check("secure_boot")
def check_secure_boot(broken: bool) -> Finding:
    """Whether Secure Boot may keep an NVIDIA driver from loading; `broken`: it does not load."""
    state = machine.secure_boot()
    if state == "on" and broken:
        return Finding(
            "warn",
            "on, and a card does not work: the firmware refuses unsigned modules",
            "enrol the key (sudo mokutil --import /var/lib/dkms/mok.pub, reboot), or use "
            "the distribution's signed modules",
        )
    return Finding("ok", state)


@check("sleep")
def check_sleep() -> Finding:
    """Whether the host may suspend during a run."""
    if machine.may_sleep():
        return Finding("warn", "a desktop session is running and may suspend the machine")
    return Finding("ok", "stays awake")


@check("port")
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
                who, run = _describe_listener(port)
                ours = f"that run is active: launch status --run {run}; wait for it, or stop it:"
                ours += f" launch cluster down --run {run}"
                another = f"use another port: -e motley_port={port + 1}"
                return Finding(
                    "fail",
                    f"port {port} on {address} is in use{who}",
                    f"{ours if run else 'stop that process'}, or {another}",
                )
            if error.errno == errno.EADDRNOTAVAIL:
                return Finding(
                    "fail",
                    f"{address} is not an address of this host",
                    "set motley_bind_address to one that `ip address` lists",
                )
            return Finding("fail", f"port {port} on {address}: {error.strerror}")
    return Finding("ok", f"{port} on {address} is free")


@check("folder")
def check_folder(path: str | Path, least: int) -> Finding:
    """Whether a folder, or the place where it will be made, is writable and has `least` bytes."""
    place = folder = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return Finding("fail", f"{place} is not a folder", "choose another folder")
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding(
            "fail", f"{place} is not writable", "choose another folder, or change its owner"
        )
    free = shutil.disk_usage(place).free
    if free < least:
        return Finding(
            "fail",
            f"{place} has {free // _MIB} MiB free, {least // _MIB} MiB are needed",
            "free some space, or choose another folder",
        )
    return Finding("ok", f"{folder}, {free / _GIB:.1f} GiB free")


def _describe_listener(port: int) -> tuple[str, str]:
    """Return ` by NAME (pid N)` for the process that listens there, and the run that it serves.

    Both are empty if they are not visible.
    """
    _, output = run_command(["ss", "-Hltnp", f"sport = :{port}"])
    found = re.search(r'users:\(\("([^"]*)",pid=(\d+)', output)
    if not found:
        return "", ""
    words: list[bytes] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{found[2]}/cmdline").read_bytes().split(b"\0")
    run = ""
    if b"coordinator" in words and b"--run-id" in words[:-1]:
        run = words[words.index(b"--run-id") + 1].decode(errors="replace")
    name = f"the coordinator of run {run}" if run else found[1]
    return f" by {name} (pid {found[2]})", run
