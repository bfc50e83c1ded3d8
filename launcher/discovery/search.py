"""The steps of `launch discover`: search, query each machine, measure links, propose, write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher.discovery.candidates import (
    Candidate,
    choose_host_name,
    merge_candidates,
    parse_address,
    ssh_config_hosts,
)
from launcher.discovery.host_queries import FoundMachine, RefusedMachine, ask_all, shared_keys
from launcher.discovery.inventory_file import InventoryUpdate, save_inventory, update_inventory
from launcher.discovery.links import MeasuredLink, measure_links
from launcher.discovery.mdns import Announcement, browse_announcements
from launcher.discovery.proposal import Proposal, propose_roles
from launcher.errors import ConfigError, LauncherError, PreflightError, UnreachableError
from launcher.hosts import ssh
from launcher.hosts.fleet import AT_ONCE, ask_each
from launcher.inventory.hosts import Host, load_inventory
from launcher.terminal import show_progress

_RESOLVING = 60.0
"""Seconds for `ssh -G` of all candidates, each of which has its own deadline."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """The arguments of a discovery: sources, and what to do with the results."""

    addresses: tuple[str, ...] = ()
    user: str | None = None
    ssh_config: Path | None = None
    """None: ~/.ssh/config, where there is one."""
    accept_new_host_keys: bool = False
    """Record the unknown keys of the addresses and the inventory's hosts; look nowhere else."""
    mdns: bool = True
    seconds: float = 3.0
    """How long to listen for answers of mDNS."""
    links: bool = True
    port: int = 9000
    """The TCP port that link rates are measured at."""
    inventory: Path | None = None
    """The file to write; its hosts are queried too."""


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """Hosts, links and proposal that a search found."""

    found: tuple[FoundMachine, ...]
    refused: tuple[RefusedMachine, ...]
    links: tuple[MeasuredLink, ...] = ()
    proposal: Proposal | None = None
    written: InventoryUpdate | None = None
    problems: tuple[LauncherError, ...] = ()
    """Problems for the user to solve, the most severe first."""


def discover_machines(search: Search) -> Discovery:
    """Look for machines, ask them, and write the inventory if one is named.

    Raises:
        ConfigError: an address, ssh_config or the inventory cannot be used.
        UnreachableError: nothing was found.
    """
    if search.accept_new_host_keys:
        if not search.addresses:
            raise ConfigError(
                "--accept-new-host-keys needs the addresses whose keys you have compared: any "
                "machine on the network can announce itself"
            )
        ssh.accept_new_host_keys()
    known = _known_hosts(search.inventory)
    candidates, blocked = _list_candidates(search, known)
    if not candidates:
        why = f"{blocked}; " if blocked else "nothing announced itself by mDNS; "
        raise UnreachableError(f"no machine found: {why}give addresses: launch discover ADDRESS...")
    with show_progress("querying the machines"):
        found, refused = ask_all(merge_candidates(_resolve_candidates(candidates)))
    found, refused = _match_known_hosts(found, refused, known)
    problems: list[LauncherError] = [PreflightError(line) for line in shared_keys(found)]
    alike = bool(problems)
    links: list[MeasuredLink] = []
    if search.links and not all(one.is_open for one in found):
        problems.append(
            PreflightError(
                f"the links of more than {AT_ONCE} machines are not measured; name fewer of them, "
                "or --no-links"
            )
        )
    elif search.links and not alike:
        with show_progress("measuring the links"):
            links = measure_links(found, search.port)
    problems += [one.error for one in refused if one.is_error]
    problems += [PreflightError(link.summary) for link in links if link.problem]
    problems += [UnreachableError(f"{blocked}; give addresses, or --no-mdns")] if blocked else []
    proposal = written = None
    if found and not alike:
        disks = {one.name: one.disk for one in found if one.disk is not None}
        proposal = propose_roles([one.host for one in found], disks, links)
        if search.inventory is not None:
            written = update_inventory(search.inventory, known, found, links, proposal)
            save_inventory(written)
    return Discovery(
        found=tuple(found),
        refused=tuple(refused),
        links=tuple(links),
        proposal=proposal,
        written=written,
        problems=tuple(problems),
    )


