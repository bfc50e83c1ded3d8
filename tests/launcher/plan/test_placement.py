"""Placement over tables of easy and nasty clusters. It is pure: no machine is asked."""

import json
from dataclasses import replace

import pytest

from launcher.errors import ConfigError, PreflightError
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.placement import place_run
from launcher.plan.plan import LaunchPlan
from tests.launcher.plan.places import LOCAL, SETTING, flag
from trainer.config.run import RunConfig, load_config
from trainer.system.process.child import FALLBACK_VARIABLE
from trainer.system.untrusted_data import validate_data

RTX = Device("cuda", "GPU-4090", "RTX 4090", 24 << 30)
RADEONS = (Device("wgpu", "0000:0b:00.0"), Device("wgpu", "0000:0e:00.0"))
CARD = "0000:0b:00.0"
INTEL = Host(
    name="intel",
    address="10.0.0.2",
    coordinator=True,
    bind_address="10.0.0.2",
    devices=RADEONS,
)
LAMBDA = Host(name="lambda", address="10.0.0.3", devices=(RTX,))


@pytest.fixture
def config() -> RunConfig:
    return load_config("quickstart", {"output": "/out"})


def seats(plan: LaunchPlan) -> list[tuple[str, str, int | None]]:
    return [(worker.host, worker.device, worker.local_rank) for worker in plan.workers]


def test_this_machine_is_filled_up_and_its_cores_divided(config: RunConfig) -> None:
    plan = place_run([LOCAL], config, 3, SETTING)
    assert [p.name for p in plan.processes] == ["coordinator", "worker-0", "worker-1", "worker-2"]
    assert [worker.threads for worker in plan.workers] == [3, 3, 2]
    assert [worker.rank for worker in plan.workers] == [0, 1, 2]
    assert plan.leader.address == "127.0.0.1:9000"
    for worker in plan.workers:
        assert flag(worker.argv, "--coordinator") == "127.0.0.1:9000"
        assert "--threads" not in worker.argv, "it takes fewer while others use the processors"
        assert worker.env["OMP_NUM_THREADS"] == str(worker.threads)
        assert flag(worker.argv, "--tls") == f"{worker.folder}/tls"
    assert validate_data(LaunchPlan, json.loads(plan.to_json()), "plan") == plan


def test_more_workers_than_cores_get_one_thread_each(config: RunConfig) -> None:
    plan = place_run([replace(LOCAL, cores=2)], config, 5, SETTING)
    assert [worker.threads for worker in plan.workers] == [1] * 5


def test_the_reference_cluster_keeps_inventory_order(config: RunConfig) -> None:
    plan = place_run([INTEL, LAMBDA], config, None, SETTING)
    assert seats(plan) == [
        ("intel", "0000:0b:00.0", 0),
        ("intel", "0000:0e:00.0", 1),
        ("lambda", "GPU-4090", 0),
    ]
    assert [worker.backend for worker in plan.workers] == ["wgpu", "wgpu", "cuda"]
    assert flag(plan.workers[2].argv, "--gpus") == "GPU-4090"
    assert plan.workers[2].argv[0] == "/opt/motley/current/bin/trainer"
    assert flag(plan.leader.argv, "--bind") == "10.0.0.2:9000"
    assert flag(plan.leader.argv, "--expect-workers") == "3"
    assert {worker.address for worker in plan.workers} == {"10.0.0.2:9000"}
    assert "10.0.0.2" in plan.leader.certificate_names


def test_a_gpu_comes_before_cpu_workers_and_keeps_a_core(config: RunConfig) -> None:
    plan = place_run([replace(LOCAL, devices=(RTX,))], config, 3, SETTING)
    assert [(w.backend, w.threads) for w in plan.workers] == [
        ("cuda", None),
        ("cpu", 4),
        ("cpu", 3),
    ]


def test_unequal_hosts_are_filled_where_the_most_cores_are_left(config: RunConfig) -> None:
    big = Host(name="big", bind_address="10.0.0.1", coordinator=True, devices=(), cores=32)
    small = Host(name="small", devices=(), cores=4)
    hosts = [replace(host, fill_with_cpu=True) for host in (small, big)]
    plan = place_run(hosts, config, 5, SETTING)
    assert [host for host, _, _ in seats(plan)] == ["big"] * 5
    plan = place_run(hosts, config, 10, SETTING)
    assert [host for host, _, _ in seats(plan)] == ["small"] + ["big"] * 9


def test_fewer_workers_than_devices_take_the_first(config: RunConfig) -> None:
    plan = place_run([INTEL, LAMBDA], config, 1, SETTING)
    assert seats(plan) == [("intel", "0000:0b:00.0", 0)]
    assert [host.name for host in plan.hosts] == ["intel"]


def test_threads_of_the_inventory_stay(config: RunConfig) -> None:
    fixed = Device("cpu", "cpu", threads=6)
    plan = place_run([replace(LOCAL, devices=(fixed,))], config, 2, SETTING)
    assert [worker.threads for worker in plan.workers] == [6, 2]
    assert flag(plan.workers[0].argv, "--threads") == "6"


