"""A lab: a few hosts in namespaces of their own, and the operator's place among them."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.testbed.errors import LabError
from tests.testbed.host import Host
from tests.testbed.login import write_inventory, write_ssh
from tests.testbed.namespaces import GATEWAY, NAME_SERVER, NETWORK, Namespaces, Word
from tests.testbed.plan import Plan
from tests.testbed.processes import Completed, run
from tests.testbed.requirements import complaint

FIRST_HOST = 11
OWN = ("lab.json", "log", "etc", "hosts", "cgroup", "id", "id.pub", "ssh_config")


class Lab:
    """The lab of a folder, which holds all it has; several may be up in different folders."""

    gateway = GATEWAY

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).absolute()
        if not re.fullmatch(r"[\w./+@-]+", str(self.folder)):
            raise LabError(f"{self.folder}: a lab's folder has no blanks and no , : in its path")
        self.hosts_folder = self.folder / "hosts"
        self.private_key = self.folder / "id"
        self.ssh_config = self.folder / "ssh_config"
        self.known_hosts = self.folder / "etc/ssh/ssh_known_hosts"
        self._namespaces = Namespaces(self.folder)

    # --- up and down --------------------------------------------------------------------------

    def up(self, attached: bool = False) -> Lab:
        """Make the lab, without hosts. `attached`: it dies with this process, however that ends."""
        if reason := complaint():
            raise LabError(reason)
        if self.is_up:
            raise LabError(f"{self.folder}: this lab is up; python -m tests.testbed down")
        self.down()  # what a lab that died has left here
        try:
            self._lay_out()
            self._namespaces.make(attached)
        except BaseException:
            self.down()
            raise
        return self

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.down()

    def _lay_out(self) -> None:
        self.hosts_folder.mkdir(parents=True)
        etc = self.folder / "etc"
        (etc / "ssh").mkdir(parents=True)
        (etc / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\n", encoding="utf-8")
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed"]
        run([*key, "-f", self.private_key])
        self.write_ssh()

    def down(self) -> None:
        """Remove the lab and its hosts, whatever state they are in, and the folder if empty."""
        self._namespaces.remove()
        for name in OWN:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    @property
    def is_up(self) -> bool:
        """Whether its first process runs."""
        return self._namespaces.first is not None

    # --- hosts --------------------------------------------------------------------------------

    @property
    def hosts(self) -> dict[str, Host]:
        """Its hosts by name, in the order of their addresses."""
        found = [json.loads(file.read_text()) for file in self.hosts_folder.glob("*/host.json")]
        plans = [Plan(**values) for values in found]
        plans.sort(key=lambda plan: int(plan.ip.rpartition(".")[2]))
        return {plan.name: Host(self, plan) for plan in plans}

    def host(self, name: str) -> Host:
        """Return one host; LabError when there is none of that name."""
        hosts = self.hosts
        if name not in hosts:
            raise LabError(f"no host {name}; there are: {', '.join(hosts) or 'none'}")
        return hosts[name]

    def add_host(
        self, name: str, suite: str = "bookworm", ip: str | None = None, **options: Any
    ) -> Host:
        """Make and boot a host; `options` are those of `host.Plan`: disk, volumes, nspawn."""
        plan = Plan(name=name, suite=suite, ip=ip or self.free_addresses(1)[0], **options)
        return self.add_hosts([plan])[0]

    def add_hosts(self, plans: Sequence[Plan | str]) -> list[Host]:
        """Make and boot several hosts beside each other; a plain name is a Debian 12 host."""
        self._namespaces.enter()
        added: list[Host] = []
        for plan in plans:
            if isinstance(plan, str):
                plan = Plan(name=plan, ip=self.free_addresses(1)[0])
            taken = self.hosts
            if plan.name in taken or plan.ip in (host.ip for host in taken.values()):
                raise LabError(f"host {plan.name} ({plan.ip}): name or address is taken")
            if not re.fullmatch(rf"{re.escape(NETWORK)}\.[0-9]+", plan.ip):
                raise LabError(f"host {plan.name}: address {plan.ip} is not in {NETWORK}.0/24")
            host = Host(self, plan)
            try:
                host.create()
                self.write_ssh()
                host.start()
            except BaseException:
                host.remove()
                raise
            added.append(host)
        for host in added:
            host.wait_booted()
        return added

    def free_addresses(self, count: int) -> list[str]:
        """Return the first addresses that no host has."""
        taken = {host.ip for host in self.hosts.values()}
        every = (f"{NETWORK}.{number}" for number in range(FIRST_HOST, 250))
        return [ip for ip in every if ip not in taken][:count]

    # --- running things -----------------------------------------------------------------------

    def command(
        self, argv: Sequence[Word], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the machine's command that runs `argv` in the lab: the operator's own machine.

        There the hosts have names, every ssh knows their host keys, and the programs of this Python
        environment come first in PATH. The file system is the machine's.
        """
        settings = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            # Open connections to a host must not outlive it: a folder that goes with the lab.
            "ANSIBLE_SSH_CONTROL_PATH_DIR": "/run/ansible",
            **(env or {}),
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        return self._namespaces.enter("env", "-C", cwd or Path.cwd(), *words, *argv)

    def run(
        self,
        argv: Sequence[Word],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
        check: bool = True,
        input: str | None = None,
    ) -> Completed:
        """Run a command in the lab, as `command` describes; LabError when it fails."""
        command = self.command(argv, cwd=cwd, env=env)
        return run(command, timeout=timeout, check=check, input=input)

    def inside(
        self,
        *argv: Word,
        check: bool = True,
        input: str | None = None,
        log: IO[str] | None = None,
    ) -> Completed:
        """Run a short command of the test bed itself in the lab, see `Namespaces.inside`."""
        return self._namespaces.inside(*argv, check=check, input=input, log=log)

    # --- what operators need ------------------------------------------------------------------

    def write_ssh(self) -> None:
        """Write the names, addresses and host keys of the hosts there are."""
        write_ssh(self)

    def write_inventory(
        self,
        path: Path,
        variables: Mapping[str, Any] | None = None,
        host_variables: Mapping[str, Mapping[str, Any]] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
        hosts: Iterable[Host] | None = None,
    ) -> Path:
        """Write an Ansible inventory of the hosts; see `login.write_inventory`."""
        return write_inventory(self, path, variables, host_variables, groups, hosts)
