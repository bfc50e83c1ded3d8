"""`trainer distill audit`: do the stored scores agree with the teacher's?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.commands.device_options import place_options
from trainer.config.limits import MOST
from trainer.config.teacher_engines import TEACHER_ENGINES, explain_resident
from trainer.system.commandline.number import Number
from trainer.system.commandline.options import PATH
from trainer.system.errors import InputError, RefusedError

if TYPE_CHECKING:
    from trainer.replica.backend import Compute


@click.command("audit")
@click.argument("folder", metavar="DIR", type=PATH)
@click.option("--teacher", "model", help="The teacher; default: the path stored in DIR.")
@click.option(
    "--tokenizer",
    type=PATH,
    help="The student's tokenizer folder; default: the teacher's own tokenizer.",
)
@click.option(
    "--fraction",
    type=Number(0, 1),
    default=0.001,
    help="Fraction of the existing windows; at least one window.",
)
@click.option("--seed", type=click.IntRange(0, MOST), default=0, help="Seed of the sample.")
@click.option(
    "--engine",
    type=click.Choice([*TEACHER_ENGINES]),
    help="Engine that scores; default: torch if the model fits the memory, else DIR's own.",
)
@place_options("auto", "cuda", "wgpu", "cpu")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def audit(
    folder: Path,
    model: str | None,
    tokenizer: Path | None,
    fraction: float,
    seed: int,
    engine: str | None,
    compute: Compute,
    as_json: bool,
) -> None:
    """Score a part of DIR again and compare; fails if another teacher wrote it.

    Needs the teacher and the tokenizer, not the corpus: the tokens are in the shards.
    """
    from trainer.distill.answers.shard_loader import open_logits
    from trainer.distill.teacher.audit import audit_limit, check_teacher, open_auditor
    from trainer.distill.teacher.audit import audit_windows as compare
    from trainer.distill.teacher.scoring import open_teacher
    from trainer.model.files import resolve_model

    logits = open_logits(folder)
    model_dir = resolve_model(model or logits.description.teacher.name)
    vocabulary = check_teacher(logits, model_dir, tokenizer or model_dir)
    if engine is None:
        engine, teacher = open_auditor(logits, model_dir, vocabulary, compute)
    elif reason := explain_resident(engine, compute.resident):
        raise InputError(f"--resident {compute.resident}: {reason}")
    else:
        teacher = open_teacher(model_dir, vocabulary, logits.description, compute, engine=engine)
    limit = audit_limit(logits.description.teacher.engine, engine)
    found = compare(logits, teacher, fraction=fraction, seed=seed, limit=limit)
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        worst = "" if found.max_kl is None else f", at most {found.max_kl:.2e}"
        click.echo(f"{found.windows} windows, {found.positions:,} positions scored again")
        click.echo(
            f"KL of stored to live: {found.mean_kl:.2e} +- {found.standard_error:.1e} nats{worst}"
        )
        if found.same_draws is not None:
            click.echo(f"samples drawn again identically: {found.same_draws:.2%}")
    if found.is_another_teacher:
        raise RefusedError(
            f"{folder}: the scores are {found.mean_kl:.3g} nats from this teacher's (rounding stays"
            f" below {limit:g}): another teacher wrote them; score again into another folder"
        )
