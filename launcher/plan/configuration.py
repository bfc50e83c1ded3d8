"""The run config as the launcher hands it to the trainer: preset or file, flags, absolute paths.

A model's hub name is not a path and is kept unchanged; preflight checks whether it is available.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from launcher.errors import ConfigError
from launcher.files import MANAGED_STATE
from launcher.inventory.hosts import Host, find_coordinator_host
from launcher.plan.hub import is_hub_name
from trainer.config import distill_job
from trainer.config import run as run_config
from trainer.config.distill_job import DistillJob
from trainer.config.run import SCRIPT, RunConfig, anchor_path
from trainer.config.script import Script
from trainer.planning.defaults import provisional_settings

DEFAULT_PRESET = "quickstart"
_PATHS = (
    ("teacher", "model"),
    ("teacher", "tokenizer"),
    ("student", "model"),
    ("student", "validation"),
    ("evaluation", "prompts"),
    ("evaluation", "problems"),
)
"""Settings of a distillation's job that may be null."""
_INPUT_SETTINGS = frozenset(
    (
        *("model.path", "data.train", "data.validation", "teacher.data", "evaluation.data"),
        *(f"{section}.{name}" for section, name in _PATHS),
    )
)
OWN_RUN_SETTINGS = frozenset(("model.path", "data.train"))
"""Any of these settings defines a run of the user's own, without a preset or file."""
INPUTS = "inputs"
"""Folder below a host's state folder for models and data: `launch sync inputs` fills it."""


@dataclass(frozen=True)
class JobRequest:
    """A job as a command line gives it: a preset or file, and settings in place of its own."""

    leader: Literal["coordinator", "student"]
    """The process that leads such a run: a fine-tune's, or a distillation's."""
    source: str | None
    settings: Mapping[str, Any]
    """By dotted key; None sets one to null."""
    folder: Path | None = None
    """Where relative paths start; None: see `anchor_paths`."""
    script: Script | None = None
    """The model, data and loss that this start names."""

    @property
    def derived_settings(self) -> set[str] | None:
        """The given settings of a fine-tune whose others follow from its data; None: it has all."""
        given = set(self.settings)
        if (
            self.leader == "student"
            or self.source is not None
            or OWN_RUN_SETTINGS.isdisjoint(given)
        ):
            return None
        # Without data of one's own it is the quickstart's, and so is its validation.
        return given if "data.train" in given else {*given, "data.validation"}

    @property
    def brings_inputs(self) -> bool:
        """Whether model, data or script are the user's: a preset's may still have to be made."""
        return (
            self.is_file or self.script is not None or not _INPUT_SETTINGS.isdisjoint(self.settings)
        )

    @property
    def is_file(self) -> bool:
        """Whether the job is read from a file of the user's."""
        presets = (
            distill_job.list_presets() if self.leader == "student" else run_config.list_presets()
        )
        return self.source is not None and (
            self.source not in presets or Path(self.source).exists()
        )

    def anchor_paths(self, hosts: Sequence[Host]) -> JobRequest:
        """Return the order with the folder where its relative paths start, on whichever host.

        Those of a fine-tune start at the current folder if the coordinator is on this machine, else
        at that host's state folder: `launch sync inputs` puts a model in `inputs/model`.
        """
        head = find_coordinator_host(hosts)
        here = self.leader == "student" or head.is_local
        folder = Path.cwd() if here else Path(head.state_folder or MANAGED_STATE)
        return replace(self, folder=self.folder or folder)

    def resolve_job(self, hosts: Sequence[Host]) -> RunConfig | DistillJob:
        """Return the job on these hosts, with absolute paths.

        Raises:
            ConfigError: no such file or preset, or a key or value is wrong.
        """
        folder = self.anchor_paths(hosts).folder
        assert folder is not None
        if self.leader == "student":
            return resolve_job(self.source, self.settings, hosts, folder)
        settings = {"task": SCRIPT, **self.settings} if self.script else self.settings
        config = resolve_config(self.source, settings, folder)
        if (config.task == SCRIPT) != (self.script is not None):
            raise ConfigError(
                f"--script: its loss is its task; leave out task {config.task}"
                if self.script
                else "task script: name the script with --script FILE of launch cluster up; no"
                " config names one"
            )
        return config


