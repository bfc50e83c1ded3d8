"""A plan for people: the table of strategies, and one strategy's formulas."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from launcher.views.tables import Column, make_table
from trainer.config.exchange import MIN_RING_SIZE
from trainer.planning.decision import Pick
from trainer.planning.devices import GIB, count_text, format_gib
from trainer.planning.exchange_choice import ChosenExchange
from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.planning.strategies import ROWS_EACH, Request, StrategyOption
from trainer.planning.strategy import Strategy
from trainer.planning.streaming import WorkerPlan

_COLUMNS = (
    Column("STRATEGY"),
    Column("PICK"),
    Column("WEIGHTS", spare=4, right=True),
    Column("GRADS", spare=4, right=True),
    Column("OPTIM", spare=4, right=True),
    Column("ACTIV", spare=4, right=True),
    Column("LOGITS", spare=5, right=True),
    Column("BUFFERS", spare=5, right=True),
    Column("GiB", right=True),
    Column("FITS"),
    Column("RECOMPUTE", spare=3),
    Column("S/STEP", right=True),
    Column("COMPUTE", spare=2, right=True),
    Column("COMM", spare=2, right=True),
    Column("BUBBLE", spare=2, right=True),
    Column("HOURS", right=True),
    Column("KWH", spare=1, right=True),
    Column("COST", spare=1, right=True),
)


def describe_request(request: Request) -> list[str]:
    """Return what is planned, and what was guessed."""
    shape = request.shape
    size = f"{count_text(shape.parameters)} parameters"
    if shape.active_parameters != shape.parameters:
        size += f", {count_text(shape.active_parameters)} active"
    lines = [
        f"{shape.name}: {size}; {request.method}; {request.cluster.text}",
        f"a step: {ROWS_EACH} rows of {request.length} tokens for each device;"
        f" {request.efficiency:.0%} of the devices' peak assumed",
    ]
    return lines + [f"note: {text}" for text in (shape.remark, *request.cluster.remarks) if text]


def plan_table(
    request: Request,
    options: Sequence[StrategyOption],
    picked: StrategyOption | None,
    width: int | None,
) -> Table:
    """Return a line for each strategy; the one that is picked is marked."""
    rows = [_option_row(request, option, option is picked) for option in options]
    return make_table(_COLUMNS, rows, width)


def describe_streams(options: Sequence[StrategyOption]) -> list[str]:
    """Return where and how fast options read layers at each use, by their devices."""
    return [
        f"{option.title}: {worker.describe()}" for option in options for worker in option.workers
    ]


def describe_choice(request: Request, pick: Pick, again: Mapping[str, str]) -> list[str]:
    """Return what is picked and why, in words, and the next command.

    Args:
        again: the options that name a run's inventory and model.
    """
    chosen, second = pick.option, pick.second
    if chosen is None:
        return [*pick.lines]
    of = f"fits in {format_gib(chosen.memory.total)} of {format_gib(chosen.room)} GiB"
    if second is None:
        beside = "; nothing else fits"
    else:
        beside = f", {_describe_speed(chosen, second)} {second.title}"
        if second.training.recompute != "none" and chosen.training.recompute == "none":
            beside += ", which must recompute"
    command = _next_command(chosen, again, request.cluster.hosts)
    return [f"{chosen.title} {of}{beside}.", f"Why: {pick.reason}.", "next:", f"  {command}"]


def _describe_speed(chosen: StrategyOption, second: StrategyOption) -> str:
    if chosen.time is None or second.time is None:
        return f"with {format_gib(second.memory.total)} GiB next is"
    faster = second.seconds / chosen.seconds
    if 0.97 < faster < 1.03:
        return "as fast as"
    if faster > 1:
        return f"{faster:.2g} times as fast as"
    return f"at {faster:.0%} of the speed of"


def _exchange_lines(strategy: Strategy, choice: ChosenExchange | None) -> list[str]:
    """Return the settings of what was chosen for the link."""
    if choice is None or choice.is_exact:
        return []
    codec = f"exchange.codec={choice.setting}"
    if strategy.data != "diloco":
        return [codec]
    return ["exchange.schedule=rounds", f"exchange.inner_steps={choice.every}", codec]


def _next_command(chosen: StrategyOption, again: Mapping[str, str], hosts: int) -> str:
    """Return the command that starts a strategy, with places for what a plan does not know."""
    strategy, given = chosen.strategy, {"--model": "DIR", **again, "--data": "FILE"}
    settings = {"qlora": ["model.quantization=nf4"], "full": ["method=full"], "lora": []}[
        chosen.training.method
    ]
    own = strategy.data in ("motley", "diloco") or strategy.world == 1
    if own:
        settings += _exchange_lines(strategy, chosen.time.choice if chosen.time else None)
        start = ["launch", "cluster", "up", *(part for pair in given.items() for part in pair)]
    else:
        if strategy.data != "ddp" or strategy.tensor > 1 < strategy.replicas:
            settings.append("parallel.data=fsdp")
        if strategy.tensor > 1:
            settings.append(f"parallel.tensor={strategy.tensor}")
        if strategy.sequence:
            settings.append("parallel.sequence=true")
        if strategy.stages > 1:
            settings += [
                f"parallel.pipeline.stages={strategy.stages}",
                f"parallel.pipeline.schedule={strategy.schedule}",
            ]
        meeting = f"--nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint HOST:29500"  # each host's
        ranks = (
            f"torchrun --nproc-per-node {strategy.world // hosts} {meeting if hosts > 1 else ''}"
        )
        start = f"{ranks} -m trainer finetune --distributed".split()
        start += [given["--model"], "--data", "FILE"]
    return shlex.join([*start, *(part for one in settings for part in ("--set", one))])


def _option_row(request: Request, option: StrategyOption, picked: bool) -> list[str]:
    parts = [format_gib(size) for size in option.memory.bytes_by_part().values()]
    time, cost = option.time, option.cost
    seconds = ["-"] * 4
    if time is not None:
        strategy = option.strategy
        seconds = [
            _format_figure(time.total),
            _format_figure(time.compute.value),
            _format_figure(time.exposed.value) if strategy.world > 1 else "-",
            _format_figure(time.bubble.value) if strategy.stages > 1 else "-",
        ]
    hours = kwh = money = "-"
    if cost is not None:
        hours = _format_figure(cost.seconds / 3600)
        kwh = "-" if cost.kwh is None else _format_figure(cost.kwh)
        if cost.money is not None:
            money = f"{cost.money:.2f} {request.prices.currency}"
    return [
        option.title,
        "<-" if picked else "",
        *parts,
        format_gib(option.memory.total),
        "yes" if option.fits else "not yet" if option.has_memory else "no",
        option.training.recompute,
        *seconds,
        hours,
        kwh,
        money,
    ]


def _format_figure(value: float) -> str:
    """Return three digits of a figure, without an exponent."""
    if value >= 1000:
        return f"{value:,.0f}"
    return "<0.001" if 0 < value < 0.001 else f"{value:.3g}"


def explain_option(option: StrategyOption) -> list[str]:
    """Return each formula of a strategy with its numbers put in, and its source."""
    training, strategy = option.training, option.strategy
    lines = [
        f"{option.title}: {strategy.microbatches} micro-batches of {training.rows} x"
        f" {training.length} tokens, recompute {training.recompute}"
    ]
    for part, term in option.memory.list_terms():
        lines += [
            f"{part}: {term.name} = {term.value / GIB:.3f} GiB",
            f"    {term.formula}",
            f"    = {term.with_numbers}",
            f"    {term.source}",
        ]
    lines.append(f"together {option.memory.total / GIB:.2f} GiB of {option.room / GIB:.2f} usable")
    for term in option.time.list_terms() if option.time is not None else ():
        lines += [
            f"time: {term.name} = {term.value:.4g} s",
            f"    {term.formula}",
            f"    = {term.with_numbers}",
            f"    {term.source}",
        ]
    if option.time is not None and option.time.choice is not None:
        lines.append("the first that adds at most 5 % to a step is taken, else the least:")
        for one in option.time.choice.candidates:
            when = "each step" if one.every == 1 else f"once in {one.every} steps"
            lines.append(f"    {one.codec} {when}: {one.exposed_ms:.3g} ms")
    if strategy.title == "DDP" and strategy.world >= MIN_RING_SIZE:
        lines.append(
            "as a run, on hosts whose network you trust: launch cluster up --set"
            " exchange.topology=ring"
        )
    return lines


def plan_tree(request: Request, options: Sequence[StrategyOption], pick: Pick) -> dict[str, Any]:
    """Return a plan as JSON (`motley.strategies/2`)."""
    return {
        "schema": "motley.strategies/2",
        "model": {
            "name": request.shape.name,
            "parameters": request.shape.parameters,
            "active_parameters": request.shape.active_parameters,
            "note": request.shape.remark,
        },
        "cluster": request.cluster.text,
        "method": request.method,
        "precision": request.precision,
        "options": [_option_tree(option) for option in options],
        "recommended": pick.option.key if pick.option is not None else None,
        "reasons": pick.lines,
    }


def _option_tree(option: StrategyOption) -> dict[str, Any]:
    time = option.time
    return {
        "strategy": option.key,
        "fits": option.fits,
        "available_bytes": option.room,
        "total_bytes": option.memory.total,
        "bytes_by_part": option.memory.bytes_by_part(),
        "rows": option.training.rows,
        "microbatches": option.strategy.microbatches,
        "recompute": option.training.recompute,
        "seconds": None
        if time is None
        else {
            "step": time.total,
            "compute": time.compute.value,
            "exposed": time.exposed.value,
            "bubble": time.bubble.value,
        },
        "exchange": None if time is None or time.choice is None else _choice_tree(time.choice),
        "workers": [_worker_tree(worker) for worker in option.workers],
        "cost": None if option.cost is None else asdict(option.cost),
    }


def _worker_tree(worker: WorkerPlan) -> dict[str, Any]:
    reading, resident = worker.reading, worker.training.resident
    return {
        "device": worker.pool.device.name,
        "count": worker.pool.count,
        "layers": worker.layers,
        "resident": worker.layers if resident is None else max(0, resident),
        "head_resident": resident != HEAD_STREAMED,
        "total_bytes": worker.memory.total,
        "available_bytes": worker.room,
        "refusal": worker.refused or None,
        "tokens_per_second": worker.rate,
        "reading": None
        if reading is None
        else {
            "source": reading.source.name.removeprefix("the "),
            "bytes_per_second": reading.source.rate,
            "assumed": reading.source.is_assumed,
            "tokens": reading.tokens,
            "hidden_from": reading.hidden_from,
            "speed": reading.speed,
        },
    }


def _choice_tree(choice: ChosenExchange) -> dict[str, Any]:
    return {
        "codec": choice.codec,
        "interval": choice.every,
        "within_limit": choice.within,
        "candidates": [
            {"codec": one.codec, "interval": one.every, "exposed_ms": one.exposed_ms}
            for one in choice.candidates
        ],
    }
