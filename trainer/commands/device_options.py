"""The options of commands that compute: where, and from what of the data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import click

from trainer.system.backends import RequestedBackend
from trainer.system.commandline.number import Threads
from trainer.system.commandline.options import PATH, Command, combine_options

if TYPE_CHECKING:
    from trainer.checkpoint.trained_model import TrainedModel
    from trainer.config.run import Resident
    from trainer.replica.backend import Compute
    from trainer.run.distributed.inference import Ranks


class ResidentLayers(click.ParamType):
    """How many layers stay in memory."""

    name = "auto|all|N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Resident:
        """Return `auto`, `all` or a number."""
        if value in ("auto", "all"):
            return value
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither auto nor all nor a number of layers", param, ctx)
        return int(value)


resident_option = click.option(
    "--resident",
    type=ResidentLayers(),
    default="auto",
    help="Layers that stay in memory; the others are read at each use. auto: what fits.",
)
_quantization_option = click.option(
    "--quantization",
    type=click.Choice(["none", "nf4"]),
    help="nf4: linears and experts in 4 bits, as model.quantization. Default: as trained.",
)


def place_options(
    *backends: RequestedBackend, reads: bool = True, quantizes: bool = False
) -> Callable[[Command], Command]:
    """Return a decorator that adds --gpu-backend, --gpu, --threads and --resident: `compute`.

    Args:
        reads: the command only computes forwards; else it has no --resident.
        quantizes: the command uses a trained model; it has --quantization.
    """
    add = combine_options(
        click.option(
            "--gpu-backend",
            "backend",
            type=click.Choice(backends),
            default="auto",
            help="A named backend is required; auto uses the first that works.",
        ),
        click.option(
            "--gpu",
            metavar="GPU",
            default="",
            show_default=False,
            help="Index, UUID, PCI address or name of a required device; default: the first.",
        ),
        click.option("--threads", type=Threads(), help="CPU threads."),
        *([resident_option] if reads else []),
        *([_quantization_option] if quantizes else []),
    )

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(
            backend: RequestedBackend,
            gpu: str,
            threads: int | None,
            resident: Resident = "auto",
            **rest: Any,
        ) -> None:
            from trainer.replica.backend import Compute

            quantization = rest.pop("quantization") if quantizes else None
            command(compute=Compute(backend, gpu, threads, resident, quantization), **rest)

        return cast("Command", add(call))

    return decorate


parallel_option = click.option(
    "--parallel",
    metavar="KEY=VALUE,...",
    help="Run on the processes that torchrun starts, such as tensor=2; see docs/strategies.md.",
)


lost_text_option = click.option(
    "--lost-text",
    type=click.Choice(["refuse", "accept"]),
    help="For conversations whose text the chat template leaves out; default: "
    "as trained, else refuse.",
)


def _parse_columns(
    _: click.Context, param: click.Parameter, given: tuple[str, ...]
) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    if not all(ours and theirs for ours, _, theirs in pairs):
        raise click.BadParameter("expected KEY=NAME, such as text=body", param=param)
    return {ours: theirs for ours, _, theirs in pairs}


columns_option = click.option(
    "--column",
    "columns",
    metavar="KEY=NAME",
    multiple=True,
    callback=_parse_columns,
    help="Name of a key in the data, as data.columns, such as text=body; may be repeated.",
)


def corpus_options(*, required: bool) -> Callable[[Command], Command]:
    """Return a decorator that adds --data, several times, and --column."""
    return combine_options(
        click.option(
            "--data",
            type=PATH,
            multiple=True,
            required=required,
            help="A text file, data of any format, or a folder; may be repeated.",
        ),
        columns_option,
    )


def open_ranks(parallel: str | None, compute: Compute) -> AbstractContextManager[Ranks | None]:
    """Return the processes of --parallel; None without it."""
    if parallel is None:
        return nullcontext()
    from trainer.run.distributed.inference import Ranks

    return Ranks(parallel, compute)


def make_announcer(
    doing: str, trained: TrainedModel, ranks: Ranks | None
) -> Callable[[str, str], None]:
    """Return what prints where a model computes, and why no earlier device was taken."""

    def tell(device: str, reason: str) -> None:
        why = f" ({reason})" if reason else ""
        if ranks is None or ranks.leads:
            click.echo(f"{doing} {trained.path} on {device}{why}", err=True)

    return tell
