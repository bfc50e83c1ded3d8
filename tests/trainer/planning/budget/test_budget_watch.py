"""The guard at work: what it writes, what it takes over from earlier attempts, and a whole run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.clock import Clock
from tests.trainer.small_model import write_data, write_model
from trainer.config.budget import BudgetConfig
from trainer.config.run import RunConfig, load_config
from trainer.planning.budget.budget_watch import BudgetWatch
from trainer.planning.budget.ledger import SpendLedger
from trainer.planning.budget.power import PowerMeter
from trainer.run.composition import roles
from trainer.run.composition.roles import Placement
from trainer.system.errors import InputError

HOSTS = [
    {"name": "rack", "price_hour": 3.6, "ranks": [1, 2]},
    {"name": "home", "watts": 1000.0, "price_kwh": 0.36, "ranks": [0]},
]
A_SECOND = 3.6 / 3600 + 0.36 / 3600


class Desk:
    """Where attempts of a run are made, with clocks that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "spend.jsonl"
        self.clock, self.wall = Clock(50.0), Clock(1_000_000.0)
        self.meter = PowerMeter(folder, folder, folder / "none")

    def open(self, run: str = "run", **budget: Any) -> BudgetWatch:
        tree = {"ceiling": 10.0, "currency": "EUR", "hosts": HOSTS, **budget}
        return BudgetWatch(
            BudgetConfig.model_validate(tree),
            run,
            self.path,
            every=10,
            total_steps=100,
            clock=self.clock,
            wall=self.wall,
            meter=self.meter,
        )

    def wait(self, watch: BudgetWatch | None, seconds: float) -> str | None:
        """Let time pass in ticks; return why the run must stop."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.wall.now += 1
            ending = None if watch is None else watch.ending
            if ending:
                return ending
        return None

    @property
    def spent(self) -> float:
        return sum(record.cost for record in SpendLedger(self.path).read_records())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_line_a_minute_for_each_host_and_the_rest_at_the_end(desk: Desk) -> None:
    watch = desk.open()
    desk.wait(watch, 150)
    records = SpendLedger(desk.path).read_records()
    assert [(r.host, r.seconds, r.is_final) for r in records] == [
        (host, seconds, False) for seconds in (0.0, 60.0, 60.0) for host in ("rack", "home")
    ]
    watch.close()
    assert desk.spent == pytest.approx(150 * A_SECOND)
    assert [r.is_final for r in SpendLedger(desk.path).read_records()[-2:]] == [True, True]


def test_attempts_add_up_to_the_ceiling(desk: Desk) -> None:
    watch = desk.open(ceiling=0.2)
    assert desk.wait(watch, 100) is None
    watch.close()
    desk.wait(None, 10_000)  # what lies between two starts is not the run's
    watch = desk.open(ceiling=0.2)
    assert watch.status["spent"] == pytest.approx(100 * A_SECOND)
    reason = desk.wait(watch, 1000)
    assert reason is not None
    assert reason.startswith("budget.ceiling: 0.17 of 0.20 EUR are spent")
    watch.close()
    assert desk.spent <= 0.2
    assert desk.wait(desk.open(ceiling=0.3), 10) is None, "a higher ceiling continues it"


def test_a_killed_attempt_loses_no_second(desk: Desk) -> None:
    """It wrote its last line up to a minute before, and its hosts went on meanwhile."""
    killed = desk.open()
    desk.wait(killed, 90)
    desk.wait(None, 20)
    watch = desk.open()
    assert watch.status["spent"] == pytest.approx(110 * A_SECOND)
    watch.close()
    assert desk.spent == pytest.approx(110 * A_SECOND)


def test_a_run_that_died_long_ago_is_not_billed_for_the_time_since(desk: Desk) -> None:
    killed = desk.open()
    desk.wait(killed, 90)
    desk.wait(None, 5000)
    # But for the minute that it may not have written: what it had told does not shrink.
    assert desk.open().status["spent"] == pytest.approx(120 * A_SECOND)


@pytest.mark.parametrize("away", [0, 20, 890, 910, 100_000])
@pytest.mark.parametrize("lasted", [0, 5, 59, 61, 130])
def test_what_a_killed_run_has_told_never_shrinks(desk: Desk, lasted: int, away: int) -> None:
    """After a clean end too: the attempt that follows it is killed before its first minute."""
    watch = desk.open()
    desk.wait(watch, 200)
    watch.close()
    desk.wait(None, 4000)
    watch = desk.open()
    told = 0.0
    for _ in range(4):
        desk.wait(watch, lasted)
        told, before = watch.status["spent"], told
        assert told >= before
        desk.wait(None, away)
        watch = desk.open()
        assert watch.status["spent"] >= told


def test_a_crash_loop_that_dies_at_once_reaches_its_ceiling(desk: Desk) -> None:
    reason, attempts = None, 0
    while reason is None and attempts < 1000:
        attempts += 1
        reason = desk.wait(desk.open(ceiling=0.2), 3) or desk.wait(None, 10)
    assert reason is not None
    assert reason.startswith("budget.ceiling: 0.17 of 0.20 EUR are spent")
    assert desk.spent == pytest.approx(0.2 - 30 * A_SECOND, abs=13 * A_SECOND)


@pytest.mark.parametrize("fault", ["data", "kill"])
def test_a_start_that_fails_before_it_has_read_its_inputs_is_on_record(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: Any) -> None:
        raise InputError("no data") if fault == "data" else Killed

    monkeypatch.setattr(roles, "read_inputs", die)
    alone = Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None)
    with pytest.raises((InputError, Killed)):
        roles.run_local(config(model, tmp_path, 90.0), "run", alone)
    records = SpendLedger(tmp_path / "spend.jsonl").read_records()
    assert [record.host for record in records] == ["here", "here"]
    assert records[-1].is_final == (fault == "data"), (
        "after a kill the time until the next start counts"
    )
    assert records[-1].seconds > 0


def test_a_clock_that_was_set_back_takes_nothing_away(desk: Desk) -> None:
    killed = desk.open()
    desk.wait(killed, 60)
    desk.wall.now -= 3600
    assert desk.open().status["spent"] == pytest.approx(60 * A_SECOND)


def test_a_crash_loop_is_idle_all_the_time(desk: Desk) -> None:
    """Restarts are no progress: each attempt goes on with the idle time of the one before."""
    watch = desk.open(idle_stop=300, ceiling=None)
    desk.wait(watch, 30)
    watch.record_step(7, {})
    for _ in range(3):
        assert desk.wait(watch, 70) is None
        watch.close(ended=False)
        watch = desk.open(idle_stop=300, ceiling=None)
        watch.record_resumption(7)
    reason = desk.wait(watch, 200)
    assert reason is not None
    assert reason.startswith("budget.idle_stop")


def test_the_power_that_workers_measure_counts_for_their_host(desk: Desk) -> None:
    watch = desk.open()
    watch.record_step(1, {0: 250.0, 5: 9999.0})
    desk.wait(watch, 60)
    watch.close()
    rack, home = [r for r in SpendLedger(desk.path).read_records() if r.seconds]
    assert (rack.measured_seconds, home.measured_seconds) == (0.0, 60.0)
    assert home.kwh == pytest.approx(250 * 60 / 3.6e6)
    watch = desk.open()
    watch.record_step(1, {0: 250.0})
    assert watch.status["measured_hosts"] == ["home"]
    desk.wait(watch, 121)
    assert watch.status["measured_hosts"] == [], "an old reading holds no longer"


@pytest.mark.parametrize("lasted", [20, 90])
def test_a_killed_attempt_loses_no_second_of_what_only_sensors_tell(
    desk: Desk, lasted: int
) -> None:
    """Its last line says at what power it ran; the first one comes with the first reading."""
    hosts = [{"name": "home", "price_kwh": 0.36, "ranks": [0]}]
    killed = desk.open(hosts=hosts)
    killed.record_step(1, {0: 500.0})
    desk.wait(killed, lasted)
    desk.wait(None, 20)
    again = desk.open(hosts=hosts)
    each = 0.36 * 500 / 3.6e6
    assert again.status["spent"] == pytest.approx((lasted + 20) * each)
    assert again.status["hourly_cost"] == pytest.approx(3600 * each)


def test_a_disk_that_takes_no_line_stops_nothing_and_loses_nothing(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    watch = desk.open(ceiling=1.0)
    desk.path.unlink()
    desk.path.mkdir()
    with caplog.at_level(logging.ERROR):
        assert desk.wait(watch, 200) is None
    assert caplog.text.count("ALARM") == 1
    assert watch.status["spent"] == pytest.approx(200 * A_SECOND)
    desk.path.rmdir()
    watch.close()
    assert desk.spent == pytest.approx(200 * A_SECOND)


def test_a_ceiling_without_any_price_is_refused(desk: Desk) -> None:
    with pytest.raises(InputError, match=r"budget.ceiling: no host has a price"):
        desk.open(hosts=[{"name": "home", "watts": 500}])
    assert desk.open(ceiling=None, hosts=[{"name": "home", "watts": 500}]).ending is None


# A whole run


class Stepping(BudgetWatch):
    """Its clock is that of the run: ten seconds a step."""

    def __init__(self, *words: Any, **named: Any) -> None:
        self.time = Clock()
        super().__init__(*words, **named, clock=self.time)

    def record_step(self, step: int, watts: Mapping[int, float]) -> None:
        self.time.now += 10.0
        super().record_step(step, watts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget")
    write_data(folder / "train.jsonl", count=20)
    return write_model(folder / "model", folder / "train.jsonl")


def config(model: Path, output: Path, ceiling: float) -> RunConfig:
    budget = {"ceiling": ceiling, "currency": "EUR"}
    budget["hosts"] = [{"name": "here", "price_hour": 3600.0}]
    return load_config(
        None,
        {
            "num_classes": 3,
            "method": "full",
            "model.path": str(model),
            "data.train": str(model.parent / "train.jsonl"),
            "output": str(output),
            "training.batch_size": 4,
            "training.micro_batch_size": 4,
            "training.epochs": 2,
            "checkpoint.every": 4,
            "budget": budget,
        },
    )


def test_a_run_stops_in_order_and_goes_on_with_a_higher_ceiling(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "BudgetWatch", Stepping)
    alone = Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None)
    whole = config(model, tmp_path, 1000.0)
    assert roles.run_local(config(model, tmp_path, 90.0), "run", alone) == 9
    status = json.loads((tmp_path / "status.json").read_bytes())
    # A second checkpoint, after step 8, would cost 80, and the end after it 30.
    assert (status["state"], status["exit_code"]) == ("stopped", 9)
    assert status["reason"].startswith("budget.ceiling: ")
    assert 2 <= status["step"] < 8
    assert status["checkpoint"]["step"] == status["step"], "all that was committed is saved"
    assert status["budget"]["spent"] <= 90.0
    assert roles.run_local(whole, "run", alone) == 0
    status = json.loads((tmp_path / "status.json").read_bytes())
    assert (status["state"], status["step"]) == ("completed", 10)
    records = SpendLedger(tmp_path / "spend.jsonl").read_records()
    assert sum(record.cost for record in records) == pytest.approx(100.0)
