"""One transfer with rsync: source, target, and the meaning of its exit code.

A broken transfer resumes where it stopped: a partial file is kept in `.rsync-partial`, and a file
appears under its name only when it is complete.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Literal

from launcher.errors import LauncherError, PartialError, PreflightError, UnreachableError

SERVER = "sudo -n -u motley -- /usr/bin/rsync --config=/etc/motley/rsyncd.conf"
"""Command that the share role's sudo rule allows on a host; rsync adds `--server --daemon .`."""

PARTIAL = ".rsync-partial"
SILENCE = 60
"""Seconds without a byte after which a transfer gives up."""

_OLDEST = (3, 2)
_LOST = (10, 12, 30, 35, 255)
_TEMPORARY = (PARTIAL, ".tmp-*", ".old-*", ".link-*", ".probe-*", ".lease-*", ".fetched-*")
"""Patterns of unfinished files, which are never transferred."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Endpoint:
    """A folder on a host, and how rsync reaches it."""

    host: str
    folder: str
    """Absolute, on that host."""
    way: Literal["local", "login", "module"] = "local"
    """As files of this machine, as files of the login there, or by a module of `SERVER`."""
    module: str = ""
    destination: str = ""
    ssh: tuple[str, ...] = ()

    def address(self, path: str = "") -> str:
        """Return rsync's name for a path below the folder."""
        if self.way == "module":
            return f"{self.destination}::{self.module}/{path}"
        prefix = f"{self.destination}:" if self.way == "login" else ""
        return f"{prefix}{self.folder}/{path}"

    @property
    def options(self) -> list[str]:
        """The arguments by which rsync gets there."""
        if self.way == "local":
            return []
        # rsync itself splits this at blanks; it doubles quotes instead of escaping them.
        shell = " ".join("'" + word.replace("'", "''") + "'" for word in self.ssh)
        if self.way == "module":
            return ["-e", shell, "--rsync-path", SERVER]
        return ["-e", shell, "--protect-args"]  # the login shell there gets no path


@dataclass(frozen=True)
class TransferStats:
    """The statistics of one transfer."""

    files: int = 0
    size: int = 0
    """Bytes of those files."""
    sent: int = 0
    """Bytes that went over the wire, both ways."""
    names: tuple[str, ...] = ()
    """Files that were moved, or would be."""

    def __add__(self, other: TransferStats) -> TransferStats:
        return TransferStats(
            self.files + other.files,
            self.size + other.size,
            self.sent + other.sent,
            self.names + other.names,
        )


