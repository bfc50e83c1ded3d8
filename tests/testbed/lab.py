"""A lab: the namespaces that hold a few hosts, their switch, and their way to the network.

One process (lab.sh) is the first of a pid namespace: hosts, uplink and mounts die with it. The
uplink is slirp4netns on the same bridge, so the machine needs no bridge, no NAT and no forwarding.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from tests.testbed.errors import LabError
from tests.testbed.host import Host, Plan
from tests.testbed.processes import Completed, Process, run, wait_until
from tests.testbed.requirements import complaint

FIRST = Path(__file__).with_name("lab.sh")
NETWORK = "10.77.0"
FIRST_HOST = 11
NAMESPACES = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
OWN = ("lab.json", "log", "etc", "hosts", "cgroup", "id", "id.pub", "ssh_config")

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


class Lab:
    """The lab of a folder, which holds all it has; several may be up in different folders."""

    gateway = f"{NETWORK}.2"

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).absolute()
        if not re.fullmatch(r"[\w./+@-]+", str(self.folder)):
            raise LabError(f"{self.folder}: a lab's folder has no blanks and no , : in its path")
        self.hosts_folder = self.folder / "hosts"
        self.private_key = self.folder / "id"
        self.ssh_config = self.folder / "ssh_config"
        self.known_hosts = self.folder / "etc/ssh/ssh_known_hosts"
        self._held: int | None = None  # attached: the lab ends when this pipe is closed
        self._child: subprocess.Popen[Any] | None = None

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
            self._enter(attached)
            self._connect()
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
        (etc / "resolv.conf").write_text(f"nameserver {NETWORK}.3\n")
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed"]
        run([*key, "-f", self.private_key])
        self.write_ssh()

    def _enter(self, attached: bool) -> None:
        key = f"motley-testbed-{os.getpid()}-{os.urandom(4).hex()}"
        stay = "attached" if attached else "detached"
        kinds = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        command = ["unshare", *kinds, "--propagation", "private", "--fork"]
        command += ["--kill-child=SIGKILL", "--", str(FIRST), "enter", str(self.folder), key, stay]
        self._save({"key": key})
        hold_read, hold_write = os.pipe()
        told_read, told_write = os.pipe()
        try:
            with (self.folder / "log").open("w") as log:
                streams: dict[str, Any] = {"stdout": told_write, "stderr": log, "cwd": "/"}
                if attached:
                    self._child = subprocess.Popen(
                        command, stdin=hold_read, start_new_session=True, **streams
                    )
                else:
                    detached = ["setsid", "--fork", *command]
                    subprocess.run(detached, check=True, stdin=subprocess.DEVNULL, **streams)
        finally:
            os.close(hold_read)
            os.close(told_write)
        self._held = hold_write
        with os.fdopen(told_read) as told:
            numbers = [told.readline().strip(), told.readline().strip()]
            parts = [Process.of(int(number)) for number in numbers if number.isdigit()]
            self._save({"key": key, "processes": [[p.pid, p.started] for p in parts if p]})
            if told.readline() != "ready\n":
                raise LabError(f"the lab did not start: {self._last_words()}")

    def _connect(self) -> None:
        """Plug slirp4netns into the bridge: a gateway and a name server for every host."""
        first = self._first()
        network = ["--netns-type=path", f"/proc/{first.pid}/ns/net", "tap0"]
        options = [f"--cidr={NETWORK}.0/24", "--disable-host-loopback"]
        ready_read, ready_write = os.pipe()
        try:
            with (self.folder / "log").open("a") as log:
                # In the lab's pid namespace, so that it dies with it, but in the machine's network.
                command = ["nsenter", f"--target={first.pid}", "--pid", "--", "setsid", "--fork"]
                command += ["slirp4netns", f"--ready-fd={ready_write}", *options, *network]
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=log,
                               stderr=log, pass_fds=[ready_write], cwd="/")  # fmt: skip
        finally:
            os.close(ready_write)
        with os.fdopen(ready_read) as ready:
            if ready.read(1) != "1":
                raise LabError(f"no uplink: {self._last_words()}")
        self.inside("ip", "link", "set", "tap0", "master", "tb0", "up")

    def down(self) -> None:
        """Remove the lab and its hosts, whatever state they are in, and the folder if empty."""
        known = self._known()
        processes = [Process(*pair) for pair in known.get("processes", [])]
        for process in processes:
            process.kill()
        for process in processes:
            wait_until(lambda p=process: not p.alive, 20, f"process {process.pid} does not end")
        if self._child is not None:
            self._child.wait(20)
            self._child = None
        if self._held is not None:
            os.close(self._held)
            self._held = None
        if key := known.get("key"):
            wait_until(lambda: self._forget(key), 20, f"cgroup {key}: not empty")
        for name in OWN:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _forget(self, key: str) -> bool:
        command = ["unshare", "--mount", "--propagation", "private", "--", FIRST, "forget"]
        return run([*command, self.folder, key], check=False).returncode == 0

    def _last_words(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "no output"

    # --- what is known of it ------------------------------------------------------------------

    def _known(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "lab.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def _save(self, known: dict[str, Any]) -> None:
        (self.folder / "lab.json").write_text(json.dumps(known))

    @property
    def is_up(self) -> bool:
        """Whether its first process runs."""
        pairs = self._known().get("processes", [])
        return len(pairs) == 2 and Process(*pairs[0]).alive

    def _first(self) -> Process:
        if not self.is_up:
            raise LabError(f"{self.folder}: no lab is up; python -m tests.testbed up")
        return Process(*self._known()["processes"][0])

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
        self._first()
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
        self, argv: Sequence[str | os.PathLike[str]], *,
        cwd: Path | None = None, env: Mapping[str, str] | None = None,
    ) -> list[str]:  # fmt: skip
        """Return the machine's command that runs `argv` in the lab: the operator's own machine.

        There the hosts have names, every ssh knows their host keys, and the programs of this Python
        environment come first in PATH. The file system is the machine's.
        """
        enter = ["nsenter", f"--target={self._first().pid}", *NAMESPACES, "--"]
        settings = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            # Open connections to a host must not outlive it: a folder that goes with the lab.
            "ANSIBLE_SSH_CONTROL_PATH_DIR": "/run/ansible",
            **(env or {}),
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        return [
            *enter,
            "env",
            "-C",
            str(cwd or Path.cwd()),
            *words,
            *(os.fspath(word) for word in argv),
        ]

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
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
        *argv: str | os.PathLike[str],
        check: bool = True,
        input: str | None = None,
        log: IO[str] | None = None,
    ) -> Completed:
        """Run a short command of the test bed itself in the lab's namespaces.

        With a log the outputs go there: what the command leaves behind may keep them open.
        """
        command = ["nsenter", f"--target={self._first().pid}", *NAMESPACES, "--", *argv]
        if log is None:
            return run(command, check=check, input=input)
        subprocess.run(command, check=check, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return subprocess.CompletedProcess([os.fspath(word) for word in command], 0, "", "")

    # --- what operators need ------------------------------------------------------------------

    def write_ssh(self) -> None:
        """Write the names, addresses and host keys of the hosts there are."""
        known, names, aliases = "", "127.0.0.1 localhost lab\n", ""
        for host in self.hosts.values():
            public = host.folder / "seed/etc/ssh/ssh_host_ed25519_key.pub"
            kind, key = public.read_text().split()[:2]
            known += f"{host.ip},{host.name} {kind} {key}\n"
            names += f"{host.ip} {host.name}\n"
            aliases += f"Host {host.name}\n    HostName {host.ip}\n"
        etc = self.folder / "etc"
        self.known_hosts.write_text(known)
        (etc / "hosts").write_text(names)
        config = SSH_CONFIG.format(key=self.private_key, known_hosts=self.known_hosts)
        self.ssh_config.write_text(aliases + config)
        (etc / "ssh/ssh_config").write_text(aliases + config)

    def write_inventory(
        self,
        path: Path,
        variables: Mapping[str, Any] | None = None,
        host_variables: Mapping[str, Mapping[str, Any]] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> Path:
        """Write an Ansible inventory of the hosts: how to log in, and what the caller adds."""
        login = {
            "ansible_user": "ops",
            "ansible_ssh_private_key_file": str(self.private_key),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={self.known_hosts}"
            " -o StrictHostKeyChecking=yes",
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        hosts = {
            name: {"ansible_host": host.ip, **(host_variables or {}).get(name, {})}
            for name, host in self.hosts.items()
        }
        members = {
            group: {"hosts": dict.fromkeys(names)} for group, names in (groups or {}).items()
        }
        content = {"all": {"hosts": hosts, "vars": {**login, **(variables or {})}}}
        if members:
            content["all"]["children"] = members
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return path