def _known_hosts(inventory: Path | None) -> tuple[Host, ...]:
    if inventory is None:
        return ()
    if inventory.suffix not in (".yml", ".yaml"):
        raise ConfigError(f"--write {inventory}: the name of an inventory ends in .yml")
    if not inventory.parent.is_dir():
        raise ConfigError(f"--write {inventory}: there is no folder {inventory.parent}")
    if not inventory.exists():
        return ()
    with show_progress("reading the inventory"):
        return load_inventory(inventory)


def _list_candidates(search: Search, known: Sequence[Host]) -> tuple[list[Candidate], str]:
    """Return where to look, the most explicit first, and why mDNS cannot be used."""
    own = Path("~/.ssh/config").expanduser()
    config = search.ssh_config or (own if own.is_file() else None)
    args = () if search.ssh_config is None else ("-F", str(search.ssh_config.absolute()))
    candidates = [Candidate(host, ("inventory",)) for host in known]
    for text in search.addresses:
        host = parse_address(text, search.user, args)
        candidates.append(Candidate(host, ("address",)))
    if search.accept_new_host_keys:
        return candidates, ""
    announced: list[Announcement] = []
    blocked = ""
    if search.mdns:
        with show_progress("listening for machines"):
            announced, blocked = browse_announcements(search.seconds)
    aliases = ssh_config_hosts(config) if config is not None else []
    candidates += [
        Candidate(Host(name=name, user=search.user, ssh_args=args), ("ssh config",))
        for name in aliases
    ]
    candidates += [_announced_candidate(one, search.user, args) for one in announced]
    return candidates, blocked


def _announced_candidate(one: Announcement, user: str | None, args: tuple[str, ...]) -> Candidate:
    address = one.addresses[0]
    host = Host(
        name=choose_host_name((one.name, address), ()),
        address=address,
        user=user,
        ssh_port=None if one.port == 22 else one.port,
        ssh_args=args,
    )
    names = frozenset((f"{one.name.lower()}.local", *one.addresses))
    return Candidate(host, ("mDNS",), names, one.port)


def _resolve_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with the addresses and ports that ssh would take.

    Raises:
        ConfigError: ssh_config cannot be used.
    """
    questions = {
        str(i): (one.host, partial(_resolve_candidate, one)) for i, one in enumerate(candidates)
    }
    answers = ask_each(questions, _RESOLVING, _read_place)
    for error in answers.errors.values():
        raise error
    return list(answers.found.values())


def _read_place(host: Host) -> tuple[str, int] | None:
    """Return the address and port of a host; None: it is this machine."""
    if host.is_local:
        return None
    route = ssh.find_route(host)
    return route.address.lower(), route.port


def _resolve_candidate(candidate: Candidate, place: tuple[str, int] | None) -> Candidate:
    if place is None:
        return replace(candidate, names=candidate.names | {candidate.host.name})
    return replace(candidate, names=candidate.names | {place[0]}, port=place[1])


def _match_known_hosts(
    found: Sequence[FoundMachine], refused: Sequence[RefusedMachine], known: Sequence[Host]
) -> tuple[list[FoundMachine], list[RefusedMachine]]:
    """Take a machine for the inventory's host of its name if that one is silent at its address."""
    silent = {
        one.candidate.host.name: one for one in refused if one.candidate.sources[0] == "inventory"
    }
    names = {host.name for host in known}
    kept: list[FoundMachine] = []
    moved: set[str] = set()
    for one in found:
        if one.sources[0] != "inventory" and one.name in names:
            if one.name in silent and not ssh.is_changed_key(silent[one.name].error):
                moved.add(one.name)
            else:  # another machine of that name
                name = choose_host_name((one.name,), (*names, *(o.name for o in found)))
                one = replace(one, host=replace(one.host, name=name))
        kept.append(one)
    return kept, [
        one
        for one in refused
        if one.candidate.host.name not in moved or one.candidate.sources[0] != "inventory"
    ]
