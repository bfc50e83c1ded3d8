"""The locks of launcher/locks: every package that is installed, with its version and its hashes.

    python scripts/lock.py              # `make lock`: after a change of pyproject.toml
    python scripts/lock.py --upgrade    # `make lock UPGRADE=1`: the newest versions that fit

One file for each set of packages that is installed together, in the format of pip's requirements
files. A lock holds for every Python from 3.11 on and for Linux on x86_64 and aarch64, which is
asked of the index for each at the end; no index is named in it. torch stands apart, in one file
for each of its builds.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from launcher.installation.uv_like_pip import pip_settings, uv_variables

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "launcher" / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
EXTRAS = tuple(PROJECT["project"]["optional-dependencies"])
SOURCES = {"lm-eval": ("rouge-score", "sqlitedict", "word2number")}
"""What has no wheels and is built on the spot; anything else comes as a wheel or not at all."""

BINARY = ("--only-binary", ":all:")
COMPILED = (
    *("--universal", "--python-version", PYTHONS[0], "--generate-hashes", "--no-header"),
    *BINARY,
)
CHECKED = ("--dry-run", "--target", "/nonexistent", "--no-deps", "--require-hashes", *BINARY)

CUDA = re.compile(r"torch==|triton==|nvidia-(?!ml-py)|cuda-")
HEADER = "# Made by `make lock` from pyproject.toml (docs/dependencies.md).\n"


class Uv:
    """The uv of this environment, on pip's main index alone.

    An extra index or a folder of wheels may offer builds that exist on this machine only.
    """

    def __init__(self) -> None:
        found = uv_variables(pip_settings())
        for name in ("UV_INDEX", "UV_FIND_LINKS", "UV_INDEX_STRATEGY"):
            found.pop(name, None)
        self._environment = {**found, **os.environ}
        self._program = str(Path(sys.executable).with_name("uv"))

    def __call__(self, *arguments: str, text: str | None = None, index: str | None = None) -> str:
        """Run it; its error ends this program. `index` replaces the main index."""
        environment = {**self._environment, **({"UV_DEFAULT_INDEX": index} if index else {})}
        done = subprocess.run(
            [self._program, "--quiet", *arguments],
            cwd=ROOT,
            env=environment,
            input=text,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise SystemExit(f"lock: uv {' '.join(arguments[:2])}: {done.stderr.strip()}")
        return done.stdout


def compile_lock(uv: Uv, known: str, *arguments: str, text: str | None = None) -> str:
    """Return what `uv pip compile` finds; versions in `known` stay where they fit."""
    with tempfile.NamedTemporaryFile("w+", suffix=".txt", encoding="utf-8") as file:
        file.write(known)
        file.flush()
        style = ("--annotation-style", "line", "--output-file", file.name)
        uv("pip", "compile", *arguments, *COMPILED, *style, text=text)
        return Path(file.name).read_text(encoding="utf-8")


def entries(text: str) -> list[str]:
    """Return the packages of a lock, each with its hashes."""
    plain = re.sub(r"^#.*\n", "", text, flags=re.M)
    return re.split(r"^(?=[a-z0-9])", plain, flags=re.M)[1:]


def sources(*extras: str) -> list[str]:
    """Return the arguments that allow these extras their source distributions."""
    names = [name for extra in extras for name in SOURCES.get(extra, ())]
    return [word for name in names for word in ("--no-binary", name)]


def write(name: str, packages: list[str], header: str = HEADER) -> None:
    """Write a lock."""
    LOCKS.mkdir(exist_ok=True)
    (LOCKS / f"{name}.txt").write_text(header + "".join(packages), encoding="utf-8")


def lock_cpu_torch(uv: Uv, version: str) -> None:
    """Write the lock of torch's CPU build, by its own index; without that, the old one may do."""
    path = LOCKS / "torch-cpu.txt"
    wanted = f"torch=={version}+cpu"
    try:
        index = os.environ["TORCH_CPU_INDEX"]
        arguments = ("-", *COMPILED, "--no-deps", "--no-annotate")
        text = uv("pip", "compile", *arguments, text=wanted, index=index)
    except SystemExit as error:
        if not path.exists() or wanted not in path.read_text(encoding="utf-8"):
            raise
        print(f"{error}\nlock: {path.name} stays as it is", file=sys.stderr)
    else:
        write("torch-cpu", entries(text))


def check(uv: Uv) -> None:
    """Ask the index for a wheel of every package, for every Python and machine."""
    for python in PYTHONS:
        for machine in MACHINES:
            for names in (("dev", "torch-cuda"), ("lm-eval",), ("uv",)):
                files = [word for n in names for word in ("--requirement", f"{LOCKS}/{n}.txt")]
                place = ("--python-version", python, "--python-platform", machine)
                uv("pip", "install", *CHECKED, *sources(*names), *place, *files)
            print(f"lock: Python {python}, {machine}: a wheel for each")


def main() -> None:
    """Write every lock."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="the newest versions that fit")
    upgrade = parser.parse_args().upgrade
    uv = Uv()
    locks = () if upgrade else LOCKS.glob("*.txt")
    known = "".join(sorted({entry for file in locks for entry in entries(file.read_text())}))
    # Of all together, so that a package has one version in every lock.
    every = compile_lock(uv, known, "pyproject.toml", "--all-extras", *sources(*EXTRAS))
    found = {}
    for extra in EXTRAS:
        chosen = ["pyproject.toml", "--extra", extra, *sources(extra)]
        found[extra] = entries(compile_lock(uv, every, *chosen))
        write(extra, [entry for entry in found[extra] if not CUDA.match(entry)])
    write("torch-cuda", [entry for entry in found["trainer"] if CUDA.match(entry)])
    # What an environment is made with, before there is anything else in it.
    tools = [r for r in PROJECT["project"]["optional-dependencies"]["dev"] if r.startswith("uv")]
    write("uv", entries(compile_lock(uv, every, "-", text="\n".join(tools))))
    version = next(e for e in found["trainer"] if e.startswith("torch==")).split("==")[1].split()[0]
    lock_cpu_torch(uv, version)
    check(uv)


if __name__ == "__main__":
    main()