def test_unknown_cores_leave_the_threads_to_the_worker(config: RunConfig) -> None:
    plan = place_run([replace(LOCAL, cores=None)], config, 2, SETTING)
    assert all("--threads" not in worker.argv for worker in plan.workers)


def test_ipv6_is_bracketed_on_command_lines_only(config: RunConfig) -> None:
    plan = place_run([replace(INTEL, bind_address="fd00::2"), LAMBDA], config, None, SETTING)
    assert flag(plan.leader.argv, "--bind") == "[fd00::2]:9000"
    assert plan.workers[0].address == "[fd00::2]:9000"
    assert "fd00::2" in plan.leader.certificate_names


def test_two_networks_an_explicit_address_beats_the_route_and_ansible_host(
    config: RunConfig,
) -> None:
    management = replace(INTEL, address="192.168.1.2", bind_address="10.0.0.2")
    setting = replace(SETTING, routes={"intel": "172.16.0.2"})
    plan = place_run([management, LAMBDA], config, None, setting)
    assert plan.bind_address == "10.0.0.2"
    plan = place_run([replace(management, bind_address=None), LAMBDA], config, None, setting)
    assert plan.bind_address == "172.16.0.2"
    plan = place_run([replace(management, bind_address=None), LAMBDA], config, None, SETTING)
    assert plan.bind_address == "192.168.1.2"


def test_without_a_route_its_reason_is_the_error(config: RunConfig) -> None:
    named = replace(INTEL, bind_address=None, address="intel.home")
    setting = replace(SETTING, no_route="host intel: no address of it has a route from lambda")
    with pytest.raises(ConfigError, match="no address of it has a route from lambda"):
        place_run([named, LAMBDA], config, None, setting)
    explicit = place_run([INTEL, LAMBDA], config, None, setting)
    assert explicit.bind_address == "10.0.0.2"


def test_host_names_alone_are_enough_when_routes_are_known(config: RunConfig) -> None:
    """Debian's 127.0.1.1 in /etc/hosts cannot matter: no name is resolved."""
    hosts = [
        replace(INTEL, bind_address=None, address="intel"),
        replace(LAMBDA, address="lambda"),
    ]
    setting = replace(SETTING, routes={"intel": "10.0.0.2", "lambda": "10.0.0.3"})
    plan = place_run(hosts, config, None, setting)
    assert plan.leader.address == "10.0.0.2:9000"
    assert {worker.address for worker in plan.workers} == {"10.0.0.2:9000"}
    assert plan.workers[2].certificate_names == ("10.0.0.3", "lambda")


def test_one_remote_machine_alone_stays_on_loopback(config: RunConfig) -> None:
    plan = place_run([replace(INTEL, bind_address=None)], config, None, SETTING)
    assert plan.leader.address == "127.0.0.1:9000"
    assert {worker.address for worker in plan.workers} == {"127.0.0.1:9000"}


def test_the_laptop_may_coordinate_or_train_beside_hosts_over_ssh(config: RunConfig) -> None:
    laptop = replace(LOCAL, name="laptop", bind_address=None, fill_with_cpu=False)
    routes = {"laptop": "10.0.0.9", "intel": "10.0.0.2", "lambda": "10.0.0.3"}
    setting = replace(SETTING, routes=routes)
    remote = replace(INTEL, coordinator=False, bind_address=None)
    plan = place_run([laptop, remote], config, None, setting)
    assert plan.leader.address == "10.0.0.9:9000"
    assert plan.leader.argv[0] == "/venv/bin/trainer"
    assert plan.workers[1].argv[0] == "/opt/motley/current/bin/trainer"
    assert {worker.address for worker in plan.workers} == {"10.0.0.9:9000"}
    assert "10.0.0.9" in plan.workers[0].certificate_names
    plan = place_run(
        [replace(INTEL, bind_address=None), replace(laptop, coordinator=False)],
        config,
        None,
        setting,
    )
    assert plan.leader.address == "10.0.0.2:9000"
    assert plan.leader.folder.startswith("/var/lib/motley/runs/")
    assert plan.workers[2].folder.startswith("/state/runs/")


def test_two_names_of_one_remote_machine(config: RunConfig) -> None:
    """Different cards may be claimed by both names; one card may not, however it is called."""
    other = replace(INTEL, name="intel-too", coordinator=False, devices=(RADEONS[1],))
    one = replace(INTEL, bind_address=None, devices=(RADEONS[0],))
    setting = replace(SETTING, identities={"intel": "m1", "intel-too": "m1"})
    plan = place_run([one, other], config, None, setting)
    assert plan.leader.address == "127.0.0.1:9000"
    assert [worker.device for worker in plan.workers] == [d.id for d in RADEONS]
    by_uuid = Device("cuda", "GPU-1", pci=CARD)
    twice = [
        replace(one, devices=(by_uuid,)),
        replace(other, devices=(Device("wgpu", CARD, pci=CARD),)),
    ]
    with pytest.raises(ConfigError, match="intel and intel-too are the same machine"):
        place_run(twice, config, None, setting)
    apart = replace(SETTING, identities={"intel": "m1", "intel-too": "m2"})
    plan = place_run([INTEL, replace(twice[1])], config, None, apart)
    assert len(plan.workers) == 3


