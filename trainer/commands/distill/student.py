"""`trainer distill student`: train a small model on a big one's logits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.commands.device_options import place_options
from trainer.commands.run_options import collect_overrides, run_options
from trainer.config import run as run_config
from trainer.config.budget import apply_environment
from trainer.config.notify_command import read_notify_command
from trainer.system.commandline.number import Number
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from trainer.replica.backend import Compute

_PRESET = "student"
_SETTINGS = {
    "student": "model.path",
    "logits": "data.train",
    "alpha": "distillation.alpha",
    "temperature": "distillation.temperature",
    "divergence": "distillation.divergence",
}


@click.command("student")
@click.option(
    "--teacher-logits",
    "logits",
    type=click.Path(),
    metavar="DIR",
    help="A teacher's folder of logits, complete or still being written.",
)
@click.option("--student", type=click.Path(), metavar="MODEL", help="A model folder to start from.")
@click.option(
    "--student-config",
    "shape",
    metavar="FILE|NAME",
    help="A new model: a config.json, or albor-350m; created below the output.",
)
@click.option(
    "--tokenizer", type=click.Path(), metavar="DIR", help="The tokenizer folder of a new model."
)
@click.option("--alpha", type=Number(), help="Weight of the divergence; 0 is only cross-entropy.")
@click.option("--temperature", type=Number(), help="Temperature of both in the divergence.")
@click.option(
    "--divergence",
    type=click.Choice(["forward", "reverse", "jsd"]),
    help="KL(teacher || student), KL(student || teacher), or their mean.",
)
@run_options("window", config=_PRESET)
@place_options("auto", "cuda", "cpu", reads=False)
@click.option("--compile", "compiled", is_flag=True, help="Compile layers with torch.compile.")
@click.option(
    "--teacher-timeout",
    type=Number(min=0),
    default=120.0,
    help="Seconds without a live teacher until a missing shard is an error.",
)
@click.option(
    "--await-scores",
    is_flag=True,
    help="End only after an eval runner has scored the checkpoints, so that a budget includes it.",
)
def student(
    source: str,
    shape: str | None,
    tokenizer: str | None,
    settings: tuple[str, ...],
    run_id: str | None,
    compute: Compute,
    compiled: bool,
    teacher_timeout: float,
    await_scores: bool,
    **flags: Any,
) -> None:
    """Train a student on a folder of teacher logits, even while it is being written."""
    gpus = [compute.gpu] if compute.gpu else []
    if "," in compute.gpu:
        raise InputError(f"--gpu {compute.gpu}: a student trains on one device")
    if (shape is None) != (tokenizer is None) or (shape and flags["student"]):
        raise InputError("give --student MODEL, or --student-config and --tokenizer")
    if source == _PRESET and not (flags["logits"] and (flags["student"] or shape)):
        raise InputError(
            "give --teacher-logits DIR, and --student MODEL or --student-config and --tokenizer"
        )
    given = collect_overrides(flags, _SETTINGS, settings)
    config = run_config.load_config(source, given)
    if shape:
        given["model.path"] = str(Path(config.output) / "student")
        config = run_config.load_config(source, given)
    budget = apply_environment(config.budget, os.environ)
    config = config.model_copy(update={"budget": budget})
    from trainer.distill.student.inputs import FreshStudent
    from trainer.model.files import local_model
    from trainer.run.composition.roles import Placement, interrupt_on_signals
    from trainer.run.composition.student_role import run_student
    from trainer.system.process.stop_signals import StopRequest

    stop = StopRequest()
    interrupt_on_signals(stop.request)
    fresh = None
    if shape and tokenizer:
        folder = local_model(Path(tokenizer)) or Path(tokenizer)
        fresh = FreshStudent(shape=shape, tokenizer_dir=folder)
    place = Placement(gpus, compute.backend, compute.threads, rank=None, tls_dir=None)
    code = run_student(
        config,
        run_id or config.name,
        place,
        compiled=compiled,
        teacher_timeout=teacher_timeout,
        stop=stop,
        fresh=fresh,
        scored=await_scores,
        notify=read_notify_command(flags["notify"]),
    )
    click.get_current_context().exit(code)
