"""`launch report`: a run as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.commands import completion
from launcher.commands.options import inventory_option
from trainer.system.commandline.options import PATH

if TYPE_CHECKING:
    from launcher.runs.cluster import Cluster

_ENDINGS = {"html": "html", "md": "md", "card": "md"}


@click.command()
@click.argument("run_id", metavar="[RUN]", required=False, shell_complete=completion.run_ids)
@inventory_option
@click.option(
    "--format",
    "form",
    type=click.Choice(list(_ENDINGS)),
    help="A page, Markdown, or the model card with it; default: by --output's suffix, else html.",
)
@click.option(
    "--output", "-o", type=PATH, metavar="FILE", help="Default: RUN.html, RUN.md and so on."
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def report(
    cluster: Cluster, run_id: str | None, form: str | None, output: Path | None, force: bool
) -> None:
    """Write what a run was, did and survived into one file that needs no network.

    RUN is the run's id, or the output folder of `trainer finetune`; default: the active run, else
    the latest.
    """
    from launcher.errors import ConfigError
    from launcher.runs.output_run import is_output, read_output
    from launcher.runs.records.registry import Registry
    from launcher.views import render
    from launcher.views.dashboard.markdown import format_markdown, model_card
    from launcher.views.dashboard.report import as_html, make_report
    from trainer.system.storage.atomic_file import write_atomically

    view = read_output(Path(run_id)) if run_id is not None and is_output(Path(run_id)) else None
    registry = cluster.find_runs_registry() if view is None else Registry.for_this_user()
    run = cluster.find_run(run_id) if view is None else view.run
    if view is not None and (known := registry.read_runs({view.run.run_id})):
        run, view = known[0], None  # a launcher's, which has more of it
    if run is None:
        raise ConfigError("no run has been started here; start one with: launch cluster up")
    form = _choose_format(form, output)
    path = output or Path(f"{run.run_id}.{_ENDINGS[form]}")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already; --force replaces it, -o names another file")
    found = make_report(registry, run, view)
    texts = {"html": as_html, "md": format_markdown, "card": model_card}
    try:
        write_atomically(path, texts[form](found).encode(), mode=None, durable=False)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    render.print_line(str(path))


def _choose_format(form: str | None, output: Path | None) -> str:
    """Return the format of a report: the given one, else that of the file's ending.

    Raises:
        ConfigError: the ending is that of another format, or of none.
    """
    from launcher.errors import ConfigError

    ending = output.suffix.lower().lstrip(".") if output else ""
    if not ending:
        return form or "html"
    if ending not in _ENDINGS.values():
        known = ", ".join(dict.fromkeys(f".{each}" for each in _ENDINGS.values()))
        raise ConfigError(f"{output}: no report has the suffix .{ending}; use {known}")
    if form is not None and _ENDINGS[form] != ending:
        raise ConfigError(f"{output}: --format {form} ends in .{_ENDINGS[form]}, not in .{ending}")
    return form or ending
