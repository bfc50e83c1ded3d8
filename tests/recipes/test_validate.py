"""Role validate: a refusal is one line that names host and variable, before anything changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

FACTS = {
    "distribution": "Debian",
    "distribution_version": "12.9",
    "distribution_major_version": "12",
    "service_mgr": "systemd",
    "all_ipv4_addresses": ["192.0.2.10", "10.0.0.3"],
    "all_ipv6_addresses": ["2001:db8::10"],
}
PLAY = """
- name: Only the role
  hosts: all
  gather_facts: false
  tasks:
    - name: Pretend to be another host
      ansible.builtin.set_fact:
        cacheable: true
        {facts}
    - name: Validate
      ansible.builtin.include_role:
        name: validate
"""


def validate(tmp_path: Path, hosts: dict[str, Any], **extra: Any) -> tuple[dict[str, str], str]:
    """Run the role on made-up hosts; return what each was refused for, and all that was said."""
    known = {
        name: {**variables, "facts": {**FACTS, **variables.get("facts", {})}}
        for name, variables in hosts.items()
    }
    tree = {"all": {"vars": {"ansible_connection": "local"}, "hosts": known}}
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump(tree))
    facts = "\n        ".join(f'{name}: "{{{{ facts.{name} }}}}"' for name in FACTS)
    (tmp_path / "play.yml").write_text(PLAY.format(facts=facts))
    settings = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
        "ANSIBLE_LOCALHOST_WARNING": "false",
    }
    argv = [Path(sys.executable).parent / "ansible-playbook", "-i", "inventory.yml", "play.yml"]
    done = subprocess.run(
        [*map(str, argv), "-e", json.dumps(extra)],
        cwd=tmp_path,
        env=settings,
        capture_output=True,
        text=True,
        timeout=110,
    )
    pattern = r"^(?:fatal|failed): \[(\w+)\](?:: FAILED!| \(item=.*\)) => (\{.*\})$"
    failures = re.findall(pattern, done.stdout, re.MULTILINE)
    refused = {host: str(json.loads(result)["msg"]) for host, result in failures}
    assert "changed=0" in done.stdout
    return refused, done.stdout + done.stderr


@pytest.mark.long
def test_what_is_wrong_with_a_host(tmp_path: Path) -> None:
    bind = {"motley_coordinator": True, "share_mode": "rsync"}
    hosts = {
        "old": {**bind, "facts": {"distribution_major_version": "11"}},
        "fedora": {**bind, "facts": {"distribution": "Fedora", "distribution_version": "42"}},
        "jammy": {
            **bind,
            "motley_bind_address": "192.0.2.99",
            "facts": {"distribution": "Ubuntu", "distribution_version": "22.04"},
        },
        "sysv": {**bind, "facts": {"service_mgr": "sysvinit"}},
        "named": {**bind, "motley_bind_address": "intel.example.org"},
        "looped": {**bind, "motley_bind_address": "127.0.1.1"},
        "six": {**bind, "motley_bind_address": "::1"},
        "open": {**bind, "motley_bind_address": "0.0.0.0"},
        "open6": {**bind, "motley_bind_address": "::"},
        "elsewhere": {**bind, "motley_bind_address": "192.0.2.11"},
        "bare": bind,
        "relative": {**bind, "ansible_host": "2001:db8::10", "motley_share_folder": "srv/motley"},
        "wide": {**bind, "ansible_host": "10.0.0.3", "motley_port": 70000},
        "shareless": {"share_server": "nobody"},
    }
    # Every one of them stands for a coordinator: one run of Ansible for all.
    pretend = {"cluster_coordinators": ["x"], "cluster_coordinator": "{{ inventory_hostname }}"}
    refused, output = validate(tmp_path, hosts, **pretend)

    expected = {
        "old": "Debian 11 is not supported",
        "fedora": "Fedora 42 is not supported",
        "jammy": "motley_bind_address 192.0.2.99 is not an address of this host (192.0.2.10,",
        "sysv": "need systemd, this host is run by sysvinit",
        "named": "motley_bind_address must be one IP address",
        "looped": "motley_bind_address 127.0.1.1 is loopback",
        "six": "motley_bind_address ::1 is loopback",
        "open": "motley_bind_address 0.0.0.0 would listen on every network",
        "open6": "motley_bind_address :: would listen on every network",
        "elsewhere": "motley_bind_address 192.0.2.11 is not an address of this host",
        "bare": "motley_bind_address must be one IP address of this host (192.0.2.10,",
        "relative": "motley_share_folder must be an absolute path",
        "wide": "motley_port must be from 1 to 65535, it is 70000",
        "shareless": "share_server must name a host of the inventory",
    }
    assert set(refused) >= set(expected), output
    for host, message in expected.items():
        assert refused[host].startswith(f"{host}: "), refused[host]
        assert message in refused[host]
        assert "\n" not in refused[host]


@pytest.mark.parametrize(
    ("coordinators", "message"),
    [
        ([], "a, b: motley_coordinator must be true on exactly one host, it is on 0"),
        (["a", "b"], "a, b: motley_coordinator must be true on exactly one host, it is on 2"),
    ],
)
def test_a_cluster_has_one_coordinator(
    tmp_path: Path, coordinators: list[str], message: str
) -> None:
    hosts = {name: {"motley_coordinator": name in coordinators} for name in ("a", "b")}
    refused, output = validate(tmp_path, hosts)
    assert message in refused.values(), output
