"""What hosts say about themselves fills the inventory; what it lists has to be there."""

import threading
from typing import Any

import pytest

from launcher.agent.operations import describe_machine
from launcher.errors import PreflightError, UnreachableError, raise_all
from launcher.hosts.local import LocalConnection
from launcher.hosts.survey import apply_devices, survey_connections
from launcher.inventory.facts.devices import Detection, Device
from launcher.inventory.hosts import Host
from trainer.system.untrusted_data import validate_data

RTX = {
    "backend": "cuda",
    "id": "GPU-1",
    "name": "RTX 4090",
    "memory": 24 << 30,
    "pci": "0000:01:00.0",
}
RADEON = {"backend": "wgpu", "id": "0000:0b:00.0", "name": "W5700X", "memory": 8 << 30}
FOUND = {
    "devices": [RTX],
    "problems": [],
    "vulkan": [RADEON],
    "vulkan_problems": ["AMD card at 0000:0e:00.0 is not shown by Vulkan: no access"],
}


def test_auto_takes_what_the_host_found() -> None:
    host, problems = apply_devices(Host(name="a"), validate_data(Detection, FOUND, "devices"))
    assert host.devices == (Device(**RTX),)
    assert host.auto_devices
    assert problems == ()


def test_listed_cards_get_what_the_host_knows_of_them() -> None:
    listed = (Device("wgpu", "0000:0b:00.0"), Device("cuda", "0000:01:00.0"), Device("cpu", "cpu"))
    host, problems = apply_devices(
        Host(name="a", devices=listed), validate_data(Detection, FOUND, "devices")
    )
    assert host.devices == (Device(**RADEON), Device(**RTX), Device("cpu", "cpu"))
    assert not host.auto_devices
    assert problems == ()


def test_cards_of_a_replica_group_stay_together() -> None:
    listed = (Device("cuda", "0000:01:00.0", group=0, strategy="ddp"), Device("cpu", "cpu"))
    host, _ = apply_devices(
        Host(name="a", devices=listed), validate_data(Detection, FOUND, "devices")
    )
    assert host.devices == (Device(**RTX, group=0, strategy="ddp"), Device("cpu", "cpu"))


def test_a_listed_card_that_is_not_there_is_a_problem_in_the_hosts_words() -> None:
    listed = (
        Device("wgpu", "0000:0e:00.0"),
        Device("cuda", "GPU-7"),
        Device("wgpu", "0000:01:00.0"),
    )
    host, problems = apply_devices(
        Host(name="a", devices=listed), validate_data(Detection, FOUND, "devices")
    )
    assert host.devices == listed
    assert problems == (
        "there is no wgpu device 0000:0e:00.0: "
        "AMD card at 0000:0e:00.0 is not shown by Vulkan: no access",
        "there is no cuda device GPU-7",
        "there is no wgpu device 0000:01:00.0",
    )


def test_a_local_host_learns_its_cores_and_keeps_its_folder() -> None:
    host = Host(name="a", connection="local", devices=())
    found = survey_connections([host], {"a": LocalConnection()})
    assert (found.hosts[0].cores or 0) >= 1
    assert found.hosts[0].state_folder is None
    assert found.failures == {}


def test_a_remote_host_keeps_its_runs_where_its_agent_says() -> None:
    found = survey_connections([Host(name="a", devices=())], {"a": LocalConnection()})
    assert found.hosts[0].state_folder == LocalConnection().state_folder


class Equipped(LocalConnection):
    """This machine, with more cards."""

    def call(self, *question: Any, **more: Any) -> Any:
        return FOUND if question[0] == "devices" else super().call(*question, **more)


@pytest.mark.parametrize(
    ("listed", "spare"),
    [(None, ["0000:0b:00.0"]), ((Device("wgpu", "0000:0b:00.0"),), ["GPU-1"])],
)
def test_cards_that_nobody_uses_are_known(
    listed: tuple[Device, ...] | None, spare: list[str]
) -> None:
    found = survey_connections([Host(name="a", devices=listed)], {"a": Equipped()})
    assert [device.id for device in found.spare["a"]] == spare


@pytest.mark.parametrize(
    ("listed", "allowed"), [("llvmpipe", True), ("SwiftShader", True), ("0000:0b:00.0", False)]
)
def test_software_devices_count_only_where_one_is_listed(listed: str, allowed: bool) -> None:
    asked: list[Any] = []

    class Asked(Equipped):
        def call(self, *question: Any, **more: Any) -> Any:
            asked.extend(question[1:2] if question[0] == "devices" else ())
            return super().call(*question, **more)

    survey_connections([Host(name="a", devices=(Device("wgpu", listed),))], {"a": Asked()})
    assert asked == [{"allow_software": allowed}]


def test_hosts_without_a_connection_are_left_as_the_inventory_has_them() -> None:
    host = Host(name="a", devices=())
    assert survey_connections([host], {}).hosts == (host,)


