"""Placement of a ring: its ranks, and what is refused before anything is started. Pure."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from launcher.errors import ConfigError
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.placement import place_run
from launcher.plan.plan import LaunchPlan
from launcher.plan.ring import ring_notes
from launcher.runs.records.plan_file import read_record
from tests.launcher.plan.places import LOCAL, SETTING, flag
from trainer.config.run import RunConfig, load_config

CARDS = tuple(Device("cuda", f"GPU-{number}", "RTX 4090", 24 << 30) for number in range(2))
FAR = Host(name="far", address="10.0.0.3", devices=CARDS)
HEAD = Host(
    name="head", address="10.0.0.2", coordinator=True, bind_address="10.0.0.2", devices=CARDS
)


@pytest.fixture
def config() -> RunConfig:
    return load_config("quickstart", {"output": "/out", "exchange.topology": "ring"})


def test_a_ring_has_ranks_alone_and_meets_at_rank_0(config: RunConfig) -> None:
    plan = place_run([FAR, HEAD], config, None, SETTING)
    assert [process.name for process in plan.processes] == [f"worker-{n}" for n in range(4)]
    assert [process.host for process in plan.processes] == ["head", "head", "far", "far"]
    assert plan.leader is plan.workers[0], "it keeps the run, and reports on it"
    for rank, worker in enumerate(plan.workers):
        assert "--distributed" in worker.argv
        assert flag(worker.argv, "--world-size") == "4"
        assert flag(worker.argv, "--rank") == str(rank)
        assert flag(worker.argv, "--master") == "10.0.0.2:9000" == worker.address
        assert flag(worker.argv, "--gpus") == f"GPU-{rank % 2}"
        assert not {"--role", "--tls", "--coordinator"} & set(worker.argv)
        assert not worker.certificate_names, "it gets no certificate, for which it has no use"


def test_a_ring_on_this_machine(config: RunConfig) -> None:
    plan = place_run([LOCAL], config, 4, SETTING)
    assert [worker.threads for worker in plan.workers] == [2] * 4
    assert plan.leader.address == "127.0.0.1:9000"


def test_a_plan_of_a_ring_is_read_back(config: RunConfig) -> None:
    plan = place_run([LOCAL], config, 4, SETTING)
    tree = {**json.loads(plan.to_json()), "started": 1.0}
    found = read_record(json.dumps(tree).encode(), SETTING.run_id).plan
    assert [process.name for process in found.processes] == [p.name for p in plan.processes]
    assert found.leader.rank == 0


def test_a_plan_without_a_leader_is_none(config: RunConfig) -> None:
    tree = json.loads(place_run([LOCAL], config, 4, SETTING).to_json())
    coordinator = {**tree["processes"][0], "name": "coordinator", "role": "coordinator"}
    tree["processes"].append({**coordinator, "rank": None})
    tree["started"] = 1.0
    with pytest.raises(ValueError, match="worker-0 cannot lead a run"):
        read_record(json.dumps(tree).encode(), SETTING.run_id)


@pytest.mark.parametrize(
    ("hosts", "expect", "reason"),
    [
        ([LOCAL], 3, "3 workers, and a ring has at least 4: a star of fewer is as fast"),
        (
            [replace(HEAD, devices=(*CARDS, Device("wgpu", "0000:0b:00.0"))), FAR],
            None,
            "worker-2 on head computes with wgpu: exchange.topology ring runs on cuda or cpu",
        ),
        (
            [HEAD, replace(FAR, devices=(CARDS[0], Device("cuda", "GPU-9", "RTX 3090")))],
            None,
            "worker-3 on far has RTX 3090, worker-0 on head has RTX 4090",
        ),
        (
            [HEAD, FAR, replace(LOCAL, coordinator=False, name="old")],
            None,
            "worker-4 on old has CPU, worker-0 on head has RTX 4090",
        ),
        (
            [
                replace(
                    HEAD,
                    devices=tuple(replace(card, group=1, strategy="ddp") for card in CARDS),
                ),
                *(replace(FAR, name=f"far{number}") for number in range(2)),
            ],
            None,
            "worker-0 on head is a replica group",
        ),
        (
            [replace(HEAD, devices=()), *(replace(FAR, name=f"far{n}") for n in range(2))],
            None,
            "head has no device to train on, and rank 0 keeps the run",
        ),
    ],
)
def test_what_makes_no_ring_is_named_with_the_remedy(
    config: RunConfig, hosts: list[Host], expect: int | None, reason: str
) -> None:
    setting = replace(SETTING, identities={host.name: host.name for host in hosts})
    with pytest.raises(ConfigError, match="topology ring") as error:
        place_run(hosts, config, expect, setting)
    assert reason in str(error.value)
    assert "; " in str(error.value)
    assert "\n" not in str(error.value)


def test_the_same_hosts_make_a_star() -> None:
    plan: LaunchPlan = place_run([LOCAL], load_config("quickstart", {"output": "/out"}), 3, SETTING)
    assert plan.leader.role == "coordinator"


def test_a_start_says_what_a_ring_is_not(config: RunConfig) -> None:
    (line,) = ring_notes(config.exchange, "run-1")
    assert "not elastic" in line
    assert "not encrypted" in line
    assert line.endswith("launch cluster up --resume run-1")
    assert ring_notes(load_config("quickstart", {}).exchange, "run-1") == []
