"""Several hosts at once: one that hangs, refuses or has a defect costs the others nothing."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest

from launcher.agent import operations
from launcher.errors import PartialError, PreflightError, UnreachableError
from launcher.hosts import fleet
from launcher.hosts.fleet import AT_ONCE, Answers, ask_each, describe_pending, format_error
from launcher.hosts.local import LocalConnection
from launcher.inventory.hosts import Host
from tests.waiting import wait_for

T = TypeVar("T")

HOSTS = [Host(name="intel"), Host(name="lambda"), Host(name="attic")]


@pytest.fixture
def tried(silent_hosts: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Connect to whatever a test asks for, except `attic`; who was tried, in order."""
    tried: list[str] = []

    def connect(host: Host) -> LocalConnection:
        tried.append(host.name)
        if host.name == "attic":
            raise UnreachableError("host attic: connection refused")
        return LocalConnection()

    monkeypatch.setattr("launcher.hosts.ssh.connect_host", connect)
    return tried


def ask_at_once(
    tasks: Mapping[str, Callable[[], T]], deadline: float, enough: str | None = None
) -> Answers[T]:
    """Put tasks to hosts of their names, which are not connected."""
    questions = {name: (Host(name=name), lambda task: task()) for name in tasks}
    return ask_each(questions, deadline, lambda host: tasks[host.name], enough)


def test_answers_keep_the_order_of_the_questions() -> None:
    second = threading.Event()

    def first() -> int:
        assert second.wait(60)
        return 1

    def set_second() -> int:
        second.set()
        return 2

    answers = ask_at_once({"a": first, "b": set_second}, 60)
    assert list(answers.found.items()) == [("a", 1), ("b", 2)]


def test_who_is_late_is_named_and_the_others_count() -> None:
    never = threading.Event()
    answers = ask_at_once({"slow": never.wait, "quick": lambda: True}, 0.2)
    never.set()
    assert answers.found == {"quick": True}
    assert isinstance(answers.errors["slow"], UnreachableError)
    assert str(answers.errors["slow"]).startswith("host slow: no answer within 0 s")


def test_one_success_may_be_enough() -> None:
    never = threading.Event()
    answers = ask_at_once({"slow": never.wait, "head": lambda: True}, 60, enough="head")
    never.set()
    assert answers == Answers({"head": True}, {})


def test_few_of_many_are_asked_concurrently() -> None:
    """Each takes a thread here, and most of them a process."""
    under_way: set[int] = set()
    most = 0

    def task(number: int) -> int:
        nonlocal most
        under_way.add(number)
        most = max(most, len(under_way))
        barrier.wait(60)
        under_way.discard(number)
        return number

    barrier = threading.Barrier(AT_ONCE)
    answers = ask_at_once({str(n): partial(task, n) for n in range(3 * AT_ONCE)}, 60)
    assert [*answers.found.values()] == list(range(3 * AT_ONCE))
    assert most == AT_ONCE


def test_those_behind_late_ones_are_late_too() -> None:
    never = threading.Event()
    tasks = {str(n): never.wait for n in range(2 * AT_ONCE)}
    answers = ask_at_once(tasks, 0.1)
    never.set()
    assert [*answers.errors] == [*tasks]


