"""Candidate addresses of machines: given ones, an inventory's, ssh_config's, and those from mDNS.

Reads ssh_config, and contacts no machine.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from launcher.errors import ConfigError
from launcher.inventory.hosts import Host
from trainer.system.regular_file import read_text

Source = Literal["inventory", "address", "ssh config", "mDNS"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ADDRESS = re.compile(
    r"(?:(?P<user>[^@\s:]+)@)?"
    r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:@\[\]-][^\s:@\[\]]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)"
    r"(?::(?P<port>[0-9]{1,5}))?"
)
_PATTERN = re.compile(r"[*?!]")
_DEEPEST = 16
"""Levels of Include that ssh follows."""


@dataclass(frozen=True)
class Candidate:
    """A machine that may be one of the cluster's."""

    host: Host
    """How it is reached."""
    sources: tuple[Source, ...]
    names: frozenset[str] = frozenset()
    """Addresses and names that lead to the same sshd."""
    port: int = 22

    @property
    def is_named(self) -> bool:
        """Whether the user named it, so that a missing answer is an error."""
        return not {"inventory", "address"}.isdisjoint(self.sources)


def parse_address(text: str, user: str | None, ssh_args: tuple[str, ...]) -> Host:
    """Return the host of `[USER@]HOST[:PORT]`; an IPv6 address with a port stands in brackets.

    Raises:
        ConfigError: it is something else.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"] or 22) not in range(1, 65536):
        raise ConfigError(f"{text!r} is not an address; write [USER@]HOST[:PORT]")
    address = found["host"].strip("[]")
    return Host(
        name=address,
        address=address,
        user=found["user"] or user,
        ssh_port=None if found["port"] is None else int(found["port"]),
        ssh_args=ssh_args,
    )


def ssh_config_hosts(file: Path, depth: int = 0) -> list[str]:
    """Return the hosts that an ssh_config names, without patterns; Include is followed.

    A host whose section says `User git` keeps repositories and is left out.

    Raises:
        ConfigError: it cannot be read.
    """
    if depth > _DEEPEST:
        raise ConfigError(f"{file}: Include goes deeper than {_DEEPEST} files")
    try:
        lines = read_text(file, errors="surrogateescape").splitlines()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    found: dict[str, None] = {}
    section: list[str] = []
    for key, words in _parse_settings(lines):
        if key == "include":
            # Relative ones are those of ~/.ssh, wherever the file itself is.
            bases = [Path(word).expanduser() for word in words]
            for path in (Path("~/.ssh").expanduser() / base for base in bases):
                for included in sorted(path.parent.glob(path.name)):
                    found |= dict.fromkeys(ssh_config_hosts(included, depth + 1))
        elif key == "host":
            section = [word for word in words if not _PATTERN.search(word)]
            found |= dict.fromkeys(section)
        elif key == "match":
            section = []
        elif key == "user" and words == ["git"]:
            for name in section:
                found.pop(name, None)
    return list(found)


def _parse_settings(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    for line in lines:
        key, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if key and not key.startswith("#"):
            try:
                yield key.lower(), shlex.split(rest)
            except ValueError:  # ssh itself reports its syntax when it is called
                yield key.lower(), rest.split()


def merge_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates, those that lead to one sshd as one: the first says how."""
    merged: list[Candidate] = []
    for candidate in candidates:
        for index, known in enumerate(merged):
            if known.port == candidate.port and known.names & candidate.names:
                sources = dict.fromkeys((*known.sources, *candidate.sources))
                names = known.names | candidate.names
                merged[index] = replace(known, sources=tuple(sources), names=names)
                break
        else:
            merged.append(candidate)
    return merged


def choose_host_name(candidates: Iterable[str], taken: Iterable[str]) -> str:
    """Return the first wish that can be an inventory's name, with a number if it is taken."""
    used = set(taken)
    chosen = next(
        (w for part in candidates if _NAME.fullmatch(w := part.strip()) and w != "localhost"),
        "host",
    )
    numbers = (f"{chosen}-{number}" for number in range(2, len(used) + 3))
    return next(name for name in (chosen, *numbers) if name not in used)