def transfer_files(
    host: str,
    sources: Sequence[str],
    target: str,
    options: Sequence[str],
    report: Report | None = None,
    names: Sequence[str] | None = None,
) -> TransferStats:
    """Run rsync to its end; `names`, relative to the one source, replace what it would find.

    Raises:
        PreflightError: there is no usable rsync here or there.
        UnreachableError: the host does not answer, or stops answering.
        PartialError: rsync stopped for another reason, in its words.
    """
    command = [find_rsync(), "--times", "--perms", f"--partial-dir={PARTIAL}", "--delay-updates"]
    # Two checkpoints of one name have equal sizes, and may be of the same second.
    command += ["--modify-window=-1", *(f"--exclude={pattern}" for pattern in _TEMPORARY)]
    command += [f"--timeout={SILENCE}", "--stats", "--out-format=%i %n", "--info=progress2"]
    command += [*options, *(["--files-from=-", "--from0"] if names is not None else [])]
    process = subprocess.Popen(
        [*command, "--", *sources, target],
        stdin=subprocess.DEVNULL if names is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    complaints: list[bytes] = []
    listener = threading.Thread(
        target=_drain_stream, args=(process.stderr, complaints), daemon=True
    )
    listener.start()
    try:
        if process.stdin is not None:
            feeder = threading.Thread(
                target=_feed_names, args=(process.stdin, names or ()), daemon=True
            )
            feeder.start()
        output = _follow_progress(process.stdout, host, report)
        code = process.wait()
    except BaseException:
        process.terminate()  # it keeps what it has
        process.wait()
        raise
    listener.join()
    text = b"".join(complaints).decode(errors="replace")
    if code not in (0, 24):  # 24: files vanished during the transfer, the manifest shows it
        raise explain_exit_code(host, code, text)
    return _read_stats(output)


def find_rsync() -> str:
    """Return this machine's rsync.

    Raises:
        PreflightError: there is none, or one that is too old.
    """
    program = shutil.which("rsync")
    if program is None:
        raise PreflightError("rsync is missing on this machine; install the package rsync")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = re.match(r"rsync\s+version (\d+)\.(\d+)", done.stdout)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST:
        first = (done.stdout.splitlines() or ["no version"])[0]
        raise PreflightError(f"{program}: {first}; launch sync needs rsync 3.2 or newer")
    return program


def explain_exit_code(host: str, code: int, text: str) -> LauncherError:
    """Return the error that rsync's exit code and messages stand for."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    words = [
        line for line in lines if not re.match(r"rsync error: |rsync: .*connection unexpe", line)
    ]
    # ssh ends with its reason, rsync begins with it.
    reason = (words or lines or [f"rsync exited with code {code}"])[-1 if code == 255 else 0]
    if "command not found" in text or "rsync: not found" in text:
        return PreflightError(f"host {host}: rsync is missing there; install the package rsync")
    if "is your shell clean" in text:
        return PreflightError(
            f"host {host}: a start-up file of its login shell prints, which breaks rsync; see"
            " launch doctor, `login shell`"
        )
    if "sudo:" in text or "rsyncd.conf" in text:
        return PreflightError(
            f"host {host}: {reason}; run: ansible-playbook recipes/gpu-training.yml --tags share"
        )
    if code in _LOST:
        again = "the same command resumes where it stopped"
        return UnreachableError(f"host {host}: the transfer broke off ({reason}); {again}")
    return PartialError(f"host {host}: {reason}")


def _drain_stream(stream: IO[bytes], into: list[bytes]) -> None:
    with stream:
        into.extend(stream)


def _feed_names(stream: IO[bytes], names: Sequence[str]) -> None:
    try:
        with stream:
            stream.write(b"".join(os.fsencode(name) + b"\0" for name in names))
    except BrokenPipeError:
        pass  # rsync has ended: its exit code has the cause


def _follow_progress(stream: IO[bytes], host: str, report: Report | None) -> str:
    """Read rsync's output; each further tenth is reported once."""
    kept: list[str] = []
    tenths = 0
    with stream:
        for chunk in _read_chunks(stream):
            shown = re.search(r"^\s*[\d,]+\s+(\d+)%\s+(\S+/s)", chunk)
            if shown is None:
                kept.append(chunk)
            elif shown[2].startswith("0.00"):
                continue  # over before there was a speed to tell
            elif report is not None and int(shown[1]) // 10 > tenths:
                tenths = int(shown[1]) // 10
                report(f"{host}: {shown[1]} %, {shown[2]}")
    return "\n".join(kept)


def _read_chunks(stream: IO[bytes]) -> Iterator[str]:
    rest = b""
    while data := os.read(stream.fileno(), 1 << 16):
        *whole, rest = re.split(rb"[\r\n]+", rest + data)
        yield from (piece.decode(errors="surrogateescape") for piece in whole)
    yield rest.decode(errors="surrogateescape")


def _read_stats(output: str) -> TransferStats:
    def number(label: str) -> int:
        found = re.search(rf"^{label}: ([\d,]+)", output, re.MULTILINE)
        return int(found[1].replace(",", "")) if found else 0

    return TransferStats(
        number("Number of regular files transferred"),
        number("Total transferred file size"),
        number("Total bytes sent") + number("Total bytes received"),
        tuple(re.findall(r"^[<>]f\S* (.+)$", output, re.MULTILINE)),
    )
