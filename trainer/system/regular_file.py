"""Whole files that a person, a folder or a host names: regular ones of a bounded size alone.

A named pipe would be waited for without an end, and a device or a sparse file fill the memory.
Errors are OSErrors, so that each caller reports them as it does a missing file. Standard library
only.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MOST = 64 << 20
"""Bytes of a file that is read whole: tokenizers have some 30 MiB, and all else is smaller."""

MOST_LINES = 4 << 30
"""Bytes of a file that grows by lines as long as a run lasts."""

_KINDS = {
    stat.S_IFDIR: "is a folder, not a file",
    stat.S_IFIFO: "is a named pipe, not a file",
}


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe or a device.
    """
    # O_NONBLOCK: the open itself of a pipe waits for its writer; regular files ignore it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
            reason = _KINDS.get(stat.S_IFMT(mode), "is a device, not a file")
            raise OSError(code, reason, str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_file(path: Path, most: int = MOST) -> None:
    """Check a file that a library will read by its path.

    Raises:
        OSError: as `read_file`.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise _too_large(path, most)


def read_file(path: Path, most: int = MOST) -> bytes:
    """Return what a regular file holds.

    Raises:
        OSError: as `open_file`, or it has more than `most` bytes.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most:
            # It may grow meanwhile, and files of the kernel have no size.
            chunk, data = max(size + 1, 1 << 16), bytearray()
            while len(data) <= most and (part := file.read(min(chunk, most + 1 - len(data)))):
                data += part
            if len(data) <= most:
                return bytes(data)
    raise _too_large(path, most)


def read_text(path: Path, most: int = MOST, errors: str = "strict") -> str:
    """Return the text in UTF-8 of a regular file, with line ends as text files have them.

    Raises:
        OSError: as `read_file`.
        UnicodeDecodeError: it is something else.
    """
    text = read_file(path, most).decode(errors=errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"is larger than {most:,} bytes", str(path))
