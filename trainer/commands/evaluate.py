"""`trainer evaluate`: score a trained model, or each checkpoint of a run as it appears."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.commands.device_options import (
    columns_option,
    lost_text_option,
    make_announcer,
    open_ranks,
    parallel_option,
    place_options,
)
from trainer.config.data import LostText
from trainer.config.limits import MOST_NEW_TOKENS
from trainer.system.commandline.number import Number
from trainer.system.commandline.options import PATH

if TYPE_CHECKING:
    from trainer.evaluate.scoring import EvaluationScores
    from trainer.replica.backend import Compute

_LONGEST_NAME = 20


@click.command("evaluate")
@click.argument("model", type=PATH, required=False)
@click.option(
    "--data", type=PATH, multiple=True, help="Data of any format; repeatable with --watch."
)
@columns_option
@click.option(
    "--held-out", is_flag=True, help="Only what MODEL's run held out of --data, its training data."
)
@click.option("--base", help="The base model of an adapter, if it has moved.")
@place_options("auto", "cuda", "wgpu", "cpu", quantizes=True)
@parallel_option
@click.option("--max-seq-len", type=click.IntRange(min=1), help="Tokens; default: as trained.")
@lost_text_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--watch", type=PATH, metavar="DIR", help="Score the checkpoints of this run.")
@click.option(
    "--tasks",
    default="loss",
    help="For --watch: loss, generate, code, lm-eval:NAME; the first picks the best.",
)
@click.option("--prompts", type=PATH, help="For generate: data of any format.")
@click.option("--problems", type=PATH, help="For code: JSON Lines: prompt, test, entry_point.")
@click.option("--run-code", is_flag=True, help="Allow code: runs code written by the model.")
@click.option(
    "--samples", type=click.IntRange(min=1), default=1, help="For code: samples per problem."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1, MOST_NEW_TOKENS),
    default=128,
    help="For generate and code: maximum tokens of an answer.",
)
@click.option(
    "--temperature",
    type=Number(),
    default=0.0,
    help="For generate and code; 0 takes the most likely token.",
)
@click.option(
    "--lm-eval-tasks",
    "harness_tasks",
    type=PATH,
    metavar="DIR",
    help="Your own lm-eval tasks, YAML.",
)
@click.option(
    "--lm-eval-limit",
    "harness_limit",
    type=click.IntRange(min=1),
    help="Samples of each lm-eval task.",
)
@click.option("--once/--until-done", help="Exit when no checkpoint is left, or the run is over.")
@click.option(
    "--every",
    type=Number(min=0, min_open=True),
    default=10.0,
    help="Seconds between two checks of DIR.",
)
@click.option(
    "--claim-timeout",
    type=Number(min=0, min_open=True),
    default=60.0,
    help="Seconds after which a silent runner loses its claim; use one value for all runners.",
)
@click.option(
    "--with-student",
    is_flag=True,
    help="Exit with a run that ends early, or 15 minutes after its last heartbeat.",
)
@click.option("--runner", help="Name in records and curves; default: the host's, and --gpu.")
def evaluate(
    model: Path | None,
    data: tuple[Path, ...],
    columns: dict[str, str],
    held_out: bool,
    base: str | None,
    compute: Compute,
    parallel: str | None,
    max_seq_len: int | None,
    lost_text: LostText | None,
    as_json: bool,
    watch: Path | None,
    tasks: str,
    prompts: Path | None,
    once: bool,
    every: float,
    claim_timeout: float,
    with_student: bool,
    runner: str | None,
    **of_tasks: Any,
) -> None:
    """Evaluate MODEL: an output folder, a checkpoint, an adapter or a full model.

    With --watch, score each checkpoint of a run as it appears, together with other runners;
    the options from --tasks on need --watch.
    """
    if (model is None) == (watch is None):
        raise click.UsageError("give MODEL or --watch DIR")
    if model is not None:
        from trainer.checkpoint.trained_model import load_trained
        from trainer.evaluate.scoring import score_file

        if len(data) != 1:
            raise click.UsageError("give --data FILE" if not data else "give --data once")
        if held_out and columns:
            raise click.UsageError("--held-out reads --data as its run did, without --column")
        with open_ranks(parallel, compute) as ranks:
            trained = load_trained(model, base, max_seq_len, lost_text)
            scores = score_file(
                trained,
                data[0],
                compute,
                on_open=make_announcer("evaluating", trained, ranks),
                columns=columns or None,
                held_out=held_out,
                opener=ranks and ranks.open_evaluator,
            )
        if ranks is None or ranks.leads:
            _print(scores, as_json)
        return
    if held_out or parallel is not None:
        option = "--held-out" if held_out else "--parallel"
        raise click.UsageError(f"{option} belongs to MODEL, not to --watch")
    if columns and not (data or prompts):
        raise click.UsageError("--column names keys of --data and --prompts")
    assert watch is not None
    from trainer.evaluate.runner import Runner, RunnerOptions
    from trainer.evaluate.tasks import TaskOptions, make_tasks

    material = TaskOptions(data=data, columns=columns or None, prompts=prompts, **of_tasks)
    manner = RunnerOptions(
        name=runner or _own_name(compute),
        every=every,
        claim_timeout=claim_timeout,
        once=once,
        base=base,
        max_seq_len=max_seq_len,
        lost_text=lost_text,
        with_student=with_student,
    )
    Runner(watch, make_tasks(tasks, material), compute, manner).run()


def _own_name(compute: Compute) -> str:
    """Return a name for a runner; two on two cards of a host have two."""
    parts = [socket.gethostname(), compute.gpu.replace("/", "-")]
    return "-".join(filter(None, parts))


def _print(scores: EvaluationScores, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(scores.as_json()))
        return
    figures = (
        f"{name} {value:.4f}"
        for name in ("loss", "accuracy", "mcc", "perplexity")
        if (value := getattr(scores, name)) is not None
    )
    click.echo(f"{', '.join(figures)} on {scores.count} samples")
    if scores.confusion is not None:
        click.echo("rows are labels, columns predictions:")
        names = scores.names or tuple(map(str, range(len(scores.confusion))))
        width = max(3, *(len(name[:_LONGEST_NAME]) for name in names))
        for name, row in zip(names, scores.confusion, strict=True):
            counts = " ".join(f"{count:>6}" for count in row)
            click.echo(f"{name[:_LONGEST_NAME]:>{width}} {counts}")
