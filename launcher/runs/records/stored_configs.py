"""The config of a resumed run: the copy on this machine, else the one on its host.

A config names files that every host reads and folders that they write. Processes on a host may have
changed the copy there. So each start leaves a copy here, in `configs/` of the state folder,
and a machine without one takes from a host only paths that Motley manages.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

import yaml

from launcher.errors import ConfigError
from launcher.files import MANAGED_STATE, SHARE, default_state_folder, make_private_folder
from launcher.inventory.hosts import Host
from launcher.plan.hub import is_hub_name
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.runs.records.registry import Registry
from trainer.data.sources import HUB
from trainer.system.storage.atomic_file import write_atomically
from trainer.system.untrusted_data import parse_json, validate_data
from trainer.system.yaml_tree import parse_yaml

RUN_PATHS = {
    "model.path": "--model DIR",
    "data.train": "--data FILE",
    "output": "--output DIR",
    **{
        key: f"--set {key}=PATH"
        for key in (
            *("data.validation", "checkpoint.folder", "model.adapter"),
            *("training.sample_prompts", "distillation.on_policy.prompts"),
        )
    },
}
"""The paths in a run config, and how they are given with `--resume`."""
JOB_PATHS = {
    "teacher.model": "--teacher DIR",
    "teacher.data": "--data PATH",
    "teacher.tokenizer": "--tokenizer DIR",
    "student.model": "--student DIR",
    "student.output": "--output DIR",
    "logits": "--logits DIR",
    **{
        key: f"--set {key}=PATH"
        for key in (
            *("student.config", "student.validation", "student.checkpoint.folder"),
            *("student.training.sample_prompts", "student.distillation.on_policy.prompts"),
            *("evaluation.data", "evaluation.prompts", "evaluation.problems"),
        )
    },
}
_DATA = ("data.train", "data.validation", "teacher.data", "student.validation", "evaluation.data")
"""The paths that may be data sets of the hub."""
_PRIVATE = ("ca", "configs", "inventories", "lock", "push", "queue", "runs")
"""Names in a state folder that are the launcher's own."""
_DEFAULT_OUTPUT = re.compile(r"runs/output(-\d+)?(/.*)?")
"""The default output, and those of its kind with a number."""
_TASK = re.compile(r"[\w:-]+", re.ASCII)


@dataclass(frozen=True)
class StartArguments:
    """The arguments of a start besides its config and the inventory."""

    limit: str = "all"
    extra_vars: tuple[str, ...] = ()
    """`KEY=VALUE`, as given with -e."""
    expect_workers: int | None = None

    def merge_with(self, earlier: StartArguments) -> StartArguments:
        """Return an earlier start with the arguments of this one in place."""
        return StartArguments(
            earlier.limit if self.limit == "all" else self.limit,
            (*earlier.extra_vars, *self.extra_vars),
            self.expect_workers or earlier.expect_workers,
        )

    @property
    def without_secrets(self) -> StartArguments:
        """It without the variables that do not decide placement: they may hold a password."""
        own = tuple(text for text in self.extra_vars if text.strip().startswith("motley_"))
        return replace(self, extra_vars=own)

    def __str__(self) -> str:
        limit = ["--limit", self.limit] if self.limit != "all" else []
        extra = [word for variable in self.extra_vars for word in ("-e", variable)]
        workers = ["--expect-workers", str(self.expect_workers)] if self.expect_workers else []
        return shlex.join([*limit, *extra, *workers])


def store_config(run_id: str, config: bytes, start: StartArguments) -> None:
    """Keep the config and arguments of a start; without them `--resume` here needs more flags."""
    path = _config_folder(run_id)
    with contextlib.suppress(OSError):
        make_private_folder(path.parent)
        write_atomically(path, config)
        write_atomically(
            path.with_suffix(".start.json"), json.dumps(asdict(start.without_secrets)).encode()
        )


def store_entry(run_id: str, entry: bytes) -> None:
    """Keep what this machine adds to a queue on another host.

    Raises:
        ConfigError: the state folder cannot be written.
    """
    path = _config_folder(run_id).with_suffix(".queue.json")
    try:
        make_private_folder(path.parent)
        write_atomically(path, entry)
    except OSError as error:
        raise ConfigError(f"{path.parent}: {error.strerror}; set MOTLEY_STATE_DIR") from None


def is_own_entry(run_id: str, entry: bytes) -> bool:
    """Whether this machine has added just this to a queue."""
    with contextlib.suppress(OSError):
        return _config_folder(run_id).with_suffix(".queue.json").read_bytes() == entry
    return False


def read_start_arguments(run_id: str | None) -> StartArguments:
    """Return the arguments of this machine's start of a run; empty if another started it."""
    if run_id is None:
        return StartArguments()
    try:
        data = _config_folder(run_id).with_suffix(".start.json").read_bytes()
        return validate_data(StartArguments, parse_json(data, "start.json"), "start.json")
    except (OSError, ValueError):
        return StartArguments()