class Old(LocalConnection):
    """A host whose Motley is broken."""

    def call(self, *_: object, **__: object) -> object:
        raise RuntimeError("host c: its agent has a defect: AttributeError('x')")


class Hung(LocalConnection):
    """A host that never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def call(self, *_: object, **__: object) -> object:
        self.over.wait()
        raise UnreachableError("host b: too late")


def test_one_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "launcher.hosts.survey.describe_machine", describe_machine.with_deadline(5.0)
    )
    hung = Hung()
    hosts = [Host(name=name, devices=()) for name in "abc"]
    found = survey_connections(hosts, {"a": LocalConnection(), "b": hung, "c": Old()})
    hung.over.set()
    assert list(found.machines) == ["a"]
    assert isinstance(found.failures["b"], UnreachableError)
    assert "launch cluster push" in str(found.failures["c"])
    with pytest.raises(PreflightError, match="launch cluster push") as error:
        raise_all([found.failures["c"], found.failures["b"]])
    assert error.value.details == (str(found.failures["b"]),)


class OfTheRecipe(LocalConnection):
    """A host that the recipe has set up, with these folders in /srv."""

    def __init__(self, *folders: str) -> None:
        super().__init__()
        self.user = "motley"
        self._folders = folders

    def call(self, *question: Any, **more: Any) -> Any:
        if question == ("names", {"folder": "/srv"}, 10.0):
            return list(self._folders)
        return super().call(*question, **more)


def test_a_host_of_the_recipe_has_its_default_share() -> None:
    """Not if the inventory names another, if there is none, or if it is no host of the recipe."""
    ways: dict[str, LocalConnection] = {
        "a": OfTheRecipe("motley"),
        "b": OfTheRecipe("motley"),
        "c": OfTheRecipe("www"),
        "d": LocalConnection(),
    }
    hosts = [Host(name=name, devices=()) for name in ways]
    hosts[1] = Host(name="b", devices=(), share_folder="/mnt/share")
    found = survey_connections(hosts, ways)
    assert found.failures == {}
    shares = [host.share_folder for host in found.hosts]
    assert shares == ["/srv/motley", "/mnt/share", None, None]


class Lying(LocalConnection):
    """A host that makes up what it is asked for."""

    host = "a"

    def __init__(self, **answers: Any) -> None:
        super().__init__()
        self._answers = answers

    def call(self, *question: Any, **more: Any) -> Any:
        truth = FOUND if question[0] == "devices" else super().call(*question, **more)
        lie = self._answers.get(question[0])
        return lie(truth) if lie is not None else truth


def addresses(address: str) -> Any:
    entry = {"address": address, "prefix": 24, "interface": "eth0", "mtu": 1500}
    return lambda truth: {**truth, "network": {"addresses": [entry], "problem": ""}}


def card(**changes: object) -> Any:
    return lambda truth: {**truth, "devices": [{**RTX, **changes}]}


@pytest.mark.parametrize(
    "lies",
    [
        {"machine": lambda _: None},
        {"machine": lambda _: "x" * 10_000},
        {"machine": lambda truth: {**truth, "cores": "all"}},
        {"machine": lambda truth: {**truth, "memory": []}},
        {"machine": lambda truth: {**truth, "network": 7}},
        {"machine": addresses("--gpus")},
        {"machine": addresses("evil.example")},
        {"devices": lambda _: [1]},
        {"devices": card(backend="sh")},
        {"devices": card(id="--role=coordinator")},
        {"devices": card(id="a b\n")},
        {"devices": card(id=["x"])},
        {"devices": card(memory="much")},
        {"devices": lambda truth: {**truth, "problems": "none"}},
    ],
)
def test_facts_of_another_shape_are_that_hosts_failure(lies: dict[str, Any]) -> None:
    hosts = [Host(name="a"), Host(name="b", coordinator=True, devices=())]
    found = survey_connections(hosts, {"a": Lying(**lies), "b": LocalConnection()})
    assert list(found.failures) == ["a"]
    assert str(found.failures["a"]).startswith("host a: ")
    assert "\n" not in str(found.failures["a"])
    assert "b" in found.machines
    assert not [d for host in found.hosts for d in host.devices or () if d.backend == "cuda"]


@pytest.mark.parametrize("source", ["--bind", "x.example", 7])
def test_a_route_that_is_no_address_is_that_hosts_failure(source: object) -> None:
    route = {"source": source, "interface": "eth0"}
    other = Lying(
        machine=lambda truth: {**truth, "identity": "another"},
        routes=lambda _: {"10.0.0.2": route},
    )
    head = Lying(machine=addresses("10.0.0.2"))
    hosts = [
        Host(name="a", coordinator=True, devices=(Device("cpu", "cpu"),)),
        Host(name="b", devices=(Device("cpu", "cpu"),)),
    ]
    found = survey_connections(hosts, {"a": head, "b": other})
    assert list(found.failures) == ["b"]
    assert source not in found.sources.values()
