"""A certificate authority for development: its key in a file, and the certificates of nodes and clients.

    ca.pem      the authority's certificate, which everybody may have
    ca.key      its key: somebody who has it can act as a node or as any client
    NAME.pem    key and certificate of a node or a client in one file, as brokers, Java's clients and librdkafka's
                read it

Files with a key can be read by their owner only, from the moment they exist. No file is overwritten: another
authority under the same name would make all certificates of the first one useless.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.cli.failures import Failure, WrongUsage

CERTIFICATE_FILE = "ca.pem"
KEY_FILE = "ca.key"
ORGANIZATION = "Penstock development"
# The authority outlives its certificates, which are replaced more easily than what everybody trusts.
AUTHORITY_DAYS = 3650
# Of all that is made at once; X.509 has dates up to 9999, and this is enough for a laptop.
DAYS_MAX = 36500
# Clocks of other machines may be behind.
EARLY = timedelta(hours=1)
PRIVATE, PUBLIC = 0o600, 0o644

# A file's name and a certificate's common name, which X.509 limits to 64 characters.
_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_host = re.compile(
    r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_-]{0,62})(?:\.[a-z0-9_](?:[a-z0-9_-]{0,62}))*", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Issued:
    name: str
    # With its key.
    file: Path
    not_after: datetime
    # None for a client.
    hosts: tuple[str, ...] | None = None


class DevelopmentAuthority:
    """An authority whose files are in one directory."""

    def __init__(
        self, directory: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> None:
        self.directory = directory
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, directory: Path, days: int) -> DevelopmentAuthority:
        """A new authority in a directory that has none. Certificates may be valid for ``days``."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _subject(f"{ORGANIZATION} authority")
        begin, end = _validity(max(AUTHORITY_DAYS, days + 1))
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        # The key comes first: if only one of the two can be written, `load` says which one is missing.
        _write(directory / KEY_FILE, _key_text(key), PRIVATE)
        _write(directory / CERTIFICATE_FILE, certificate.public_bytes(Encoding.PEM), PUBLIC)
        return cls(directory, certificate, key)

    @classmethod
    def load(cls, directory: Path) -> DevelopmentAuthority:
        """The authority of a directory. Raises WrongUsage if there is none that can be used."""
        certificate_file, key_file = directory / CERTIFICATE_FILE, directory / KEY_FILE
        for each in (certificate_file, key_file):
            if not each.is_file():
                raise WrongUsage(
                    f"{each} does not exist; make an authority with `penstock tls init {directory}`"
                )
        try:
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except ValueError:
            raise WrongUsage(f"{certificate_file} is not a certificate in PEM format") from None
        try:
            key = load_pem_private_key(key_file.read_bytes(), None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise WrongUsage(f"{key_file} is not a private key in PEM format without a password") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise WrongUsage(f"{key_file} is not the key of {certificate_file}")
        with contextlib.suppress(InvalidSignature, ValueError, TypeError):
            certificate.verify_directly_issued_by(certificate)
            if certificate.not_valid_after_utc > datetime.now(UTC):
                return cls(directory, certificate, key)
            raise WrongUsage(f"the authority {certificate_file} has expired; make another one elsewhere")
        raise WrongUsage(f"{certificate_file} was not made by `penstock tls init`")

    @property
    def certificate_file(self) -> Path:
        return self.directory / CERTIFICATE_FILE

    @property
    def key_file(self) -> Path:
        return self.directory / KEY_FILE

    @property
    def not_after(self) -> datetime:
        return self._certificate.not_valid_after_utc

    def issue_node(self, name: str, hosts: Sequence[str], days: int) -> Issued:
        """A certificate by which clients know a node, and nodes each other."""
        names = [_general_name(host) for host in hosts]
        assert names, "clients would accept it under no name"
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        file, end = self._issue(name, days, usages, x509.SubjectAlternativeName(names))
        return Issued(name, file, end, tuple(hosts))

    def issue_client(self, name: str, days: int) -> Issued:
        """A certificate by which brokers know a client. Nobody accepts it as a broker's."""
        file, end = self._issue(name, days, [ExtendedKeyUsageOID.CLIENT_AUTH], None)
        return Issued(name, file, end)

    def _issue(
        self,
        name: str,
        days: int,
        usages: list[x509.ObjectIdentifier],
        hosts: x509.SubjectAlternativeName | None,
    ) -> tuple[Path, datetime]:
        begin, end = _validity(days)
        if end > self.not_after:
            left = (self.not_after - datetime.now(UTC)).days
            raise WrongUsage(f"--days {days}: the authority itself is valid for only {left} days")
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(_subject(name))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if hosts is not None:
            builder = builder.add_extension(hosts, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        file = self.directory / f"{name}.pem"
        _write(file, _key_text(key) + certificate.public_bytes(Encoding.PEM), PRIVATE)
        return file, end


def check_name(name: str) -> str:
    """A name for a file and a certificate. Raises WrongUsage."""
    if not _name.fullmatch(name):
        raise WrongUsage(f"not a name of letters, digits, '.', '_' and '-', 64 at most: {name!r}")
    if f"{name}.pem".lower() == CERTIFICATE_FILE:
        raise WrongUsage(f"{CERTIFICATE_FILE} is the authority's own file; choose another name than {name}")
    return name


def check_host(host: str) -> str:
    """A host's name or address, for a certificate. Raises WrongUsage."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        if address.is_unspecified:
            raise WrongUsage(f"--host {host}: nobody connects to this address; name those that clients use")
        return str(address)
    if not _host.fullmatch(host) or len(host) > 253:
        raise WrongUsage(
            f"--host {host}: not a host name or an IP address, without a port and in ASCII (xn--...)"
        )
    return host


def default_hosts() -> list[str]:
    """How a broker on this machine may be reached."""
    hosts = ["localhost", "127.0.0.1", "::1"]
    machine = socket.gethostname()
    if _host.fullmatch(machine) and machine not in hosts:
        hosts.append(machine)
    return hosts


def refuse_existing(files: Iterable[Path]) -> None:
    """Before anything is written, so that a refusal leaves nothing behind. Raises Failure."""
    for file in files:
        if file.exists() or file.is_symlink():
            raise _exists(file)


def _exists(file: Path) -> Failure:
    return Failure(f"{file} exists already; nothing is overwritten")


def _write(file: Path, content: bytes, mode: int) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise _exists(file) from None
    with open(descriptor, "wb") as opened:
        # The mask of the process may have taken away more than others may have.
        os.fchmod(descriptor, mode)
        opened.write(content)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _subject(name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, ORGANIZATION),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _validity(days: int) -> tuple[datetime, datetime]:
    now = datetime.now(UTC).replace(microsecond=0)
    return now - EARLY, now + timedelta(days=days)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    # Java reads keys in this format only.
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
