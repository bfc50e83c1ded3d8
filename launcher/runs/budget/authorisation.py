"""Check the estimated cost of a start against its ceiling, before anything is started."""

from __future__ import annotations

from collections.abc import Callable

from launcher.errors import ConfigError, OverBudgetError
from launcher.hosts.base import Connection
from launcher.hosts.survey import Survey
from launcher.plan.budget import refuse_unknown_rents
from launcher.plan.plan import LaunchPlan
from launcher.runs.budget.spending import MOST_SPEND
from launcher.runs.estimate import estimate_cost
from launcher.runs.records.self_reports import read_training
from launcher.terminal import show_progress
from trainer.config.budget import BudgetConfig
from trainer.config.distill_job import DistillJob
from trainer.config.run import RunConfig
from trainer.planning.budget.ledger import earlier_attempts, parse_spend
from trainer.planning.cost import money_text


def authorise_start(
    plan: LaunchPlan, job: RunConfig | DistillJob, found: Survey, report: Callable[[str], None]
) -> None:
    """Refuse a start whose cost is unknown, or would exceed its ceiling.

    Raises:
        OverBudgetError: a rented host has no price; or the cost so far plus the planned rest
            exceeds the ceiling.
        ConfigError: the ledger cannot be used.
        UnreachableError: a host does not answer.
    """
    refuse_unknown_rents(plan.hosts)
    budget = job.budget
    if budget is None or budget.ceiling is None:
        return
    budget.check_prices()
    there = found.connections[plan.leader.host]
    spent = _read_earlier_cost(there, plan, budget)
    with show_progress("estimating the cost"):
        cost = estimate_cost(job, plan, found, _read_done_steps(there, plan) if spent else 0)
    unit, ceiling = budget.currency, budget.ceiling
    before = f"{money_text(spent)} {unit} were spent, and " if spent else ""
    if cost is None or cost.money is None:
        if spent >= ceiling:
            raise OverBudgetError(
                f"{money_text(spent)} {unit} were spent, {_ceiling_remedy(ceiling, unit)}"
            )
        report(
            f"budget: {before}the remaining cost cannot be planned for this model and these "
            "devices; the run"
            f" stops before it costs {money_text(ceiling)} {unit}"
        )
        return
    money, hours = cost.money, cost.seconds / 3600
    time = f"{hours:.2f} h" if hours >= 0.1 else f"{cost.seconds:.0f} s"
    summary = f"{before}{money_text(money)} {unit} are planned for {time}"
    if spent + money > ceiling:
        raise OverBudgetError(f"{summary}, {_ceiling_remedy(ceiling, unit)}")
    report(f"budget: {summary}; the ceiling is {money_text(ceiling)} {unit}")


def _ceiling_remedy(ceiling: float, unit: str | None) -> str:
    return (
        f"and the ceiling is {money_text(ceiling)} {unit}: raise it (--set budget.ceiling=...),"
        " train fewer steps, or use cheaper hosts; nothing was started"
    )


def _read_earlier_cost(there: Connection, plan: LaunchPlan, budget: BudgetConfig) -> float:
    """Return what earlier attempts of the run have cost."""
    assert budget.ledger is not None
    try:
        data = there.read(budget.ledger, limit=MOST_SPEND)
    except FileNotFoundError:
        return 0.0
    except OSError as error:
        raise ConfigError(f"host {plan.leader.host}: {budget.ledger}: {error.strerror}") from None
    records = parse_spend(data, f"host {plan.leader.host}: {budget.ledger}")
    return earlier_attempts(records, plan.run_id, budget.currency).money


def _read_done_steps(there: Connection, plan: LaunchPlan) -> int:
    """Return the steps that earlier attempts of the run have done."""
    return (read_training(there, plan, None) or {}).get("step") or 0
