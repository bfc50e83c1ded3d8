"""The Ansible inventory as frozen Hosts: the only description of a cluster.

Ansible renders it itself (variables, Jinja, vault), in a child process (`rendering.py`); this file
asks for it and checks what comes back. Every mistake is one line that names file, host, variable.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from launcher.devices import Device
from launcher.errors import ConfigError

DEFAULT_PORT = 9000
EMBEDDED = Path(__file__).with_name("local.yml")

VARIABLES: dict[str, str] = {
    "motley_coordinator": "true or false",
    "motley_bind_address": "one IP address",
    "motley_connect_address": "an IP address or a host name",
    "motley_port": "a number from 1 to 65535",
    "motley_devices": "`auto` or a list of {backend: cuda|wgpu|cpu, id: ..., threads: ...}",
    "motley_fill_with_cpu": "true or false",
    "motley_teacher": "true or false",
    "motley_student": "true or false",
    "motley_evaluator": "true or false",
    "motley_trainer_command": "a list of strings",
    "motley_state_folder": "an absolute path",
    "motley_share_folder": "an absolute path",
}
"""Every variable the launcher reads, with what is allowed. inventory/local.yml documents them."""

_BACKENDS = ("cuda", "wgpu", "cpu")
_DEADLINE = 60.0


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine of the cluster, as the inventory describes it. Holds no secrets."""

    name: str
    connection: Literal["local", "ssh"] = "ssh"
    address: str | None = None
    """ansible_host: how the launcher reaches it."""
    ssh_port: int | None = None
    user: str | None = None
    ssh_key: str | None = None
    """ansible_ssh_private_key_file: the path of a private key on this machine."""
    ssh_args: tuple[str, ...] = ()
    """ansible_ssh_common_args and ansible_ssh_extra_args, as ssh gets them."""
    coordinator: bool = False
    bind_address: str | None = None
    connect_address: str | None = None
    port: int = DEFAULT_PORT
    devices: tuple[Device, ...] | None = None
    """None: to be detected on the host."""
    fill_with_cpu: bool = False
    teacher: bool = False
    student: bool = False
    evaluator: bool = False
    """What it does in a distillation; where no host says so, `distillation.py` chooses."""
    cores: int | None = None
    """Usable cores; None until somebody asked the host."""
    memory: int | None = None
    """Bytes of main memory; None until somebody asked the host."""
    trainer_command: tuple[str, ...] | None = None
    state_folder: str | None = None
    share_folder: str | None = None
    """The same folder on every host that names one: models, logits and checkpoints for all."""

    @property
    def is_local(self) -> bool:
        """Whether this is the machine the launcher runs on."""
        return self.connection == "local"


def load_inventory(
    source: Path | None = None, *, limit: str = "all", extra: Mapping[str, Any] | None = None
) -> tuple[Host, ...]:
    """Return the hosts of an inventory in its order; the embedded one without `source`.

    `limit` is an Ansible host pattern; `extra` overrides variables, as `-e` does for Ansible.

    Raises:
        ConfigError: the inventory is missing or broken, a variable is undefined or has the wrong
            type, or no host is left.
    """
    path = (source or EMBEDDED).absolute()
    if not path.exists():
        raise ConfigError(f"no inventory {source}: the file does not exist")
    request = {"source": str(path), "pattern": limit, "extra": dict(extra or {})}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "launcher.rendering"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{path}: Ansible did not render it within {_DEADLINE:.0f} s") from None
    return parse_answer(str(path), limit, done.stdout, done.stderr)


