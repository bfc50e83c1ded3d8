"""Compiles passes.c into a library beside it, or into another folder. Standard library only.

The name of the library holds the hash of its source: one of older sources is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

SOURCE = Path(__file__).with_name("passes.c")
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
"""Without -ffast-math and with no fused operations: each has the bits that NumPy gives."""
_DEADLINE = 120.0


def library_path(folder: Path = SOURCE.parent) -> Path:
    """Return where the library of the present source is, if it was compiled.

    Not `*.so`: that would be a module of Python, for what imports all modules of a package.
    """
    return folder / f"passes-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.library"


def compile_library(folder: Path = SOURCE.parent) -> str:
    """Compile the library if there is a C compiler, and return one line on what was done.

    Without one, or where it fails, there is no library and NumPy serves: this is no error.
    """
    made = library_path(folder)
    compiler = shutil.which("cc")
    if compiler is None:
        return "no C compiler (cc): NumPy runs the passes over gradients, which is slower"
    partial = made.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(partial), "-lm"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DEADLINE
        )
        if done.returncode == 0:
            partial.replace(made)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler}: {error}: NumPy runs the passes over gradients"
    finally:
        partial.unlink(missing_ok=True)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "it failed")
        return f"{compiler}: {first.strip()}: NumPy runs the passes over gradients"
    for old in set(folder.glob("passes-*.library")) - {made}:
        with suppress(OSError):
            old.unlink()
    return f"compiled the passes over gradients: {made.name}"
