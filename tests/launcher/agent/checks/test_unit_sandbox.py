"""What a unit sees and writes, from systemd's own words on a host that the recipe has made."""

from pathlib import Path

import pytest

from launcher.agent.checks.unit_sandbox import check_sandboxes, read_fence
from launcher.agent.checks.unit_states import read_properties

HEAD = "motley-coordinator@demo:coordinator.service"
WORKER = "motley-worker@demo:worker-0.service"
# Debian 12 (systemd 252) and 13 (257) say the same.
SHOWN = f"""\
ReadWritePaths=/var/lib/motley -/srv/motley
PrivateTmp=yes
ProtectHome=yes
ProtectSystem=strict
Id={WORKER}

ReadWritePaths=/var/lib/motley -/srv/motley
PrivateTmp=yes
ProtectHome=yes
ProtectSystem=strict
Id={HEAD}

ReadWritePaths=
PrivateTmp=no
ProtectHome=no
ProtectSystem=no
Id=open@x.service
"""
STATE = "/var/lib/motley"


@pytest.fixture(autouse=True)
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a systemctl that says what a host's has said."""
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{SHOWN}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


def needs(*writes: str, reads: tuple[str, ...] = ()) -> dict[str, list[str]]:
    return {"reads": list(reads), "writes": [STATE, *writes]}


def test_folders_of_the_state_and_of_the_share_are_fine() -> None:
    head = needs(f"{STATE}/outputs/a", "/srv/motley/checkpoints/a", reads=("/opt/data",))
    finding = check_sandboxes({HEAD: head, WORKER: needs()})
    assert (finding.status, finding.detail) == (
        "ok",
        "writes below /var/lib/motley and /srv/motley",
    )


@pytest.mark.parametrize("path", ["/data/out", "/var/lib/motley-2", "/srv"])
def test_an_output_elsewhere_is_read_only(path: str) -> None:
    finding = check_sandboxes({HEAD: needs(path), WORKER: needs()})
    assert finding.status == "fail"
    assert finding.detail == (
        f"{path} is read-only for motley-coordinator@.service, "
        "which writes below /var/lib/motley and /srv/motley"
    )
    assert "trainer_writable_folders" in finding.remedy


@pytest.mark.parametrize(("path", "folder"), [("/home/ops/m", "/home"), ("/tmp/m", "/tmp")])
def test_what_is_hidden_is_said_of_each_unit(path: str, folder: str) -> None:
    """The agent sees these folders, and may even write in one of them."""
    finding = check_sandboxes({HEAD: needs(path), WORKER: needs(reads=(path,))})
    assert finding.status == "fail"
    assert finding.detail == (
        f"{path}: motley-coordinator@.service cannot see {folder}; "
        f"{path}: motley-worker@.service cannot see {folder}"
    )
    assert "launch sync inputs" in finding.remedy


def test_links_count_as_what_they_link_to(tmp_path: Path) -> None:
    (tmp_path / "share").symlink_to("/srv/motley")
    assert check_sandboxes({HEAD: needs(f"{tmp_path}/share/out")}).status == "ok"
    (tmp_path / "link").symlink_to("/home")
    assert "cannot see /home" in check_sandboxes({HEAD: needs(f"{tmp_path}/link/x")}).detail


def test_a_unit_without_fences_may_write_anywhere() -> None:
    fence = read_fence(read_properties(SHOWN)["open@x.service"])
    assert (fence.writable, fence.hidden) == (None, ())
    assert check_sandboxes({"open@x.service": needs("/data", "/tmp/x")}).detail == "writes below /"


def test_a_systemd_that_is_silent_is_no_reason_to_refuse(systemctl: Path) -> None:
    systemctl.write_text("#!/bin/sh\nexit 1\n")
    assert check_sandboxes({HEAD: needs("/data")}).status == "warn"