def resolve_config(source: str | None, overrides: Mapping[str, Any], folder: Path) -> RunConfig:
    """Return the config of a run; relative paths in it are resolved from `folder`.

    Without a source it is the quickstart. With the user's own model or data it holds the given
    settings, and a placeholder task until `derive_data_settings` derives the rest.

    The processes of a run work elsewhere, so a path must not depend on the current folder.

    Raises:
        ConfigError: no such file or preset, or a key or value is wrong.
    """
    own = source is None and not OWN_RUN_SETTINGS.isdisjoint(overrides)
    if source is None and overrides.get("task") == SCRIPT:
        config = run_config.load_config(None, overrides)
    elif own:
        config = run_config.load_config(None, {**_rest_of_own(overrides), **overrides})
    else:
        config = run_config.load_config(source or DEFAULT_PRESET, overrides)
    path = config.model.path
    on_hub = is_hub_name(path, folder) and not path.startswith(f"{INPUTS}/")
    return config.anchor_paths(folder, model_on_hub=on_hub)


def _rest_of_own(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the required settings that the user did not give: the quickstart's model or data."""
    quickstart = run_config.load_config(DEFAULT_PRESET)
    rest: dict[str, Any] = {
        "model.path": quickstart.model.path,
        "data.train": quickstart.data.train,
    }
    if "data.train" not in given and not given.get("data.validation_fraction"):
        rest["data.validation"] = quickstart.data.validation
    return rest | provisional_settings(given)


def resolve_job(
    source: str | None, overrides: Mapping[str, Any], hosts: Sequence[Host], folder: Path
) -> DistillJob:
    """Return a distillation's job; on this machine alone relative paths start at `folder`.

    On other hosts they stay as they are: each has its own state folder and its own share.

    Raises:
        ConfigError: no such file or preset, or a key or value is wrong.
    """
    job = distill_job.load_job(source, overrides)
    if not all(host.is_local for host in hosts):
        return job
    tree: dict[str, Any] = job.model_dump(mode="json", exclude_unset=True)
    tree["teacher"]["data"] = [anchor_path(path, folder) for path in job.teacher.data]
    tree["student"]["output"] = anchor_path(job.student.output, folder)
    if job.evaluation is not None:
        tree["evaluation"]["data"] = [anchor_path(path, folder) for path in job.evaluation.data]
    if not any(host.share_folder for host in hosts):
        tree["logits"] = anchor_path(job.logits, folder)
    if job.student.config is not None and distill_job.is_shape_file(job.student.config):
        tree["student"]["config"] = anchor_path(job.student.config, folder)
    for section, name in _PATHS:
        settings: dict[str, Any] = tree.get(section) or {}
        if settings.get(name) is not None:
            settings[name] = anchor_path(settings[name], folder)
    return DistillJob.model_validate(tree)


def with_shared_checkpoints(config: RunConfig, share: str | None, run_id: str) -> RunConfig:
    """Return the config with checkpoints on the share, unless it names a folder itself."""
    if share is None or config.checkpoint.folder is not None:
        return config
    folder = str(PurePosixPath(share) / "checkpoints" / run_id)
    checkpoint = config.checkpoint.model_copy(update={"folder": folder})
    return config.model_copy(update={"checkpoint": checkpoint})


def with_free_output(
    order: JobRequest, config: RunConfig, names: Callable[[str], Sequence[str]]
) -> tuple[RunConfig, list[str]]:
    """Return the config with an output folder of its own, unless the user names one.

    Args:
        names: returns the names in a folder of the coordinator's host.

    Returns:
        The config, and a line if the folder of its preset has got a number.
    """
    if order.is_file or "output" in order.settings:
        return config, []

    def is_free(path: str) -> bool:
        return not names(str(PurePosixPath(path, "checkpoints")))

    if is_free(config.output):
        return config, []
    numbered = (f"{config.output}-{number}" for number in itertools.count(2))
    free = next(filter(is_free, numbered))
    line = f"output: {free}, because {config.output} contains an earlier run"
    return config.with_settings({"output": free}), [line]


def checkpoints_to_resume(
    config: RunConfig, run_id: str, names: Callable[[str], Sequence[str]]
) -> str:
    """Return a line that names the folder from which a run resumes whose output was copied.

    Args:
        names: returns the names in a folder of the coordinator's host.

    Raises:
        ConfigError: it holds no checkpoints, so the run would begin again.
    """
    folder = config.checkpoint.folder or str(PurePosixPath(config.output, "checkpoints"))
    if not any(name == "sharded" or name.startswith("step-") for name in names(folder)):
        raise ConfigError(
            f"--resume {run_id}: {folder} contains no checkpoints on the coordinator's host; copy "
            "the"
            " run's output folder there, or leave out --resume for a new run"
        )
    return f"resuming {run_id} from {folder}"
