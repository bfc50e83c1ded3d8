"""What a run on three hosts costs, and the end of one whose workers hang."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from tests.testbed.processes import wait_until
from tests.testbed.training import Cluster, Operator, up_flags

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(2400)]

HOUR = 36.0
"""Euros an hour of each host: a cent a second."""


def processes(status: dict[str, Any], role: str) -> list[dict[str, Any]]:
    return [process for process in status["processes"] if process["role"] == role]


def test_hanging_workers_end_a_run_and_what_it_cost_adds_up(cluster: Cluster) -> None:
    prices = {"motley_price_hour": HOUR, "motley_currency": "EUR"}
    inventory = cluster.inventory("priced", **prices)
    operator = Operator(cluster.lab, cluster.folder / "payer", inventory)
    flags = up_flags("--set", "budget.idle_stop=150s")
    run_id = operator.json("cluster", "up", *flags)["run_id"]
    working = operator.status()
    assert working["idle"] == []
    stopped = {process["host"]: process["pid"] for process in processes(working, "worker")}
    assert set(stopped) == {"head", "w1", "w2"}
    for name, pid in stopped.items():
        cluster.lab.host(name).exec(["kill", "-STOP", str(pid)])

    def over() -> bool:
        done = operator.launch("cluster", "status", "--json", check=False)
        return '"state": "stopped"' in done.stdout and operator.status()["state"] == "stopped"

    wait_until(over, 600, "the run goes on")
    ended = operator.status()
    (coordinator,) = processes(ended, "coordinator")
    assert coordinator["exit_code"] == 9
    assert ended["reason"].startswith("budget.idle_stop: no step was completed for ")
    reached = ended["training"]["step"]
    assert ended["training"]["checkpoint"]["step"] == reached
    operator.launch("cluster", "down")  # also of workers that are still stopped

    idle = operator.status()["idle"]
    assert {(host["name"], host["an_hour"], host["currency"]) for host in idle} == {
        (name, HOUR, "EUR") for name in ("head", "w1", "w2")
    }
    assert all(host["since"] > 0 for host in idle)
    said = operator.launch("cluster", "status").stderr
    assert "idle: head, w1, w2 cost 108.00 EUR an hour" in said, said

    by = {
        name: operator.json("spend", "--by", name, "--run", run_id)["totals"]
        for name in ("run", "host", "day")
    }
    (whole,) = by["run"]
    assert whole["name"] == run_id
    assert whole["money"] == pytest.approx(whole["seconds"] * HOUR / 3600)
    assert whole["money"] == pytest.approx(ended["training"]["budget"]["spent"], abs=0.05)
    assert [host["name"] for host in by["host"]] == ["head", "w1", "w2"]
    assert len({round(host["seconds"], 3) for host in by["host"]}) == 1
    for parts in by.values():
        assert sum(part["money"] for part in parts) == pytest.approx(whole["money"])
        assert sum(part["seconds"] for part in parts) == pytest.approx(whole["seconds"])
    today = datetime.datetime.now(datetime.UTC).date()
    days = {today.isoformat(), (today - datetime.timedelta(days=1)).isoformat()}
    assert {day["name"] for day in by["day"]} <= days

    again = operator.json("cluster", "up", "--resume", run_id, "--set", "budget.idle_stop=30m")
    assert again["run_id"] == run_id
    wait_until(
        lambda: (operator.status()["training"] or {}).get("step", 0) > reached, 300, "no step"
    )
    operator.launch("cluster", "down")