def list_differences(before: LaunchPlan, now: LaunchPlan) -> list[str]:
    """Return how a resumed run differs from before, a line each."""

    def devices_by_process(plan: LaunchPlan) -> dict[str, str]:
        return {p.name: _describe_placement(p) for p in plan.processes}

    old, new = devices_by_process(before), devices_by_process(now)
    return [
        f"{name}: {old.get(name, 'not there')} before, now {new.get(name, 'not there')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _describe_placement(process: ProcessPlan) -> str:
    device = process.address if process.rank is None else process.device
    if process.backend != "cpu":
        device = f"{process.backend} {device}"
    return f"{device} on {process.host}"


def read_run_config(
    registry: Registry, run_id: str, given: Collection[str]
) -> tuple[bytes, list[str]]:
    """Return the config to resume with, and remarks on it.

    A command in it is dropped: what runs is this start's own (`config/notify_command.py`).

    Args:
        given: the settings that the command line has a value for.

    Raises:
        ConfigError: there is no such run, or its config names what only this machine may name.
    """
    registry.get_run(run_id)
    own = read_stored_config(run_id)
    if own is None:
        theirs = registry.read_config(run_id)
        if not registry.is_local:
            _refuse_foreign_paths(theirs, registry.hosts, run_id, given)
        return _without_command(theirs, run_id)
    remarks: list[str] = []
    with contextlib.suppress(ConfigError):
        if registry.read_config(run_id) != own:
            remarks = [f"the hosts' config of {run_id} differs and is not used"]
    config, more = _without_command(own, run_id)
    return config, remarks + more


def _without_command(config: bytes, run_id: str) -> tuple[bytes, list[str]]:
    try:
        tree: Any = yaml.safe_load(config)
    except (yaml.YAMLError, ValueError, RecursionError):
        return config, []  # its reader names the fault
    if not isinstance(tree, dict) or "notify" not in tree:
        return config, []
    settings = cast("dict[str, Any]", tree)
    command = settings.pop("notify")
    remark = f"the notify of {run_id} is not used; give your own: --notify COMMAND"
    return yaml.safe_dump(settings, sort_keys=False).encode(), [remark] if command else []


def read_stored_config(run_id: str) -> bytes | None:
    """Return the config of a run that this machine started; None of any other."""
    with contextlib.suppress(OSError):
        return _config_folder(run_id).read_bytes()
    return None


def _config_folder(run_id: str) -> Path:
    return default_state_folder() / "configs" / f"{run_id}.yaml"


def _refuse_foreign_paths(
    config: bytes, hosts: Sequence[Host], run_id: str, given: Collection[str]
) -> None:
    try:
        tree: Any = parse_yaml(config)
    except yaml.YAMLError:
        tree = None
    if not isinstance(tree, dict):
        raise ConfigError(f"run {run_id}: its run.yaml is not a config; start a new run")
    settings = cast("dict[str, Any]", tree)
    is_job = "teacher" in settings
    for key, flag in (JOB_PATHS if is_job else RUN_PATHS).items():
        for path in () if key in given else _iterate_values(settings, key):
            if not (_is_allowed_path(path, hosts, is_job) or _on_hub(key, path)):
                raise ConfigError(
                    f"run {run_id} was not started from this machine, and its host's config names "
                    f"{key} {path}, which is not a path of Motley's there; if it is right, "
                    f"give it as well: {flag}"
                )
    code = [
        value for value in _iterate_values(settings, "evaluation.run_code") if value is not False
    ]
    tasks = [task for task in _iterate_values(settings, "evaluation.tasks") if not _is_task(task)]
    for key, found in (("evaluation.run_code", code), ("evaluation.tasks", tasks)):
        if found and key not in given:
            raise ConfigError(
                f"run {run_id} was not started from this machine, and its host's config sets {key} "
                f"to {found[0]}; if that is right, give it as well: --set {key}=VALUE"
            )


def _is_task(name: object) -> bool:
    return isinstance(name, str) and _TASK.fullmatch(name) is not None


def _is_allowed_path(path: object, hosts: Sequence[Host], is_job: bool) -> bool:
    """Whether a path lies where Motley keeps models, data and results of its own."""
    if not isinstance(path, str) or not path.isprintable():
        return False
    pure = PurePosixPath(path)
    if ".." in pure.parts or path.startswith("-"):
        return False
    if not pure.is_absolute():
        return is_job and _is_open(pure)  # of a job: below a host's state folder or share
    for host in hosts:
        own = host.state_folder or (str(default_state_folder()) if host.is_local else MANAGED_STATE)
        if pure.is_relative_to(host.share_folder or SHARE):
            return True
        if pure.is_relative_to(own):
            return _is_open(pure.relative_to(own))
    return False


def _is_open(path: PurePosixPath) -> bool:
    return _DEFAULT_OUTPUT.fullmatch(str(path)) is not None or path.parts[:1] not in [
        (),
        *[(p,) for p in _PRIVATE],
    ]


def _on_hub(key: str, path: object) -> bool:
    """Whether a path of a setting is a model or a data set of the hub."""
    if not isinstance(path, str):
        return False
    if key == "model.path":
        return is_hub_name(path, Path("/")) and not path.startswith("inputs/")
    return key in _DATA and HUB.fullmatch(path) is not None


def _iterate_values(tree: Mapping[str, Any], key: str) -> Iterator[object]:
    """Yield what a dotted key has: nothing, one value, or those of a list."""
    found: Any = tree
    for part in key.split("."):
        found = cast("dict[str, Any]", found).get(part) if isinstance(found, dict) else None
    if isinstance(found, list):
        yield from cast("list[Any]", found)
    elif found is not None:
        yield found
