"""Run any command under the budget guard."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.errors import ConfigError, OverBudgetError
from launcher.files import default_state_folder, make_private_folder
from launcher.inventory.hosts import Host
from launcher.plan.budget import find_currency, list_host_rates, refuse_unknown_rents
from launcher.runs.records.registry import new_run_id
from trainer.config.budget import BudgetConfig, apply_environment, load_budget
from trainer.planning.budget.budget_watch import BudgetWatch
from trainer.planning.budget.ledger import SPEND_FILE
from trainer.system.process.child import signal_group, start_child

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL; their cost is kept back from the ceiling."""
_LOOK_EVERY = 0.5
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def command_budget(
    hosts: Sequence[Host],
    own: Mapping[str, float | None],
    ceiling: float | None,
    currency: str | None,
    environment: Mapping[str, str],
) -> BudgetConfig:
    """Return the budget of a command: on the hosts of an inventory, or on this machine.

    Args:
        own: what this machine costs, by flags, without hosts of an inventory.

    Raises:
        ConfigError: there is no ceiling or no price, or two of them or two currencies.
        OverBudgetError: a rented host has no price.
    """
    given = [name for name, value in own.items() if value is not None]
    if hosts and given:
        raise ConfigError(f"give --{given[0].replace('_', '-')} or an inventory, not both")
    refuse_unknown_rents(hosts)
    if ceiling is not None and currency is None:
        raise ConfigError(f"--ceiling {ceiling:g} needs its currency: --currency EUR")
    flags = load_budget({"ceiling": ceiling, "currency": currency}, "flags")
    budget = apply_environment(flags, environment)
    if budget is None or budget.ceiling is None:
        raise ConfigError("give --ceiling 5 --currency EUR, or set MOTLEY_BUDGET_CEILING")
    tree = budget.model_dump() | {"currency": find_currency(hosts, budget.currency)}
    here = {"name": platform.node() or "localhost", **own}
    tree["hosts"] = [rate.model_dump() for rate in list_host_rates(hosts, {})] if hosts else [here]
    budget = load_budget(tree, "flags")
    budget.check_prices()
    return budget


def run_guarded(
    argv: Sequence[str], budget: BudgetConfig, name: str | None, grace: float = GRACE
) -> int:
    """Run a command to its end and return its exit code (128 + N if signal N ended it).

    Args:
        name: what its cost is recorded under; the same name adds up to one ceiling. None: its own.

    Raises:
        ConfigError: the command cannot be started, or the ledger not be used.
        OverBudgetError: the guard stopped it, with all that it had started in its group.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise ConfigError(f"{argv[0]}: no such command")
    folder = default_state_folder()
    run = name or new_run_id("command")
    try:
        make_private_folder(folder)
        watch = BudgetWatch(budget, run, folder / SPEND_FILE, stopping=grace)
    except OSError as error:
        raise ConfigError(f"state folder {folder}: {error.strerror}") from None
    if ending := watch.ending:
        watch.close()
        raise OverBudgetError(f"{run}: {ending}; nothing was started")
    try:
        child = start_child([program, *argv[1:]], str(Path.cwd()), os.environ, None)
    except OSError as error:
        watch.close()
        raise ConfigError(f"{argv[0]}: cannot be started: {error.strerror}") from None
    before = {
        number: signal.signal(number, lambda caught, _: signal_group(child.pid, caught))
        for number in _FORWARDED
    }
    reason = ""
    try:
        while child.poll() is None and not reason:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_EVERY)
            if child.returncode is None and (ending := watch.ending):
                reason = ending
                _end_child(child, grace)
    finally:
        signal_group(child.pid, signal.SIGKILL)
        code: int = child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        watch.close()
    if reason:
        raise OverBudgetError(f"{run}: {reason}; the command was stopped")
    return code if code >= 0 else 128 - code


def _end_child(child: subprocess.Popen[bytes], grace: float) -> None:
    signal_group(child.pid, signal.SIGTERM)
    signal_group(child.pid, signal.SIGCONT)
    with suppress(subprocess.TimeoutExpired):
        child.wait(grace)
