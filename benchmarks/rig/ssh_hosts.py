"""Hosts behind real sshds, each in a network namespace of its own, and the inventory of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.rig.network import ShapedNetwork

MEGABIT = 10**6
PATIENCE = 60.0


class SshHosts(NamedTuple):
    """The hosts of a network, and the machine on it from which a person starts runs."""

    inside: list[str]
    """Prefix of a command that runs on that machine."""
    inventory: Path


@contextmanager
def ssh_hosts(folder: Path, count: int) -> Iterator[SshHosts]:
    """Run `count` hosts with a CPU worker each on a switch of 1 Gbit/s; the first coordinates.

    All see the same files, but each has a state folder and a cache of its own below `folder`.
    """
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if sshd is None:
        raise SystemExit("needs sshd (openssh-server)")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # the service's start makes it else
    for name in ("user", "host"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder / name}"]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    with ShapedNetwork(count + 1, 1000 * MEGABIT) as network, ExitStack() as stack:
        for index in range(1, count + 1):
            config = _write_sshd_config(folder, index, network.address(index))
            script = f"hostname host{index}; exec {sshd} -D -e -f {config}"
            command = [*network.inside(index), "unshare", "--uts", "sh", "-c", script]
            with (folder / f"sshd{index}.log").open("wb") as log:
                process = subprocess.Popen(command, stderr=log, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        for index in range(1, count + 1):
            _wait_for_port(network.inside(index), network.address(index))
        yield SshHosts(network.inside(0), _write_inventory(folder, network, count))


def _write_sshd_config(folder: Path, index: int, address: str) -> Path:
    path = folder / f"sshd{index}_config"
    path.write_text(
        f"ListenAddress {address}\nHostKey {folder}/host\nPidFile none\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/user.pub\nUsePAM no\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
        f"SetEnv MOTLEY_STATE_DIR={folder}/host{index} MOTLEY_CACHE={folder}/cache{index}\n"
    )
    return path


def _wait_for_port(inside: list[str], address: str) -> None:
    probe = [*inside, "bash", "-c", f"exec 3<>/dev/tcp/{address}/22"]
    deadline = time.monotonic() + PATIENCE
    while subprocess.run(probe, stderr=subprocess.DEVNULL).returncode:
        if time.monotonic() > deadline:
            raise SystemExit(f"no sshd answers on {address}")
        time.sleep(0.02)


def _write_inventory(folder: Path, network: ShapedNetwork, count: int) -> Path:
    key = (folder / "host.pub").read_text().rsplit(maxsplit=1)[0]
    addresses = [network.address(index) for index in range(1, count + 1)]
    (folder / "known_hosts").write_text("".join(f"{each} {key}\n" for each in addresses))
    (folder / "ssh_config").write_text(
        f"Host *\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile none\n"
    )
    hosts = {
        f"host{number}": {
            "ansible_host": address,
            "ansible_ssh_common_args": f"-F {folder}/ssh_config",
            "motley_trainer_command": [str(Path(sys.executable).with_name("trainer"))],
            "motley_devices": [{"backend": "cpu", "threads": 1}],
        }
        for number, address in enumerate(addresses, 1)
    }
    hosts["host1"] |= {"motley_coordinator": True, "motley_bind_address": addresses[0]}
    path = folder / "hosts.yml"
    path.write_text(json.dumps({"all": {"hosts": hosts}}))
    return path
