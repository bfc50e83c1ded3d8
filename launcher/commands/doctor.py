"""`launch doctor`: every check of `up`, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from launcher.commands.options import config_options, config_order, inventory_options, json_option

if TYPE_CHECKING:
    from launcher.agent.checks.finding import Result
    from launcher.runs.cluster import Cluster


@click.command()
@inventory_options
@config_options
@json_option
def doctor(cluster: Cluster, as_json: bool, **config_flags: Any) -> None:
    """Check this machine, or every host of an inventory, for a run; change nothing.

    Model, data, output and memory are checked only if they are given (--preset, --config, --model
    or --data). Exits with 4 if a check fails.
    """
    whole = any(config_flags.values())
    show_checks(cluster.diagnose(config_order(**config_flags), whole), as_json)


def show_checks(checks: Sequence[Result], as_json: bool) -> None:
    """Print checks.

    Raises:
        PreflightError: one of them failed.
    """
    from launcher.errors import PreflightError
    from launcher.views import render

    if as_json:
        tree = [asdict(check) for check in checks]
        render.print_json({"schema": "motley.doctor/1", "checks": tree})
    else:
        render.make_console().print(render.checks_table(checks, render.terminal_width()))
    failed = sum(check.status == "fail" for check in checks)
    if failed:
        raise PreflightError(f"{failed} of {len(checks)} checks failed")
