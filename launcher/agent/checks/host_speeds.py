"""How fast a host's disk reads a model, and its processor multiplies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import validate_call

from launcher.agent.operation import operation
from trainer.model.files import local_model
from trainer.model.layout import read_headers
from trainer.system.errors import InputError
from trainer.system.regular_file import open_file

READ_SECONDS = 2.0
"""Length of a test of the disk."""
_PRODUCT_SECONDS = 0.5
_CHUNK = 8 << 20
_PRODUCT = (1024, 2048)


@dataclass(frozen=True)
class HostSpeeds:
    """Measurements of a host."""

    read: float | None
    """Bytes a second at which its disk reads a model; None: the model is not there."""
    products: float
    """Operations a second of fp32 products on all cores."""


@operation("speeds", deadline=READ_SECONDS + 30, least=0)
@validate_call
def measure_host(model: Path) -> HostSpeeds:
    """Return how fast this host's disk reads a model's files, and its processor multiplies."""
    try:
        files = {header.file for header in read_headers(local_model(model) or model).values()}
        read = measure_read(files)
    except InputError:
        read = None
    return HostSpeeds(read, measure_products())


def measure_read(files: Iterable[Path], seconds: float = READ_SECONDS) -> float:
    """Return the bytes a second at which a disk reads files, without what memory has of them.

    Only what is read is dropped from the page cache before. A page that a process maps stays there.

    Raises:
        InputError: a file cannot be read.
    """
    memory = memoryview(bytearray(_CHUNK))
    done, took = 0, 0.0
    for path in sorted(files, key=lambda path: -path.stat().st_size):
        try:
            with open_file(path) as file:
                descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
                for begin in range(0, size, _CHUNK):
                    os.posix_fadvise(descriptor, begin, _CHUNK, os.POSIX_FADV_DONTNEED)
                    began = time.perf_counter()
                    done += os.preadv(descriptor, [memory], begin)
                    took += time.perf_counter() - began
                    if took >= seconds:
                        return done / took
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return done / max(took, 1e-9)


def measure_products(seconds: float = _PRODUCT_SECONDS) -> float:
    """Return the operations a second of fp32 products on all of this process's cores."""
    rows, columns = _PRODUCT
    left, right = np.ones((rows, columns), np.float32), np.ones((columns, columns), np.float32)
    result = left @ right  # the library starts its threads
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        np.matmul(left, right, out=result)
        count += 1
    return count * 2 * rows * columns * columns / took
