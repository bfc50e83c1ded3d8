"""How the operator reaches the hosts: ssh's configuration, host keys, an Ansible inventory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from tests.testbed.host import Host
    from tests.testbed.lab import Lab

SSH_CONFIG = """\
Host *
    User ops
    IdentityFile {key}
    IdentitiesOnly yes
    StrictHostKeyChecking yes
    GlobalKnownHostsFile {known_hosts}
    BatchMode yes
    ConnectTimeout 10
"""


def write_ssh(lab: Lab) -> None:
    """Write the names, addresses and host keys of the lab's hosts.

    They are what every ssh in the lab finds in /etc/ssh, and `ssh_config` for those outside it.
    """
    known, names, aliases = "", "127.0.0.1 localhost lab\n", ""
    for host in lab.hosts.values():
        public = host.folder / "seed/etc/ssh/ssh_host_ed25519_key.pub"
        kind, key = public.read_text(encoding="utf-8").split()[:2]
        known += f"{host.ip},{host.name} {kind} {key}\n"
        names += f"{host.ip} {host.name}\n"
        aliases += f"Host {host.name}\n    HostName {host.ip}\n"
    config = aliases + SSH_CONFIG.format(key=lab.private_key, known_hosts=lab.known_hosts)
    contents = {
        lab.known_hosts: known,
        lab.folder / "etc/hosts": names,  # written in place: this very file is bound in the lab
        lab.ssh_config: config,
        lab.folder / "etc/ssh/ssh_config": config,
    }
    for path, content in contents.items():
        path.write_text(content, encoding="utf-8")


def write_inventory(
    lab: Lab,
    path: Path,
    variables: Mapping[str, Any] | None = None,
    host_variables: Mapping[str, Mapping[str, Any]] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    hosts: Iterable[Host] | None = None,
) -> Path:
    """Write an Ansible inventory: how to log in, and what the caller adds.

    Args:
        hosts: those in it; None: all that the lab has now, also those of other tests.
    """
    known = f"-o UserKnownHostsFile={lab.known_hosts} -o StrictHostKeyChecking=yes"
    login = {
        "ansible_user": "ops",
        "ansible_ssh_private_key_file": str(lab.private_key),
        "ansible_ssh_common_args": known,
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    entries = {
        host.name: {"ansible_host": host.ip, **(host_variables or {}).get(host.name, {})}
        for host in hosts or lab.hosts.values()
    }
    content: dict[str, Any] = {"hosts": entries, "vars": {**login, **(variables or {})}}
    if groups:
        content["children"] = {
            group: {"hosts": {name: {} for name in names}} for group, names in groups.items()
        }
    path.write_text(yaml.safe_dump({"all": content}, sort_keys=False), encoding="utf-8")
    return path
