"""The run to export: a new one, by its config, or one of this machine's registry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from launcher.errors import ConfigError, PreflightError
from launcher.inventory.hosts import Host
from launcher.plan.configuration import JobRequest
from launcher.runs.records.registry import Registry, new_run_id
from launcher.runs.records.stored_configs import read_run_config
from launcher.runs.status import RunMonitor
from trainer.config.run import RunConfig
from trainer.model.files import local_model
from trainer.planning.defaults import derive_settings
from trainer.system.yaml_tree import parse_yaml

_HERE = (Host(name="localhost", connection="local"),)


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """A run and its settings, with this machine's paths."""

    run_id: str
    config: RunConfig


def open_new_run(order: JobRequest) -> ExportSource:
    """Return a new run for another system; missing settings are derived from its data and model.

    Raises:
        ConfigError: there is no such file, or a setting is wrong.
    """
    config = order.resolve_job(_HERE)
    assert isinstance(config, RunConfig)
    if order.derived_settings is not None:
        folder = local_model(Path(config.model.path))
        found = {
            part.key: part.value
            for part in derive_settings(config, order.derived_settings, folder, ())
        }
        config = config.with_settings(found)
    return ExportSource(run_id=new_run_id(config.name), config=config)


def open_own_run(registry: Registry, run_id: str, order: JobRequest) -> ExportSource:
    """Return a run that began here, with other settings where the run allows it.

    Raises:
        ConfigError: there is no such run, it is no fine-tune, its files are on another host, or a
            setting must stay as it is.
        PreflightError: it is up.
    """
    run = registry.get_run(run_id)
    if order.source is not None:
        raise ConfigError("--run uses its own config; leave out --preset and --config")
    if run.plan.leader.role == "student":
        raise ConfigError(f"run {run_id} is a distillation; only fine-tunes are exported")
    if not run.leader_host.is_local:
        raise ConfigError(
            f"run {run_id} has its files on {run.plan.leader.host}; export it on that host"
        )
    if RunMonitor(run).observe().is_live:
        raise PreflightError(
            f"run {run_id} is up; stop it first: launch cluster down --run {run_id}"
        )
    kept = read_run_config(registry, run_id, set(order.settings))[0]
    try:
        before = RunConfig.model_validate(parse_yaml(kept))
        config = before.with_settings(order.settings)
    except (ConfigError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"run {run_id}: {str(error).splitlines()[0]}") from None
    if changes := before.list_changes(config):
        raise ConfigError(
            f"--run {run_id}: a run keeps these settings until its end: {', '.join(changes)}"
        )
    return ExportSource(run_id=run_id, config=config)
