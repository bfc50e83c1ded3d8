"""One host of a lab: a booted Debian with its own address, disk, host key and link."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tests.testbed.errors import LabError
from tests.testbed.image import image
from tests.testbed.mirrors import PIP_CERTIFICATES, pip_configuration
from tests.testbed.plan import Plan
from tests.testbed.processes import (
    Completed,
    Process,
    children,
    command_line,
    everyone,
    run,
    wait_until,
)

if TYPE_CHECKING:
    from tests.testbed.lab import Lab

SUPERVISOR = Path(__file__).with_name("host.sh")
RATE = re.compile(r"[1-9][0-9]*(?:\.[0-9]+)?[kmg]bit")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}


class Host:
    """A host of `lab`, whether it runs or not; any process that knows the folder can use it."""

    def __init__(self, lab: Lab, plan: Plan) -> None:
        self.lab = lab
        self.plan = plan
        self.name = plan.name
        self.ip = plan.ip
        self.folder = lab.hosts_folder / plan.name
        self._leader: Process | None = None

    # --- making and removing ----------------------------------------------------------------

    def create(self) -> None:
        """Lay out the disk and the link of a new host; it does not run yet."""
        base = image(self.plan.suite, bare=self.plan.bare)
        if self.folder.exists():  # somebody was killed while making it
            self.remove()
        self._write_seed()
        volumes = {f"volume{i}": size for i, size in enumerate(self.plan.volumes.values())}
        disk = self.folder / "disk"
        disk.mkdir()
        (self.folder / "root").mkdir()
        if self.plan.disk:
            self.lab.inside("mount", "-t", "tmpfs", "-o", f"size={self.plan.disk}", "disk", disk)
        self.lab.inside("mkdir", "-p", disk / "upper", disk / "work")
        overlay = f"lowerdir={self.folder}/seed:{base},upperdir={disk}/upper,workdir={disk}/work"
        # index and nfs_export: what a user-space NFS server needs to keep file handles.
        overlay += ",index=on,nfs_export=on"
        self.lab.inside("mount", "-t", "overlay", "-o", overlay, self.name, self.folder / "root")
        for volume, size in volumes.items():
            (self.folder / volume).mkdir()
            options = f"size={size},mode=755"
            self.lab.inside("mount", "-t", "tmpfs", "-o", options, volume, self.folder / volume)
        name, veth = self.name, self.interface
        self.lab.inside("ip", "netns", "add", name)
        self.lab.inside("ip", "link", "add", veth, "type", "veth", "peer", "eth0", "netns", name)
        self.lab.inside("ip", "link", "set", veth, "master", "tb0", "up")
        # By address: a host made anew under an old one is the same to its neighbours' tables.
        hardware = ":".join(f"{int(part):02x}" for part in ("2", "0", *self.ip.split(".")))
        lines = ["link set lo up", f"link set eth0 address {hardware}"]
        lines += [f"address add {self.ip}/24 dev eth0", "link set eth0 up"]
        lines += [f"route add default via {self.lab.gateway}", ""]
        batch = "\n".join(lines)
        self.lab.inside("ip", "-netns", name, "-batch", "-", input=batch)
        (self.folder / "host.json").write_text(json.dumps(asdict(self.plan)), encoding="utf-8")

    def _write_seed(self) -> None:
        """Write what makes this host this host: the layer of its disk above the image."""
        seed = self.folder / "seed"
        etc, ssh, keys = seed / "etc", seed / "etc/ssh", seed / "home/ops/.ssh"
        for folder in (self.folder, seed, etc, ssh, keys.parent.parent, keys.parent, keys):
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        (etc / "hostname").write_text(f"{self.name}\n")
        # As Debian's installer leaves it: the own name is a loopback address.
        (etc / "hosts").write_text(f"127.0.0.1\tlocalhost\n127.0.1.1\t{self.name}\n")
        pip = pip_configuration()
        (etc / "pip.conf").write_text(pip.text)
        if pip.certificates:
            (etc / "ssl").mkdir(mode=0o755)
            shutil.copyfile(pip.certificates, seed / PIP_CERTIFICATES.relative_to("/"))
        key = ssh / "ssh_host_ed25519_key"
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", key])
        shutil.copy(self.lab.private_key.with_suffix(".pub"), keys / "authorized_keys")
        for path in (etc / "hostname", etc / "hosts", etc / "pip.conf", keys / "authorized_keys"):
            path.chmod(0o644)
        for path in (keys.parent, keys, keys / "authorized_keys"):
            shutil.chown(path, 1000, 1000)
        keys.chmod(0o700)

    def remove(self) -> None:
        """Remove the host, running or not, with its disk and its link."""
        self.crash()
        self.lab.inside("ip", "link", "delete", self.interface, check=False)
        self.lab.inside("ip", "netns", "delete", self.name, check=False)
        mounts = ["root", *(f"volume{i}" for i in range(len(self.plan.volumes)))]
        mounts += ["disk"] if self.plan.disk else []
        for mount in mounts:
            self.lab.inside("umount", "--lazy", self.folder / mount, check=False)
        self.lab.inside(
            "find",
            f"/sys/fs/cgroup/{self.name}",
            "-depth",
            "-type",
            "d",
            "-exec",
            "rmdir",
            "{}",
            "+",
            check=False,
        )
        shutil.rmtree(self.folder, ignore_errors=True)
        self.lab.write_ssh()

    # --- power --------------------------------------------------------------------------------

    def start(self) -> None:
        """Switch it on, without waiting for its boot."""
        if self._nspawn() is not None:
            return
        log = (self.folder / "console.log").open("a")
        binds = [f"--bind-ro={folder}" for folder in pip_configuration().folders]
        volumes = enumerate(self.plan.volumes)
        binds += [f"--bind={self.folder}/volume{number}:{path}" for number, path in volumes]
        if Path("/dev/fuse").exists():
            binds.append("--bind=/dev/fuse")
        with log:
            self.lab.inside(
                "setsid",
                "--fork",
                SUPERVISOR,
                self.name,
                "--quiet",
                "--boot",
                "--register=no",
                "--keep-unit",
                "--console=pipe",
                f"--machine={self.name}",
                f"--directory={self.folder}/root",
                f"--network-namespace-path=/run/netns/{self.name}",
                "--resolv-conf=replace-host",
                "--capability=CAP_NET_ADMIN",
                "--system-call-filter=open_by_handle_at name_to_handle_at",
                *binds,
                *self.plan.nspawn,
                log=log,
            )

    def wait_booted(self, timeout: float = 60) -> None:
        """Wait until its systemd has nothing more to start; a failed unit is a LabError."""
        state = ""

        def booted() -> bool:
            nonlocal state
            if self.leader is None:
                return False
            done = self.exec(["systemctl", "is-system-running", "--wait"], check=False)
            state = done.stdout.strip()
            return state in ("running", "degraded")

        try:
            wait_until(booted, timeout, f"host {self.name} has not booted")
        except LabError as error:
            console = (self.folder / "console.log").read_text(errors="replace").splitlines()
            tail = " | ".join(line for line in console[-4:] if line.strip())
            raise LabError(f"{error} (systemd: {state or 'absent'}; console: {tail})") from None
        if state == "degraded":
            failed = self.exec(["systemctl", "--failed", "--plain", "--no-legend"]).stdout
            units = [line.split()[0] for line in failed.splitlines()]
            journal = ["journalctl", "--boot", "--no-pager", "--output=cat", "--lines=6"]
            said = self.exec([*journal, *(f"--unit={unit}" for unit in units)], check=False).stdout
            words = " | ".join(said.splitlines())
            raise LabError(f"host {self.name}: failed at boot: {', '.join(units)} ({words})")

    def reboot(self, timeout: float = 60) -> None:
        """Reboot as `reboot` does, and wait until it is up again."""
        before = self._must_run()
        self.exec(["systemctl", "reboot"], check=False)
        self.wait_rebooted(before, timeout)

    def wait_rebooted(self, before: Process | None, timeout: float = 60) -> None:
        """Wait until it is up again, its process 1 (`leader`) another than before."""
        complaint = f"host {self.name} did not reboot"
        wait_until(lambda: self.leader not in (None, before), timeout, complaint)
        self.wait_booted(timeout)

    def power_off(self, timeout: float = 60) -> None:
        """Shut it down in order; `start()` switches it on again with the same disk."""
        if self.leader is not None:
            self.exec(["systemctl", "poweroff"], check=False)
            wait_until(lambda: self._nspawn() is None, timeout, f"host {self.name} still runs")

    def crash(self) -> None:
        """Pull the plug: every process dies at once, the disk stays."""

        def dead() -> bool:
            leader, nspawn = self.leader, self._nspawn()
            for process in (leader, nspawn):
                if process is not None:
                    process.kill()
            return leader is None and nspawn is None

        wait_until(dead, 20, f"host {self.name} cannot be killed")

    @property
    def running(self) -> bool:
        """Whether it is switched on."""
        return self.leader is not None

    def _nspawn(self) -> Process | None:
        directory = f"--directory={self.folder}/root"
        for pid in everyone():
            words = command_line(pid)
            if words and words[0].endswith("systemd-nspawn") and directory in words:
                return Process.of(pid)
        return None

    @property
    def leader(self) -> Process | None:
        """Its process 1 as the machine sees it, None when it is off."""
        if self._leader is None or not self._leader.alive:
            nspawn = self._nspawn()
            self._leader = None
            for pid in children(nspawn.pid) if nspawn else []:
                program = command_line(pid)[:1]  # none any more once it has ended
                if program and not program[0].endswith("systemd-nspawn"):
                    self._leader = Process.of(pid)
        return self._leader

    def _must_run(self) -> Process:
        if (leader := self.leader) is None:
            raise LabError(f"host {self.name} is off: python -m tests.testbed on {self.name}")
        return leader

    # --- commands -----------------------------------------------------------------------------

    def command(
        self, argv: Sequence[str], *, user: str = "root", env: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the machine's command that runs `argv` in this host, as root or as `user`."""
        leader = str(self._must_run().pid)
        enter = ["nsenter", "--target", leader, "--mount", "--uts", "--ipc", "--net", "--pid"]
        settings = [f"{key}={value}" for key, value in {**ENVIRONMENT, **(env or {})}.items()]
        change = [] if user == "root" else ["runuser", "-u", user, "--"]
        inner = ["env", "-i", "-C", "/", *settings, *change, *argv]
        return [*enter, "--cgroup", "--root", "--", *inner]

    def exec(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        check: bool = True,
        input: str | None = None,
    ) -> Completed:
        """Run a command in the host, past ssh and past its link; LabError when it fails."""
        command = self.command(argv, user=user, env=env)
        return run(command, timeout=timeout, check=check, input=input)

    # --- link -----------------------------------------------------------------------------------

    @property
    def interface(self) -> str:
        """The lab's end of the host's cable."""
        return f"v-{self.name}"

    def shape(self, rate: str | None) -> None:
        """Limit the link to a rate such as 50mbit, both ways; None: no limit."""
        if rate is not None and not RATE.fullmatch(rate):
            raise LabError(f"rate {rate!r}: a number and kbit, mbit or gbit, such as 50mbit")
        # A burst above 64 KiB: else large segments are split and the rate is not reached.
        limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"] if rate else []
        for end in (["dev", self.interface], ["dev", "eth0"]):
            tc = ["tc"] if end[1] == self.interface else ["tc", "-netns", self.name]
            verb = "replace" if rate else "delete"
            self.lab.inside(*tc, "qdisc", verb, *end, "root", *limit, check=rate is not None)

    def cut(self) -> None:
        """Pull the cable."""
        self.lab.inside("ip", "link", "set", self.interface, "down")

    def heal(self) -> None:
        """Put the cable back; the bridge takes up to a second to notice."""
        self.lab.inside("ip", "link", "set", self.interface, "up")
        wait_until(lambda: self.linked, 20, f"host {self.name}: its link is not up")

    @property
    def rate(self) -> str | None:
        """The limit of the link as tc shows it, None without one."""
        shown = self.lab.inside("tc", "qdisc", "show", "dev", self.interface).stdout
        found = re.search(r"\btbf\b.* rate (\S+)", shown)
        return found[1] if found else None

    @property
    def linked(self) -> bool:
        """Whether the cable is in."""
        shown = self.lab.inside("ip", "-o", "link", "show", self.interface).stdout
        return "state UP" in shown
