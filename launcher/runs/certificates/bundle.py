"""Certificates for runs that are started by hand: a folder with one subfolder per process.

    DIR/coordinator/{ca.pem,cert.pem,key.pem}
    DIR/rank-0/...

The trainer looks for these names in --tls DIR, $MOTLEY_TLS_DIR or ~/.config/motley/tls.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ConfigError
from launcher.runs.certificates.authority import Authority, certificate_identity
from trainer.system.storage.atomic_file import write_atomically

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*", re.IGNORECASE)
_MEMBER = re.compile(r"coordinator|rank-\d+")


@dataclass(frozen=True)
class CertificateBundle:
    """Paths and identities of a written bundle."""

    folder: Path
    members: tuple[str, ...]
    """Names of the folders in it: `coordinator`, `rank-0`, ..."""


def write_bundle(
    authority: Authority,
    folder: Path,
    run_id: str,
    ranks: int,
    hosts: Sequence[str],
    *,
    replace: bool,
) -> CertificateBundle:
    """Write a bundle for the coordinator and `ranks` workers of a run, atomically.

    `hosts` are the names and addresses of all these processes. With `replace` an existing
    bundle is replaced; a folder that holds anything else never is.

    Raises:
        ConfigError: a host is no name or address, the folder exists, or a write fails.
    """
    for host in hosts:
        _require_host(host)
    folder = folder.expanduser().resolve()
    _require_place(folder, replace=replace)
    identities = {"coordinator": certificate_identity(run_id, None)}
    identities |= {f"rank-{rank}": certificate_identity(run_id, rank) for rank in range(ranks)}
    names = tuple(dict.fromkeys(hosts))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for member, identity in identities.items():
                (staging / member).mkdir(mode=0o700)
                for name, content in authority.issue(identity, names).contents_by_name().items():
                    write_atomically(staging / member / name, content)
            _replace_bundle(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    return CertificateBundle(folder, tuple(identities))


def _require_host(host: str) -> None:
    with contextlib.suppress(ValueError):
        if "%" not in host and ipaddress.ip_address(host):
            return
    if not _HOST_NAME.fullmatch(host):
        raise ConfigError(f"--host {host}: give an IP address or a host name, without a port")


def _require_place(folder: Path, *, replace: bool) -> None:
    """Refuse a place that holds anything but a bundle that may be replaced."""
    if not folder.is_dir():
        if folder.exists():
            raise ConfigError(f"{folder} is a file; give -o a new folder")
        return
    try:
        found = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    other = [path.name for path in found if not (_MEMBER.fullmatch(path.name) and path.is_dir())]
    if other:
        raise ConfigError(f"{folder} contains other files, such as {other[0]}; give another -o")
    if found and not replace:
        raise ConfigError(f"{folder} already contains certificates; --force makes new ones")


def _replace_bundle(staging: Path, folder: Path) -> None:
    """Move a finished bundle to its place; if that fails, the old one is restored."""
    if not folder.exists():
        staging.rename(folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        old = folder.rename(aside / folder.name)
        try:
            staging.rename(folder)
        except BaseException:
            old.rename(folder)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
