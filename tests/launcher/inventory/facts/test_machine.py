"""What a machine says about itself: who it is, which code it has, what may stop it."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.hosts.local import LocalConnection
from launcher.inventory.facts.machine import (
    Machine,
    code_digest,
    describe_machine,
    detect_provider,
    may_sleep,
    read_machine_id,
    secure_boot,
)
from tests import ROOT
from trainer.system.untrusted_data import validate_data

VARIABLE = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def test_a_machine_survives_json_and_knows_itself() -> None:
    here = validate_data(Machine, LocalConnection().call("machine", {}), "machine")
    assert here == describe_machine()
    assert here.cores >= 1
    assert here.libraries["numpy"].count(".") == 2


def test_a_newer_hosts_further_keys_are_passed_over() -> None:
    newer = {**LocalConnection().call("machine"), "colour": "red"}
    assert validate_data(Machine, newer, "machine") == describe_machine()


def fake_proc(folder: Path, boot: str, namespace: str) -> Path:
    (folder / "sys/kernel/random").mkdir(parents=True)
    (folder / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
    (folder / "self/ns").mkdir(parents=True)
    (folder / "self/ns/net").symlink_to(f"net:[{namespace}]")
    return folder


def test_clones_and_containers_are_not_taken_for_one_machine(tmp_path: Path) -> None:
    same_image = tmp_path / "machine-id"
    same_image.write_text("6c1b\n")
    first = read_machine_id(fake_proc(tmp_path / "1", "boot-1", "4026531840"), same_image)
    clone = read_machine_id(fake_proc(tmp_path / "2", "boot-2", "4026531840"), same_image)
    container = read_machine_id(fake_proc(tmp_path / "3", "boot-1", "4026532001"), same_image)
    assert len({first, clone, container}) == 3
    assert read_machine_id() == read_machine_id()


def test_code_is_compared_by_content(tmp_path: Path) -> None:
    """A checkout and what is installed of it are the same, whatever else lies around."""
    for package in ("launcher", "trainer"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    assert code_digest(tmp_path) == code_digest(ROOT)
    (tmp_path / "launcher" / "notes.txt~").write_text("x")
    assert code_digest(tmp_path) == code_digest(ROOT)
    (tmp_path / "trainer" / "new.py").touch()
    assert code_digest(tmp_path) != code_digest(ROOT)


def test_secure_boot(tmp_path: Path) -> None:
    assert secure_boot(tmp_path / "no-efi" / "efivars") == "off"
    variables = tmp_path / "efivars"
    assert secure_boot(variables) == "unknown"  # UEFI, but its variables are not mounted
    variables.mkdir()
    (variables / "BootOrder-x").touch()
    assert secure_boot(variables) == "off"
    (variables / VARIABLE).write_bytes(b"\x06\0\0\0\1")
    assert secure_boot(variables) == "on"
    (variables / VARIABLE).write_bytes(b"\x06\0\0\0\0")
    assert secure_boot(variables) == "off"


@pytest.mark.parametrize(
    ("targets", "desktop", "expected"),
    [
        ("static\nstatic\nstatic\n", (0, "active\n"), True),
        ("masked\nmasked\nmasked\n", (0, "active\n"), False),
        ("static\nstatic\nstatic\n", (3, "inactive\n"), False),
    ],
)
def test_a_desktop_may_fall_asleep(targets: str, desktop: tuple[int, str], expected: bool) -> None:
    def run(argv: Sequence[str]) -> tuple[int, str]:
        return (0, targets) if argv[1] == "is-enabled" else desktop

    assert may_sleep(run) is expected


def test_no_systemd_no_sleep() -> None:
    assert may_sleep(lambda _: (127, "systemctl: not installed")) is False


def test_clouds_are_known_by_their_firmware(tmp_path: Path) -> None:
    assert detect_provider(tmp_path) == ""
    for name, value, cloud in (
        ("sys_vendor", "Amazon EC2", "Amazon"),
        ("product_name", "Google Compute Engine", "Google"),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "Azure"),
        ("sys_vendor", "Hetzner", "Hetzner"),
        ("sys_vendor", "Dell Inc.", ""),
    ):
        folder = tmp_path / (cloud or "own")
        folder.mkdir()
        (folder / name).write_text(f"{value}\n")
        assert detect_provider(folder) == cloud
