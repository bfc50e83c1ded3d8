"""`launch distill`: teachers, a student and an evaluator, each on its host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launcher.commands import complete
from launcher.commands.cluster_access import read_hosts
from launcher.commands.options import cluster_options, config_of_run, given_settings, json_option

if TYPE_CHECKING:
    from launcher.inventory.hosts import Host
    from launcher.plan.plan import LaunchPlan
    from trainer.config.distill_job import DistillJob

Command = TypeVar("Command", bound=Callable[..., Any])

_OVERRIDES = {
    "teacher": "teacher.model",
    "tokenizer": "teacher.tokenizer",
    "student": "student.model",
    "logits": "logits",
    "output": "student.output",
}


def job_options(command: Command) -> Command:
    """Add the options that describe the job."""
    for option in reversed(
        (
            click.option(
                "--config",
                "source",
                metavar="FILE|PRESET",
                shell_complete=complete.job_presets,
                help="The job (YAML).",
            ),
            click.option(
                "--set",
                "settings",
                multiple=True,
                metavar="KEY=VALUE",
                shell_complete=complete.job_keys,
                help="Override a setting, e.g. --set student.training.epochs=2.",
            ),
            click.option(
                "--teacher", type=click.Path(), metavar="DIR", help="The teacher's model folder."
            ),
            click.option(
                "--data",
                type=click.Path(),
                multiple=True,
                metavar="DIR|FILE",
                help="The corpus; may be repeated.",
            ),
            click.option(
                "--tokenizer", type=click.Path(), metavar="DIR", help="The student's, if trimmed."
            ),
            click.option(
                "--student", type=click.Path(), metavar="DIR", help="A model folder to start from."
            ),
            click.option(
                "--logits",
                type=click.Path(),
                metavar="DIR",
                help="The folder between them, on the share.",
            ),
            click.option(
                "--output",
                "-o",
                type=click.Path(),
                metavar="DIR",
                help="The student's output folder.",
            ),
        )
    ):
        command = option(command)
    return command


@click.command()
@cluster_options
@job_options
@click.option(
    "--resume",
    metavar="ID",
    shell_complete=complete.run_ids,
    help="Resume a run from its job and checkpoints.",
)
@click.option("--wait", is_flag=True, help="Follow to the end; exit with the job's result.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="How long the start may take.",
)
@click.option("--dry-run", is_flag=True, help="Print the commands for each host; start nothing.")
@json_option
def up(
    inventory: Path | None,
    limit: str,
    extra_vars: tuple[str, ...],
    source: str | None,
    resume: str | None,
    wait: bool,
    timeout: float | None,
    dry_run: bool,
    as_json: bool,
    **job_flags: Any,
) -> None:
    """Start a distillation and return once every process works.

    It outlives this terminal: launch cluster status | logs | down.
    """
    from launcher.commands.starting import say_how_it_goes_on, show_plan, start_run
    from launcher.errors import ConfigError
    from launcher.hosts.fleet import REACH
    from launcher.runs import up as bringup
    from launcher.runs.kept_configs import Start, start_of
    from launcher.runs.registry import Registry
    from launcher.runs.stopwatch import Stopwatch
    from launcher.views.render import working

    watch = Stopwatch()
    if resume is not None and source is not None:
        raise ConfigError("--resume brings its own job; leave out --config")
    start = Start(limit, extra_vars)
    if resume is not None:
        start = start.over(start_of(resume))
    hosts = read_hosts(inventory, start.limit, start.extra_vars)
    before: LaunchPlan | None = None
    watch.lap("inventory")
    registry = Registry.default() if dry_run and resume is None else Registry.of(hosts, REACH)
    if resume is None:
        job = read_job(source, hosts, **job_flags)
    else:
        flags = {key: job_flags[flag] for flag, key in _OVERRIDES.items()}
        flags["teacher.data"] = job_flags["data"]
        given = given_settings(job_flags["settings"], flags)
        with config_of_run(registry, resume, "student", given) as path:
            job = read_job(str(path), hosts, **job_flags)
        before = registry.get(resume).plan
    with working("asking the hosts what they have"):
        found = bringup.look_around(hosts, only_to_plan=dry_run)
    watch.lap("connect and survey")
    plan = bringup.make_plan(found, job, None, resume)
    if before is not None:
        say_how_it_goes_on(start, before, plan)
    if dry_run:
        show_plan(plan, as_json)
        return
    start_run(
        plan, job, registry, found, watch, resumed=resume is not None, wait=wait, timeout=timeout,
        as_json=as_json, start=start,
    )  # fmt: skip


@click.command()
@cluster_options
@job_options
@json_option
def doctor(
    inventory: Path | None,
    limit: str,
    extra_vars: tuple[str, ...],
    source: str | None,
    as_json: bool,
    **job_flags: Any,
) -> None:
    """Run every check of `launch distill up`; change nothing. Exits with 4 when one fails."""
    from launcher.commands.doctor import show_checks
    from launcher.runs.doctor import diagnose
    from launcher.views.render import working

    hosts = read_hosts(inventory, limit, extra_vars)
    job = read_job(source, hosts, **job_flags)
    with working("checking the hosts"):
        checks = diagnose(hosts, job, None, whole=True)
    show_checks(checks, as_json)


def read_job(
    source: str | None,
    hosts: tuple[Host, ...],
    settings: tuple[str, ...],
    data: tuple[str, ...],
    **flags: str | None,
) -> DistillJob:
    """Return the job that `job_options` describe.

    Raises:
        ConfigError: a wrong key or value.
    """
    from launcher.plan.configuration import parse_assignments, resolve_job

    overrides = parse_assignments(settings, "--set")
    nulls = [key for key, value in overrides.items() if value is None]
    overrides |= {path: flags[flag] for flag, path in _OVERRIDES.items() if flags[flag] is not None}
    overrides["teacher.data"] = list(data) or overrides.get("teacher.data")
    return resolve_job(source, overrides, hosts, Path.cwd(), nulls)
