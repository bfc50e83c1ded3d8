"""Import the result of an exported run into its output folder and the registry of runs.

The folder is treated as untrusted, like a host's answer: checkpoints are verified by their
manifest, reports must have the expected shape, links are not followed, and the output folder is the
one that this machine recorded at the export. On another machine it has to be given.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from launcher.errors import ConfigError, PreflightError
from launcher.export import checkpoints
from launcher.export.bundle import METRICS, RECORD, SCHEMA
from launcher.export.job import OUTPUT
from launcher.hosts import ssh as reaching
from launcher.hosts.local import LocalConnection
from launcher.inventory.hosts import Host, head_of
from launcher.plan.plan import COORDINATOR, LaunchPlan, ProcessPlan
from launcher.runs.budget.spending import MOST_SPEND
from launcher.runs.records.kept_configs import Start, keep_config, kept_config
from launcher.runs.records.registry import Registry, time_of
from launcher.runs.records.self_reports import read_report
from launcher.runs.status import OVER, RunMonitor
from launcher.runs.up import deliver
from trainer.checkpoint.reader import FOLDER, step_of
from trainer.config.run import RunConfig
from trainer.planning.budget.ledger import SPEND_FILE, SpendLedger, SpendRecord, parse_spend
from trainer.system.commandline.run_id import RUN_ID
from trainer.system.errors import InUseError, StorageError
from trainer.system.received import parse, receive
from trainer.system.storage import lease
from trainer.system.storage.atomic_file import write_atomically

STATUS = "status.json"
_MOST = 1 << 20


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)

    schema_name: Literal["motley.export/1"] = Field(alias="schema")
    run_id: Annotated[str, Field(pattern=f"^{RUN_ID}$")]
    home: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Homecoming:
    """An imported run."""

    run_id: str
    state: str
    step: int
    output: Path


def import_run(folder: Path, registry: Registry, output: Path | None = None) -> Homecoming:
    """Bring an exported run's result into its output folder and the registry.

    Args:
        folder: as `bundle.export_run` wrote it, with the `output` that the trainer filled.
        output: where the result goes; None for the place that this machine kept.

    Raises:
        ConfigError: the folder is none, holds no result, is damaged, or is behind what is here.
        PreflightError: the run is up, or a process writes its output folder.
    """
    record = _read_record(folder)
    run_id = record.run_id
    status = read_report(LocalConnection(), str((folder / OUTPUT / STATUS).absolute()))
    steps = status.get("total_steps") if status is not None else None
    checkpoints.examine(folder / OUTPUT / FOLDER, output or folder, steps)
    newest = checkpoints.newest(folder / OUTPUT / FOLDER, run_id)
    if status is None or status.get("run_id") != run_id or newest is None:
        raise ConfigError(
            f"{folder}: holds no result of run {run_id}; copy {OUTPUT}/ back from where it ran"
        )
    if not registry.is_here:
        raise ConfigError(
            f"the runs of this inventory are kept on {head_of(registry.hosts).name};"
            " import the run on that host"
        )
    known = next(iter(registry.all({run_id})), None)
    if known is not None and RunMonitor(known).observe().is_live:
        raise PreflightError(
            f"run {run_id} is up; end it first: launch cluster down --run {run_id}"
        )
    config = _home(record, output)
    if known is not None and known.plan.output != config.output:
        raise ConfigError(f"run {run_id} has its output in {known.plan.output}; leave out -o")
    place = Path(config.output)
    stored = Path(config.checkpoint.folder or place / FOLDER)
    _refuse_others(place, stored, run_id, newest)
    state = str(status.get("state")) if status.get("state") in OVER else "stopped"
    spent = _spending(folder / OUTPUT / SPEND_FILE, run_id)
    with _writing((place, stored), run_id) as workspace:
        checkpoints.bring(folder / OUTPUT / FOLDER, stored, run_id, workspace)
        for name in (METRICS, STATUS):
            source = folder / OUTPUT / name
            if source.is_file() and not source.is_symlink():
                write_atomically(place / name, source.read_bytes(), 0o644)
    _account(registry.folder / SPEND_FILE, spent)
    _register(registry, run_id, config, state, status.get("reason"), known is not None)
    return Homecoming(run_id=run_id, state=state, step=step_of(newest), output=place)


def _read_record(folder: Path) -> _Record:
    path = folder / RECORD
    try:
        with path.open("rb") as file:
            return receive(_Record, parse(file.read(_MOST), RECORD), RECORD)
    except OSError as error:
        reason = error.strerror
    except ValueError as error:
        reason = f"not of {SCHEMA}: {error}"
    raise ConfigError(f"{path}: {reason}; give a folder that launch export wrote")


def _home(record: _Record, output: Path | None) -> RunConfig:
    """Return the config with the paths of this machine."""
    kept = kept_config(record.run_id)
    tree: Any = record.home if kept is None else yaml.safe_load(kept)
    if kept is None and output is None:
        raise ConfigError(
            f"run {record.run_id} was not exported here; name the folder for its result: -o DIR"
        )
    try:
        config = RunConfig.model_validate(tree)
        if output is not None:
            place = {"output": str(output.absolute()), "checkpoint.folder": None}
            config = config.with_settings(place)
    except (ConfigError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{RECORD}: the config of run {record.run_id}: {first}") from None
    return config


def _refuse_others(place: Path, stored: Path, run_id: str, incoming: Path) -> None:
    """Refuse an output folder of another run, or with more steps than come back."""
    there = read_report(LocalConnection(), str(place / STATUS))
    strangers = checkpoints.owners(stored) - {run_id}
    if there is not None and there.get("run_id") not in (None, run_id):
        strangers.add(str(there["run_id"]))
    if strangers:
        raise ConfigError(f"{place}: holds run {min(strangers)}; name another folder: -o DIR")
    here = checkpoints.newest(stored, run_id)
    if here is not None and step_of(here) > step_of(incoming):
        raise ConfigError(
            f"{stored}: run {run_id} is at step {step_of(here)} here, and at {step_of(incoming)} in"
            " the result; nothing was changed"
        )


def _spending(path: Path, run_id: str) -> list[SpendRecord]:
    """Return what the run has cost where it ran, of a ledger that may be anything."""
    if path.is_symlink() or not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            data = file.read(MOST_SPEND)
        found = parse_spend(data, str(path))
        for record in found:
            receive(SpendRecord, record.model_dump(), str(path))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return [record for record in found if record.run == run_id]


def _account(path: Path, spent: list[SpendRecord]) -> None:
    """Add what is not yet in this machine's ledger: an import may be repeated."""
    ledger = SpendLedger(path)
    try:
        known = set(ledger.read())
        if fresh := [record for record in spent if record not in known]:
            ledger.append(fresh)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


