"""`launch plan --distill`: which engines fit a teacher, in how many hours, and who waits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.commands.options import combine_options

if TYPE_CHECKING:
    from trainer.planning.logits_size import StoredScores
    from trainer.planning.shapes import ModelShape

distillation_options = combine_options(
    click.option(
        "--distill",
        is_flag=True,
        help="Plan a distillation whose teacher is the model: engines, hours, stored bytes.",
    ),
    click.option(
        "--student",
        metavar="DIR|NAME",
        help="With --distill: the student; shows its wait for teachers.",
    ),
    click.option(
        "--rate",
        "rates",
        multiple=True,
        metavar="TOKENS|DIR",
        help="With --distill: tokens/s of a teacher, or logits whose teachers measured it.",
    ),
    click.option(
        "--scheme",
        type=click.Choice(["topk", "sampled", "full"]),
        default="topk",
        help="With --distill: the scores that are kept.",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(min=1),
        default=64,
        help="With --distill and topk: tokens kept.",
    ),
)

_OF_DISTILL = ("student", "rates", "scheme", "top_k")
_WITH_DISTILL = ("model", "shape", "inventory", "text", "tokens", "length", "distill", "as_json")


def refuse_mixed(distill: bool) -> None:
    """Refuse options of the other kind of plan.

    Raises:
        ConfigError: names the first one.
    """
    from launcher.errors import ConfigError

    for parameter in click.get_current_context().command.params:
        name = parameter.name or ""
        if name not in _WITH_DISTILL and (name in _OF_DISTILL) != distill and _is_given(name):
            flag = parameter.opts[0]
            needs = "cannot be combined with --distill" if distill else "needs --distill"
            raise ConfigError(f"{flag} {needs}")


def _is_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def print_distillation_plan(
    shape: ModelShape,
    student: str | None,
    tokens: float,
    length: int,
    kept: StoredScores,
    inventory: Path | None,
    text: str | None,
    rates: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print the plan of a distillation.

    Raises:
        ConfigError: the student or a rate cannot be read.
        PreflightError: no engine fits, or the student does not.
    """
    from launcher.errors import PreflightError
    from launcher.runs import distillation_plan
    from launcher.runs.plan_inputs import named_student
    from launcher.views import distillation_plan as view
    from launcher.views import render
    from trainer.planning.cluster_text import parse_cluster
    from trainer.planning.teachers import WINDOW

    devices = (
        distillation_plan.survey_devices(inventory)
        if text is None
        else distillation_plan.read_described_devices(parse_cluster(text))
    )
    given, measured = distillation_plan.read_rates(rates, devices.found)
    request = distillation_plan.DistillationRequest(
        shape=shape,
        student=None if student is None else named_student(student),
        tokens=tokens,
        length=length if _is_given("length") else WINDOW,
        kept=kept,
        devices=devices,
        given=given,
        measured=measured,
    )
    planned = distillation_plan.plan_distillation(request)
    if as_json:
        render.print_json(view.teaching_tree(request, planned))
    else:
        for line in view.describe_request(request):
            render.print_line(line)
        render.make_console().print(view.teacher_table(request, planned, render.terminal_width()))
        render.say_result(view.describe_choice(request, planned))
    if planned.pick is None:
        raise PreflightError("no engine fits this teacher on these hosts")
    if not planned.student_fits:
        raise PreflightError("the student does not fit on its device")
