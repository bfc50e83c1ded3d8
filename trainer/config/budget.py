"""The settings of the budget guard: a ceiling, and the cost of each host."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from trainer.config.section import Section, build_settings
from trainer.system.errors import InputError

CEILING_VARIABLE = "MOTLEY_BUDGET_CEILING"
CURRENCY_VARIABLE = "MOTLEY_BUDGET_CURRENCY"
LEDGER = "spend.jsonl"
"""The one name of a ledger: configs are shared, and theirs names no other file to append to."""
CURRENCY = r"[A-Z]{3}"
"""A code of ISO 4217, such as EUR."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _parse_seconds(value: Any) -> Any:
    """Read `90s`, `30m`, `2h` or `1d`; numbers are seconds."""
    if not isinstance(value, str):
        return value
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", value):
        return float(found[1]) * _SECONDS[found[2]]
    raise ValueError("must be a duration such as 90s, 30m or 2h")


Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Watts = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class HostRate(Section):
    """The cost of one whole host; its prices are in the currency of the budget."""

    name: str = Field(min_length=1)
    price_hour: Price | None = None
    """Rent per hour."""
    watts: Watts | None = None
    """Its power under load, used while it is not measured."""
    price_kwh: Price | None = None
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The workers on it, whose readings of its power count."""

    @property
    def is_priced(self) -> bool:
        """Whether an hour of it costs a known sum, at least in part."""
        return self.price_hour is not None or self.price_kwh is not None


class BudgetConfig(Section):
    """The budget of a run. `launch` fills in `hosts` and `ledger` from the inventory."""

    ceiling: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Money that the run may cost, over all its attempts; before it is exceeded, the run saves and
    ends."""
    currency: Annotated[str, Field(pattern=rf"^{CURRENCY}$")] | None = None
    """ISO 4217 code, such as `EUR`; a ceiling and prices need it."""
    idle_stop: Annotated[float, BeforeValidator(_parse_seconds), Field(gt=0)] | None = None
    """Time without a completed step after which the run saves and ends: `90s`, `30m`, `2h`, or
    seconds."""
    hosts: tuple[HostRate, ...] = ()
    """`name`, `price_hour`, `watts`, `price_kwh` and `ranks` of each, the coordinator's first;
    `launch` fills them in."""
    ledger: str | None = Field(default=None, min_length=1)
    """The file that records spending, called spend.jsonl; null: the one in `output`."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.ceiling is not None and self.currency is None:
            raise ValueError("a ceiling needs its currency, such as EUR")
        if self.ledger is not None and PurePath(self.ledger).name != LEDGER:
            raise ValueError(f"ledger must be a file called {LEDGER}: lines are appended to it")
        if self.currency is None and any(host.is_priced for host in self.hosts):
            raise ValueError("prices need their currency, such as EUR")
        return self

    def check_prices(self) -> None:
        """Check that the ceiling can be held.

        Raises:
            InputError: no host has a price, so nothing would ever be counted.
        """
        if self.ceiling is not None and not any(host.is_priced for host in self.hosts):
            raise InputError(
                "budget.ceiling: no host has a price, so nothing would be counted; give"
                " motley_price_hour, or motley_price_kwh with motley_watts, in the inventory"
                " (budget.hosts without one)"
            )


def load_budget(tree: dict[str, Any], where: str) -> BudgetConfig:
    """Return a budget.

    Raises:
        InputError: a value is wrong; names `where` and its key.
    """
    return build_settings(BudgetConfig, tree, {}, where)


def apply_environment(
    budget: BudgetConfig | None, environment: Mapping[str, str]
) -> BudgetConfig | None:
    """Return a budget with the environment's ceiling, unless it has one of its own.

    Raises:
        InputError: the variables are no ceiling and currency, or the currency is another one.
    """
    text = environment.get(CEILING_VARIABLE, "")
    if not text or (budget is not None and budget.ceiling is not None):
        return budget
    try:
        ceiling = float(text)
    except ValueError:
        ceiling = math.nan
    if not (math.isfinite(ceiling) and ceiling > 0):
        raise InputError(f"{CEILING_VARIABLE}: must be a number above 0; got {text!r}")
    currency = environment.get(CURRENCY_VARIABLE, "")
    if not re.fullmatch(CURRENCY, currency):
        raise InputError(
            f"{CEILING_VARIABLE}={text} needs its currency: {CURRENCY_VARIABLE}=EUR;"
            f" got {currency!r}"
        )
    budget = budget or BudgetConfig()
    if budget.currency not in (None, currency):
        raise InputError(
            f"two currencies: {CURRENCY_VARIABLE} is {currency}, budget.currency is"
            f" {budget.currency}; give one"
        )
    return budget.model_copy(update={"ceiling": ceiling, "currency": currency})
