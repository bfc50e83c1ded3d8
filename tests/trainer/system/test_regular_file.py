"""Files that are read whole: regular ones of a bounded size, at once and without their memory."""

import os
import resource
import socket
from pathlib import Path

import pytest

from trainer.system.regular_file import MOST, open_file, read_file, read_text


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"caf\xc3\xa9\r\nb\rc\n")
    link.symlink_to(path)
    assert read_file(link) == path.read_bytes()
    assert read_text(path) == "café\nb\nc\n"
    assert read_file(Path("/proc/self/status")).startswith(b"Name:")  # no size, and content
    with open_file(path) as file:
        assert file.read(3) == b"caf"
    path.write_bytes(b"\xff")
    assert read_text(path, errors="replace") == "�"
    with pytest.raises(UnicodeDecodeError):
        read_text(path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe, unix = tmp_path / "pipe", tmp_path / "socket"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(unix))
    for path, reason in (
        (pipe, "is a named pipe, not a file"),
        (Path("/dev/zero"), "is a device, not a file"),
        (tmp_path, "is a folder, not a file"),
        (unix, "No such device or address"),
        (tmp_path / "absent", "No such file or directory"),
    ):
        with pytest.raises(OSError) as caught:
            read_file(path)
        assert (caught.value.strerror, caught.value.filename) == (reason, str(path))


def test_a_file_over_the_limit_is_refused_without_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.write_bytes(b"x" * 10)
    assert read_file(path, 10) == b"x" * 10
    with pytest.raises(OSError, match="is larger than 9 bytes"):
        read_file(path, 9)
    with path.open("r+b") as file:
        file.truncate(60 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OSError, match=f"is larger than {MOST:,} bytes"):
        read_file(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 10


def test_a_file_without_a_size_is_read_up_to_the_limit() -> None:
    with pytest.raises(OSError, match="is larger than 100 bytes"):
        read_file(Path("/proc/self/status"), 100)