@contextmanager
def _writing(folders: tuple[Path, Path], run_id: str) -> Generator[Path]:
    """Hold output and checkpoints as their one writer; yield where copies grow."""
    workspace = folders[-1]
    try:
        with ExitStack() as stack:
            for folder in folders:
                held = lease.take(folder, run_id)
                stack.callback(held.release)
                workspace = held.workspace
            yield workspace
    except InUseError as error:
        raise PreflightError(str(error)) from None
    except StorageError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{error.filename or folders[0]}: {error.strerror}") from None


def _register(
    registry: Registry, run_id: str, config: RunConfig, state: str, reason: Any, known: bool
) -> None:
    """List the run as one that has ended; one that is listed keeps its plan."""
    host = head_of(registry.hosts) if registry.hosts else Host(name="localhost", connection="local")
    here = reaching.connect(host)
    if not known:
        leader = ProcessPlan(
            name=COORDINATOR,
            role="coordinator",
            host=host.name,
            device="",
            backend="",
            threads=None,
            argv=(),
            env={},
            folder="",
        )
        plan = LaunchPlan(run_id=run_id, output=config.output, hosts=(host,), processes=(leader,))
        run, record = registry.record(plan)
        tree = json.loads(record)
        began = time_of(run_id) or tree["started"]
        text = config.to_yaml().encode()
        keep_config(run_id, text, Start())
        deliver(run, json.dumps({**tree, "started": began}, indent=1).encode(), text)
    run = registry.get(run_id)
    here.remove(run.mark(run.head, here))
    words: dict[str, Any] = {"state": "failed" if state == "failed" else "exited"}
    if reason:
        words["message"] = str(reason)
    path = f"{run.folder(run.head, here)}/processes/{run.plan.leader.name}/state.json"
    here.write(path, json.dumps(words).encode())
