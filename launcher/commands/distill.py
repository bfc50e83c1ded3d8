"""`launch distill`: teachers, a student and an evaluator, each on its host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from launcher.commands import completion
from launcher.commands.job_start import start_job
from launcher.commands.options import (
    cluster_options,
    combine_options,
    json_option,
    make_job_request,
    start_options,
)

if TYPE_CHECKING:
    from launcher.plan.configuration import JobRequest
    from launcher.runs.cluster import Cluster

_SETTINGS = {
    "teacher": "teacher.model",
    "data": "teacher.data",
    "tokenizer": "teacher.tokenizer",
    "student": "student.model",
    "logits": "logits",
    "output": "student.output",
}
"""Settings of the options that have a name of their own."""

job_options = combine_options(
    click.option(
        "--config",
        "source",
        metavar="FILE|PRESET",
        shell_complete=completion.job_presets,
        help="The job's settings (YAML), or the name of a preset.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=completion.job_keys,
        help="Override a setting, e.g. --set student.training.epochs=2.",
    ),
    click.option("--teacher", type=click.Path(), metavar="DIR", help="The teacher's model folder."),
    click.option(
        "--data",
        type=click.Path(),
        multiple=True,
        metavar="DIR|FILE",
        help="The corpus; may be repeated.",
    ),
    click.option(
        "--tokenizer",
        type=click.Path(),
        metavar="DIR",
        help="The student's tokenizer, if it is trimmed.",
    ),
    click.option(
        "--student", type=click.Path(), metavar="DIR", help="A model folder to start from."
    ),
    click.option(
        "--logits",
        type=click.Path(),
        metavar="DIR",
        help="The folder of the teacher's logits, in the shared folder.",
    ),
    click.option(
        "--output",
        "-o",
        type=click.Path(),
        metavar="DIR",
        help="Folder for the student's checkpoints and metrics.",
    ),
)
"""Describe a distillation; see `job_order`."""


def job_order(source: str | None, settings: tuple[str, ...], **flags: Any) -> JobRequest:
    """Return the distillation that `job_options` describe.

    Raises:
        ConfigError: a setting is no KEY=VALUE.
    """
    named = {key: flags[name] for name, key in _SETTINGS.items()}
    return make_job_request("student", source, settings, named)


@click.command()
@cluster_options
@job_options
@start_options
def up(cluster: Cluster, **flags: Any) -> None:
    """Start a distillation and return when every process is working.

    It continues without this terminal: launch status, launch logs, launch cluster down.
    """
    start_job(cluster, job_order, **flags)


@click.command()
@cluster_options
@job_options
@json_option
def doctor(cluster: Cluster, as_json: bool, **job_flags: Any) -> None:
    """Run every check of `launch distill up`; change nothing. Exits with 4 if one fails."""
    from launcher.commands.doctor import show_checks

    show_checks(cluster.diagnose(job_order(**job_flags), whole=True), as_json)
