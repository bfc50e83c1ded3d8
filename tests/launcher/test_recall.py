"""Inventories that are not rendered again: only as long as nothing about them can have changed."""

from pathlib import Path

import pytest

from launcher.inventory import cache
from launcher.inventory.cache import fingerprint, recall_hosts
from launcher.inventory.hosts import Host

TEXT = "all:\n  hosts:\n    intel: {ansible_host: 10.0.0.2, motley_devices: [{backend: cpu}]}\n"


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster").mkdir()
    path = tmp_path / "cluster" / "hosts.yml"
    path.write_text(TEXT)
    return path


def test_what_has_not_changed_is_rendered_once(
    inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = recall_hosts(inventory)
    assert [(host.name, host.address) for host in hosts] == [("intel", "10.0.0.2")]
    monkeypatch.setattr(cache, "load_inventory", lambda _: (Host(name="other"),))
    assert recall_hosts(inventory) == hosts
    inventory.write_text(TEXT.replace("10.0.0.2", "10.0.0.3"))
    assert recall_hosts(inventory) == (Host(name="other"),)


def test_a_damaged_memory_is_none(inventory: Path, tmp_path: Path) -> None:
    hosts = recall_hosts(inventory)
    (kept,) = (tmp_path / "state" / "inventories").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    for text in ("", "[]", '{"mark": 1}', kept.read_text().replace('"name"', '"nome"')):
        kept.write_text(text)
        assert recall_hosts(inventory) == hosts


@pytest.mark.parametrize(
    "place",
    ["group_vars/all.yml", "host_vars/intel", "../group_vars/all", "../ansible.cfg", "hosts.yml"],
)
def test_every_file_that_ansible_reads_counts(inventory: Path, place: str) -> None:
    before = fingerprint(inventory)
    assert before is not None
    path = inventory.parent / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("[defaults]\n")
    assert fingerprint(inventory) not in (None, before)


def test_settings_of_ansible_count(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(inventory)
    monkeypatch.setenv("ANSIBLE_HASH_BEHAVIOUR", "merge")
    assert fingerprint(inventory) != before


@pytest.mark.parametrize(
    "line",
    [
        "{{ lookup('env', 'PORT') }}",
        "{{ query('file', 'x') }}",
        "{{ now() }}",
        "!vault |\n  $ANSIBLE_VAULT;1.1;AES256",
    ],
)
def test_what_may_change_without_its_files_or_is_secret_is_never_kept(
    inventory: Path, line: str
) -> None:
    inventory.write_text(f"{TEXT}# {line}\n")
    assert fingerprint(inventory) is None


def test_scripts_and_absent_files_are_never_kept(inventory: Path) -> None:
    inventory.chmod(0o755)
    assert fingerprint(inventory) is None
    assert fingerprint(inventory.with_name("absent.yml")) is None
