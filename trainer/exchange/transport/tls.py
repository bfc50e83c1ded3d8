"""Mutual TLS 1.3 between the members of a run; plaintext on loopback only.

Each process has a folder with `ca.pem`, `cert.pem` and `key.pem`. Its run and its role in it are a
URI in its certificate: `urn:motley:run:RUN:coordinator` or `urn:motley:run:RUN:rank:3`. Both sides
check it, so a certificate of one run is of no use in another, though one CA has signed both.
"""

from __future__ import annotations

import ipaddress
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainer.exchange.protocol.members import RefusalError
from trainer.system.errors import InputError, ProtocolError
from trainer.system.regular_file import read_text
from trainer.system.timestamp import format_timestamp

Certificate = Mapping[str, Any]
"""A certificate as `ssl` decodes it."""
Chain = Sequence[Certificate]
"""A peer's certificate, and behind it those of the CAs that may have signed it."""

TRANSIENT = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""A connection that merely broke during TLS: the coordinator may be restarting."""
COORDINATOR = "coordinator"
_RANK = "rank:"
_DATES_ARE_OURS = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME. Its alert says "bad certificate" of one whose time has not
come, and a clock that is behind right after boot would end a worker for good; `_check_dates` looks
at the dates of every peer instead, before anything else is read or sent."""


def make_context(folder: Path, *, server: bool) -> ssl.SSLContext:
    """Return a context that presents this process's certificate and demands one of the same CA.

    Host names are not compared: the CA belongs to this one cluster, home networks rename hosts,
    and it is the role in the certificate that decides which end may be the coordinator.

    Raises:
        InputError: a file is missing or not usable.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= _DATES_ARE_OURS
    for name in ("ca.pem", "cert.pem", "key.pem"):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder / name}: no such file; --tls takes the folder of one process, as "
                "`launch cluster up` makes it"
            )
    try:
        made.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        made.load_verify_locations(folder / "ca.pem")
    except (ssl.SSLError, OSError) as error:
        raise InputError(f"{folder}: certificate or key cannot be used: {error}") from None
    return made


def retry_once(operation: Callable[[memoryview], int], buffer: memoryview) -> int:
    """Read from or write to a TLS connection; retry an error once before it counts as lost.

    OpenSSL looks into a queue of the thread to tell what went wrong, and Python leaves errors of
    other connections there (python/cpython#148594; since 3.13.2 of every write to
    a disconnected peer). A connection that had nothing to do would be lost with them.

    Raises:
        OSError: it must wait (`ssl.SSLWantReadError`, `ssl.SSLWantWriteError`), or is broken.
    """
    try:
        return operation(buffer)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise
    except OSError as error:
        _empty_error_queue()
        try:
            if count := operation(buffer):
                return count
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except OSError:
            pass
        raise error


def _empty_error_queue() -> None:
    """Make a handshake begin, which is where OpenSSL empties the thread's queue of errors."""
    handshake = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(
        ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="localhost"
    )
    with suppress(ssl.SSLWantReadError):
        handshake.do_handshake()


def read_certified_rank(chain: Chain, run_id: str) -> int:
    """Return the rank in a worker's certificate.

    Raises:
        ProtocolError: the certificate is not that of a worker of this run.
        RefusalError: by this clock it is not valid yet (worth another try), or no longer.
    """
    _check_dates(chain, "the worker's", "the coordinator's clock")
    for role in _read_roles(chain[0], run_id):
        number = role.removeprefix(_RANK)
        if role.startswith(_RANK) and number.isascii() and number.isdecimal():
            return int(number)
    raise ProtocolError(f"the peer's certificate names no rank of run {run_id}")


def check_coordinator(chain: Chain, run_id: str) -> None:
    """Check that a certificate is that of the coordinator of a run.

    Raises:
        RefusalError: it is not; or by this clock it is not valid yet (worth another try), or no
            longer.
    """
    _check_dates(chain, "the coordinator's", "the local clock")
    if COORDINATOR not in _read_roles(chain[0], run_id):
        raise RefusalError(f"the peer's certificate is not a coordinator's of run {run_id}")


def require_run(folder: Path, run_id: str) -> None:
    """Refuse to start with a certificate of our own that every peer of this run would refuse.

    Raises:
        InputError: it is of another run.
    """
    with suppress(OSError, ValueError):  # `context` says what cannot be read
        der = ssl.PEM_cert_to_DER_cert(read_text(folder / "cert.pem"))
        if _uri_prefix(run_id).encode() not in der:
            raise InputError(
                f"{folder / 'cert.pem'} is not of run {run_id}; give the --run-id that it was made "
                f"for, or make others: launch certificates --run-id {run_id}"
            )


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Split `host:port` (IPv6 in brackets).

    Raises:
        InputError: it is not such an address; names the flag.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"{flag} {text}: give an address as HOST:PORT, such as 192.168.1.5:9000")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_dates(chain: Chain, whose: str, clock: str) -> None:
    now = time.time()
    for certificate, owner in zip(chain, [whose, *["the CA's"] * len(chain)], strict=False):
        begin = ssl.cert_time_to_seconds(certificate["notBefore"])
        end = ssl.cert_time_to_seconds(certificate["notAfter"])
        if now < begin:
            raise RefusalError(
                f"{owner} certificate is valid from {format_timestamp(begin)} on, "
                f"{clock} says {format_timestamp(now)}: "
                "is that clock behind?",
                retry=True,
            )
        if now > end:
            raise RefusalError(
                f"{owner} certificate was valid until {format_timestamp(end)}, "
                f"{clock} says {format_timestamp(now)}: "
                "is that clock right? `launch cluster up` issues new certificates"
            )


def _read_roles(certificate: Certificate, run_id: str) -> list[str]:
    """Return the roles in a run that a certificate names."""
    names: tuple[tuple[str, str], ...] = certificate.get("subjectAltName", ())
    prefix = _uri_prefix(run_id)
    uris = [value for kind, value in names if kind == "URI"]
    return [uri.removeprefix(prefix) for uri in uris if uri.startswith(prefix)]


def _uri_prefix(run_id: str) -> str:
    return f"urn:motley:run:{quote(run_id, safe='')}:"
