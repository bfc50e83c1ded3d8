"""Inventories through Ansible itself: what is right becomes Hosts, what is wrong one line."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.inventory.hosts import EMBEDDED, find_coordinator_host, load_inventory, parse_answer
from launcher.plan.plan import LaunchPlan
from tests import ROOT
from trainer.system.untrusted_data import validate_data

HEAD = "all:\n  hosts:\n    box:\n      ansible_connection: local\n"


def write(folder: Path, text: str, name: str = "hosts.yml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_embedded_default_is_this_machine_and_ships_as_one_truth() -> None:
    (host,) = load_inventory()
    assert host.is_local
    assert host.coordinator
    assert host.fill_with_cpu
    assert host.devices is None
    assert (host.bind_address, host.port) == ("127.0.0.1", 9000)
    assert EMBEDDED.resolve() == ROOT / "inventory" / "local.yml"


@pytest.mark.long
def test_the_embedded_default_is_read_as_ansible_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Ansible, whose start takes longer than all else of a command, if it adds nothing."""
    monkeypatch.chdir(tmp_path)
    extra = {"motley_port": "9100", "motley_devices": [{"backend": "cpu"}], "other": 1}
    by_ansible = load_inventory(EMBEDDED, extra=extra)
    assert by_ansible[0].port == 9100
    template = {"motley_port": "{{ 9000 + 7 }}"}
    with pytest.raises(ConfigError) as refused:
        load_inventory(EMBEDDED, extra=template)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", None)
        assert load_inventory(extra=extra) == by_ansible
        with pytest.raises(ConfigError) as refused_too:
            load_inventory(extra=template)
    assert str(refused_too.value) == str(refused.value)
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text(
        "motley_price_kwh: 0.5\nmotley_currency: EUR\n"
    )
    assert load_inventory() == load_inventory(EMBEDDED)


@pytest.mark.parametrize("source", ["lambda,intel", "lambda,intel,", "me@lambda,intel"])
def test_names_are_an_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    hosts = load_inventory(Path(source))
    assert [host.name.removeprefix("me@") for host in hosts] == ["lambda", "intel"]
    assert find_coordinator_host(hosts) is hosts[0]
    assert not any(host.is_local or host.coordinator for host in hosts)
    with pytest.raises(ConfigError, match="no inventory there/lambda,intel: the file does not"):
        load_inventory(Path("there/lambda,intel"))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"motley_price_hour": -1}, "motley_price_hour: must be a number, 0 or more"),
        ({"motley_price_hour": "two"}, "motley_price_hour: must be a number, 0 or more"),
        ({"motley_price_kwh": ".inf"}, "motley_price_kwh: must be a number, 0 or more"),
        ({"motley_watts": 0}, "motley_watts: must be a number above 0"),
        ({"motley_price_hour": 1}, "motley_currency: a price needs its currency"),
        ({"motley_currency": "euro"}, "motley_currency: must be a code of ISO 4217"),
        ({"motley_rented": "maybe"}, "motley_rented: must be true or false"),
    ],
)
def test_prices_that_cannot_be_used(variables: dict[str, object], words: str) -> None:
    host = {"name": "box", "errors": {}, "variables": variables}
    with pytest.raises(ConfigError) as found:
        parse_answer("hosts.yml", "all", json.dumps({"hosts": [host], "groups": []}), "")
    assert str(found.value).startswith(f"hosts.yml: host box: {words}")
    assert "\n" not in str(found.value)


def test_what_a_host_costs() -> None:
    variables = {
        "motley_price_hour": "2.40",  # as Jinja gives it
        "motley_watts": 600,
        "motley_price_kwh": 0,
        "motley_currency": "USD",
        "motley_rented": False,
    }
    host = {"name": "box", "errors": {}, "variables": variables}
    text = json.dumps({"hosts": [host], "groups": []})
    (found,) = parse_answer("hosts.yml", "all", text, "")
    assert (found.price_hour, found.watts, found.price_kwh) == (2.4, 600.0, 0.0)
    assert (found.currency, found.rented) == ("USD", False)


