"""A distillation's plan for people and programs: engines, hours, bytes, and who waits."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from launcher.runs.distillation_plan import DistillationPlan, DistillationRequest
from launcher.views.tables import Column, make_table
from trainer.planning.devices import DISK_RATE, count_text, format_gib, size_text
from trainer.planning.logits_size import StoredScores
from trainer.planning.teachers import WINDOW, TeacherOption

_COLUMNS = (
    Column("ENGINE"),
    Column("WEIGHTS"),
    Column("ON"),
    Column("PICK"),
    Column("GiB", right=True),
    Column("LEAST", spare=1, right=True),
    Column("OF", spare=1, right=True),
    Column("FITS"),
    Column("TEACHERS", spare=2, right=True),
    Column("TOKENS/S", right=True),
    Column("RATE"),
    Column("HOURS", right=True),
)


def describe_request(request: DistillationRequest) -> list[str]:
    """Return what is planned, and what was guessed."""
    shape = request.shape
    size = f"{count_text(shape.parameters)} parameters"
    if shape.active_parameters != shape.parameters:
        size += f", {count_text(shape.active_parameters)} active"
    lines = [
        f"{shape.name}: {size}; scores {count_text(request.tokens)} tokens in windows of"
        f" {request.length}"
    ]
    return lines + [f"note: {text}" for text in (shape.remark, *request.devices.remarks) if text]


def teacher_table(request: DistillationRequest, plan: DistillationPlan, width: int | None) -> Table:
    """Return a line for each engine and type of weights; the one that is picked is marked."""
    rows = [_option_row(one, one is plan.pick, request.tokens) for one in plan.options]
    return make_table(_COLUMNS, rows, width)


def _option_row(option: TeacherOption, picked: bool, tokens: float) -> list[str]:
    fits, seconds = option.fits != "no", option.scoring_seconds(tokens)
    return [
        option.format.engine or "none",
        option.format.weights,
        option.place,
        "<-" if picked else "",
        format_gib(option.total),
        format_gib(option.least),
        format_gib(option.room),
        "from disk" if option.fits == "disk" else option.fits,
        str(option.teachers) if fits else "-",
        "-" if option.rate is None else f"{option.rate:.3g}",
        option.source if option.rate is not None else "-",
        "-" if seconds is None else _format_hours(seconds),
    ]


def describe_choice(request: DistillationRequest, plan: DistillationPlan) -> list[str]:
    """Return the hours, the bytes and who waits, in words, and the next command."""
    refused = [f"{one.format.name}: {one.refused}" for one in plan.options if one.refused]
    lines = [
        *_time_lines(request, plan),
        *_student_lines(request, plan),
        _teacher_share(request, plan),
    ]
    read = [
        f"{one.format.name} on {one.device}: {one.streamed}" for one in plan.options if one.streamed
    ]
    return [*lines, *refused, *read, *_next_command(request, plan)]


def _time_lines(request: DistillationRequest, plan: DistillationPlan) -> list[str]:
    option = plan.pick
    if option is None:
        return _too_large(plan.options)
    lines: list[str] = []
    how = f"{option.format.name} on {option.device}"
    seconds = option.scoring_seconds(request.tokens)
    if seconds is None or option.rate is None:
        lines.append(f"{how}: fits; its speed is not known, measure it: --rate")
    else:
        how += f", {option.teachers} teachers" if option.teachers > 1 else ""
        lines.append(
            f"{how}: {_format_hours(seconds)} hours at {option.rate:.3g} tokens/s, {option.source}"
        )
    if option.fits == "disk":
        lines.append(
            f"{format_gib(option.total)} GiB do not fit into {format_gib(option.room)}: each"
            f" forward reads the weights from their file, at {DISK_RATE / 1e9:g} GB/s if that is as"
            " assumed"
        )
    return lines


def _too_large(options: Sequence[TeacherOption]) -> list[str]:
    """Return the format that needs least memory, and how much."""
    able = [one for one in options if one.format.engine is not None and not one.refused]
    if not able:
        return ["No engine computes it on these devices"]
    least = min(able, key=lambda one: one.least)
    whole = (
        "" if least.least == least.total else f"; {format_gib(least.total)} to read the disk once"
    )
    return [
        f"No engine fits: the least is {least.format.name} on {least.place}, with"
        f" {format_gib(least.least)} GiB of {format_gib(least.room)} there{whole}",
        "Give a host with more memory, or use a smaller teacher",
    ]


def _student_lines(request: DistillationRequest, plan: DistillationPlan) -> list[str]:
    """Return whether the student waits for the teachers."""
    if request.student is None or plan.learning is None:
        return []
    (group,) = request.devices.student.groups
    who = f"The student {request.student.name} on {group.device.name}"
    learning = plan.learning
    if not learning.fits:
        return [
            f"{who} needs {format_gib(learning.memory.total)} GiB, {format_gib(learning.room)} "
            "are available: use a smaller one"
        ]
    cost, scoring = plan.learning_cost, None
    if plan.pick is not None:
        scoring = plan.pick.scoring_seconds(request.tokens)
    if cost is None:
        return [f"{who}: its speed is not known"]
    learns = f"{who} learns an epoch in {_format_hours(cost.seconds)} hours, computed"
    if scoring is None:
        return [learns]
    if scoring > cost.seconds:
        waits = 1 - cost.seconds / scoring
        return [f"{learns}, and waits for the teachers {waits:.0%} of the time"]
    return [f"{learns}, and never waits: the teachers are faster"]


def _teacher_share(request: DistillationRequest, plan: DistillationPlan) -> str:
    each = plan.bytes_per_token
    source = "measured" if plan.bytes_measured else "computed"
    return (
        f"In the shared folder: {size_text(each * request.tokens)}, {each:.4g} bytes a token"
        f" ({request.kept.scheme}), {source}"
    )


def _next_command(request: DistillationRequest, plan: DistillationPlan) -> list[str]:
    option, kept = plan.pick, request.kept
    if option is None or not plan.student_fits:
        return []
    settings: dict[str, object] = {"engine": option.format.engine}
    if option.format.quantization != "none":
        settings["quantization"] = option.format.quantization
    elif option.format.takes_dtype:
        settings["dtype"] = option.format.weights
    if option.place != "cpu":
        settings["backend"] = option.place
    # Without a number each teacher's host has one.
    if option.teachers != max(
        1, sum(candidate.place == "cpu" for candidate in request.devices.teachers)
    ):
        settings["processes"] = option.teachers
    if kept.scheme != "topk":
        settings["scheme"] = kept.scheme
    elif kept.top_k != StoredScores().top_k:
        settings["top_k"] = kept.top_k
    if request.length != WINDOW:
        settings["max_seq_len"] = request.length
    command = ["launch", "distill", "up", "--config", "JOB"]
    for key, value in settings.items():
        command += ["--set", f"teacher.{key}={value}"]
    lines = ["next:", f"  {shlex.join(command)}"]
    if option.format.is_gguf:
        lines.insert(0, "Its teacher.model is a GGUF file of these types")
    return lines


def _format_hours(seconds: float) -> str:
    """Return hours for people, as a plan knows them."""
    return f"{seconds / 3600:.3g}" if seconds < 3.6e6 else f"{seconds / 3600:,.0f}"


def teaching_tree(request: DistillationRequest, plan: DistillationPlan) -> dict[str, Any]:
    """Return a plan as JSON (`motley.distillation/1`)."""
    shape, student, learning = request.shape, request.student, plan.learning
    cost = plan.learning_cost
    return {
        "schema": "motley.distillation/1",
        "model": {
            "name": shape.name,
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
            "note": shape.remark,
        },
        "tokens": request.tokens,
        "sequence_length": request.length,
        "options": [_option_tree(one, request.tokens) for one in plan.options],
        "recommended": None if plan.pick is None else plan.options.index(plan.pick),
        "logits": {
            "scheme": request.kept.scheme,
            "bytes_per_token": plan.bytes_per_token,
            "bytes": plan.bytes_per_token * request.tokens,
            "measured": plan.bytes_measured,
        },
        "student": None
        if student is None or learning is None
        else {
            "name": student.name,
            "fits": learning.fits,
            "seconds": None if cost is None else cost.seconds,
        },
        "seconds": plan.total_seconds(request.tokens),
    }


def _option_tree(option: TeacherOption, tokens: float) -> dict[str, Any]:
    tree = asdict(option)
    kind = tree.pop("format")
    return {
        "engine": kind["engine"],
        "weights": kind["weights"],
        "bits": kind["bits"],
        "backend": tree["place"],
        "device": tree["device"],
        "bytes": {"weights": tree["weights"], "working": tree["working"], "minimum": tree["least"]},
        "available_bytes": tree["room"],
        "fits": tree["fits"],
        "refusal": tree["refused"],
        "teachers": tree["teachers"],
        "tokens_per_second": tree["rate"],
        "rate_source": tree["source"],
        "seconds": option.scoring_seconds(tokens),
    }
