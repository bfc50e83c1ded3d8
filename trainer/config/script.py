"""A script as its operator named it: the bytes that were hashed are those that run. No torch.

A script runs only where a command line names it, by its digest where another process made that
command. No config has a key for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trainer.system.errors import InputError, RefusedError, convert_read_errors
from trainer.system.regular_file import read_file


@dataclass(frozen=True)
class Script:
    """The content of a script, which has not run yet."""

    path: Path
    content: bytes
    digest: str
    """BLAKE2b of the content, in hex."""


def read_script(path: Path, digest: str | None = None) -> Script:
    """Read a script.

    Args:
        digest: of the script that the start of the run named; None: this is that start.

    Raises:
        InputError: it cannot be read.
        RefusedError: it is another one.
    """
    with convert_read_errors(path, InputError):
        content = read_file(path, 1 << 20)
    script = Script(path.absolute(), content, hashlib.blake2b(content, digest_size=32).hexdigest())
    if digest not in (None, script.digest):
        raise RefusedError(f"{path}: is not the script that the run was started with; start again")
    return script