def parse_answer(path: str, limit: str, answer: str, warnings: str) -> tuple[Host, ...]:
    """Read what `rendering.py` wrote; `warnings` is what Ansible said besides.

    Raises:
        ConfigError: as `load_inventory`.
    """
    try:
        tree: dict[str, Any] = json.loads(answer)
    except ValueError:
        reason = _last_line(warnings) or "no answer"
        raise ConfigError(f"{path}: Ansible could not render it: {reason}") from None
    if "missing" in tree:
        raise ConfigError(
            f"reading an inventory needs Ansible ({tree['missing']}): "
            "pip install 'motley[launcher]'"
        )
    if "error" in tree:
        raise ConfigError(explain(path, str(tree["error"]), str(tree["origin"]), warnings))
    if not tree["hosts"]:
        raise ConfigError(_no_hosts(path, limit, tree["groups"], warnings))
    hosts = tuple(_host(path, host) for host in tree["hosts"])
    coordinators = [host.name for host in hosts if host.coordinator]
    if len(coordinators) > 1:
        raise ConfigError(
            f"{path}: motley_coordinator is true on {', '.join(coordinators)}; one host must be it"
        )
    return hosts


def explain(path: str, error: str, origin: str, warnings: str) -> str:
    """Turn Ansible's many-line complaint into `path:line:column: reason`."""
    reasons = re.findall(
        r"^(?:YAML parsing failed|Failed to parse inventory): (.+)$", warnings, re.MULTILINE
    )
    if not reasons:
        return f"{origin or path}: {error.rstrip('.')}"
    # Ansible tries several readers; the one meant for this kind of file knows what is wrong.
    if Path(path).suffix not in (".yml", ".yaml", ".json"):
        return f"{path}: {reasons[-1].rstrip('.')}"
    place = re.search(rf"^Origin: ({re.escape(path)}:\d+(?::\d+)?)", warnings, re.MULTILINE)
    return f"{place.group(1) if place else path}: {reasons[0].rstrip('.')}"


def _no_hosts(path: str, limit: str, groups: list[str], warnings: str) -> str:
    if limit != "all":
        known = ", ".join(group for group in groups if group != "ungrouped")
        return f"{path}: no host or group matches '{limit}' (groups: {known})"
    skipped = re.search(r"^\[WARNING\]: (.+)$", warnings, re.MULTILINE)
    return f"{path}: it names no hosts{f': {skipped.group(1)}' if skipped else ''}"


def _host(path: str, tree: dict[str, Any]) -> Host:
    name = str(tree["name"])
    for variable, reason in cast("dict[str, str]", tree["errors"]).items():
        raise ConfigError(f"{path}: host {name}: {variable}: {reason.rstrip('.')}")
    values = cast("dict[str, Any]", tree["variables"])
    for variable in values:
        if variable.startswith("motley_") and variable not in VARIABLES:
            close = difflib.get_close_matches(variable, VARIABLES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(VARIABLES)}"
            raise ConfigError(f"{path}: host {name}: unknown variable {variable} ({hint})")
    reader = _Reader(f"{path}: host {name}", values)
    connection = reader.text("ansible_connection") or "ssh"
    if connection not in ("local", "ssh", "smart", "paramiko"):
        reader.refuse("ansible_connection", "must be local or ssh")
    return Host(
        name=name,
        connection="local" if connection == "local" else "ssh",
        address=reader.text("ansible_host"),
        ssh_port=reader.number("ansible_port"),
        user=reader.text("ansible_user"),
        ssh_key=reader.text("ansible_ssh_private_key_file")
        or reader.text("ansible_private_key_file"),
        ssh_args=(
            *reader.arguments("ansible_ssh_common_args"),
            *reader.arguments("ansible_ssh_extra_args"),
        ),
        coordinator=reader.flag("motley_coordinator"),
        bind_address=reader.bind_address(),
        connect_address=reader.text("motley_connect_address"),
        port=reader.number("motley_port") or DEFAULT_PORT,
        devices=reader.devices(),
        fill_with_cpu=reader.flag("motley_fill_with_cpu"),
        teacher=reader.flag("motley_teacher"),
        student=reader.flag("motley_student"),
        evaluator=reader.flag("motley_evaluator"),
        trainer_command=reader.command(),
        state_folder=reader.folder("motley_state_folder"),
        share_folder=reader.folder("motley_share_folder"),
    )


