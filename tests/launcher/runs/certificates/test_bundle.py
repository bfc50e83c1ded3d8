"""Certificate bundles: private, whole or not there, and what the trainer looks for."""

import json
import os
from pathlib import Path

import pytest
from cryptography import x509

from launcher.cli import run
from launcher.commands.certificates import certificates
from launcher.errors import ConfigError
from launcher.runs.certificates import bundle
from launcher.runs.certificates.authority import Authority
from launcher.runs.certificates.bundle import write_bundle
from trainer.config.run import load_config
from trainer.exchange.transport import tls
from trainer.run.composition.roles import Placement, run_coordinator, run_worker
from trainer.system.errors import InputError


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def alternatives(file: Path) -> x509.SubjectAlternativeName:
    leaf = x509.load_pem_x509_certificate(file.read_bytes())
    return leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


@pytest.mark.usefixtures("own_state")
def test_the_command_writes_what_the_trainer_looks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "to" / "tls"
    arguments = ["certificates", "-o", str(folder), "--ranks", "2", "--json"]
    assert run([*arguments, "--host", "intel", "--host", "fd00::1"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["schema"] == "motley.certificates/1"
    assert tree["members"] == ["coordinator", "rank-0", "rank-1"]
    place = Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=str(folder))
    assert place.find_certificates("coordinator", "10.0.0.1") == folder / "coordinator"
    for member, role in (("coordinator", "coordinator"), ("rank-1", "rank:1")):
        uri = f"urn:motley:run:run:{role}"
        tls.make_context(folder / member, server=member == "coordinator")
        names = alternatives(folder / member / "cert.pem")
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [uri]
        assert names.get_values_for_type(x509.DNSName) == ["intel"]
        assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["fd00::1"]
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert [path.name for path in folder.parent.iterdir()] == ["tls"]


@pytest.mark.usefixtures("own_state")
def test_a_bundle_is_replaced_on_request_only_and_by_the_same_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tls"
    arguments = ["certificates", "-o", str(folder), "--ranks", "1"]
    assert run(arguments) == 0
    before = contents(folder)
    assert run(arguments) == 2
    assert "already contains certificates; --force makes new ones" in capsys.readouterr().err
    assert contents(folder) == before
    assert run([*arguments, "--force"]) == 0
    after = contents(folder)
    assert after["rank-0/ca.pem"] == before["rank-0/ca.pem"]
    assert after["rank-0/key.pem"] != before["rank-0/key.pem"]


def test_a_folder_with_anything_else_in_it_is_never_replaced(
    tmp_path: Path, authority: Authority
) -> None:
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"contains other files, such as thesis\.tex"):
        write_bundle(authority, tmp_path, "run", 1, [], replace=True)
    with pytest.raises(ConfigError, match="is a file"):
        write_bundle(authority, tmp_path / "thesis.tex", "run", 1, [], replace=True)
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0", "thesis.tex"}


def test_an_empty_folder_is_filled(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "tls").mkdir()
    assert write_bundle(authority, tmp_path / "tls", "run", 1, [], replace=False).members == (
        "coordinator",
        "rank-0",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["tls"]


@pytest.mark.parametrize("fails_at", range(5))
def test_a_disk_that_fails_leaves_the_old_bundle(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Two ranks are nine writes; a failing move counts as well."""
    folder = tmp_path / "tls"
    write_bundle(authority, folder, "run", 2, [], replace=False)
    before = contents(folder)
    calls = 0
    real_write, real_rename = bundle.write_atomically, Path.rename

    def write(path: Path, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 * fails_at + 1:
            raise OSError(28, os.strerror(28))
        real_write(path, data)

    def rename(self: Path, target: Path) -> Path:
        if fails_at == 4 and target == folder and self.parent == folder.parent:
            raise OSError(5, os.strerror(5))
        return real_rename(self, target)

    monkeypatch.setattr(bundle, "write_atomically", write)
    monkeypatch.setattr(Path, "rename", rename)
    if fails_at == 4:
        calls = -100
    with pytest.raises(ConfigError, match="cannot be written"):
        write_bundle(authority, folder, "run", 2, [], replace=True)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["tls"]


@pytest.mark.parametrize("host", ["", "intel:9000", "a b", "-x", "fe80::1%eth0", "[::1]", "ä.de"])
def test_what_is_no_host_is_refused(tmp_path: Path, authority: Authority, host: str) -> None:
    with pytest.raises(ConfigError, match="give an IP address or a host name"):
        write_bundle(authority, tmp_path / "tls", "run", 1, [host], replace=False)
    assert not (tmp_path / "tls").exists()


def test_a_process_refuses_to_start_with_a_certificate_of_another_run(
    tmp_path: Path, authority: Authority
) -> None:
    write_bundle(authority, tmp_path / "tls", "first", 1, [], replace=False)
    place = Placement(gpus=[], backend="cpu", threads=1, rank=0, tls_dir=str(tmp_path / "tls"))
    config = load_config("quickstart")
    refusal = r"cert\.pem is not of run second; .* launch certificates --run-id second"
    with pytest.raises(InputError, match=refusal):
        run_coordinator(config, "second", place, "127.0.0.1:9000", 1)
    with pytest.raises(InputError, match=refusal):
        run_worker(config, "second", place, "127.0.0.1:9000")


def test_without_more_words_both_programs_mean_the_same_run(tmp_path: Path) -> None:
    """`launch certificates` and `trainer finetune` of the README name none."""
    (default,) = [p.default for p in certificates.params if p.name == "run_id"]
    assert (
        default == load_config(None, {"model.path": "m", "data.train": "d", "num_classes": 2}).name
    )
