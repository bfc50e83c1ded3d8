"""`launch cluster`: start a run, inspect it, stop it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.commands import complete
from launcher.commands.cluster_access import open_registry, read_hosts
from launcher.commands.options import (
    config_of_run,
    config_options,
    given_of_own,
    given_settings,
    inventory_option,
    inventory_options,
    json_option,
    read_config,
    refuse_other_agreement,
    run_option,
)

if TYPE_CHECKING:
    from launcher.plan.plan import LaunchPlan


@click.command()
@inventory_options
@config_options
@click.option(
    "--resume",
    metavar="ID",
    shell_complete=complete.run_ids,
    help="Resume a run from its config and checkpoints.",
)
@click.option("--wait", is_flag=True, help="Follow to the end; exit with the job's result.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), metavar="SECONDS", help="How long joining may take."
)
@click.option("--dry-run", is_flag=True, help="Print the commands for each host; start nothing.")
@json_option
def up(
    inventory: Path | None,
    limit: str,
    extra_vars: tuple[str, ...],
    expect_workers: int | None,
    resume: str | None,
    wait: bool,
    timeout: float | None,
    dry_run: bool,
    as_json: bool,
    **config_flags: Any,
) -> None:
    """Start a run and return once every worker has joined and training has begun.

    The run outlives this terminal. Without --preset or --config it is the quickstart; with a
    --model or --data of your own the settings follow from them.
    """
    from launcher.commands.starting import say_how_it_goes_on, show_plan, start_run
    from launcher.errors import ConfigError
    from launcher.hosts.fleet import REACH
    from launcher.plan.configuration import with_shared_checkpoints
    from launcher.preflight.own_settings import follow_data
    from launcher.runs import up as bringup
    from launcher.runs.kept_configs import Start, start_of
    from launcher.runs.registry import Registry, head_of
    from launcher.runs.stopwatch import Stopwatch
    from launcher.views.render import note, working

    watch = Stopwatch()
    if resume is not None and (config_flags["preset"] or config_flags["config"]):
        raise ConfigError("--resume brings its own config; leave out --preset and --config")
    start = Start(limit, extra_vars, expect_workers)
    if resume is not None:
        start = start.over(start_of(resume))
    hosts = read_hosts(inventory, start.limit, start.extra_vars)
    config = read_config(**config_flags, hosts=hosts) if resume is None else None
    before: LaunchPlan | None = None
    watch.lap("inventory")
    registry = Registry.default() if dry_run and resume is None else Registry.of(hosts, REACH)
    if config is None:
        flags = {"model.path": "model", "data.train": "data", "output": "output"}
        again = given_settings(
            config_flags["settings"], {key: config_flags[flag] for key, flag in flags.items()}
        )
        with config_of_run(registry, str(resume), "coordinator", again) as path:
            resumed: dict[str, Any] = {**config_flags, "config": path}
            config = read_config(**resumed)
            refuse_other_agreement(
                read_config(None, path, (), None, None, None), config, str(resume)
            )
        before = registry.get(str(resume)).plan
        start = replace(start, expect_workers=start.expect_workers or len(before.workers))
    given = None if resume is not None else given_of_own(**config_flags)
    with working("asking the hosts what they have"):
        found = bringup.look_around(hosts, only_to_plan=dry_run and given is None)
    watch.lap("connect and survey")
    plan = bringup.make_plan(found, config, start.expect_workers, resume)
    if given is not None:
        with working("measuring the data"):
            config, lines = follow_data(config, given, plan, found)
        for line in lines:
            note(line)
        watch.lap("settings")
    if before is not None:
        say_how_it_goes_on(start, before, plan)
    if resume is None:
        config = with_shared_checkpoints(config, head_of(hosts).share_folder, plan.run_id)
    if dry_run:
        show_plan(plan, as_json)
        return
    start_run(
        plan, config, registry, found, watch, resumed=resume is not None, wait=wait,
        timeout=timeout, as_json=as_json, start=start,
    )  # fmt: skip


@click.command()
@inventory_option
@run_option
@click.option("--watch", "-w", is_flag=True, help="Refresh every second, until q.")
@json_option
def status(inventory: Path | None, run_id: str | None, watch: bool, as_json: bool) -> None:
    """Show the run that is up, or the latest one."""
    from launcher.runs.status import RunMonitor, find_run
    from launcher.views import render
    from launcher.views.follow import watch_run

    run = find_run(open_registry(inventory), run_id)
    if run is None:
        if as_json:
            render.print_json(
                {"schema": "motley.cluster.status/1", "run_id": None, "state": "none"}
            )
        else:
            render.say("nothing has been started here; start with: launch cluster up")
        return
    if watch:
        watch_run(run, as_json)
        return
    view = RunMonitor(run).observe()
    if as_json:
        render.print_json(render.status_tree(view))
        return
    render.tell(render.headline(view))
    render.console().print(render.status_table(view, render.width()))
    for remark in (*view.remarks, *view.unreachable.values()):
        render.tell(remark)
    render.say(f"output: {run.plan.output}")
    render.say_card(view)


@click.command()
@inventory_option
@run_option
@click.option("--all", "everything", is_flag=True, help="Every run that is up or left processes.")
@json_option
def down(inventory: Path | None, run_id: str | None, everything: bool, as_json: bool) -> None:
    """Stop the run and check that none of its processes is left.

    The coordinator finishes its step and saves. If nothing runs, this does nothing.
    """
    from launcher.runs.down import tear_down
    from launcher.runs.status import find_run
    from launcher.views import render

    registry = open_registry(inventory, to_look=False)
    if everything:
        runs = registry.all()
    else:
        run = find_run(registry, run_id)
        runs = [run] if run is not None else []
    endings = [tear_down(run) for run in runs]
    if as_json:
        render.print_json(
            {
                "schema": "motley.cluster.down/1",
                "runs": [
                    {
                        "run_id": e.run_id,
                        "stopped": e.stopped,
                        "killed": e.stragglers,
                        "left": e.left,
                    }
                    for e in endings
                ],
            }
        )
    else:
        for ending in endings:
            if ending.stopped or ending.stragglers:
                render.say(f"{ending.run_id}: stopped {', '.join(ending.stopped) or 'nothing'}")
                for straggler in ending.stragglers:
                    render.say(f"{ending.run_id}: killed a leftover process: {straggler}")
        if not any(ending.stopped or ending.stragglers or ending.left for ending in endings):
            render.say("nothing was running")
        elif not any(ending.left for ending in endings):
            render.say("no process is left")
    for ending in endings:
        ending.require_all()
