"""The Ansible inventory as frozen Hosts: the only description of a cluster.

Ansible renders it itself (variables, Jinja, vault), in a child process (`rendering.py`); this file
starts it and checks the result. The embedded inventory has nothing to render. Every mistake is one
line that names file, host, variable.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from launcher.errors import ConfigError
from launcher.inventory.facts.devices import Device
from launcher.inventory.rendering import PREFIX
from launcher.inventory.variables import INVENTORY_KEYS, VARIABLES, VariableReader
from launcher.terminal import note
from trainer.system.errors import plain_reason
from trainer.system.key_table import UnknownKeys
from trainer.system.regular_file import check_file

DEFAULT_PORT = 9000
EMBEDDED = Path(__file__).with_name("local.yml")

_DEADLINE = 180.0


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine of the cluster, as the inventory describes it. Holds no secrets."""

    name: str
    connection: Literal["local", "ssh", "none"] = "ssh"
    """`none`: a run names it, but the inventory does not, so it cannot be reached."""
    address: str | None = None
    """ansible_host: how the launcher reaches it."""
    ssh_port: int | None = None
    user: str | None = None
    ssh_key: str | None = None
    """ansible_ssh_private_key_file: the path of a private key on this machine."""
    ssh_first_args: tuple[str, ...] = ()
    """ssh_args of ansible.cfg, or ansible_ssh_args, which count before the host's variables."""
    ssh_args: tuple[str, ...] = ()
    """ansible_ssh_common_args and ansible_ssh_extra_args, as ssh gets them."""
    coordinator: bool = False
    bind_address: str | None = None
    connect_address: str | None = None
    port: int = DEFAULT_PORT
    devices: tuple[Device, ...] | None = None
    """None: to be detected on the host."""
    auto_devices: bool = False
    """The devices were detected, so a process may fall back if its device fails at the start."""
    fill_with_cpu: bool = False
    teacher: bool = False
    student: bool = False
    evaluator: bool = False
    """Its role in a distillation; if no host has one, `plan/distillation.py` chooses."""
    cores: int | None = None
    """Usable cores; None until the host is surveyed."""
    memory: int | None = None
    """Bytes of main memory; None until the host is surveyed."""
    trainer_command: tuple[str, ...] | None = None
    state_folder: str | None = None
    share_folder: str | None = None
    """The same folder on every host that names one: models, logits and checkpoints for all."""
    link_rates: tuple[tuple[str, float], ...] = ()
    """Measured rates to other hosts, by name, in bit/s."""

    price_hour: float | None = None
    """Rent of the whole host."""
    watts: float | None = None
    """Its power under load."""
    price_kwh: float | None = None
    currency: str | None = None
    """Currency of its prices: ISO 4217."""
    rented: bool | None = None
    """None: the inventory does not say; see `plan/budget.py`."""
    provider: str = ""
    """The cloud that its firmware names; empty until the host is surveyed."""

    @property
    def is_local(self) -> bool:
        """Whether this is the machine the launcher runs on."""
        return self.connection == "local"


def find_coordinator_host(hosts: Sequence[Host]) -> Host:
    """Return the coordinator's host of an inventory."""
    return next((host for host in hosts if host.coordinator), hosts[0])


def load_inventory(
    source: Path | None = None, *, limit: str = "all", extra: Mapping[str, Any] | None = None
) -> tuple[Host, ...]:
    """Return the hosts of an inventory in its order; the embedded one without `source`.

    A source with a comma, such as `lambda,intel`, is a list of names, as for Ansible.
    `limit` is an Ansible host pattern; `extra` overrides variables, as `-e` does for Ansible.

    Raises:
        ConfigError: the inventory is missing or broken, a variable is undefined or has the wrong
            type, or no host is left.
    """
    path = (source or EMBEDDED).absolute()
    place = str(path)
    _check_files(path)
    if not path.exists() and "," in path.name and len(Path(str(source)).parts) == 1:
        place = f"{path.name.strip(',')},"
    elif not path.exists():
        raise ConfigError(f"no inventory {source}: the file does not exist")
    plain = not any(name.startswith("ansible_") for name in extra or ())
    if source is None and limit == "all" and plain and not _has_variables():
        return parse_answer(place, limit, json.dumps(_render_embedded(path, extra or {})), "")
    request = {"source": place, "pattern": limit, "extra": dict(extra or {})}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "launcher.inventory.rendering"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{place}: Ansible did not render it within {_DEADLINE:.0f} s") from None
    return parse_answer(place, limit, done.stdout, done.stderr)


def _check_files(path: Path) -> None:
    """Refuse pipes, devices and huge files, which Ansible would read without an end.

    Raises:
        ConfigError: the inventory, a file in its folder or one of its variables is such a file.
    """
    for top in (path, path.with_name("group_vars"), path.with_name("host_vars")):
        for file in (top, *top.rglob("*")):
            try:
                if file.exists() and not file.is_dir():
                    check_file(file)
            except PermissionError:
                continue  # Ansible names it
            except OSError as error:
                raise ConfigError(f"{file}: {plain_reason(error)}") from None


