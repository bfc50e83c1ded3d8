"""Mutual TLS 1.3 between the members of a run; plaintext on loopback only.

Each process has a folder with `ca.pem`, `cert.pem` and `key.pem`. Its role is a URI in its
certificate: `urn:motley:coordinator` or `urn:motley:rank:3`.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import InputError, ProtocolError

COORDINATOR = "urn:motley:coordinator"
_RANK = "urn:motley:rank:"


def context(folder: Path, *, server: bool) -> ssl.SSLContext:
    """Return a context that presents this process's certificate and demands one of the same CA.

    Host names are not compared: the CA belongs to this one cluster, home networks rename hosts,
    and it is the role in the certificate that says who may be the coordinator.

    Raises:
        InputError: a file is missing or not usable.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
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


def certified_rank(certificate: Mapping[str, Any]) -> int:
    """Return the rank in a peer's certificate, as `ssl` decodes it.

    Raises:
        ProtocolError: the certificate is not a worker's.
    """
    for uri in _uris(certificate):
        number = uri.removeprefix(_RANK)
        if uri.startswith(_RANK) and number.isascii() and number.isdecimal():
            return int(number)
    raise ProtocolError("the peer's certificate names no rank")


def is_coordinator(certificate: Mapping[str, Any]) -> bool:
    """Return whether a certificate is the coordinator's."""
    return COORDINATOR in _uris(certificate)


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


def _uris(certificate: Mapping[str, Any]) -> list[str]:
    names: tuple[tuple[str, str], ...] = certificate.get("subjectAltName", ())
    return [value for kind, value in names if kind == "URI"]