class _Reader:
    """One host's variables with their types checked."""

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        self._where = where
        self._values = values

    def refuse(self, variable: str, message: str) -> NoReturn:
        raise ConfigError(
            f"{self._where}: {variable}: {message}, got {self._values.get(variable)!r}"
        )

    def text(self, variable: str) -> str | None:
        value = self._values.get(variable)
        if value is not None and not (isinstance(value, str) and value.strip()):
            self.refuse(variable, f"must be {VARIABLES.get(variable, 'a text')}")
        return value

    def flag(self, variable: str) -> bool:
        value = self._values.get(variable, False)
        if isinstance(value, str):  # Jinja leaves strings behind
            value = {"true": True, "false": False, "yes": True, "no": False}.get(value.lower())
        if not isinstance(value, bool):
            self.refuse(variable, "must be true or false")
        return bool(value)

    def number(self, variable: str) -> int | None:
        value = self._values.get(variable)
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65536:
            self.refuse(variable, "must be a number from 1 to 65535")
        return value

    def bind_address(self) -> str | None:
        value = self.text("motley_bind_address")
        if value is None:
            return None
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            self.refuse("motley_bind_address", "must be one IP address")
        if address.is_unspecified or address.is_multicast:
            self.refuse("motley_bind_address", "must be the address of one network interface")
        return str(address)

    def devices(self) -> tuple[Device, ...] | None:
        value = self._values.get("motley_devices", "auto")
        if value == "auto":
            return None
        if not isinstance(value, list):
            self.refuse("motley_devices", f"must be {VARIABLES['motley_devices']}")
        devices = tuple(self._device(entry) for entry in cast("list[Any]", value))
        ids = [device.id for device in devices if device.backend != "cpu"]
        for double in {identity for identity in ids if ids.count(identity) > 1}:
            self.refuse("motley_devices", f"names {double} twice")
        return devices

    def _device(self, entry: object) -> Device:
        if not isinstance(entry, dict):
            self.refuse("motley_devices", "must hold mappings such as {backend: cpu}")
        fields = cast("dict[str, Any]", entry)
        backend = fields.get("backend")
        if backend not in _BACKENDS:
            self.refuse("motley_devices", f"backend must be one of {', '.join(_BACKENDS)}")
        for unknown in fields.keys() - {"backend", "id", "threads"}:
            self.refuse("motley_devices", f"unknown key {unknown} (known: backend, id, threads)")
        identity = fields.get("id", "cpu" if backend == "cpu" else None)
        if not isinstance(identity, str) or identity.isdigit():
            self.refuse("motley_devices", "a GPU needs `id`: its UUID or PCI address, no index")
        threads = fields.get("threads")
        if threads is not None and (
            not isinstance(threads, int) or isinstance(threads, bool) or threads < 1
        ):
            self.refuse("motley_devices", "threads must be a number above 0")
        return Device(backend, str(identity), threads=threads)

    def command(self) -> tuple[str, ...] | None:
        value = self._values.get("motley_trainer_command")
        if value is None:
            return None
        parts = cast("list[Any]", value) if isinstance(value, list) else []
        if not parts or not all(isinstance(part, str) and part for part in parts):
            self.refuse("motley_trainer_command", "must be a list of strings")
        return tuple(cast("list[str]", parts))

    def folder(self, variable: str) -> str | None:
        value = self.text(variable)
        if value is not None and not value.startswith("/"):
            self.refuse(variable, "must be an absolute path")
        return value

    def arguments(self, variable: str) -> tuple[str, ...]:
        """Read a line of arguments for ssh; an empty one is how Ansible's users switch it off."""
        value = self._values.get(variable)
        if value is None:
            return ()
        if not isinstance(value, str):
            self.refuse(variable, "must be a text")
        try:
            return tuple(shlex.split(value))
        except ValueError:
            self.refuse(variable, "must have its quotes closed")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
