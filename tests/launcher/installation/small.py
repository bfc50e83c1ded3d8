"""A small Motley with small packages, and the real uv."""

import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.launcher.handmade import lock_of, make_uv, make_wheel

Answer = dict[str, Any]
Install = Callable[..., Answer]


def motley(
    folder: Path,
    version: str,
    *needs: str,
    broken: bool = False,
    extra: str = "coordinator",
    uv: str | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write a small motley that starts, or does not; it needs leaf and more from the shelf."""
    wheels = [leaf_or_twig(folder / "copies", name) for name in ("leaf", *needs)]
    content = {
        "launcher/__init__.py": f"version = '{version}'",
        "launcher/session/__init__.py": "",
        "launcher/session/__main__.py": "import nothing_like_it" if broken else "import leaf",
        f"launcher/locks/{extra}.txt": lock_of(*wheels),
        "launcher/locks/uv.txt": uv or uv_lock(),
        "trainer/__init__.py": "",
        "trainer/commands/finetune.py": "",
    }
    content |= files or {}
    return make_wheel(folder, "motley", version, content, "Requires-Python: >=3.11")


def leaf_or_twig(folder: Path, name: str) -> Path:
    """Write a wheel that needs another one, which no lock names; its bytes are always the same."""
    return make_wheel(folder, name, "1.0", {f"{name}.py": ""}, "Requires-Dist: unlocked")


def running(root: Path) -> str:
    """Return the version that the installed Python imports."""
    command = [root / "current/bin/python", "-P", "-c", "import launcher; print(launcher.version)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@cache
def uv_lock() -> str:
    """Return the lock of the uv on the shelf."""
    with tempfile.TemporaryDirectory() as folder:
        return lock_of(make_uv(Path(folder)))
