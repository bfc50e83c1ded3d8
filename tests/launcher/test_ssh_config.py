"""Where ssh would go, by the real `ssh -G` on configurations of our own."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.hosts.ssh_config import SshRoute, expand, route_to, ssh_arguments
from launcher.inventory.hosts import Host


def write(folder: Path, text: str, name: str = "config") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.needs("ssh")
def test_include_aliases_and_wildcards_count(tmp_path: Path) -> None:
    included = write(tmp_path, "Host intel\n  HostName 10.0.0.3\n  Port 2200\n", "more")
    config = write(
        tmp_path,
        f'Include {included}\nHost *\n  User me\n  IdentityFile "{tmp_path}/a key"\n'
        f"  IdentitiesOnly yes\n  HostKeyAlias box\n  UserKnownHostsFile {tmp_path}/one "
        f"{tmp_path}/two\n  GlobalKnownHostsFile none\n  IdentityAgent {tmp_path}/socket\n",
    )
    route = route_to(Host(name="intel", ssh_args=("-F", config)))
    assert (route.hostname, route.port, route.user) == ("10.0.0.3", 2200, "me")
    assert route.identities == (f"{tmp_path}/a key",)
    assert route.identities_only
    assert route.host_key_alias == "box"
    assert route.known_hosts == (f"{tmp_path}/one", f"{tmp_path}/two")
    assert route.agent == f"{tmp_path}/socket"
    assert route.jump is None
    assert route.proxy_command is None


@pytest.mark.needs("ssh")
def test_the_inventory_wins_over_ssh_config(tmp_path: Path) -> None:
    config = write(tmp_path, "Host *\n  User me\n  Port 2200\n  IdentityFile ~/.ssh/mine\n")
    host = Host(
        name="intel",
        address="10.0.0.9",
        ssh_port=2222,
        user="operator",
        ssh_key=write(tmp_path, "", "lab"),
        ssh_args=("-F", config, "-o", "Port=1", "-o", "ConnectTimeout=3"),
    )
    route = route_to(host)
    assert (route.alias, route.hostname, route.port) == ("10.0.0.9", "10.0.0.9", 2222)
    assert route.user == "operator"
    assert route.identities[0] == str(tmp_path / "lab")
    with pytest.raises(ConfigError, match="ansible_ssh_private_key_file: no file /no/such"):
        route_to(replace(host, ssh_key="/no/such"))


@pytest.mark.parametrize(
    ("setting", "variable", "expected"),
    [
        ("none", "/run/agent", None),
        ("SSH_AUTH_SOCK", "/run/agent", "/run/agent"),
        ("$OTHER", "/run/agent", "/run/other"),
        ("", "/run/agent", "/run/agent"),
        ("", None, None),
    ],
)
@pytest.mark.needs("ssh")
def test_which_ssh_agent_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    variable: str | None,
    expected: str | None,
) -> None:
    monkeypatch.setenv("OTHER", "/run/other")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    if variable:
        monkeypatch.setenv("SSH_AUTH_SOCK", variable)
    config = write(tmp_path, f"Host *\n  IdentityAgent {setting}\n" if setting else "")
    assert route_to(Host(name="intel", ssh_args=("-F", config))).agent == expected


@pytest.mark.needs("ssh")
def test_jump_hosts_are_routes_of_their_own(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        "Host gate\n  HostName gate.example\n  User porter\n  Port 2201\n"
        "Host intel\n  ProxyJump gate,me@[::1]:2202\n",
    )
    route = route_to(Host(name="intel", ssh_args=("-F", config)))
    assert route.jump is not None
    assert (route.jump.hostname, route.jump.port, route.jump.user) == ("::1", 2202, "me")
    assert route.jump.jump is not None
    first = route.jump.jump
    assert (first.alias, first.hostname, first.port) == ("gate", "gate.example", 2201)
    assert first.user == "porter"
    assert first.jump is None


@pytest.mark.needs("ssh")
def test_a_jump_host_on_the_command_line_counts_too(tmp_path: Path) -> None:
    config = write(tmp_path, "")
    for args in (("-J", "gate"), ("-Jgate",), ("-o", "ProxyJump=gate")):
        route = route_to(Host(name="intel", ssh_args=("-F", config, *args)))
        assert route.jump is not None
        assert route.jump.hostname == "gate"
        command = ssh_arguments(route, [])
        assert not any(part.startswith("-J") for part in command)
        assert any("-W" in part for part in command)


@pytest.mark.needs("ssh")
def test_the_ssh_command_verifies_whatever_else_is_said(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        f"Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile {tmp_path}/theirs\n"
        "  GlobalKnownHostsFile none\n",
    )
    host = Host(name="intel", ssh_args=("-F", config, "-o", "StrictHostKeyChecking=no"))
    command = ssh_arguments(route_to(host), [str(tmp_path / "a b" / "own")])
    assert command.index("StrictHostKeyChecking=yes") < command.index("StrictHostKeyChecking=no")
    assert f'UserKnownHostsFile="{tmp_path}/a b/own" {tmp_path}/theirs' in command
    assert "BatchMode=yes" in command


def as_ssh_runs(option: str) -> list[str]:
    """Return the words of a ProxyCommand option as the shell gives them to the next program."""
    tokens = {"%%": "%", "%h": "H", "%p": "P"}
    text = re.sub("%.", lambda found: tokens[found[0]], option.removeprefix("ProxyCommand="))
    return shlex.split(text)


def test_hops_are_quoted_for_the_shell_that_runs_them(tmp_path: Path) -> None:
    inner = SshRoute(
        alias="gate", hostname="gate", port=22, user="me", known_hosts=(f"{tmp_path}/100% mine",)
    )
    middle = replace(inner, alias="door", hostname="door", jump=inner)
    outer = replace(inner, alias="intel", hostname="intel", jump=middle)
    (proxy,) = [p for p in ssh_arguments(outer, []) if p.startswith("ProxyCommand=")]
    assert "'" not in proxy  # rsync's -e would split there
    once = as_ssh_runs(proxy)
    assert once[-3:] == ["-W", "[H]:P", "door"]
    (proxy,) = [p for p in once if p.startswith("ProxyCommand=")]
    twice = as_ssh_runs(proxy)
    assert twice[-3:] == ["-W", "[H]:P", "gate"]
    assert f'UserKnownHostsFile="{tmp_path}/100%% mine"' in twice


def test_a_proxy_command_gets_its_tokens_and_no_shell_words() -> None:
    route = SshRoute(alias="a", hostname="10.0.0.3", port=2222, user="me")
    assert expand("nc -X 5 %h %p # %r@%n %% %z", route) == ("nc -X 5 10.0.0.3 2222 # me@a % %z")
    for bad in ("$(id)", "a b", "a;b", "`id`"):
        with pytest.raises(ConfigError, match="cannot go into a ProxyCommand"):
            expand("nc %h", replace(route, hostname=bad))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-F", "/no/such/file"), "/no/such/file"),
        (("-o", "NoSuchOption=1"), "Bad configuration option"),
    ],
)
@pytest.mark.needs("ssh")
def test_settings_that_ssh_does_not_take_are_one_line(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        route_to(Host(name="intel", ssh_args=args))
    assert str(caught.value).startswith("host intel: ")
    assert "\n" not in str(caught.value)


def test_a_name_that_is_an_option_is_no_name() -> None:
    with pytest.raises(ConfigError, match="'-oProxyCommand=x' is no name of a host"):
        route_to(Host(name="intel", address="-oProxyCommand=x"))


def test_without_ssh_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="host intel: there is no `ssh` here"):
        route_to(Host(name="intel"))
