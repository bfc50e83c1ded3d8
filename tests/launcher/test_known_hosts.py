"""known_hosts as OpenSSH writes it: what stands there is found, what changed is refused."""

import subprocess
import threading
from pathlib import Path

import pytest
from sshd import make_key

from launcher.errors import UnreachableError
from launcher.hosts.known_hosts import entry_name, find, fingerprint, remember, verify

KEY = b"\0\0\0\x0bssh-ed25519" + b"\0\0\0\x20" + b"k" * 32
OTHER = b"\0\0\0\x0bssh-ed25519" + b"\0\0\0\x20" + b"o" * 32


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "motley" / "known_hosts"


def public(path: Path) -> tuple[str, str]:
    kind, key = path.with_suffix(".pub").read_text().split()[:2]
    return kind, key


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("intel", "intel", True),
        ("intel,10.0.0.3", "10.0.0.3", True),
        ("Intel", "intel", True),
        ("intel", "intel2", False),
        ("*.lan", "a.lan", True),
        ("10.0.0.?", "10.0.0.3", True),
        ("*,!intel", "intel", False),
        ("!intel,*", "lambda", True),
        ("[127.0.0.1]:2222", "[127.0.0.1]:2222", True),
        ("[127.0.0.1]:2222", "127.0.0.1", False),
        ("[127.0.0.1]:2222", "1:2222", False),
        ("127.0.0.1", "[127.0.0.1]:2222", False),
        ("[fe80::1]:22", "fe80::1", False),
        ("|1|bad|worse", "intel", False),
        ("|1|", "intel", False),
    ],
)
def test_patterns_mean_what_they_mean_to_ssh(
    tmp_path: Path, pattern: str, name: str, matches: bool
) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(f"# a comment\n\n{pattern} ssh-ed25519 AAAA comment\nbroken\n{name} x %%%\n")
    found = find(name, [str(tmp_path / "none"), str(path), str(path)])
    assert [(entry.place, entry.kind) for entry in found] == (
        [(f"{path}:3", "ssh-ed25519")] if matches else []
    )


@pytest.mark.needs("ssh-keygen")
def test_hashed_names_are_found_as_ssh_keygen_hashes_them(tmp_path: Path) -> None:
    kind, key = public(make_key(tmp_path / "key"))
    path = tmp_path / "known_hosts"
    path.write_text(f"intel {kind} {key}\n[intel]:2222 {kind} {key}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(path)], check=True, capture_output=True)
    assert "intel" not in path.read_text()
    assert [entry.line for entry in find("intel", [str(path)])] == [1]
    assert [entry.line for entry in find("[intel]:2222", [str(path)])] == [2]
    assert not find("lambda", [str(path)])


@pytest.mark.needs("ssh-keygen")
def test_fingerprints_are_those_of_ssh_keygen(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    said = subprocess.run(
        ["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, text=True, check=True
    ).stdout
    path = tmp_path / "known_hosts"
    path.write_text("intel " + (tmp_path / "key.pub").read_text())
    assert fingerprint(find("intel", [str(path)])[0].key) == said.split()[1]


@pytest.mark.needs("ssh-keygen")
def test_what_is_remembered_ssh_finds_and_we_do(own_home: Path) -> None:
    verify("host intel", "[10.0.0.3]:2222", [], "ssh-ed25519", KEY, True)
    remember(own_home, "lambda", "ssh-ed25519", OTHER)
    known = find("[10.0.0.3]:2222", [str(own_home)])
    verify("host intel", "[10.0.0.3]:2222", known, "ssh-ed25519", KEY, False)
    assert own_home.stat().st_mode & 0o777 == 0o600
    done = subprocess.run(
        ["ssh-keygen", "-F", "[10.0.0.3]:2222", "-f", str(own_home)], capture_output=True, text=True
    )
    assert "found: line 1" in done.stdout


def test_unknown_changed_and_revoked_keys_are_refused_with_what_to_do(
    tmp_path: Path, own_home: Path
) -> None:
    with pytest.raises(UnreachableError, match=r"not known yet.*--accept-new-host-keys"):
        verify("host intel", "intel", [], "ssh-ed25519", KEY, False)
    assert not own_home.exists()
    remember(own_home, "intel", "ssh-ed25519", OTHER)
    known = find("intel", [str(own_home)])
    for accept_new in (False, True):
        with pytest.raises(UnreachableError, match="HAS CHANGED") as caught:
            verify("host intel", "intel", known, "ssh-ed25519", KEY, accept_new)
        assert f"{own_home}:1 says {fingerprint(OTHER)}" in str(caught.value)
        assert f"ssh-keygen -R intel -f {own_home}" in str(caught.value)
        assert "\n" not in str(caught.value)
        # A key of another kind is no first contact either.
        with pytest.raises(UnreachableError, match="HAS CHANGED"):
            verify("host intel", "intel", known, "ecdsa-sha2-nistp256", KEY, accept_new)
    path = tmp_path / "revoked"
    path.write_text(own_home.read_text().replace("intel", "@revoked *", 1))
    known = find("intel", [str(own_home), str(path)])
    with pytest.raises(UnreachableError, match=rf"revoked in {path}:1"):
        verify("host intel", "intel", known, "ssh-ed25519", OTHER, True)


def test_a_certificate_authority_alone_vouches_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    remember(path, "@cert-authority *", "ssh-ed25519", KEY)
    known = find("intel", [str(path)])
    assert [entry.marker for entry in known] == ["@cert-authority"]
    with pytest.raises(UnreachableError, match="not known yet"):
        verify("host intel", "intel", known, "ssh-ed25519", KEY, False)


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, own_home: Path) -> None:
    (tmp_path / "config").write_text("in the way")
    with pytest.raises(UnreachableError, match=rf"host intel: .* cannot be written to {own_home}"):
        verify("host intel", "intel", [], "ssh-ed25519", KEY, True)


def test_several_hosts_remembered_at_once_are_all_there(own_home: Path) -> None:
    threads = [
        threading.Thread(target=remember, args=(own_home, f"host{n}", "ssh-ed25519", KEY))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(own_home.read_text().splitlines()) == 20
    assert all(find(f"host{n}", [str(own_home)]) for n in range(20))


def test_names_are_those_that_ssh_looks_up() -> None:
    assert entry_name("Intel", 22) == "intel"
    assert entry_name("10.0.0.3", 2222) == "[10.0.0.3]:2222"
    assert entry_name("::1", 2222) == "[::1]:2222"
    assert entry_name("10.0.0.3", 2222, "Intel") == "intel"
