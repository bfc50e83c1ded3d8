"""Copy models, data and logits to the hosts, and checkpoints from them, with rsync.

Readers trust a manifest, so it travels last: an incomplete transfer is never taken for a
complete one, and the same command resumes it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from launcher.agent.checks.shared_folder import find_share_source
from launcher.errors import ConfigError, LauncherError, PartialError
from launcher.files import SHARE
from launcher.hosts import fleet, ssh
from launcher.hosts.base import Connection
from launcher.hosts.bootstrap import RUN_USER
from launcher.hosts.fleet import REACH, format_error
from launcher.inventory.hosts import Host
from launcher.transfer.rsync import Endpoint, Report, TransferStats, transfer_files
from trainer.system.regular_file import read_file
from trainer.system.storage.atomic_file import link_atomically
from trainer.system.untrusted_data import is_path_below, validate_json

Kind = Literal["inputs", "logits", "checkpoints"]

MANIFEST = "manifest.json"
COMPLETION_MARKERS = (MANIFEST, "config.json", "*.index.json")
"""Files by which readers take a folder for complete."""

POINTERS = ("latest", "best")

_FETCHED = ".fetched-manifests"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_COPY = ("--recursive", "--copy-links")
_READABLE = "--chmod=D755,F644"
_DEADLINE = 1e8
"""Seconds, which are years: a transfer takes as long as it makes progress."""


@dataclass(frozen=True)
class SyncResult:
    """The result of one host."""

    host: str
    folder: str
    moved: TransferStats
    note: str = ""
    """Why nothing was done, where nothing had to be."""
    complete: tuple[str, ...] = ()
    """Folders with a manifest that are whole on the receiving side."""

    @property
    def describe(self) -> str:
        """One line for people."""
        if self.note:
            return f"{self.host}: {self.note}"
        size = f"{self.moved.files} files, {self.moved.size / 1e6:.1f} MB"
        return f"{self.host}: {self.folder}: {size if self.moved.files else 'up to date'}"


def push_inputs(hosts: Sequence[Host], paths: Sequence[Path], report: Report) -> list[SyncResult]:
    """Bring model folders and data files to `inputs/` in the state folder of every host.

    Raises:
        ConfigError: a path is missing, or two have the same name.
        LauncherError: a host failed; the others were finished first.
    """
    names: dict[str, Path] = {}
    for path in paths:
        name = path.resolve().name
        if not (path.is_file() or path.is_dir()):
            what = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise ConfigError(f"{path}: {what}")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{path}: its name may have only letters, digits and . _ + -")
        if name in names:
            raise ConfigError(f"{path} and {names[name]} would have the same name on the hosts")
        names[name] = path.resolve()

    def push(host: Host, there: Connection) -> SyncResult:
        place = find_endpoint(host, there, "inputs")
        moved = TransferStats()
        for name, path in names.items():
            if path.is_dir():
                moved += push_folder(path, place, name, there, report, delete=True)
            else:
                options = [*place.options, "--copy-links", _READABLE]
                moved += transfer_files(host.name, [str(path)], place.address(), options, report)
        return SyncResult(host.name, place.folder, moved)

    return _run_on_hosts(hosts, push)


def push_logits(hosts: Sequence[Host], source: Path, report: Report) -> list[SyncResult]:
    """Bring a folder of logits to every host that does not have it by a mounted share.

    Raises:
        ConfigError: there is no such folder.
        LauncherError: a host failed; the others were finished first.
    """
    if not source.is_dir():
        raise ConfigError(f"{source}: is not a folder")

    def push(host: Host, there: Connection) -> SyncResult:
        place = find_endpoint(host, there, "logits")
        if mounted := there.ask(find_share_source, place.folder):
            return SyncResult(host.name, place.folder, TransferStats(), f"has them from {mounted}")
        return SyncResult(host.name, place.folder, push_folder(source, place, "", there, report))

    return _run_on_hosts(hosts, push)


def pull_folder(host: Host, kind: Kind, name: str, target: Path, report: Report) -> SyncResult:
    """Bring the share's folder of a host here, or only `name` in it.

    Every folder with a manifest appears with its manifest last, when all its files are here; links
    such as `latest` follow. What was removed there stays here.

    Raises:
        ConfigError: the name is not a plain one, or the target cannot be written.
        LauncherError: the host failed.
    """
    if name and not _NAME.fullmatch(name):
        raise ConfigError(f"{name}: is not the name of a folder of {kind}")
    there = fleet.ask_hosts([host], lambda _, found: found, REACH).require()[host.name]
    place = find_endpoint(host, there, kind)
    try:
        target.mkdir(parents=True, exist_ok=True)
        moved, complete = _pull_new(place, name, target, report)
    except OSError as error:
        raise ConfigError(f"{error.filename or target}: {error.strerror}") from None
    return SyncResult(host.name, str(target), moved, "", tuple(complete))


def push_folder(
    source: Path,
    place: Endpoint,
    name: str,
    there: Connection,
    report: Report,
    delete: bool = False,
) -> TransferStats:
    """Bring one folder to a place, its vouchers last; `delete`: nothing else stays in it there."""
    sources, target = [f"{source}/"], place.address(f"{name}/" if name else "")
    options = [*place.options, *_COPY, _READABLE]
    only = [
        "--include=*/",
        *(f"--include={marker}" for marker in COMPLETION_MARKERS),
        "--exclude=*",
    ]
    changed = transfer_files(
        place.host, sources, target, [*options, *only, "--dry-run", "--existing", "--checksum"]
    )
    for marker in changed.names:  # from now on the old content vouches for nothing
        there.remove_file(str(PurePosixPath(place.folder, name, marker)))
    without = [f"--exclude={marker}" for marker in COMPLETION_MARKERS]
    moved = transfer_files(place.host, sources, target, [*options, *without], report)
    last = ["--delete-after"] if delete else []
    return moved + transfer_files(place.host, sources, target, [*options, *last])


def find_endpoint(host: Host, there: Connection, kind: Kind) -> Endpoint:
    """Return where a host keeps inputs, logits or checkpoints, and how rsync gets there.

    Raises:
        ConfigError: the inventory does not say where the share of a host without the role is.
    """
    managed = not host.is_local and there.user == RUN_USER
    if kind == "inputs":
        folder = f"{host.state_folder or there.state_folder}/inputs"
    elif host.share_folder is not None or managed:
        folder = f"{host.share_folder or SHARE}/{kind}"
    else:
        raise ConfigError(
            f"host {host.name}: set motley_share_folder to the folder that contains its {kind}"
        )
    if host.is_local:
        there.make_folder(folder)
        return Endpoint(host.name, folder)
    command = ssh.find_route(host).command
    name = host.address or host.name
    destination = f"[{name}]" if ":" in name else name  # an IPv6 address
    if managed and host.user != RUN_USER:
        return Endpoint(host.name, folder, "module", kind, destination, command)
    there.make_folder(folder)
    return Endpoint(host.name, folder, "login", kind, destination, command)


def _run_on_hosts(
    hosts: Sequence[Host], task: Callable[[Host, Connection], SyncResult]
) -> list[SyncResult]:
    """Do it on all hosts at once; all finish, then the errors of all are raised as one."""
    answers = fleet.ask_hosts(hosts, task, _DEADLINE)
    done = [*answers.found.values()]
    if not answers.errors:
        return done
    lines = [format_error(name, error) for name, error in answers.errors.items()]
    lines += [f"done: {synced.describe}" for synced in done]
    first = next(iter(answers.errors.values()))
    kind = type(first) if isinstance(first, LauncherError) and not done else PartialError
    raise kind(lines[0], lines[1:])


def _pull_new(
    place: Endpoint, name: str, target: Path, report: Report
) -> tuple[TransferStats, list[str]]:
    source = place.address(f"{name}/" if name else "")
    fetched = target / _FETCHED
    shutil.rmtree(fetched, ignore_errors=True)
    kept = ["*/", MANIFEST, *POINTERS]
    only = ["--prune-empty-dirs", *(f"--include={name}" for name in kept), "--exclude=*"]
    options = [*place.options, "--recursive", "--links", "--checksum"]
    # What is complete there at this moment, beside the folders here and not yet in them.
    transfer_files(place.host, [source], f"{fetched}/", [*options, *only])
    manifests = {
        path.parent.relative_to(fetched): path
        for path in fetched.rglob(MANIFEST)
        if path.is_file() and not path.is_symlink()  # a link would have us read a file of our own
    }
    for folder, manifest in manifests.items():
        own = target / folder / MANIFEST
        with contextlib.suppress(FileNotFoundError):
            if read_file(own) != read_file(manifest):
                own.unlink()  # another one of the same name: it vouches for nothing from now on
    names = [str(folder / file) for folder, m in manifests.items() for file in _manifest_sizes(m)]
    moved = TransferStats()
    if names:
        moved = transfer_files(
            place.host, [source], f"{target}/", place.options, report, sorted(names)
        )
    complete: list[str] = []
    for folder, manifest in sorted(manifests.items()):
        sizes = _manifest_sizes(manifest)
        if sizes and all(
            _file_size(target / folder / file) == size for file, size in sizes.items()
        ):
            manifest.replace(target / folder / MANIFEST)
            complete.append(str(folder))
        else:
            report(f"{place.host}: {folder}: was removed there meanwhile, skipped")
    for link in [p for p in fetched.rglob("*") if p.is_symlink() and p.name in POINTERS]:
        _follow_link(link, target / link.relative_to(fetched))
    shutil.rmtree(fetched)
    return moved, complete


def _follow_link(link: Path, own: Path) -> None:
    """Let a link here show what it shows there, if that is complete here."""
    shown = link.readlink()
    inside = _is_name(str(shown)) and (own.parent / shown / MANIFEST).is_file()
    if not inside or (own.exists() and not own.is_symlink()):
        return
    link_atomically(own, shown)


@dataclass(frozen=True)
class _File:
    size: int


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, _File]


def _manifest_sizes(manifest: Path) -> dict[str, int]:
    """Return the files that a manifest names, with their sizes; none when it is damaged."""
    try:
        found = validate_json(_Manifest, read_file(manifest), MANIFEST, least=0)
    except (OSError, ValueError):
        return {}
    sizes = {name: entry.size for name, entry in found.files.items()}
    return sizes if all(map(_is_file, sizes)) else {}


def _is_name(text: str) -> bool:
    """Whether a text names something in a folder, and nothing outside of it."""
    return PurePosixPath(text).name == text and text not in ("", "..") and text.isprintable()


def _is_file(text: str) -> bool:
    """Return whether a text names a file in a folder, and nothing outside of it."""
    return is_path_below(text) and text.isprintable()


def _file_size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