def test_cards_of_two_vendors_on_one_host(config: RunConfig) -> None:
    mixed = replace(INTEL, devices=(replace(RTX, pci="0000:01:00.0"), RADEONS[0]), cores=8)
    plan = place_run([mixed], config, 2, SETTING)
    assert [flag(w.argv, "--gpu-backend") for w in plan.workers] == ["cuda", "wgpu"]
    assert [flag(w.argv, "--gpus") for w in plan.workers] == ["GPU-4090", CARD]
    assert [w.local_rank for w in plan.workers] == [0, 1]


def test_only_a_device_that_was_found_may_be_replaced(config: RunConfig) -> None:
    found = replace(LAMBDA, auto_devices=True)
    plan = place_run([INTEL, found], config, None, SETTING)
    assert [w.env.get(FALLBACK_VARIABLE) for w in plan.workers] == [None, None, "1"]


def test_a_port_forward_may_be_on_loopback(config: RunConfig) -> None:
    behind = replace(LAMBDA, connect_address="127.0.0.1")
    plan = place_run([INTEL, behind], config, None, SETTING)
    assert plan.workers[2].address == "127.0.0.1:9000"


def test_a_worker_on_another_network_connects_elsewhere_and_the_certificate_knows(
    config: RunConfig,
) -> None:
    far = replace(LAMBDA, connect_address="gateway.example")
    plan = place_run([INTEL, far], config, None, SETTING)
    assert plan.workers[2].address == "gateway.example:9000"
    assert plan.workers[0].address == "10.0.0.2:9000"
    assert {"gateway.example", "10.0.0.2"} <= set(plan.leader.certificate_names)


def test_a_trainer_and_a_state_folder_of_its_own(config: RunConfig) -> None:
    host = replace(LOCAL, trainer_command=("/x/python", "-m", "t"), state_folder="/data/motley")
    plan = place_run([host], config, 1, SETTING)
    assert plan.leader.argv[:4] == ("/x/python", "-m", "t", "finetune")
    assert plan.leader.folder.startswith("/data/motley/runs/quickstart-")


NASTY = {
    "too few": ([INTEL, LAMBDA], 4, PreflightError, "4 workers are expected.*has 3 devices"),
    "nothing": ([replace(INTEL, devices=())], None, PreflightError, "has 0 devices"),
    "no head": (
        [replace(INTEL, coordinator=False), LAMBDA],
        None,
        ConfigError,
        "motley_coordinator: true on one of the hosts intel, lambda",
    ),
    "loopback for others": (
        [replace(INTEL, bind_address="127.0.1.1"), LAMBDA],
        None,
        ConfigError,
        "127.0.1.1 is loopback; workers on lambda",
    ),
    "loopback by address": (
        [replace(INTEL, bind_address=None, address="127.0.0.1"), LAMBDA],
        None,
        ConfigError,
        "is loopback",
    ),
    "a name is no address": (
        [replace(INTEL, bind_address=None, address="intel.home"), LAMBDA],
        None,
        ConfigError,
        "host intel: set motley_bind_address",
    ),
    "link-local": (
        [replace(INTEL, bind_address="fe80::2"), LAMBDA],
        None,
        ConfigError,
        "fe80::2 is link-local; workers on lambda",
    ),
    "one card for two backends": (
        [replace(LOCAL, devices=(replace(RTX, pci=CARD), Device("wgpu", CARD, pci=CARD)))],
        None,
        ConfigError,
        "host localhost: motley_devices names the card 0000:0b:00.0 twice",
    ),
    "not asked": ([INTEL, replace(LAMBDA, devices=None)], None, ConfigError, "not been queried"),
    "one card twice": (
        [
            replace(LOCAL, devices=(RTX,)),
            replace(LOCAL, name="me", coordinator=False, devices=(RTX,)),
        ],
        None,
        ConfigError,
        "localhost and me are the same machine and both claim GPU-4090",
    ),
}


@pytest.mark.parametrize("case", NASTY)
def test_what_cannot_be_placed_is_one_line(config: RunConfig, case: str) -> None:
    hosts, expect, kind, message = NASTY[case]
    with pytest.raises(kind, match=message) as error:
        place_run(hosts, config, expect, SETTING)
    assert "\n" not in str(error.value)


def test_the_same_cluster_always_gives_the_same_ranks(config: RunConfig) -> None:
    hosts = [INTEL, replace(LAMBDA, fill_with_cpu=True)]
    assert place_run(hosts, config, 5, SETTING) == place_run(hosts, config, 5, SETTING)
