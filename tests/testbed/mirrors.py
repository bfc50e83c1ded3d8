"""Where this machine gets its packages from, so that the hosts do likewise.

Read from apt's and pip's own configuration when a host is made; nothing of it is written into the
project. Credentials and proxies of the environment are not handed on.
"""

from __future__ import annotations

import ast
import configparser
import io
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from tests.testbed.errors import LabError
from tests.testbed.processes import run

PUBLIC = "http://deb.debian.org/debian"

# What a host needs of this machine's apt options: how to get there and what to believe.
APT_OPTIONS = re.compile(
    r"Acquire::(?:Check-Date|Check-Valid-Until|Retries|ForceIPv4"
    r"|https?::(?:Proxy|Verify-Peer|Verify-Host|Timeout)(?:::.*)?) "
)
PLACES = {"index-url", "extra-index-url", "find-links", "cert", "no-index", "trusted-host"}


@cache
def apt_sources(suite: str) -> list[str]:
    """Return a Debian suite's lines of sources.list, from the mirrors that apt uses here."""
    listing = run(["apt-get", "indextargets", "--format", "$(SITE)"], check=False).stdout
    sites = sorted(set(listing.split()))

    def site(name: str) -> str | None:
        return next((s for s in sites if urlsplit(s).path.rstrip("/").endswith(name)), None)

    main = site("/debian") or PUBLIC
    security = site("/debian-security") or f"{main.rstrip('/')}-security"
    return [
        f"deb {main} {suite} main",
        f"deb {main} {suite}-updates main",
        f"deb {security} {suite}-security main",
    ]


@cache
def apt_options() -> list[str]:
    """Return the options of this machine's apt that its hosts need too, as apt writes them."""
    dump = run(["apt-config", "dump"]).stdout.splitlines()
    options = [line.rstrip(";") for line in dump if APT_OPTIONS.match(line)]
    return [*options, 'Acquire::Languages "none"']


PIP_CERTIFICATES = Path("/etc/ssl/pip.pem")
"""Where a host keeps a copy of the certificates that this machine's pip is told to trust."""


@dataclass(frozen=True)
class Pip:
    """pip's configuration for a host, and what it names of this machine."""

    text: str
    folders: tuple[Path, ...]
    """To be bound into the host, read-only, at the same path."""
    certificates: Path | None


@cache
def pip_configuration(listing: str | None = None) -> Pip:
    """Return what `pip config list` says here, as an /etc/pip.conf and what goes with it.

    Of an index `.../simple` the parent is bound, since its pages point beside it. The environment
    (PIP_...) wins over files, as with pip itself.
    """
    if listing is None:
        listing = run([sys.executable, "-m", "pip", "config", "list"]).stdout
    settings = _merged(listing)
    certificates = Path(settings["cert"]) if "cert" in settings else None
    if certificates is not None:
        settings["cert"] = str(PIP_CERTIFICATES)
    folders: set[Path] = set()
    for name in settings.keys() - {"cert"}:
        for word in settings[name].split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                index = name.endswith("index-url") and len(path.parts) > 3
                folders.add(path.parent if index else path)
    config = configparser.RawConfigParser()
    config["global"] = {name: "\n".join(value.split()) for name, value in settings.items()}
    text = io.StringIO()
    config.write(text)
    return Pip(text.getvalue(), tuple(sorted(folders)), certificates)


def _merged(listing: str) -> dict[str, str]:
    """Return the settings that say where packages come from, of lines `section.name='value'`."""
    found: dict[str, dict[str, str]] = {"global": {}, ":env:": {}}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found and name in PLACES:
            try:
                found[section][name] = str(ast.literal_eval(value))
            except (SyntaxError, ValueError):
                raise LabError(f"pip config list: cannot read {line!r}") from None
    return found["global"] | found[":env:"]