def _has_variables() -> bool:
    """Whether Ansible would read variables of every inventory in the current folder."""
    return any(Path(name).exists() for name in ("group_vars", "host_vars"))


def _render_embedded(path: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `rendering.py` answers, without half a second of CPU time for Ansible's start.

    The embedded inventory has plain values, and values of `-e` are no templates for Ansible either.
    """
    import yaml

    hosts: Any = yaml.safe_load(path.read_text(encoding="utf-8"))["all"]["hosts"]
    known = {name: value for name, value in extra.items() if name.startswith(PREFIX)}
    return {
        "hosts": [
            {"name": name, "variables": {**variables, **known}, "errors": {}}
            for name, variables in hosts.items()
        ],
        "groups": ["all", "ungrouped"],
    }


def parse_answer(path: str, limit: str, answer: str, warnings: str) -> tuple[Host, ...]:
    """Read the output of `rendering.py`; `warnings` is Ansible's stderr.

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
        raise ConfigError(explain_error(path, str(tree["error"]), str(tree["origin"]), warnings))
    if not tree["hosts"]:
        raise ConfigError(_no_hosts(path, limit, tree["groups"], warnings))
    hosts = tuple(_parse_host(path, host) for host in tree["hosts"])
    unknown = UnknownKeys(INVENTORY_KEYS)
    for host in tree["hosts"]:
        unknown.add(host.get("keys", ()))
    if (report := unknown.report()) is not None:
        _say_once(f"{path}: {report}")
    coordinators = [host.name for host in hosts if host.coordinator]
    if len(coordinators) > 1:
        raise ConfigError(
            f"{path}: motley_coordinator is true on {', '.join(coordinators)}; choose one host"
        )
    return hosts


@functools.cache
def _say_once(line: str) -> None:
    note(line)


def explain_error(path: str, error: str, origin: str, warnings: str) -> str:
    """Turn Ansible's error of several lines into `path:line:column: reason`."""
    reasons = re.findall(
        r"^(?:YAML parsing failed|Failed to parse inventory): (.+)$", warnings, re.MULTILINE
    )
    if "plugin: maximum recursion depth exceeded" in warnings:
        return f"{path}: is nested too deeply"
    if not reasons:
        return f"{origin or path}: {error.rstrip('.')}"
    # Ansible tries several parsers; the one for this kind of file reports the real error.
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


def _parse_host(path: str, tree: dict[str, Any]) -> Host:
    name = str(tree["name"])
    for variable, reason in cast("dict[str, str]", tree["errors"]).items():
        raise ConfigError(f"{path}: host {name}: {variable}: {reason.rstrip('.')}")
    if (refusal := INVENTORY_KEYS.explain_refusal(tree.get("keys", ()))) is not None:
        raise ConfigError(f"{path}: host {name}: {refusal}")
    values = cast("dict[str, Any]", tree["variables"])
    for variable in values:
        if variable.startswith("motley_") and variable not in VARIABLES:
            close = difflib.get_close_matches(variable, VARIABLES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(VARIABLES)}"
            raise ConfigError(f"{path}: host {name}: unknown variable {variable} ({hint})")
    reader = VariableReader(f"{path}: host {name}", values)
    connection = reader.get_text("ansible_connection") or "ssh"
    if connection not in ("local", "ssh", "smart", "paramiko", "paramiko_ssh"):
        reader.refuse("ansible_connection", "must be local or ssh")
    return Host(
        name=name,
        connection="local" if connection == "local" else "ssh",
        address=reader.get_text("ansible_host"),
        ssh_port=reader.read_port("ansible_port"),
        user=reader.get_text("ansible_user"),
        ssh_key=reader.get_text("ansible_ssh_private_key_file"),
        ssh_first_args=reader.read_arguments("ansible_ssh_args"),
        ssh_args=(
            *reader.read_arguments("ansible_ssh_common_args"),
            *reader.read_arguments("ansible_ssh_extra_args"),
        ),
        coordinator=reader.read_flag("motley_coordinator"),
        bind_address=reader.bind_address(),
        connect_address=reader.get_text("motley_connect_address"),
        port=reader.read_port("motley_port") or DEFAULT_PORT,
        devices=reader.read_devices(),
        fill_with_cpu=reader.read_flag("motley_fill_with_cpu"),
        teacher=reader.read_flag("motley_teacher"),
        student=reader.read_flag("motley_student"),
        evaluator=reader.read_flag("motley_evaluator"),
        trainer_command=reader.read_command(),
        state_folder=reader.read_folder("motley_state_folder"),
        share_folder=reader.read_folder("motley_share_folder"),
        link_rates=reader.link_rates(),
        **reader.read_prices(),
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