def test_variables_are_rendered_by_ansible_with_group_vars_and_order(tmp_path: Path) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text("base: 9100\nmotley_port: '{{ base + 1 }}'\n")
    path = write(
        tmp_path,
        """
all:
  children:
    gpus:
      hosts:
        zeta:
          ansible_host: 10.0.0.2
          motley_coordinator: true
          motley_bind_address: "{{ ansible_host }}"
          motley_devices:
            - {backend: wgpu, id: "0000:0b:00.0"}
            - {backend: cpu, threads: 4}
            - {backend: cpu, ids: [cpu, cpu], threads: 2, strategy: ddp}
        alpha:
          ansible_host: 10.0.0.3
          ansible_user: motley
          ansible_port: 2222
          motley_devices: [{backend: cuda, id: GPU-1}]
      vars:
        unrelated: "{{ nobody_defined_this }}"
""",
    )
    zeta, alpha = load_inventory(path)
    assert (zeta.name, zeta.port, zeta.bind_address) == ("zeta", 9101, "10.0.0.2")
    assert zeta.devices is not None
    assert [(d.backend, d.id, d.threads, d.group, d.strategy) for d in zeta.devices] == [
        ("wgpu", "0000:0b:00.0", None, None, ""),
        ("cpu", "cpu", 4, None, ""),
        ("cpu", "cpu", 2, 2, "ddp"),
        ("cpu", "cpu", 2, 2, "ddp"),
    ]
    assert (alpha.user, alpha.ssh_port, alpha.connection) == ("motley", 2222, "ssh")
    assert not alpha.coordinator
    (only,) = load_inventory(path, limit="alpha")
    assert only == alpha


def test_extra_variables_win(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "      motley_port: 1\n")
    (host,) = load_inventory(path, extra={"motley_port": 9300, "motley_devices": []})
    assert (host.port, host.devices) == (9300, ())


def test_an_ini_inventory_works(tmp_path: Path) -> None:
    path = write(tmp_path, "[all]\nbox ansible_connection=local motley_port=9200\n", "hosts.ini")
    (host,) = load_inventory(path)
    assert (host.name, host.port) == ("box", 9200)


@pytest.mark.long
def test_a_vaulted_variable_is_decrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    password = tmp_path / "password"
    password.write_text("correct horse\n")
    # In a process of its own: Ansible patches sys.intern, and torch then refuses to be imported.
    command = [sys.executable, "-m", "ansible", "vault", "encrypt_string", "10.1.2.3"]
    done = subprocess.run(
        [*command, "--vault-password-file", str(password)],
        capture_output=True,
        text=True,
        check=True,
    )
    cipher = textwrap.dedent(done.stdout.partition("\n")[2])
    text = HEAD + "      motley_bind_address: !vault |\n"
    path = write(tmp_path, text + "".join(f"        {line}\n" for line in cipher.splitlines()))
    with pytest.raises(ConfigError, match="motley_bind_address"):
        load_inventory(path)
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", str(password))
    (host,) = load_inventory(path)
    assert host.bind_address == "10.1.2.3"


