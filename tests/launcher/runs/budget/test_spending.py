"""`launch spend`, the refusal of a start, a guarded command, and what idle hosts cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.cli import run
from launcher.errors import ConfigError, OverBudgetError
from launcher.hosts.local import LocalConnection
from launcher.hosts.survey import Survey
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.placement import place_run
from launcher.plan.plan import LaunchPlan
from launcher.plan.plan_context import PlanContext
from launcher.runs.budget.authorisation import authorise_start
from launcher.runs.budget.spending import SpendTotal, idle_hosts, read_spend, sum_spend
from launcher.runs.estimate import estimate_cost
from tests import ROOT
from tests.trainer.small_model import write_data, write_model
from trainer.config.budget import BudgetConfig
from trainer.config.run import RunConfig, load_config
from trainer.planning.budget.ledger import SpendLedger, SpendRecord

pytestmark = pytest.mark.cluster

DAY = 86400.0
HOUR = ("--ceiling", "5", "--currency", "EUR", "--price-hour")


def line(run: str, host: str, until: float, money: float, **more: Any) -> SpendRecord:
    fields = {"seconds": 3600.0, "kwh": 1.0, "measured_seconds": 0.0, "currency": "EUR", **more}
    return SpendRecord(run_id=run, host=host, until=until, cost=money, **fields)


LINES = [
    line("first", "a", 0.5 * DAY, 1.0),
    line("first", "b", 0.5 * DAY, 2.0, measured_seconds=3600.0),
    line("second", "a", 1.5 * DAY, 4.0),
    line("second", "a", 1.6 * DAY, 8.0, currency="USD"),
]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("MOTLEY_BUDGET_CEILING", raising=False)
    return tmp_path / "state"


def test_totals_by_run_host_and_day() -> None:
    def money(by: Any) -> list[tuple[str, float, str | None]]:
        return [(total.name, total.cost, total.currency) for total in sum_spend(LINES, by)]

    assert money("run") == [("first", 3.0, "EUR"), ("second", 4.0, "EUR"), ("second", 8.0, "USD")]
    assert money("host") == [("a", 5.0, "EUR"), ("b", 2.0, "EUR"), ("a", 8.0, "USD")]
    days = [("1970-01-01", 3.0, "EUR"), ("1970-01-02", 4.0, "EUR"), ("1970-01-02", 8.0, "USD")]
    assert money("day") == days
    assert sum_spend(LINES, "run")[0] == SpendTotal("first", 7200.0, 2.0, 0.5, 3.0, "EUR")


def test_launch_spend(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["spend"]) == 0
    assert "nothing has been recorded" in capsys.readouterr().out
    SpendLedger(state / "spend.jsonl").append_records(LINES)
    assert run(["spend", "--by", "host"]) == 0
    shown = capsys.readouterr().out
    assert "5.00 EUR" in shown
    assert "8.00 USD" in shown
    assert [row.split()[-2] for row in shown.splitlines() if row.startswith("all")] == [
        "7.00",
        "8.00",
    ]
    assert run(["spend", "--run", "first", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["schema"], tree["by"]) == ("motley.spend/2", "run")
    assert [total["cost"] for total in tree["totals"]] == [3.0]
    with (state / "spend.jsonl").open("ab") as file:
        file.write(b"rubbish\n")
    assert run(["spend"]) == 2
    assert "spend.jsonl:5: not a line of spending" in capsys.readouterr().err


def test_two_names_of_one_machine_are_read_once(state: Path) -> None:
    SpendLedger(state / "spend.jsonl").append_records(LINES)
    place_ = SimpleNamespace(connection=LocalConnection(), folder=state, host="a")
    twice = SimpleNamespace(
        ask_hosts=lambda read, **_: SimpleNamespace(
            found={"a": read(place_), "b": read(place_)}, errors={}
        )
    )
    registry: Any = twice
    assert read_spend(registry, lambda _: None) == LINES


def test_idle_hosts() -> None:
    hosts = [
        Host(name="rack", price_hour=2.0, currency="EUR"),
        Host(name="busy", price_hour=9.0, currency="EUR"),
        Host(name="home"),
    ]
    processes = [SimpleNamespace(name="w0", host="busy"), SimpleNamespace(name="w1", host="rack")]
    states = {"w0": SimpleNamespace(is_over=False), "w1": SimpleNamespace(is_over=True)}
    plan = SimpleNamespace(plan=SimpleNamespace(processes=processes))
    view: Any = SimpleNamespace(run=plan, processes=states, state="running", training={})
    (idle,) = idle_hosts(hosts, view, now=0.0)
    assert (idle.name, idle.hourly_cost, idle.idle_cost) == ("rack", 2.0, None)
    states["w0"].is_over, view.state, view.training = True, "completed", {"updated": 1000.0}
    found = idle_hosts(hosts, view, now=1000.0 + 5400)
    assert [(host.name, host.idle_cost) for host in found] == [("rack", 3.0), ("busy", 13.5)]
    assert len(idle_hosts(hosts, None, now=0.0)) == 2


# A command


def guarded(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "launcher.cli", "budget", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def test_a_command_that_stays_below_the_ceiling_ends_as_it_does(state: Path) -> None:
    process = guarded(*HOUR, "1", "--name", "nightly", "--", "sh", "-c", "echo out; exit 4")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (4, "out\n", "")
    begin, record = SpendLedger(state / "spend.jsonl").read_records()
    assert (begin.run_id, begin.seconds, begin.is_final) == ("nightly", 0.0, False)
    assert (record.run_id, record.currency, record.is_final) == ("nightly", "EUR", True)
    assert record.cost == pytest.approx(record.seconds / 3600)


def test_a_command_is_stopped_in_order_with_all_it_started(state: Path) -> None:
    # A second costs 1, and 1 second is kept for the end: it may run for at most 4.
    script = "trap 'echo saved; exit 0' TERM; sleep 600 & wait"
    process = guarded(*HOUR, "3600", "--grace", "1", "--", "sh", "-c", script)
    out, err = process.communicate(timeout=120)
    # That the output has ended says too that nothing is left that could write to it.
    assert (process.returncode, out) == (7, "saved\n")
    assert "of 5.00 EUR are spent" in err
    assert err.count("\n") == 1


def test_the_death_of_the_guard_is_the_commands(state: Path) -> None:
    process = guarded(*HOUR, "1", "--", "sh", "-c", "echo ready; exec sleep 600")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert process.stdout.read() == "", "its end of the pipe is closed: it is gone"
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--ceiling", "5"), 2, "--ceiling 5 needs its currency: --currency EUR"),
        (("--ceiling", "-5", "--currency", "EUR"), 2, "'--ceiling': -5.0 is not in the range x>0"),
        (("--currency", "EUR", "--price-hour", "1"), 2, "give --ceiling 5 --currency EUR"),
        (("--ceiling", "5", "--currency", "EUR"), 2, "no host has a price"),
        ((*HOUR, "-1"), 2, "'--price-hour': -1.0 is not in the range x>=0"),
        ((*HOUR, "36000"), 7, "nothing was started"),
    ],
)
def test_budgets_of_commands_that_cannot_be_used(
    words: tuple[str, ...], code: int, said: str, state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["budget", *words, "--", "echo", "started"]) == code
    out, err = capfd.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert out == ""


# The refusal of a start


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authorise")
    write_data(folder / "train.jsonl", count=200)
    write_model(folder / "model", folder / "train.jsonl")
    return folder


class Start:
    """A start on this machine, at a price an hour."""

    def __init__(self, inputs: Path, folder: Path, price: float = 1.0, **host: Any) -> None:
        card = Device("cpu", "cpu", threads=1)
        self.host = Host(name="box", connection="local", devices=(card,), cores=1, memory=1 << 34)
        self.host = replace(self.host, price_hour=price, currency="EUR", **host)
        hosts = [{"name": "box", "price_hour": price}]
        self.ledger = folder / "spend.jsonl"
        budget = BudgetConfig.model_validate(
            {"ceiling": 5, "currency": "EUR", "hosts": hosts, "ledger": str(self.ledger)}
        )
        self.others: list[Host] = []
        self.config: RunConfig = load_config(
            None,
            {
                "num_classes": 3,
                "model.path": str(inputs / "model"),
                "data.train": str(inputs / "train.jsonl"),
                "output": str(folder / "out"),
                "training.epochs": 1000,
            },
        ).model_copy(update={"budget": budget})

    def settled(self) -> tuple[LaunchPlan, Survey]:
        setting = PlanContext(run_id="r", trainer_command=("t",), state_folder="/s", routes={})
        hosts = (self.host, *self.others)
        plan = place_run(hosts, self.config, None, setting)
        return plan, Survey(hosts=hosts, connections={"box": LocalConnection()})

    def cost(self, done: int) -> float:
        plan, found = self.settled()
        cost = estimate_cost(self.config, plan, found, done)
        assert cost is not None
        return cost.seconds

    def ask(self) -> list[str]:
        plan, found = self.settled()
        said: list[str] = []
        authorise_start(plan, self.config, found, said.append)
        return said


def test_what_was_spent_counts_and_so_does_what_is_done(inputs: Path, tmp_path: Path) -> None:
    start = Start(inputs, tmp_path)
    SpendLedger(start.ledger).append_records(
        [line("r", "box", 1.0, 5.0), line("x", "box", 1.0, 99.0)]
    )
    with pytest.raises(OverBudgetError, match=r"^5\.00 EUR were spent, and 0\.0"):
        start.ask()
    dear = Start(inputs, tmp_path / "b", price=1e4)
    with pytest.raises(OverBudgetError):
        dear.ask()
    SpendLedger(dear.ledger).append_records([line("r", "box", 1.0, 0.5)])
    status = {"schema": "motley.status/2", "run_id": "r", "step": 12_499}
    (tmp_path / "b" / "out").mkdir(parents=True)
    (tmp_path / "b" / "out" / "status.json").write_text(json.dumps(status))
    assert "0.50 EUR were spent" in dear.ask()[0]


def test_a_round_counts_as_its_inner_steps(inputs: Path, tmp_path: Path) -> None:
    start = Start(inputs, tmp_path)
    whole = start.cost(0)
    assert start.cost(6250) == pytest.approx(whole / 2)  # of 1,000 epochs of 200 by 16
    rounds = {
        "exchange.schedule": "rounds",
        "exchange.inner_steps": 10,
        "exchange.rounds_after": 50,
    }
    start.config = start.config.with_settings(rounds)
    assert start.cost(50 + 620) == pytest.approx(whole / 2)


def test_the_measured_link_is_planned_with(inputs: Path, tmp_path: Path) -> None:
    start = Start(inputs, tmp_path)
    start.host = replace(start.host, coordinator=True, bind_address="10.0.0.1")
    start.others = [replace(start.host, name="far", coordinator=False, connection="ssh")]
    usual = start.cost(0)
    start.host = replace(start.host, link_rates=(("far", 1e6),))
    assert start.cost(0) > 2 * usual  # a thousandth of the usual rate


def test_a_ceiling_without_any_price_is_refused(inputs: Path, tmp_path: Path) -> None:
    start = Start(inputs, tmp_path)
    budget = BudgetConfig(ceiling=5, currency="EUR")
    start.config = start.config.model_copy(update={"budget": budget})
    start.host = replace(start.host, price_hour=None, currency=None)
    with pytest.raises(ConfigError, match="no host has a price"):
        start.ask()


def test_what_cannot_be_planned_is_said(inputs: Path, tmp_path: Path) -> None:
    start = Start(inputs, tmp_path)
    start.config = start.config.with_settings({"model.path": str(tmp_path / "absent")})
    (said,) = start.ask()
    assert "cannot be planned" in said
    SpendLedger(start.ledger).append_records([line("r", "box", 1.0, 6.0)])
    with pytest.raises(OverBudgetError, match=r"^6\.00 EUR were spent"):
        start.ask()
