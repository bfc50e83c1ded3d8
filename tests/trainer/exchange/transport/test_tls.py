"""Dates of certificates: what is too early is worth another try, what is too late is not."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.runs.certificates.authority import Authority, certificate_identity
from trainer.exchange.protocol.members import RefusalError
from trainer.exchange.transport import tls
from trainer.system.errors import ProtocolError

Chain = list[dict[str, Any]]
HOURS = datetime.timedelta(hours=1)
LIFETIME = datetime.timedelta(days=30)
RUN = "run-1"
COORDINATOR, WORKER = certificate_identity(RUN, None), certificate_identity(RUN, 3)


def moment(offset: datetime.timedelta = 0 * HOURS) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + offset


def store(folder: Path, authority: Authority, identity: str, now: datetime.datetime) -> Path:
    folder.mkdir()
    for name, content in authority.issue(identity, ["127.0.0.1"], now).contents_by_name().items():
        (folder / name).write_bytes(content)
    return folder


def chains(
    coordinator: Path, worker: Path, flags: ssl.VerifyFlags = ssl.VERIFY_DEFAULT
) -> tuple[Chain, Chain]:
    """Return what the worker and what the coordinator see of the other."""
    seen: dict[Path, Chain] = {}

    def look(folder: Path, plain: socket.socket, *, server: bool) -> None:
        context = tls.make_context(folder, server=server)
        context.verify_flags |= flags
        with context.wrap_socket(plain, server_side=server) as end:
            certificate: Any = end.getpeercert()
            seen[folder] = [certificate, *context.get_ca_certs()]
            end.unwrap()  # waits until the other side has looked too

    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=look, args=(coordinator, theirs), kwargs={"server": True})
    thread.start()
    look(worker, ours, server=False)
    thread.join()
    return seen[worker], seen[coordinator]


def refusal(check: Any, chain: Sequence[Any]) -> RefusalError:
    with pytest.raises(RefusalError) as caught:
        check(chain, RUN)
    return caught.value


@pytest.fixture
def authority() -> Authority:
    return Authority.create()


def test_certificates_of_today_count(tmp_path: Path, authority: Authority) -> None:
    coordinator = store(tmp_path / "c", authority, COORDINATOR, moment())
    worker = store(tmp_path / "w", authority, WORKER, moment())
    of_coordinator, of_worker = chains(coordinator, worker)
    assert len(of_worker) == 2, "the CA's dates are looked at too"
    assert tls.read_certified_rank(of_worker, RUN) == 3
    tls.check_coordinator(of_coordinator, RUN)
    with pytest.raises(ProtocolError, match="names no rank"):
        tls.read_certified_rank(of_coordinator, RUN)
    assert "not a coordinator's" in str(refusal(tls.check_coordinator, of_worker))


def test_certificates_pass_the_checks_of_rfc_5280(tmp_path: Path, authority: Authority) -> None:
    """Python 3.13 makes them by default: key identifiers, and a critical constraint of the CA."""
    coordinator = store(tmp_path / "c", authority, COORDINATOR, moment())
    worker = store(tmp_path / "w", authority, WORKER, moment())
    _, of_worker = chains(coordinator, worker, ssl.VERIFY_X509_STRICT)
    assert tls.read_certified_rank(of_worker, RUN) == 3


def test_too_early_is_worth_another_try_and_names_both_clocks(
    tmp_path: Path, authority: Authority
) -> None:
    later = moment(26 * HOURS)
    coordinator = store(tmp_path / "c", authority, COORDINATOR, later)
    worker = store(tmp_path / "w", authority, WORKER, later)
    of_coordinator, of_worker = chains(coordinator, worker)
    begin = (later - HOURS).strftime("%Y-%m-%dT%H:%M:%SZ")
    for error, words in (
        (
            refusal(tls.check_coordinator, of_coordinator),
            f"the coordinator's certificate is valid from {begin} on, the local clock says ",
        ),
        (
            refusal(tls.read_certified_rank, of_worker),
            f"the worker's certificate is valid from {begin} on, the coordinator's clock says ",
        ),
    ):
        assert error.retry
        assert words in str(error)
        assert moment().strftime("%Y-%m-%d") in str(error)


def test_expired_is_refused_for_good(tmp_path: Path, authority: Authority) -> None:
    long_ago = moment(-LIFETIME - HOURS)
    coordinator = store(tmp_path / "c", authority, COORDINATOR, long_ago)
    worker = store(tmp_path / "w", authority, WORKER, long_ago)
    of_coordinator, of_worker = chains(coordinator, worker)
    for check, chain in (
        (tls.check_coordinator, of_coordinator),
        (tls.read_certified_rank, of_worker),
    ):
        error = refusal(check, chain)
        assert not error.retry
        assert "was valid until" in str(error)
        assert "says" in str(error)


@pytest.mark.parametrize(("days", "retry"), [(2, True), (-3651, False)])
def test_the_dates_of_the_ca_count_too(tmp_path: Path, days: int, retry: bool) -> None:
    authority = Authority.create(moment(datetime.timedelta(days=days)))
    coordinator = store(tmp_path / "c", authority, COORDINATOR, moment())
    worker = store(tmp_path / "w", authority, WORKER, moment())
    for check, chain in zip(
        (tls.check_coordinator, tls.read_certified_rank), chains(coordinator, worker), strict=True
    ):
        error = refusal(check, chain)
        assert error.retry == retry
        assert str(error).startswith("the CA's certificate")


def test_all_but_the_dates_is_still_openssls(tmp_path: Path, authority: Authority) -> None:
    coordinator = store(tmp_path / "c", authority, COORDINATOR, moment())
    foreign = store(tmp_path / "w", Authority.create(), WORKER, moment())
    (foreign / "ca.pem").write_bytes(authority.pem)
    for server in (True, False):
        context = tls.make_context(coordinator, server=server)
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    ours, theirs = socket.socketpair()
    stop = time.monotonic() + 10

    def knock() -> None:
        with (
            theirs,
            pytest.raises((ssl.SSLError, OSError)),
            tls.make_context(foreign, server=False).wrap_socket(theirs) as end,
        ):
            assert end.recv(1) or time.monotonic() > stop

    thread = threading.Thread(target=knock)
    thread.start()
    with ours, pytest.raises(ssl.SSLCertVerificationError):
        tls.make_context(coordinator, server=True).wrap_socket(ours, server_side=True)
    thread.join()
