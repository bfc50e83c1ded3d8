"""Certificates, proven by real TLS 1.3 handshakes."""

import datetime
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from launcher.errors import ConfigError
from launcher.runs.certificates.authority import Authority, Credentials, certificate_identity
from trainer.exchange.protocol.members import RefusalError
from trainer.exchange.transport import tls
from trainer.system.errors import InputError, ProtocolError


def store(folder: Path, credentials: Credentials) -> Path:
    folder.mkdir(parents=True)
    for name, content in credentials.contents_by_name().items():
        (folder / name).write_bytes(content)
    return folder


def context(purpose: ssl.Purpose, folder: Path) -> ssl.SSLContext:
    result = ssl.create_default_context(purpose, cafile=folder / "ca.pem")
    result.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    result.minimum_version = ssl.TLSVersion.TLSv1_3
    result.verify_mode = ssl.CERT_REQUIRED
    # What Python 3.13 switches on by itself: refuses chains without key identifiers.
    result.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    return result


def handshake(server: Path, client: Path, name: str = "127.0.0.1") -> object:
    """Return the client's certificate as the server sees it; raises what either side raised."""
    near, far = socket.socketpair()
    near.settimeout(10)
    far.settimeout(10)
    seen: list[object] = []

    def serve() -> None:
        try:
            with context(ssl.Purpose.CLIENT_AUTH, server).wrap_socket(
                far, server_side=True
            ) as near_end:
                seen.append(near_end.getpeercert())
                near_end.sendall(b"x")
        except OSError as error:
            seen.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    error: OSError | None = None
    try:
        far_end = context(ssl.Purpose.SERVER_AUTH, client).wrap_socket(near, server_hostname=name)
        with far_end:
            far_end.recv(1)
    except OSError as caught:
        error = caught
    thread.join()
    if isinstance(seen[0], OSError):
        raise seen[0]
    if error is not None:
        raise error
    return seen[0]


def is_coordinator(certificate: dict[str, Any], run_id: str) -> bool:
    try:
        tls.check_coordinator([certificate], run_id)
    except RefusalError:
        return False
    return True


@pytest.fixture
def authority() -> Authority:
    return Authority.create()


def test_both_sides_accept_each_other_and_the_rank_is_in_the_certificate(
    tmp_path: Path, authority: Authority
) -> None:
    server = store(
        tmp_path / "c", authority.issue("urn:motley:run:demo:coordinator", ["127.0.0.1", "box"])
    )
    client = store(tmp_path / "w", authority.issue("urn:motley:run:demo:rank:3", ["10.0.0.3"]))
    peer = handshake(server, client)
    assert isinstance(peer, dict)
    assert ("URI", "urn:motley:run:demo:rank:3") in peer["subjectAltName"]
    assert tls.read_certified_rank([peer], "demo") == 3
    assert not is_coordinator(peer, "demo")
    assert handshake(server, client, "box")


@pytest.mark.parametrize("run_id", ["demo", "a b/c:rank:1", "Läufe %41", "x" * 120])
def test_what_one_side_writes_the_other_reads(
    tmp_path: Path, authority: Authority, run_id: str
) -> None:
    server = store(
        tmp_path / "c", authority.issue(certificate_identity(run_id, None), ["127.0.0.1"])
    )
    client = store(tmp_path / "w", authority.issue(certificate_identity(run_id, 7), []))
    worker, coordinator = handshake(server, client), handshake(server, server)
    assert isinstance(worker, dict)
    assert isinstance(coordinator, dict)
    assert tls.read_certified_rank([worker], run_id) == 7
    assert is_coordinator(coordinator, run_id)
    tls.require_run(client, run_id)
    for other in ("dem", "demo:", "demo2", "a b/c", run_id + ":rank", "%"):
        assert not is_coordinator(coordinator, other)
        with pytest.raises(ProtocolError, match="names no rank of run"):
            tls.read_certified_rank([worker], other)
        with pytest.raises(InputError, match="is not of run"):
            tls.require_run(client, other)


@pytest.mark.parametrize(
    "uri", ["urn:motley:rank:0", "urn:motley:coordinator", "urn:motley:run::rank:0"]
)
def test_a_certificate_without_a_run_is_of_none(uri: str) -> None:
    dates = {"notBefore": "Jan  1 00:00:00 2020 GMT", "notAfter": "Jan  1 00:00:00 2120 GMT"}
    certificate: dict[str, Any] = {"subjectAltName": (("URI", uri),), **dates}
    assert not is_coordinator(certificate, "demo")
    with pytest.raises(ProtocolError):
        tls.read_certified_rank([certificate], "demo")


@pytest.mark.parametrize("what", ["client", "server", "name"])
def test_what_is_of_another_cluster_or_host_is_refused(
    tmp_path: Path, authority: Authority, what: str
) -> None:
    foreign = Authority.create()
    issuer = {what: foreign}
    address = "10.0.0.1" if what == "name" else "127.0.0.1"
    coordinator, worker = "urn:motley:run:demo:coordinator", "urn:motley:run:demo:rank:0"
    server = issuer.get("server", authority).issue(coordinator, [address])
    client = store(tmp_path / "w", issuer.get("client", authority).issue(worker, []))
    (client / "ca.pem").write_bytes(authority.pem)  # a stranger may trust us; we do not trust it
    with pytest.raises(ssl.SSLError):
        handshake(store(tmp_path / "c", server), client)


def test_an_expired_leaf_is_refused_and_a_clock_that_is_behind_is_not(
    tmp_path: Path, authority: Authority
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    server = store(
        tmp_path / "c", authority.issue("urn:motley:run:demo:coordinator", ["127.0.0.1"])
    )
    ahead = authority.issue("urn:motley:run:demo:rank:0", [], now + datetime.timedelta(minutes=50))
    assert handshake(server, store(tmp_path / "ahead", ahead))
    old = authority.issue("urn:motley:run:demo:rank:0", [], now - datetime.timedelta(days=31))
    with pytest.raises(ssl.SSLError):
        handshake(server, store(tmp_path / "old", old))


def test_a_leaf_cannot_sign_and_carries_what_verifiers_ask_for(authority: Authority) -> None:
    leaf = x509.load_pem_x509_certificate(
        authority.issue("urn:motley:run:demo:rank:0", ["fd00::1"]).certificate
    )
    extensions = leaf.extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    assert extensions.get_extension_for_class(x509.AuthorityKeyIdentifier)
    usage = list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert usage == [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    assert leaf.not_valid_after_utc - leaf.not_valid_before_utc < datetime.timedelta(days=31)


def test_the_authority_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    first = Authority.open(tmp_path)
    assert Authority.open(tmp_path).pem == first.pem
    assert (tmp_path / "ca-key.pem").stat().st_mode & 0o777 == 0o600


def test_a_damaged_or_foreign_authority_is_said(tmp_path: Path) -> None:
    Authority.open(tmp_path)
    key = (tmp_path / "ca-key.pem").read_bytes()
    (tmp_path / "ca-key.pem").write_bytes(key[:40])
    with pytest.raises(ConfigError, match="cannot be read"):
        Authority.open(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    Authority.open(other)
    (tmp_path / "ca-key.pem").write_bytes((other / "ca-key.pem").read_bytes())
    with pytest.raises(ConfigError, match="does not belong"):
        Authority.open(tmp_path)