def test_a_defect_is_no_answer() -> None:
    with pytest.raises(ZeroDivisionError):
        ask_at_once({"broken": lambda: 1 // 0}, 60)


def test_all_errors_are_raised_as_one() -> None:
    errors = {
        "a": OSError(28, "No space left on device", "/var/x"),
        "b": UnreachableError("host b: connection refused", ["try later"]),
    }
    with pytest.raises(PartialError) as caught:
        Answers({}, errors).require(PartialError)
    assert str(caught.value) == "host a: /var/x: No space left on device"
    assert caught.value.details == ("host b: connection refused",)
    with pytest.raises(UnreachableError) as unreachable:
        Answers({}, {"b": errors["b"]}).require()
    assert unreachable.value.details == ("try later",)
    assert Answers({"a": 1}, {}).require() == {"a": 1}


def test_a_line_names_its_host_once() -> None:
    assert format_error("b", UnreachableError("host b: gone")) == "host b: gone"
    assert format_error("b", UnreachableError("gone")) == "host b: gone"


def test_a_host_without_connection_is_not_looked_at_again_at_once(tried: list[str]) -> None:
    for _ in range(2):
        answers = fleet.ask_hosts(HOSTS, lambda host, _: host.name)
        assert list(answers.found) == ["intel", "lambda"]
        assert str(answers.errors["attic"]) == "host attic: connection refused"
    assert tried.count("attic") == 1
    fleet.ask_hosts(HOSTS, lambda host, _: host.name, deadline=fleet.REACH)
    assert tried.count("attic") == 2


def test_late_hosts_are_asked_on_after_a_look(
    silent_hosts: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The login that a look has begun is the one that answers; nothing is lost with the look."""
    logins: list[str] = []
    opened = threading.Event()

    def connect(host: Host) -> LocalConnection:
        logins.append(host.name)
        if host.name == "lambda":
            assert opened.wait(60)
        elif host.name == "attic":
            opened.wait(60)
            raise UnreachableError("host attic: connection refused")
        return LocalConnection()

    monkeypatch.setattr("launcher.hosts.ssh.connect_host", connect)
    looks: list[Answers[str]] = []

    def on_late(known: Answers[str]) -> None:
        looks.append(known)
        opened.set()

    answers = fleet.ask_hosts(HOSTS, lambda host, _: host.name, 0.2, on_late=on_late)
    (look,) = looks
    assert look.found == {"intel": "intel"}
    assert look.late == ["lambda", "attic"]
    assert str(look.errors["attic"]) == "querying attic ..."
    assert format_error("attic", look.errors["attic"]) == "querying attic ..."
    assert describe_pending(look.late) == "querying lambda, attic ..."
    assert list(answers.found) == ["intel", "lambda"]
    assert answers.late == []
    assert str(answers.errors["attic"]) == "host attic: connection refused"
    assert logins.count("intel") == 1, "what has answered is not asked again"


def test_a_look_does_not_wait_again_and_learns_how_a_late_login_ended(
    silent_hosts: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, ended = threading.Event(), threading.Event()
    refusals: list[UnreachableError] = []

    def connect(host: Host) -> LocalConnection:
        assert opened.wait(60)
        if refusals:
            ended.set()
            raise refusals[0]
        return LocalConnection()

    monkeypatch.setattr("launcher.hosts.ssh.connect_host", connect)
    cellar = Host(name="cellar")  # a login of another test may still end, and is remembered
    assert fleet.ask_hosts([cellar], lambda host, _: host.name, 0.1).late == ["cellar"]
    refusals.append(UnreachableError("host cellar: login refused"))
    assert fleet.ask_hosts([cellar], lambda host, _: host.name, fleet.LOOK).late == ["cellar"]
    opened.set()
    assert ended.wait(60)
    wait_for(lambda: silent_hosts[cellar][1] is refusals[0], "the login's own end")
    answers = fleet.ask_hosts([cellar], lambda host, _: host.name)
    assert str(answers.errors["cellar"]) == "host cellar: login refused"
    assert answers.late == []
    refusals.clear()
    silent_hosts.clear()
    assert fleet.ask_hosts([cellar], lambda host, _: host.name).found == {"cellar": "cellar"}


def test_a_host_of_another_version_is_told_from_a_defect(tried: list[str]) -> None:
    def ask(_host: Host, connection: LocalConnection) -> object:
        return connection.ask(replace(operations.read_clock, name="an unknown operation"))

    answers = fleet.ask_hosts(HOSTS[:1], ask)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PreflightError, match=r"host localhost: no operation .*launch cluster push"):
        answers.require()
