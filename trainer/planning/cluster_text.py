"""A cluster as a line of text: hosts with their devices and memory, and the link between them."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field

from trainer.planning.device_models import DeviceModel, find_device
from trainer.planning.devices import (
    GIB,
    PCIE,
    ClusterShape,
    HostPool,
    assume_processor,
    is_of_link,
    parse_link,
    with_links,
)
from trainer.system.errors import InputError

_NAME = re.compile(r"\s*([A-Za-z][\w.-]*)\s*:(.*)")
_DEVICES = re.compile(r"(?:(\d+)\s*x\s*)?(\S.*?)(?:\s+(nvlink|pcie))?", re.IGNORECASE)
"""Devices of a host: how many, which, and the link between them."""
_HOSTS = re.compile(r"(\d+)\s+hosts?", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([GT])(?:i?B)?(\s+ram)?", re.IGNORECASE)
_WITH_MEMORY = re.compile(
    r"(?P<own>\S.*?)\s+(?P<size>\d+(?:\.\d+)?\s*[GT](?:i?B)?)(?P<ram>\s+ram)?", re.IGNORECASE
)
_DISK = re.compile(r"(\d+(?:\.\d+)?)\s*([GM])B/s(?:\s+disk)?", re.IGNORECASE)
_EXAMPLES = "'8xA100-80G nvlink, 2 hosts, 200gbit', or 'a: RTX4090 64GB; b: 2xW5700X 300GB; 1gbit'"


@dataclass
class _Host:
    """A section of the text: equal hosts."""

    text: str
    name: str = ""
    hosts: int = 1
    memory: float | None = None
    disk: float | None = None
    devices: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])
    """How many, which, and the link between them."""


def parse_cluster(text: str, link: str | None = None) -> ClusterShape:
    """Return a cluster such as `a: RTX4090 64GB; b: 2xW5700X 300GB; 1gbit`.

    Hosts are separated by `;`, and the kinds of devices of one by `,`: `2x` are two of each host.
    `64GB` after a device is the memory of its host, `2 hosts` how many are alike, `3GB/s` what its
    disk reads, `nvlink` the link of its devices. A `link` between hosts may be given apart.

    Raises:
        InputError: a part cannot be read, a device is unknown, several hosts have no link or two,
            or a `link` is given for one host.
    """
    links: list[str] = []
    found: list[_Host] = []
    for section in text.split(";"):
        named = _NAME.fullmatch(section)
        host = _Host(text, named[1] if named else "")
        parts = [part.strip() for part in (named[2] if named else section).split(",")]
        links += (own := [part for part in parts if is_of_link(part)])
        for part in parts:
            if part not in own:
                _read_part(host, part)
        if own and len(own) == len(parts) and not named:
            continue  # the link alone
        if host.name and host.name in [other.name for other in found]:
            raise InputError(f"--cluster: two hosts are named {host.name!r}; write '2 hosts'")
        found.append(host)
    if link is not None and links:
        raise InputError(f"--link {link}: --cluster has a link too: {', '.join(links)}; give one")
    rates = link if link is not None else ", ".join(links)
    groups = tuple(pool for host in found for pool in _make_pools(host))
    if not groups:
        raise InputError(f"--cluster: {text!r} needs devices, such as 8xA100-80G, and no zero")
    cluster = ClusterShape(groups=groups, between=parse_link(rates) if rates else None)
    if cluster.hosts == 1 and link is not None:
        raise InputError(f"--link {link}: is between hosts, and --cluster has one; add '2 hosts'")
    return with_links(cluster)


def _read_part(host: _Host, part: str) -> None:
    """Read one part of a host's description.

    Raises:
        InputError: it is none, or contradicts another.
    """
    if match := _HOSTS.fullmatch(part):
        host.hosts = int(match[1])
    elif match := _DISK.fullmatch(part):
        _set_once(host, "disk", float(match[1]) * (1e9 if match[2].upper() == "G" else 1e6), part)
    elif (match := _SIZE.fullmatch(part)) and (match[3] or host.devices):
        if not match[3]:
            raise _refuse(host, part, f"write '{part} RAM' for the host's memory, or '1x{part}'")
        _set_once(host, "memory", _read_size(match), part)
    elif match := _DEVICES.fullmatch(part):
        count, name, link = int(match[1] or 1), match[2], (match[3] or "").lower()
        name, memory = _split_memory(host, name, part)
        if memory is not None:
            _set_once(host, "memory", memory, part)
            match = _DEVICES.fullmatch(name)
            assert match is not None
            name, link = match[2], (match[3] or link).lower()
        host.devices.append((count, name, link))
    else:
        raise _refuse(host, part, f"write it as {_EXAMPLES}")


def _set_once(host: _Host, what: str, value: float, part: str) -> None:
    if getattr(host, what) is not None:
        raise _refuse(host, part, f"the host has a {what} already")
    setattr(host, what, value)


def _split_memory(host: _Host, name: str, part: str) -> tuple[str, float | None]:
    """Return the name of a device without the host's memory after it, and that.

    `A100 80GB` is a card of the table, and `A100 512GB` one in a host of 512 GiB.

    Raises:
        InputError: the host would have less memory than its card.
    """
    found = _WITH_MEMORY.fullmatch(name)
    if found is None or _parse_sized(name, None) is not None:
        return name, None
    own, text, given = found["own"], found["size"], bool(found["ram"])
    match = _SIZE.fullmatch(text)
    assert match is not None
    memory = _read_size(match)
    try:
        device = find_device(name)
    except InputError:  # no card has that size in its name
        return own, memory
    if not given and device.memory == memory:
        return name, None
    if not given and memory < device.memory:
        raise _refuse(
            host,
            part,
            f"a {device.name} has {device.memory / GIB:g} GiB; write another card by its memory"
            f" alone, '{text}', or the host's memory as '{text} RAM'",
        )
    return own, memory


def _read_size(match: re.Match[str]) -> float:
    return float(match[1]) * GIB * (1024 if match[2].upper() == "T" else 1)


def _refuse(host: _Host, part: str, why: str) -> InputError:
    return InputError(f"--cluster: cannot read {part!r} in {host.text!r}; {why}")


def _make_pools(host: _Host) -> list[HostPool]:
    """Return the devices of a section.

    Raises:
        InputError: it has none, or an unknown one, or too few hosts.
    """
    counts = [count for count, _, _ in host.devices]
    if not counts or min(counts) < 1 or host.hosts < 1:
        raise InputError(f"--cluster: {host.text!r} needs devices, such as 8xA100-80G, and no zero")
    pools: list[HostPool] = []
    for count, name, link in host.devices:
        device = _parse_sized(name, host.memory)
        try:
            device = device or _find_device(name, link)
        except InputError as error:
            raise InputError(f"--cluster: cannot read {name!r} in {host.text!r}: {error}") from None
        inside = PCIE
        if link == "nvlink":
            if device.nvlink is None:
                raise InputError(f"--cluster: a {device.name} has no NVLink; write pcie")
            inside = device.nvlink
        pools.append(
            HostPool(
                hosts=host.hosts,
                devices=count,
                device=device,
                inside=inside,
                shares_host=bool(pools),
                name=host.name,
                main_memory=host.memory or (device.memory if device.is_processor else None),
                disk=host.disk,
            )
        )
    return pools


def _parse_sized(text: str, memory: float | None) -> DeviceModel | None:
    """Return a card of which only the memory is known, such as `8GB`, or a processor.

    `CPU` is this machine's, `CPU8-300GB` one of 8 cores with 300 GiB, `CPU8` one in a host whose
    memory is known.
    """
    if match := re.fullmatch(r"(\d+)\s*G(?:i?B)?", text, re.IGNORECASE):
        name, size = f"{match[1]}GB", int(match[1]) * GIB
        return DeviceModel(name=name, flops=None, memory=size, watts=None, source="assumed")
    if match := re.fullmatch(r"cpu([1-9]\d*)(?:-(\d+)\s*G(?:i?B)?)?", text, re.IGNORECASE):
        size = int(match[2]) * GIB if match[2] else memory
        return None if size is None else assume_processor(int(match[1]), size)
    if text.lower() == "cpu" and memory is None:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return assume_processor(os.cpu_count() or 1, size)
    return None


def _find_device(name: str, link: str) -> DeviceModel:
    """Return a device; `H100 pcie` is the card of that form, which has a row of its own.

    Raises:
        InputError: it is unknown, or a processor without its cores or memory.
    """
    if re.fullmatch(r"cpu\d*", name, re.IGNORECASE):
        raise InputError("a processor needs cores and memory: CPU8-300GB, or CPU8 300GB")
    if link == "pcie":
        with contextlib.suppress(InputError):
            return find_device(f"{name} {link}")
    return find_device(name)
