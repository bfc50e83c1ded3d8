"""The cluster's own certificate authority, and a new leaf for every process of a run.

P-256 everywhere. The CA's key never leaves the launcher; a process gets `ca.pem`, `cert.pem` and
`key.pem`. The leaf's SAN holds the run and the role as a URI, so it is valid only for these.
Leafs carry subject and authority key identifiers: Python 3.13 refuses chains without them.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import os
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from launcher.errors import ConfigError
from trainer.system.storage.atomic_file import write_atomically

CLOCK_SKEW = datetime.timedelta(hours=1)
"""Hosts whose clocks run behind by less than this still accept a fresh leaf."""
LEAF_LIFETIME = datetime.timedelta(days=30)
_LONGEST_NAME = 64  # of a common name: X.520, ub-common-name
CA_LIFETIME = datetime.timedelta(days=3650)


@dataclass(frozen=True)
class Credentials:
    """The credentials of one process: PEM bytes for `ca.pem`, `cert.pem` and `key.pem`."""

    ca: bytes
    certificate: bytes
    key: bytes

    def contents_by_name(self) -> dict[str, bytes]:
        """Return the contents by file name."""
        return {"ca.pem": self.ca, "cert.pem": self.certificate, "key.pem": self.key}


class Authority:
    """The CA of a cluster; `Authority.open` creates it on first use."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, now: datetime.datetime | None = None) -> Authority:
        """Return a new CA that signs leaf certificates only (path length 0)."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Motley cluster CA")])
        builder = (
            _certificate_builder(name, name, key.public_key(), CA_LIFETIME, now)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
            )
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Read the CA from a folder that exists, or make it there: the key for this user alone.

        Two commands may do so at once: the second finds what the first made. The certificate is
        written last: it marks a complete CA.

        Raises:
            ConfigError: the files there are damaged or do not belong together.
        """
        with _lock_folder(folder):
            return cls._open(folder)

    @classmethod
    def _open(cls, folder: Path) -> Authority:
        certificate_path, key_path = folder / "ca.pem", folder / "ca-key.pem"
        if not certificate_path.exists():
            authority = cls.create()
            write_atomically(key_path, _key_pem(authority._key))
            write_atomically(certificate_path, authority.pem)
            return authority
        try:
            certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
            key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{folder}: the cluster CA cannot be read ({error}); remove ca.pem to create "
                "a new one"
            ) from None
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or key.public_key() != certificate.public_key()
        ):
            raise ConfigError(
                f"{key_path} does not belong to ca.pem; remove both to create a new CA"
            )
        return cls(certificate, key)

    @property
    def pem(self) -> bytes:
        """The CA's certificate; no secret."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self, identity: str, names: Iterable[str], now: datetime.datetime | None = None
    ) -> Credentials:
        """Return a fresh key and a leaf for `identity` (a URI), valid for servers and clients.

        `names` are the IP addresses and host names under which others reach the process.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity[-_LONGEST_NAME:])])
        alternatives: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity)]
        alternatives += [_general_name(name) for name in names]
        issuer_id = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        certificate = (
            _certificate_builder(
                subject, self._certificate.subject, key.public_key(), LEAF_LIFETIME, now
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id.value),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        return Credentials(self.pem, pem, _key_pem(key))


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Generator[None]:
    """Wait until no other process is opening the CA of this folder: milliseconds."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def certificate_identity(run_id: str, rank: int | None) -> str:
    """Return the URI that names the worker of a rank, or the coordinator, in its certificate."""
    role = "coordinator" if rank is None else f"rank:{rank}"
    return f"urn:motley:run:{quote(run_id, safe='')}:{role}"


def _certificate_builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    lifetime: datetime.timedelta,
    now: datetime.datetime | None,
) -> x509.CertificateBuilder:
    moment = now or datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - CLOCK_SKEW)
        .not_valid_after(moment + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
