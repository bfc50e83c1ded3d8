"""`launch doctor`: every check of `up`, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from launcher.commands.options import config_options, inventory_options, json_option, read_config


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
    from launcher import bringup, render
    from launcher.configuration import parse_assignments
    from launcher.connection import connect
    from launcher.errors import PreflightError
    from launcher.host_checks import host_probes
    from launcher.inventory import load_inventory
    from launcher.job_checks import job_probes
    from launcher.preflight import examine
    from launcher.runs import Registry

    config = read_config(**config_flags)
    registry = Registry.default()
    hosts = load_inventory(inventory, limit=limit, extra=parse_assignments(extra_vars, "-e"))
    found = bringup.look_around(hosts)
    plan = bringup.make_plan(found, config, expect_workers)
    for host in plan.hosts:
        connect(host)
    probes = host_probes(plan, registry.folder, found.problems)
    if any(config_flags.values()):
        probes += job_probes(plan, config)
    checks = examine(probes)
    if as_json:
        tree = [render.check_tree(check) for check in checks]
        render.print_json({"schema": "motley.doctor/1", "checks": tree})
    else:
        render.console().print(render.checks_table(checks))
    failed = sum(check.status == "fail" for check in checks)
    if failed:
        raise PreflightError(f"{failed} of {len(checks)} checks failed")
