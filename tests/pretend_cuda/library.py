"""The library of `card.cpp`."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

TORCH = Path(sysconfig.get_path("purelib"), "torch")
"""The installed one; to import it takes seconds."""


def build(folder: Path) -> Path:
    """Compile it against the installed torch."""
    source, made = Path(__file__).with_name("card.cpp"), folder / "card.so"
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{TORCH}/include"]
    links = [f"-L{TORCH}/lib", f"-Wl,-rpath,{TORCH}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(["g++", *flags, source, "-o", made, *links], check=True)
    return made
