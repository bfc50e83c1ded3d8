"""A run to export: its config relative to its folder, its target, and the command of a process.

All names in the folder are fixed and all user values are in `run.yaml`, so the only user text in a
script is the run id, which is validated and quoted.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from launcher.errors import ConfigError
from launcher.export.target import Target
from launcher.installation.environments import TORCH_CPU_INDEX
from launcher.runs.records.run import is_run_id
from trainer.config.run import RunConfig

CONFIG = "run.yaml"
_WORD = re.compile(r"[A-Za-z0-9][\w.+!-]*", re.ASCII)
OUTPUT = "output"
SETUP = "setup.sh"
REQUIREMENTS, TORCH = "requirements.txt", "requirements-torch.txt"
RESTARTS = 3
"""How often a system starts a failed job again; it resumes from the newest checkpoint."""
GRACE = 120
"""Seconds between the request to end and the end, in which a run saves."""


@dataclass(frozen=True, kw_only=True)
class ExportedJob:
    """A run as another system starts it, in the folder that holds its files."""

    run_id: str
    config: RunConfig
    """With paths relative to the folder."""
    target: Target
    version: str
    """Motley's."""
    wheel: str
    """The file name of Motley's wheel in the folder."""

    def __post_init__(self) -> None:
        if not is_run_id(self.run_id):
            raise ConfigError(
                f"run id {self.run_id!r}: must consist of lower-case letters, digits and . _ -"
            )
        # Both stand in scripts and in the Containerfile as they are.
        if not _WORD.fullmatch(self.wheel) or not _WORD.fullmatch(self.version):
            raise ConfigError(
                f"{self.wheel!r} of version {self.version!r}: not the file name of a wheel"
            )

    @property
    def label(self) -> str:
        """The run's name where one must begin with a letter, such as a Service's (RFC 1035)."""
        return self.run_id if self.run_id[0].isalpha() else f"run-{self.run_id}"

    @property
    def finetune_arguments(self) -> str:
        """The trainer's arguments, quoted for a shell."""
        return shlex.join(
            [
                *("finetune", "--distributed", "--config", CONFIG, "--run-id", self.run_id),
                *("--gpu-backend", self.target.backend),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The files of one system."""

    files: dict[str, str]
    """Name -> text; a name that ends in `.sh` is executable."""
    steps: tuple[str, ...]
    """Next steps of the user, a line each; commands start in the exported folder."""


def pip_arguments(job: ExportedJob) -> tuple[str, ...]:
    """Return the arguments of the calls of pip that install the locked packages and Motley."""
    locked = "install --require-hashes --no-deps --only-binary :all:"
    index = "" if job.target.device else f" --extra-index-url {TORCH_CPU_INDEX}"
    wheel = shlex.quote("./" + job.wheel)
    return (
        f"{locked}{index} -r {TORCH}",
        f"{locked} -r {REQUIREMENTS}",
        f"install --no-deps {wheel}",
    )


def setup_script(job: ExportedJob) -> str:
    """Return the script that makes `.venv` with the locked packages and this Motley."""
    lines = "\n".join(f".venv/bin/python -P -m pip {arguments}" for arguments in pip_arguments(job))
    return f"""\
#!/bin/sh
# Makes .venv beside this file: the packages of two locks, by their hashes, and Motley.
set -eu
cd "$(dirname "$0")"
[ -x .venv/bin/trainer ] && exit 0
python="${{PYTHON:-python3}}"
"$python" -P -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {{
    echo "$python is no Python 3.11 or later; give one: PYTHON=python3.12 sh {SETUP}" >&2
    exit 2
}}
[ -x .venv/bin/pip ] || "$python" -P -m venv .venv
{lines}
.venv/bin/python -P -m trainer.system.passes
"""
