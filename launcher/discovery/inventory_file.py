"""Write the discovered machines as an Ansible inventory, or update an edited one."""

from __future__ import annotations

import difflib
import os
import shlex
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.discovery.host_queries import FoundMachine
from launcher.discovery.links import MeasuredLink
from launcher.discovery.proposal import Proposal, size_text
from launcher.discovery.yaml_text import YamlText
from launcher.errors import ConfigError
from launcher.inventory.hosts import Host, load_inventory
from trainer.system.errors import plain_reason
from trainer.system.regular_file import read_text
from trainer.system.storage.atomic_file import write_atomically

_SAME = 0.2
"""A rate that has changed by less than this part stays as it is written: no two are equal."""

_HEAD = """\
# An inventory by `launch discover`, for ansible-playbook and launch; inventory/hosts.yml explains
# the variables. Edit it as you like: the next `launch discover --write` adds new hosts at the end,
# corrects addresses and link rates (Mbit/s to each host), and leaves all else alone.
---
all:
  vars:
    motley_share_folder: /srv/motley
  hosts:
"""


@dataclass(frozen=True)
class InventoryUpdate:
    """The text of an inventory before and after."""

    path: Path
    before: str
    after: str

    @property
    def difference(self) -> list[str]:
        """The changed lines, as `diff -u` shows them."""
        name = str(self.path)
        lines = (self.before.splitlines(), self.after.splitlines())
        return list(difflib.unified_diff(*lines, name, name, n=1, lineterm=""))


def update_inventory(
    path: Path,
    known: Sequence[Host],
    found: Sequence[FoundMachine],
    links: Sequence[MeasuredLink],
    proposal: Proposal,
) -> InventoryUpdate:
    """Return a file with what was found; writes nothing.

    Args:
        known: the hosts of the file as it is; empty if there is none.
        found: the machines; one of the file has its name.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    before = ""
    if known:
        try:
            before = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {plain_reason(error)}") from None
    text = YamlText(str(path), before or _HEAD)
    names = {host.name for host in known}
    places = {host.name: _find_host_path(text, host.name) for host in known}
    for one in found:
        if one.name in names:
            _correct_address(
                text, places[one.name], one, next(h for h in known if h.name == one.name)
            )
        else:
            places[one.name] = ("all", "hosts", one.name)
            _add_host(text, one)
    _add_roles(text, places, known, proposal)
    for link in links:
        for here, there, rate in (
            (link.source, link.target, link.forward_rate),
            (link.target, link.source, link.reverse_rate),
        ):
            _note_rate(text, (*places[here], "motley_link_rates"), there, rate)
    return InventoryUpdate(path, before, text.text)


def save_inventory(written: InventoryUpdate) -> None:
    """Replace the file, once Ansible has read the new text and found the same hosts in it.

    Raises:
        ConfigError: the folder cannot be written, or the text is no inventory.
    """
    path = written.path
    if written.after == written.before:
        return
    descriptor, name = -1, ""
    try:
        # In its folder, so that group_vars and host_vars beside it apply.
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".discover-", suffix=".yml")
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(written.after)
        load_inventory(Path(name))
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
        write_atomically(path, written.after.encode(), mode)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(str(error).replace(name, str(path))) from None
    finally:
        if name:
            Path(name).unlink(missing_ok=True)


def _find_host_path(text: YamlText, name: str) -> tuple[str, ...]:
    """Return the path of a host's mapping: below `hosts` of `all`, or of the group that has it."""

    def search(path: tuple[str, ...]) -> tuple[str, ...] | None:
        if name in text.list_keys((*path, "hosts")):
            return (*path, "hosts", name)
        inner = ((*path, "children", group) for group in text.list_keys((*path, "children")))
        return next((found for place in inner if (found := search(place))), None)

    for top in ("all", *text.list_keys(())):
        if found := search((top,)):
            return found
    return ("all", "hosts", name)  # by a pattern such as w[1:3]: its own line beside it


def _correct_address(
    text: YamlText, place: tuple[str, ...], one: FoundMachine, known: Host
) -> None:
    """Correct the address of a host that answered elsewhere than the file says."""
    if one.host.address not in (known.address, None) and not _is_template(text, place):
        text.set((*place, "ansible_host"), one.host.address)
        if (one.host.ssh_port or 22) != (known.ssh_port or 22):
            text.set((*place, "ansible_port"), one.port)


def _is_template(text: YamlText, place: tuple[str, ...]) -> bool:
    return "{{" in str(text.get((*place, "ansible_host")))


def _add_host(text: YamlText, one: FoundMachine) -> None:
    place = ("all", "hosts", one.name)
    text.set(place, {}, describe_machine(one))
    if one.host.address is not None:
        text.set((*place, "ansible_host"), one.host.address)
        text.set((*place, "ansible_user"), one.host.user or one.user)
        if one.port != 22:
            text.set((*place, "ansible_port"), one.port)
    else:
        text.set((*place, "ansible_user"), one.user, "as ssh_config says")
    if one.host.ssh_args:
        text.set((*place, "ansible_ssh_common_args"), shlex.join(one.host.ssh_args))


def _add_roles(
    text: YamlText, places: Mapping[str, tuple[str, ...]], known: Sequence[Host], proposal: Proposal
) -> None:
    """Give each role that no host has, with the reason."""
    for name, role in (
        ("coordinator", proposal.coordinator),
        ("teacher", proposal.teacher),
        ("student", proposal.student),
    ):
        if not any(getattr(host, name) for host in known):
            text.set((*places[role.host], f"motley_{name}"), True, role.reason)
    chosen = text.get(("all", "vars", "share_server")) or text.get(("all", "vars", "share_mode"))
    if chosen is None and not known:
        share = proposal.share
        text.set(("all", "vars", "share_server"), share.host, share.reason)


def _note_rate(text: YamlText, place: tuple[str, ...], there: str, rate: float | None) -> None:
    if rate is None:
        return
    old, new = text.get((*place, there)), max(1, round(rate / 1e6))
    if not isinstance(old, int | float) or abs(new - old) > _SAME * old:
        if text.get(place):
            text.set((*place, there), new)
        else:
            text.set(place, {there: new})  # on one line


def describe_machine(one: FoundMachine) -> str:
    """Return what a machine has that does not change from day to day."""
    cores = f"{one.machine.cores} cores"
    memory = f"{size_text(one.machine.memory)} memory" if one.machine.memory else "unknown memory"
    return ", ".join([*([one.devices] if one.devices else []), cores, memory])
