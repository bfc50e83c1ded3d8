"""Options that several commands share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from launcher.commands import completion
from trainer.system.commandline.number import Number
from trainer.system.commandline.options import PATH, combine_options, notify_option

if TYPE_CHECKING:
    from launcher.plan.configuration import JobRequest

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
run_option = click.option(
    "--run",
    "run_id",
    metavar="ID",
    shell_complete=completion.run_ids,
    help="The run's id; default: the active run, else the latest.",
)


def _on_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Hand a command the `Cluster` that its options select, as its first argument."""

    @functools.wraps(command)
    def call(
        inventory: Path | None,
        nodes: str | None = None,
        limit: str = "all",
        extra_vars: tuple[str, ...] = (),
        expect_workers: int | None = None,
        accept_new_host_keys: bool = False,
        **others: Any,
    ) -> None:
        from launcher.errors import ConfigError
        from launcher.runs.cluster import Cluster
        from launcher.runs.records.stored_configs import StartArguments

        if nodes is not None:
            source = click.get_current_context().get_parameter_source("inventory")
            if source is ParameterSource.COMMANDLINE:
                raise ConfigError("give --inventory or --nodes, not both")
            if not nodes.strip(" ,"):
                raise ConfigError("--nodes names no hosts; give some, such as --nodes pc,laptop")
            inventory = Path(f"{nodes},")

        start = StartArguments(limit, extra_vars, expect_workers)
        cluster = Cluster(inventory, start, accept_new_host_keys=accept_new_host_keys)
        command(cluster, **others)

    return call


_inventory = combine_options(
    click.option(
        "--inventory",
        "-i",
        type=PATH,
        envvar="MOTLEY_INVENTORY",
        help="An Ansible inventory; default: $MOTLEY_INVENTORY, else this machine.",
    ),
    click.option(
        "--nodes",
        metavar="HOST,...",
        help="Hosts without an inventory, by ssh_config; the first one coordinates.",
    ),
)
inventory_option = combine_options(_inventory, _on_cluster)
"""Selects the cluster whose runs a command is about."""


_hosts = combine_options(
    _inventory,
    click.option(
        "--limit",
        "-l",
        default="all",
        metavar="PATTERN",
        shell_complete=completion.host_names,
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
        help="Record new SSH host keys; changed ones are still refused.",
    ),
)
cluster_options = combine_options(_hosts, _on_cluster)
"""Select the hosts of a cluster."""

inventory_options = combine_options(
    _hosts,
    click.option(
        "--expect-workers",
        "-n",
        type=click.IntRange(1, 1024),
        help="Number of workers; by default one per device.",
    ),
    _on_cluster,
)
"""Select the hosts of a cluster and the number of workers."""

config_options = combine_options(
    click.option(
        "--preset",
        metavar="NAME",
        shell_complete=completion.preset_names,
        help="A run config that ships with Motley.",
    ),
    click.option("--config", type=PATH, help="A run config of your own (YAML)."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=completion.setting_keys,
        help="Override a setting, e.g. --set training.epochs=2.",
    ),
    click.option(
        "--model",
        type=click.Path(),
        metavar="DIR|NAME",
        help="The base model: a folder, a GGUF file or a hub name.",
    ),
    click.option(
        "--data",
        type=click.Path(),
        metavar="PATH",
        help="Training data of any format, or a folder of logits.",
    ),
    click.option(
        "--output",
        "-o",
        type=click.Path(),
        metavar="DIR",
        help="Folder for checkpoints, metrics and the adapter.",
    ),
)
"""Describe a fine-tune; see `config_order`."""

timeout_option = click.option(
    "--timeout",
    type=Number(min=1),
    metavar="SECONDS",
    help="Maximum wait for joining without progress.",
)
start_options = combine_options(
    click.option(
        "--resume",
        metavar="ID",
        shell_complete=completion.run_ids,
        help="Resume a run from its config and checkpoints.",
    ),
    click.option("--wait", is_flag=True, help="Follow to the end; exit with the job's result."),
    timeout_option,
    notify_option,
    click.option(
        "--dry-run", is_flag=True, help="Print the commands for each host; start nothing."
    ),
    json_option,
)
"""Say how a run starts; see `starting.start_job`."""


def make_job_request(
    leader: Literal["coordinator", "student"],
    source: str | None,
    settings: tuple[str, ...],
    flags: Mapping[str, Any],
) -> JobRequest:
    """Return the job of a command line; `flags` are the values of options by their settings' keys.

    Raises:
        ConfigError: a setting is no KEY=VALUE.
    """
    from launcher.plan.configuration import JobRequest
    from trainer.config.section import parse_assignments

    given = {key: value for key, value in flags.items() if value not in (None, ())}
    return JobRequest(leader, source, parse_assignments(settings, "--set") | given)


def config_order(
    preset: str | None,
    config: Path | None,
    settings: tuple[str, ...],
    model: str | None,
    data: str | None,
    output: str | None,
    script: Path | None = None,
) -> JobRequest:
    """Return the fine-tune that `config_options` describe.

    Args:
        script: its model, data and loss, in place of a model and data.

    Raises:
        ConfigError: both --preset and --config, or a setting is no KEY=VALUE.
        InputError: the script cannot be read.
    """
    from launcher.errors import ConfigError

    if preset and config:
        raise ConfigError("give --preset or --config, not both")
    source = preset or (str(config) if config else None)
    flags = {"model.path": model, "data.train": data, "output": output}
    from trainer.config.script import read_script

    request = make_job_request("coordinator", source, settings, flags)
    return replace(request, script=read_script(script) if script else None)


class Currency(click.ParamType[str]):
    """A currency by its code of ISO 4217."""

    name = "code"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the code; empty is none."""
        from trainer.config.budget import CURRENCY

        if value and not re.fullmatch(CURRENCY, value):
            self.fail(f"{value!r} is not a code of three capital letters, such as EUR", param, ctx)
        return value
