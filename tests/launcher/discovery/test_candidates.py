"""Where machines may be: addresses, ssh_config, and names for an inventory."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.discovery.candidates import (
    Candidate,
    choose_host_name,
    merge_candidates,
    parse_address,
    ssh_config_hosts,
)
from launcher.errors import ConfigError
from launcher.inventory.hosts import Host


@pytest.mark.parametrize(
    ("text", "user", "address", "port"),
    [
        ("lambda", "me", "lambda", None),
        ("ops@10.0.0.5", "ops", "10.0.0.5", None),
        ("10.0.0.5:2222", "me", "10.0.0.5", 2222),
        ("ops@[fd00::5]:22", "ops", "fd00::5", 22),
        ("fd00::5", "me", "fd00::5", None),
    ],
)
def test_addresses(text: str, user: str, address: str, port: int | None) -> None:
    host = parse_address(text, "me", ("-F", "none"))
    assert (host.user, host.address, host.ssh_port) == (user, address, port)
    assert host.ssh_args == ("-F", "none")


@pytest.mark.parametrize("text", ["", "a b", "a:99999", "a:0", "@a", "a:b", "-oProxyCommand=x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address; write"):
        parse_address(text, None, ())


def test_the_hosts_of_an_ssh_config(tmp_path: Path) -> None:
    more = tmp_path / "conf.d"
    more.mkdir()
    (more / "1").write_text("Host second third\n")
    config = tmp_path / "config"
    config.write_text(
        f"User me\nInclude {more}/*\n# Host no\nHost=first *.example !not\n  HostName 10.0.0.1\n"
        'Host code\n  User git\nMatch host first\n  User git\nHost "fourth"\nHost *\n  Port 22\n'
    )
    assert ssh_config_hosts(config) == ["second", "third", "first", "fourth"]


def test_an_ssh_config_that_includes_itself(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"Include {config}\n")
    with pytest.raises(ConfigError, match="Include goes deeper"):
        ssh_config_hosts(config)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        ssh_config_hosts(tmp_path / "none")


def test_one_sshd_is_one_candidate() -> None:
    by_alias = Candidate(Host(name="lambda"), ("ssh config",), frozenset({"10.0.0.5"}))
    announced = Candidate(
        Host(name="x", address="10.0.0.5"), ("mDNS",), frozenset({"x.local", "10.0.0.5"})
    )
    elsewhere = Candidate(Host(name="y"), ("mDNS",), frozenset({"10.0.0.5"}), port=2222)
    first, second = merge_candidates([by_alias, announced, elsewhere])
    assert first.host is by_alias.host
    assert first.sources == ("ssh config", "mDNS")
    assert second == elsewhere
    assert not first.is_named


def test_names_that_an_inventory_takes() -> None:
    assert choose_host_name(("lambda", "10.0.0.5"), ()) == "lambda"
    assert choose_host_name(("lambda",), ("lambda", "lambda-2")) == "lambda-3"
    assert choose_host_name(("localhost", "10.0.0.5"), ()) == "10.0.0.5"
    assert choose_host_name(("{{ lookup('pipe', 'id') }}", "a: b", "fd00::5"), ()) == "host"
