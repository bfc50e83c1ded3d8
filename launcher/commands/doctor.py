"""`launch doctor`: every check of `up`, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.commands.cluster_access import read_hosts
from launcher.commands.options import (
    config_options,
    given_of_own,
    inventory_options,
    json_option,
    read_config,
)

if TYPE_CHECKING:
    from launcher.checks.finding import Check


@click.command()
@inventory_options
@config_options
@json_option
def doctor(
    inventory: Path | None,
    limit: str,
    extra_vars: tuple[str, ...],
    expect_workers: int | None,
    as_json: bool,
    **config_flags: Any,
) -> None:
    """Check this machine, or every host of an inventory, for a run; change nothing.

    Model, data, output and memory are checked when they are named (--preset, --config, --model
    or --data). Exits with 4 when a check fails.
    """
    from launcher.runs.doctor import diagnose
    from launcher.views.render import working

    hosts = read_hosts(inventory, limit, extra_vars)
    config = read_config(**config_flags, hosts=hosts)
    given = given_of_own(**config_flags)
    whole = any(config_flags.values())
    with working("checking the hosts"):
        checks = diagnose(hosts, config, expect_workers, whole=whole, given=given)
    show_checks(checks, as_json)


def show_checks(checks: Sequence[Check], as_json: bool) -> None:
    """Print checks.

    Raises:
        PreflightError: one of them failed.
    """
    from launcher.errors import PreflightError
    from launcher.views import render

    if as_json:
        tree = [render.check_tree(check) for check in checks]
        render.print_json({"schema": "motley.doctor/1", "checks": tree})
    else:
        render.console().print(render.checks_table(checks, render.width()))
    failed = sum(check.status == "fail" for check in checks)
    if failed:
        raise PreflightError(f"{failed} of {len(checks)} checks failed")
