"""What hosts say about themselves fills the inventory; what it lists has to be there."""

import threading
from typing import Any

import pytest

from launcher.access import LocalConnection
from launcher.devices import Device
from launcher.errors import PreflightError, UnreachableError
from launcher.inventory import Host
from launcher.survey import survey, with_devices

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
    host, problems = with_devices(Host(name="a"), FOUND)
    assert host.devices == (Device(**RTX),)
    assert problems == ()


def test_listed_cards_get_what_the_host_knows_of_them() -> None:
    listed = (Device("wgpu", "0000:0b:00.0"), Device("cuda", "0000:01:00.0"), Device("cpu", "cpu"))
    host, problems = with_devices(Host(name="a", devices=listed), FOUND)
    assert host.devices == (Device(**RADEON), Device(**RTX), Device("cpu", "cpu"))
    assert problems == ()


def test_a_listed_card_that_is_not_there_is_a_problem_in_the_hosts_words() -> None:
    listed = (
        Device("wgpu", "0000:0e:00.0"),
        Device("cuda", "GPU-7"),
        Device("wgpu", "0000:01:00.0"),
    )
    host, problems = with_devices(Host(name="a", devices=listed), FOUND)
    assert host.devices == listed
    assert problems == (
        "there is no wgpu device 0000:0e:00.0: "
        "AMD card at 0000:0e:00.0 is not shown by Vulkan: no access",
        "there is no cuda device GPU-7",
        "there is no wgpu device 0000:01:00.0",
    )


def test_a_local_host_learns_its_cores_and_keeps_its_folder() -> None:
    host = Host(name="a", connection="local", devices=())
    found = survey([host], {"a": LocalConnection()})
    assert (found.hosts[0].cores or 0) >= 1
    assert found.hosts[0].state_folder is None
    assert found.failures == {}


def test_a_remote_host_keeps_its_runs_where_its_agent_says() -> None:
    found = survey([Host(name="a", devices=())], {"a": LocalConnection()})
    assert found.hosts[0].state_folder == LocalConnection().state_folder


class Equipped(LocalConnection):
    """This machine, with more cards."""

    def ask(self, *question: Any, **more: Any) -> Any:
        return FOUND if question[0] == "devices" else super().ask(*question, **more)


@pytest.mark.parametrize(
    ("listed", "spare"),
    [(None, ["0000:0b:00.0"]), ((Device("wgpu", "0000:0b:00.0"),), ["GPU-1"])],
)
def test_cards_that_nobody_uses_are_known(
    listed: tuple[Device, ...] | None, spare: list[str]
) -> None:
    found = survey([Host(name="a", devices=listed)], {"a": Equipped()})
    assert [device.id for device in found.spare["a"]] == spare


def test_hosts_without_a_connection_are_left_as_the_inventory_has_them() -> None:
    host = Host(name="a", devices=())
    assert survey([host], {}).hosts == (host,)


class Old(LocalConnection):
    """A host whose Motley is broken."""

    def ask(self, *_: object, **__: object) -> object:
        raise RuntimeError("host c: its agent has a defect: AttributeError('x')")


class Hung(LocalConnection):
    """A host that never answers."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def ask(self, *_: object, **__: object) -> object:
        self.over.wait()
        raise UnreachableError("host b: too late")


def test_one_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.survey.ASK_DEADLINE", 0.5)
    hung = Hung()
    hosts = [Host(name=name, devices=()) for name in "abc"]
    found = survey(hosts, {"a": LocalConnection(), "b": hung, "c": Old()})
    hung.over.set()
    assert list(found.machines) == ["a"]
    assert isinstance(found.failures["b"], UnreachableError)
    assert "launch cluster push" in str(found.failures["c"])
    with pytest.raises(PreflightError, match="launch cluster push") as error:
        survey(hosts, {}, {"c": found.failures["c"], "b": found.failures["b"]}).refuse_failures()
    assert error.value.details == (str(found.failures["b"]),)
