"""`launch plan`: memory, time and cost of every strategy, before anything is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.commands.distillation_plan import (
    distillation_options,
    print_distillation_plan,
    refuse_mixed,
)
from launcher.commands.options import Currency, json_option
from trainer.system.commandline.number import Number
from trainer.system.commandline.options import PATH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.planning.strategies import Request


class _Count(click.ParamType[float]):
    """A number with an optional K, M, B or T."""

    name = "count"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        text = str(value).strip().upper()
        factor = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}.get(text[-1:], 1.0)
        try:
            count = float(text[:-1] if factor > 1 else text) * factor
        except ValueError:
            count = 0.0
        if not 0 < count < 1e18:
            self.fail(f"{value!r} is not a number of tokens, such as 50M", param, ctx)
        return count


@click.command()
@click.option("--model", metavar="DIR|NAME", help="A folder, a GGUF file or a hub name.")
@click.option("--shape", metavar="NAME", help="A named shape, e.g. 7b, qwen3-4b, gpt3-175b.")
@click.option(
    "--inventory",
    "-i",
    type=PATH,
    envvar="MOTLEY_INVENTORY",
    help="An Ansible inventory, whose hosts are queried; else this machine.",
)
@click.option(
    "--cluster",
    "text",
    metavar="TEXT",
    help="Devices, e.g. '8xA100-80G, 2 hosts, 9gbit', 'a: L4 64GB; b: 2xT4; 1gbit'.",
)
@click.option(
    "--link",
    metavar="RATE",
    help="Link between hosts, e.g. 1gbit or '50mbit, 20ms, half duplex'.",
)
@click.option("--tokens", type=_Count(), default="50M", help="Tokens to train on.")
@click.option(
    "--method",
    type=click.Choice(["lora", "qlora", "full"]),
    default="lora",
    help="Adapters, adapters over 4-bit weights (qlora), or all weights.",
)
@click.option("--length", type=click.IntRange(min=1), default=2048, help="Tokens per row.")
@click.option(
    "--rank", type=click.IntRange(min=1), default=16, help="Rank of each adapter: lora.lora_rank."
)
@click.option(
    "--adapted-layers",
    type=click.IntRange(min=1),
    help="Layers with adapters: lora.layers_to_transform.  [default: all]",
)
@click.option("--freeze-a", is_flag=True, help="LoRA trains B alone: lora.freeze_a.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16", "fp16"]),
    default="auto",
    help="Format of matrix products; auto: 16 bits on accelerators.",
)
@click.option(
    "--gradient-checkpointing",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    help="Recompute layers in the backward pass; auto: the fastest that fits.",
)
@click.option("--price-kwh", type=Number(min=0), help="Price of a kWh, for the cost of the run.")
@click.option("--price-hour", type=Number(min=0), help="Price of a device for an hour.")
@click.option(
    "--currency",
    type=Currency(),
    default="",
    show_default=False,
    metavar="CODE",
    help="Currency of both prices, e.g. EUR.",
)
@click.option("--explain", metavar="STRATEGY", help="Show a strategy's formulas, e.g. fsdp.")
@distillation_options
@json_option
def plan(
    model: str | None,
    shape: str | None,
    inventory: Path | None,
    text: str | None,
    link: str | None,
    tokens: float,
    method: Any,
    length: int,
    rank: int,
    adapted_layers: int | None,
    freeze_a: bool,
    precision: Any,
    gradient_checkpointing: str,
    price_kwh: float | None,
    price_hour: float | None,
    currency: str,
    explain: str | None,
    distill: bool,
    student: str | None,
    rates: tuple[str, ...],
    scheme: Any,
    top_k: int,
    as_json: bool,
) -> None:
    """Estimate memory, time and cost of each strategy, and pick one; start nothing.

    With --distill: of each engine that may compute a teacher.

    Exits with 2 for a model that does not train, with 4 if nothing fits.
    """
    from launcher.errors import ConfigError
    from launcher.runs.plan_inputs import (
        inventory_cluster,
        measure_cluster,
        model_shape,
        untrained_model,
    )
    from trainer.planning.cluster_text import parse_cluster
    from trainer.planning.cost import Prices
    from trainer.planning.logits_size import StoredScores
    from trainer.planning.strategies import Request, needs_reading

    refuse_mixed(distill)
    if text is not None and (inventory is not None and not _from_environment("inventory")):
        raise ConfigError("give --inventory or --cluster, not both")
    if (price_kwh is not None or price_hour is not None) and not currency:
        raise ConfigError("a price needs its currency: add --currency EUR")
    model = None if model is None else untrained_model(model)
    found = model_shape(model, shape, None if distill else "full" if method == "full" else "lora")
    if distill:
        kept = StoredScores(scheme=scheme, top_k=top_k)
        print_distillation_plan(
            found, student, tokens, length, kept, inventory, text, rates, as_json
        )
        return
    prices, survey = Prices(kwh=price_kwh, hour=price_hour, currency=currency), None
    if text is not None:
        cluster = parse_cluster(text, link)
    else:
        cluster, own, survey = inventory_cluster(inventory, link)
        prices = own if price_kwh is None and price_hour is None else prices
    request = Request(
        shape=found,
        cluster=cluster,
        method=method,
        rank=rank,
        frozen_a=freeze_a,
        adapted_layers=adapted_layers,
        length=length,
        tokens=tokens,
        precision=precision,
        prices=prices,
        recompute={"auto": None, "on": True, "off": False}[gradient_checkpointing],
    )
    if survey is not None and model is not None and needs_reading(request):
        request = replace(request, cluster=measure_cluster(survey, cluster, model))
    named = {"--inventory": inventory if text is None else None, "--model": model}
    again = {option: str(value) for option, value in named.items() if value is not None}
    _print_plan(request, explain, as_json, again)


def _from_environment(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.ENVIRONMENT


def _print_plan(
    request: Request, explain: str | None, as_json: bool, again: Mapping[str, str]
) -> None:
    """Print the table and the pick, one strategy's formulas, or all as JSON.

    Args:
        again: options of this command that the next one takes too.

    Raises:
        ConfigError: the strategy to explain is not in the plan.
        PreflightError: nothing fits.
    """
    from launcher.errors import ConfigError, PreflightError
    from launcher.views import planning, render
    from trainer.planning.decision import pick_strategy
    from trainer.planning.strategies import list_options

    found = list_options(request)
    chosen = pick_strategy(request, found)
    if as_json:
        render.print_json(planning.plan_tree(request, found, chosen))
    elif explain is not None:
        option = next((one for one in found if one.key == explain.lower()), None)
        if option is None:
            known = ", ".join(one.key for one in found)
            raise ConfigError(f"--explain {explain}: not in this plan; it has {known}")
        for line in planning.explain_option(option):
            render.print_line(line)
        return
    else:
        for line in planning.describe_request(request):
            render.print_line(line)
        table = planning.plan_table(request, found, chosen.option, render.terminal_width())
        render.make_console().print(table)
        render.say_result(planning.describe_streams(found))
        render.say_result(planning.describe_choice(request, chosen, again))
    if chosen.option is None:
        raise PreflightError("no strategy fits these devices")
