"""The soak by hand: `python -m tests.soak --minutes 60 --seed 7`."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import click

from tests.soak import room
from tests.soak.cluster import EXCHANGES, LaunchError

_MARK = ".soak"
FAULTS_A_MINUTE = 12
"""The pace unless --faults says otherwise: two cores keep up with it."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--minutes", type=click.FloatRange(min=0.5), default=10.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Which faults come when.")
@click.option(
    "--faults", type=click.IntRange(min=1), help=f"How many; {FAULTS_A_MINUTE} a minute by default."
)
@click.option(
    "--exchange",
    type=click.Choice(list(EXCHANGES)),
    default="plain",
    show_default=True,
    help="Gradients as they are or in int8, or rounds in int8.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("soak"),
    show_default=True,
    help="What it writes; what an earlier soak left there is removed.",
)
@click.option("--distill", is_flag=True, help="A distillation: teacher and student die in turn.")
def soak(
    minutes: float, seed: int, faults: int | None, exchange: str, folder: Path, distill: bool
) -> None:
    """Disturb one run of real processes, then check that nothing was lost, doubled or left over.

    Ends with 1 if a check failed; the folder is then kept for a look.
    """
    from tests.soak import distillation
    from tests.soak.run import soak as run

    if distill and faults:
        raise click.UsageError("--distill has as many deaths as there is time for; omit --faults")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    folder = folder.absolute()
    _clear(folder)
    count = faults or round(minutes * FAULTS_A_MINUTE)

    def say(line: str) -> None:
        click.echo(line, err=True)

    try:
        if distill:
            report = distillation.soak(folder, seed, minutes, say)
        else:
            report = run(folder, seed, minutes, count, say, exchange)
    except (LaunchError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    (folder / "report.json").write_text(json.dumps(report.tree(), indent=1) + "\n")
    click.echo(report.text())
    if report.passed:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
    sys.exit(0 if report.passed else 1)


def _clear(folder: Path) -> None:
    """Make the folder empty; refuse one that is not of an earlier soak."""
    mark = folder / _MARK
    if folder.exists() and any(folder.iterdir()) and not mark.exists():
        raise click.ClickException(f"{folder} is not of a soak; choose another --folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark.touch()


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    room.enter(sys.argv[1:])
    soak()
