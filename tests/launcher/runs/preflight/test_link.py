"""What a crossing means: which direction fails, and what to do about it."""

import pytest

from launcher.agent.checks.link import ProbeResult
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.placement import place_run
from launcher.plan.plan import LaunchPlan
from launcher.plan.plan_context import PlanContext
from launcher.runs.preflight.link import judge_crossing
from trainer.config.run import load_config

TARGET = "10.0.0.1:9000"


def plan() -> LaunchPlan:
    cpu = (Device("cpu", "cpu"),)
    hosts = [
        Host(name="intel", coordinator=True, bind_address="10.0.0.1", devices=cpu),
        Host(name="lambda", devices=cpu),
    ]
    setting = PlanContext(run_id="x-1", trainer_command=("t",), state_folder="/s", routes={})
    return place_run(hosts, load_config("quickstart"), None, setting)


CROSSINGS: dict[str, tuple[ProbeResult, bool, str, str]] = {
    "up": (ProbeResult("up", "it stalled", 0.001), True, "from lambda -> intel do not", "MTU"),
    "down": (ProbeResult("down", "it stalled", 0.001), True, "from intel -> lambda do not", "MTU"),
    "silent": (ProbeResult("silent", "no answer"), False, "lambda -> intel", "open TCP port 9000"),
    "answers lost": (ProbeResult("silent", "no answer"), True, "intel -> lambda: its", "open TCP"),
    "refused": (ProbeResult("refused", "x"), False, "though intel listens there", "firewall"),
    "unauthenticated": (
        ProbeResult("unauthenticated", "x"),
        False,
        f"{TARGET} is not intel",
        "connect_address",
    ),
    "unreachable": (
        ProbeResult("unreachable", "no route to host"),
        False,
        "lambda has no route to 10.0.0.1:9000: no route to host",
        "motley_bind_address on intel",
    ),
}


@pytest.mark.parametrize("case", CROSSINGS)
def test_a_failure_names_its_direction_and_a_remedy(case: str) -> None:
    crossing, heard, detail, remedy = CROSSINGS[case]
    finding = judge_crossing(crossing, "lambda", TARGET, plan(), heard)
    assert finding.status == "fail"
    assert detail in finding.detail
    assert remedy in finding.remedy


def test_speeds_are_shown_and_the_slower_way_counts() -> None:
    fast = judge_crossing(
        ProbeResult("done", "", 0.0004, 941e6, 2.3e9), "lambda", TARGET, plan(), True
    )
    assert fast.status == "ok"
    assert fast.detail == "941 Mbit/s to the coordinator, 2.3 Gbit/s back, 0.4 ms"
    slow = judge_crossing(
        ProbeResult("done", "", 0.004, 941e6, 48e6), "lambda", TARGET, plan(), True
    )
    assert slow.status == "warn"
    assert "int8" in slow.remedy


def test_a_link_that_could_not_be_measured_is_no_failure() -> None:
    assert (
        judge_crossing(ProbeResult("done", "", 0.001), "lambda", TARGET, plan(), True).status
        == "ok"
    )
