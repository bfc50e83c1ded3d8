"""Options that several commands share."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.commands import complete

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
run_option = click.option(
    "--run",
    "run_id",
    metavar="ID",
    shell_complete=complete.run_ids,
    help="Which run; the one that is up, else the latest.",
)
inventory_option = click.option(
    "--inventory",
    "-i",
    type=click.Path(path_type=Path),
    envvar="MOTLEY_INVENTORY",
    help="An Ansible inventory, else $MOTLEY_INVENTORY, else this machine.",
)


def _accept(_context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from launcher.hosts.ssh import accept_new_host_keys

        accept_new_host_keys()


def cluster_options(command: Command) -> Command:
    """Add the options that select the hosts."""
    for option in reversed(
        (
            inventory_option,
            click.option(
                "--limit",
                "-l",
                default="all",
                metavar="PATTERN",
                shell_complete=complete.host_names,
                help="Only these hosts or groups.",
            ),
            click.option(
                "--extra-var",
                "-e",
                "extra_vars",
                multiple=True,
                metavar="KEY=VALUE",
                help="Override an inventory variable, e.g. -e motley_port=9100.",
            ),
            click.option(
                "--accept-new-host-keys",
                is_flag=True,
                expose_value=False,
                callback=_accept,
                help="Record new SSH host keys; a changed one stays refused.",
            ),
        )
    ):
        command = option(command)
    return command


def inventory_options(command: Command) -> Command:
    """Add the options that select the hosts and the number of workers."""
    workers = click.option(
        "--expect-workers",
        "-n",
        type=click.IntRange(min=1),
        help="Number of workers; by default one per device.",
    )
    return cluster_options(workers(command))


def config_options(command: Command) -> Command:
    """Add the options that describe the training."""
    for option in reversed(
        (
            click.option(
                "--preset",
                metavar="NAME",
                shell_complete=complete.preset_names,
                help="A run config that Motley ships.",
            ),
            click.option(
                "--config", type=click.Path(path_type=Path), help="A run config of your own (YAML)."
            ),
            click.option(
                "--set",
                "settings",
                multiple=True,
                metavar="KEY=VALUE",
                shell_complete=complete.setting_keys,
                help="Override a setting, e.g. --set training.epochs=2.",
            ),
            click.option(
                "--model",
                type=click.Path(),
                metavar="DIR|NAME",
                help="The base model: a folder or a hub name.",
            ),
            click.option(
                "--data",
                type=click.Path(),
                metavar="PATH",
                help="Training data: JSON Lines, or a folder of logits.",
            ),
            click.option(
                "--output", "-o", type=click.Path(), metavar="DIR", help="The output folder."
            ),
        )
    ):
        command = option(command)
    return command


def read_config(
    preset: str | None,
    config: Path | None,
    settings: tuple[str, ...],
    model: str | None,
    data: str | None,
    output: str | None,
    hosts: Sequence[Any] = (),
) -> Any:
    """Return the `RunConfig` that `config_options` describe.

    Relative paths are resolved from the current folder if the coordinator of `hosts` is this
    machine, else from that host's state folder: `launch sync inputs` puts a model in
    `inputs/model`.

    Raises:
        ConfigError: both --preset and --config, or a wrong key or value.
    """
    from launcher.errors import ConfigError
    from launcher.plan.configuration import parse_assignments, resolve

    if preset and config:
        raise ConfigError("give --preset or --config, not both")
    overrides = parse_assignments(settings, "--set")
    nulls = [key for key, value in overrides.items() if value is None]
    flags = {"model.path": model, "data.train": data, "output": output}
    overrides |= {key: value for key, value in flags.items() if value is not None}
    source = preset or (str(config) if config else None)
    return resolve(source, overrides, _folder_of_paths(hosts), nulls)


def refuse_other_agreement(kept: Any, config: Any, run_id: str) -> None:
    """Refuse to resume with a `RunConfig` whose steps do not fit the completed ones.

    Raises:
        ConfigError: names every such setting.
    """
    from launcher.errors import ConfigError

    if changes := kept.changes(config):
        raise ConfigError(
            f"--resume {run_id}: a run keeps these settings until its end: {', '.join(changes)}; "
            "leave them out, or start a new run"
        )


def given_settings(settings: tuple[str, ...], flags: Mapping[str, object]) -> set[str]:
    """Return the settings that the command line has a value for; `flags` are those of a name."""
    from launcher.plan.configuration import parse_assignments

    return {*parse_assignments(settings, "--set"), *(key for key, value in flags.items() if value)}


def given_of_own(
    preset: str | None,
    config: Path | None,
    settings: tuple[str, ...],
    model: str | None,
    data: str | None,
    output: str | None,
) -> set[str] | None:
    """Return the settings that were given, where the others follow from a model or data.

    None for a run of a preset or a file, and for the quickstart.
    """
    from launcher.plan.configuration import OWN

    given = given_settings(settings, {"model.path": model, "data.train": data, "output": output})
    if preset or config or OWN.isdisjoint(given):
        return None
    if "data.train" not in given:
        given.add("data.validation")  # the quickstart's, as its data is
    return given


def _folder_of_paths(hosts: Sequence[Any]) -> Path:
    from launcher.plan.placement import REMOTE_STATE
    from launcher.runs.registry import head_of

    if not hosts or head_of(hosts).is_local:
        return Path.cwd()
    return Path(head_of(hosts).state_folder or REMOTE_STATE)


@contextlib.contextmanager
def config_of_run(
    registry: Any, run_id: str, leader: str, given: Collection[str]
) -> Generator[Path]:
    """Yield the settings of a resumed run, as a file; `leader` is the kind that it must have.

    `given` are the settings that the command line has a value for.

    Raises:
        ConfigError: there is no such run, it is of another kind, or its config cannot be used.
    """
    from launcher.errors import ConfigError
    from launcher.runs.kept_configs import config_of
    from launcher.views.render import note

    led_by = registry.get(run_id).plan.leader.role
    if led_by != leader:
        up = "launch distill up" if led_by == "student" else "launch cluster up"
        raise ConfigError(f"run {run_id} has a {led_by}; to resume it: {up} --resume {run_id}")
    config, warning = config_of(registry, run_id, given)
    if warning:
        note(warning)
    with tempfile.TemporaryDirectory(prefix="motley-") as folder:
        path = Path(folder, "run.yaml")
        path.write_bytes(config)
        yield path
