"""The section `budget`, and the environment's ceiling: every mistake is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.config.budget import BudgetConfig, apply_environment
from trainer.config.run import load_config, setting_keys
from trainer.system.errors import InputError


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"ceiling": 5}, "budget: a ceiling needs its currency"),
        ({"ledger": "/home/you/.bash_profile"}, "ledger must be a file called spend.jsonl"),
        ({"ceiling": -1, "currency": "EUR"}, "budget.ceiling: input should be greater than 0"),
        ({"ceiling": 0, "currency": "EUR"}, "budget.ceiling: input should be greater than 0"),
        ({"ceiling": float("nan"), "currency": "EUR"}, "budget.ceiling: input should be"),
        ({"ceiling": 5, "currency": "euro"}, "budget.currency: string should match"),
        ({"idle_stop": "30 minutes"}, "budget.idle_stop: must be a duration such as 90s"),
        ({"idle_stop": "0s"}, "budget.idle_stop: input should be greater than 0"),
        ({"hosts": [{"name": "a", "price_hour": 1}]}, "budget: prices need their currency"),
        ({"currency": "EUR", "hosts": [{"name": "a", "price_hour": -1}]}, "budget.hosts.0"),
        ({"ceilling": 5}, "did you mean: budget.ceiling"),
    ],
)
def test_a_budget_that_cannot_be_used(budget: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as found:
        load_config("quickstart", {"budget": budget})
    assert words in str(found.value)
    assert "\n" not in str(found.value)


def test_a_budget_survives_being_written(tmp_path: Path) -> None:
    given = {"ceiling": 5, "currency": "EUR", "idle_stop": "30m"}
    given["hosts"] = [{"name": "a", "price_hour": 1.5, "ranks": [0, 1]}]
    config = load_config("quickstart", {"budget": given})
    assert config.budget is not None
    assert config.budget.idle_stop == 1800.0
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == config
    assert "budget.ceiling" in setting_keys()
    assert not any(key.startswith("budget.hosts.") for key in setting_keys())


def test_a_higher_ceiling_may_continue_a_run() -> None:
    before = load_config("quickstart", {"budget": {"ceiling": 5, "currency": "EUR"}})
    after = load_config("quickstart", {"budget": {"ceiling": 9, "currency": "EUR"}})
    assert before.list_changes(after) == []
    assert before.agreement_digest() == after.agreement_digest()


def test_the_environments_ceiling_is_for_configs_without_one() -> None:
    given = {"MOTLEY_BUDGET_CEILING": "7.5", "MOTLEY_BUDGET_CURRENCY": "EUR"}
    found = apply_environment(None, given)
    assert found is not None
    assert (found.ceiling, found.currency) == (7.5, "EUR")
    own = BudgetConfig(ceiling=1, currency="USD")
    assert apply_environment(own, given) == own
    idle = apply_environment(BudgetConfig(idle_stop=60.0), given)
    assert idle is not None
    assert (idle.ceiling, idle.idle_stop) == (7.5, 60.0)
    assert apply_environment(None, {}) is None


@pytest.mark.parametrize(
    ("ceiling", "currency", "words"),
    [
        ("five", "EUR", "MOTLEY_BUDGET_CEILING: must be a number above 0; got 'five'"),
        ("-5", "EUR", "MOTLEY_BUDGET_CEILING: must be a number above 0; got '-5'"),
        ("inf", "EUR", "MOTLEY_BUDGET_CEILING: must be a number above 0; got 'inf'"),
        ("5", "", "MOTLEY_BUDGET_CEILING=5 needs its currency: MOTLEY_BUDGET_CURRENCY=EUR"),
        ("5", "USD", "two currencies: MOTLEY_BUDGET_CURRENCY is USD, budget.currency is EUR"),
    ],
)
def test_an_environment_that_cannot_be_used(ceiling: str, currency: str, words: str) -> None:
    given = {"MOTLEY_BUDGET_CEILING": ceiling, "MOTLEY_BUDGET_CURRENCY": currency}
    with pytest.raises(InputError) as found:
        apply_environment(BudgetConfig(currency="EUR"), given)
    assert words in str(found.value)