BROKEN = {
    "malformed": ("all:\n  hosts:\n   a:\n  - x: [\n", r"hosts\.yml:4:3: .*mapping"),
    "empty": ("", r"hosts\.yml"),
    "not a group": ("a:\n  foo: 1\n", r"names no hosts.*foo"),
    "list": ("- a\n- b\n", r"hosts\.yml"),
    "undefined": (HEAD + '      motley_port: "{{ prot }}"\n', "box: motley_port: 'prot' is undef"),
    "bad template": (HEAD + '      motley_port: "{{ 1 + }}"\n', "box: motley_port"),
    "two heads": (
        "all:\n  hosts:\n    a: {motley_coordinator: true}\n    b: {motley_coordinator: true}\n",
        "true on a, b",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_inventory_is_one_line_that_names_the_place(tmp_path: Path, case: str) -> None:
    text, message = BROKEN[case]
    with pytest.raises(ConfigError, match=message) as error:
        load_inventory(write(tmp_path, text))
    assert "\n" not in str(error.value)
    assert "hosts.yml" in str(error.value)
    assert error.value.exit_code == 2


GROUP = {"backend": "cuda", "ids": ["GPU-1", "GPU-2"], "strategy": "ddp"}
WRONG: dict[str, tuple[str, object, str]] = {
    "port text": ("motley_port", "high", "motley_port: must be a number.*'high'"),
    "port range": ("motley_port", 70000, "motley_port: must be a number.*70000"),
    "port bool": ("motley_port", True, "motley_port: must be a number"),
    "typo": ("motley_prot", 1, "unknown variable motley_prot .*mean motley_port"),
    "wildcard": ("motley_bind_address", "0.0.0.0", "one network interface"),
    "wildcard 6": ("motley_bind_address", "::", "one network interface"),
    "bind name": ("motley_bind_address", "eth0", "must be one IP address.*'eth0'"),
    "flag": ("motley_coordinator", "perhaps", "must be true or false"),
    "devices word": ("motley_devices", "all", "motley_devices: must be `auto`"),
    "device word": ("motley_devices", ["gpu"], "mappings such as"),
    "backend": ("motley_devices", [{"backend": "rocm"}], "backend must be one of"),
    "index": ("motley_devices", [{"backend": "cuda", "id": "0"}], "no index"),
    "no id": ("motley_devices", [{"backend": "wgpu"}], "a GPU needs `id`"),
    "device key": ("motley_devices", [{"backend": "cpu", "gpu": 1}], "unknown key gpu"),
    "group of one": ("motley_devices", [{**GROUP, "ids": ["GPU-1"]}], "two or more devices"),
    "group without ids": ("motley_devices", [{**GROUP, "ids": None}], "two or more devices"),
    "group with id": ("motley_devices", [{**GROUP, "id": "GPU-3"}], "two or more devices"),
    "group of indices": ("motley_devices", [{**GROUP, "ids": ["0", "1"]}], "no index"),
    "group on wgpu": ("motley_devices", [{**GROUP, "backend": "wgpu"}], "must be cuda or cpu"),
    "group twice": ("motley_devices", [{**GROUP, "ids": ["GPU-1"] * 2}], "names GPU-1 twice"),
    "strategy": ("motley_devices", [{**GROUP, "strategy": "dpd"}], "strategy must be one of ddp"),
    "no strategy": ("motley_devices", [{**GROUP, "strategy": None}], "must be one of ddp"),
    "threads": ("motley_devices", [{"backend": "cpu", "threads": 0}], "above 0"),
    "twice": ("motley_devices", [{"backend": "cuda", "id": "G"}] * 2, "names G twice"),
    "command": ("motley_trainer_command", "trainer", "must be a list of strings"),
    "folder": ("motley_state_folder", "here", "must be an absolute path"),
    "connection": ("ansible_connection", "winrm", "must be local or ssh"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_names_file_host_and_variable(case: str) -> None:
    variable, value, message = WRONG[case]
    host = {"name": "box", "variables": {variable: value}, "errors": {}}
    with pytest.raises(ConfigError, match=message) as error:
        parse_answer("/x/hosts.yml", "all", json.dumps({"hosts": [host], "groups": []}), "")
    assert str(error.value).startswith("/x/hosts.yml: host box: ")


def test_ansible_that_dies_or_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match="could not render it: ERROR: unsupported locale"):
        parse_answer("/x/hosts.yml", "all", "", "warning\nERROR: unsupported locale\n")
    with pytest.raises(ConfigError, match=r"pip install 'motley\[launcher\]'"):
        parse_answer("/x/hosts.yml", "all", '{"missing": "No module named ansible"}', "")


def test_a_missing_file_and_an_unknown_group_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yml: the file does not exist"):
        load_inventory(tmp_path / "absent.yml")
    with pytest.raises(ConfigError, match=r"matches 'gpuz' \(groups: all\)"):
        load_inventory(write(tmp_path, HEAD), limit="gpuz")


@pytest.mark.parametrize("place", ["hosts.yml", "folder/hosts.yml", "group_vars/all.yml"])
@pytest.mark.parametrize("kind", ["named pipe", "device", "sparse"])
def test_no_pipe_and_nothing_endless_is_read(tmp_path: Path, place: str, kind: str) -> None:
    """Ansible would wait for the pipe, and read the other two until memory ends."""
    bad = tmp_path / place
    bad.parent.mkdir(exist_ok=True)
    if kind == "named pipe":
        os.mkfifo(bad)
    elif kind == "device":
        bad.symlink_to("/dev/zero")
    else:
        bad.touch()
        os.truncate(bad, 60 << 30)
    source = bad.parent if place.startswith("folder") else tmp_path / "hosts.yml"
    if place.startswith("group_vars"):
        write(tmp_path, HEAD)
    with pytest.raises(ConfigError) as error:
        load_inventory(source)
    reason = "is larger than 67,108,864 bytes" if kind == "sparse" else f"is a {kind}, not a file"
    assert str(error.value) == f"{bad}: {reason}"


def test_collections_without_an_end_are_named(tmp_path: Path) -> None:
    deep = write(tmp_path, "all: " + "{a: " * 20000 + "1" + "}" * 20000)
    with pytest.raises(ConfigError, match=r"hosts\.yml: is nested too deeply"):
        load_inventory(deep)


def test_an_undefined_group_in_ini_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "[x:children]\ny\n", "hosts.ini")
    with pytest.raises(ConfigError, match=r"hosts\.ini: .*undefined group 'y'"):
        load_inventory(path)


def test_a_broken_group_vars_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text("a: [\n")
    with pytest.raises(ConfigError, match=r"all\.yml") as error:
        load_inventory(write(tmp_path, HEAD))
    assert "\n" not in str(error.value)


def test_how_ssh_reaches_a_host_is_ansible_s_own_and_survives_a_plan(tmp_path: Path) -> None:
    text = """
all:
  hosts:
    far:
      ansible_host: 10.0.0.9
      ansible_port: "2222"
      ansible_user: operator
      ansible_ssh_private_key_file: /keys/key
      ansible_ssh_common_args: -J "{{ door }}" -o 'UserKnownHostsFile=/a b'
      ansible_ssh_extra_args: -v
      motley_share_folder: /srv/motley
    old:
      ansible_private_key_file: /keys/other
      ansible_ssh_common_args: ""
  vars: {door: gate}
"""
    far, old = load_inventory(write(tmp_path, text))
    assert (far.address, far.ssh_port, far.user) == ("10.0.0.9", 2222, "operator")
    assert far.ssh_key == "/keys/key"
    assert far.ssh_args == ("-J", "gate", "-o", "UserKnownHostsFile=/a b", "-v")
    assert far.share_folder == "/srv/motley"
    assert (old.ssh_key, old.ssh_args, old.share_folder) == ("/keys/other", (), None)
    plan = LaunchPlan(
        run_id="run",
        output="out",
        bind_address="10.0.0.9",
        port=9000,
        hosts=(far, old),
        processes=(),
    )
    assert validate_data(LaunchPlan, json.loads(plan.to_json()), "plan").hosts == (far, old)
    (bad,) = [write(tmp_path, HEAD + "      ansible_ssh_common_args: -o 'x\n", "bad.yml")]
    with pytest.raises(ConfigError, match="common_args: has an unclosed quotation mark"):
        load_inventory(bad)


def test_a_variable_counts_under_all_its_names(tmp_path: Path) -> None:
    text = """
[gpu]
old ansible_ssh_host=192.0.2.7 ansible_ssh_port=2222 ansible_ssh_user=pi
both ansible_host=192.0.2.1 ansible_ssh_host=192.0.2.8 ansible_port=1 ansible_ssh_port=2 ansible_ssh_args="-J gate"
full ansible_connection=ansible.builtin.ssh
here ansible_connection=ansible.legacy.local
"""  # noqa: E501 - a line is a host
    old, both, full, here = load_inventory(write(tmp_path, text, "hosts.ini"))
    assert (old.address, old.ssh_port, old.user) == ("192.0.2.7", 2222, "pi")
    assert (both.address, both.ssh_port) == ("192.0.2.8", 2), "the last of the names, as Ansible"
    assert both.ssh_first_args == ("-J", "gate")
    assert (full.connection, here.connection) == ("ssh", "local")


def test_ansible_s_settings_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ansible.cfg").write_text(
        "[defaults]\nremote_user = pi\nremote_port = 2200\nprivate_key_file = /keys/lab\n"
        "[ssh_connection]\nssh_args = -F ./ssh.cfg\nssh_extra_args = -J gate\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANSIBLE_SSH_COMMON_ARGS", "-4")
    text = (
        'a\nb ansible_user=me ansible_port=22 ansible_ssh_args= ansible_ssh_common_args="-6 -C"\n'
    )
    plain, own = load_inventory(write(tmp_path, text, "hosts.ini"))
    assert (plain.user, plain.ssh_port, plain.ssh_key) == ("pi", 2200, "/keys/lab")
    assert (plain.ssh_first_args, plain.ssh_args) == (("-F", "./ssh.cfg"), ("-4", "-J", "gate"))
    assert (own.user, own.ssh_port, own.ssh_first_args) == ("me", 22, ())
    assert own.ssh_args == ("-6", "-C", "-J", "gate")
    with (tmp_path / "ansible.cfg").open("a") as settings:
        settings.write("ssh_executable = /opt/ssh\n")
    with pytest.raises(ConfigError, match="host a: 'ssh_executable' is not used"):
        load_inventory(tmp_path / "hosts.ini")


@pytest.mark.long
def test_a_script_and_a_limit_beside_a_host_that_cannot_be_read(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        '#!/bin/sh\necho \'{"gpu": {"hosts": ["box"]}, "_meta": {"hostvars":'
        ' {"box": {"ansible_host": "192.0.2.9", "ansible_user": "o"}}}}\'\n',
        "dyn.sh",
    )
    script.chmod(0o755)
    (host,) = load_inventory(script)
    assert (host.name, host.address, host.user) == ("box", "192.0.2.9", "o")
    text = """
all:
  children:
    servers: {hosts: {box: {ansible_host: 192.0.2.9, ansible_become: yes}}}
    cloud: {hosts: {vps: {ansible_host: "{{ vault_vps_ip }}"}}}
"""
    path = write(tmp_path, text)
    assert [host.address for host in load_inventory(path, limit="servers")] == ["192.0.2.9"]
    with pytest.raises(ConfigError, match=r"host vps: ansible_host: .*vault_vps_ip"):
        load_inventory(path)
