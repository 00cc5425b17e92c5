"""The files of a TLS listener and its clients, as a broker's and librdkafka's settings name them."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from tests.tls.authority import Authority


class TlsFiles:
    """A directory with an authority, the certificate of a broker on loopback, and those of clients."""

    def __init__(
        self, directory: Path, authority: Authority | None = None, *, host: str = "127.0.0.1"
    ) -> None:
        self.directory = directory
        self.authority = authority or Authority()
        self._host = host
        self.authorities = directory / "ca.pem"
        self.authorities.write_text(self.authority.pem)
        self.keystore = directory / "broker.pem"
        self.replace_keystore()

    def replace_keystore(self, *, valid_days: int = 365) -> None:
        """Another certificate for the broker, put in place at once."""
        chain, key = self.authority.issue(self._host, is_host=True, valid_days=valid_days)
        new = self.keystore.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(key + chain)
        os.replace(new, self.keystore)

    def settings(self, client_auth: str = "requested") -> dict[str, str]:
        """Of the broker."""
        return {
            "ssl.keystore.location": str(self.keystore),
            "ssl.truststore.location": str(self.authorities),
            "ssl.client.auth": client_auth,
        }

    def librdkafka(self, name: str | None = None) -> dict[str, str]:
        """Of a client, with a certificate if it has a name."""
        settings = {"security.protocol": "ssl", "ssl.ca.location": str(self.authorities)}
        if name is None:
            return settings
        chain, key = self.authority.issue(name)
        certificate_file, key_file = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        certificate_file.write_text(chain)
        key_file.write_text(key)
        return {
            **settings,
            "ssl.certificate.location": str(certificate_file),
            "ssl.key.location": str(key_file),
        }

    def java(self, name: str) -> Path:
        """The settings of a Java client with a certificate, in a file of properties."""
        keystore = self.directory / f"{name}-java.pem"
        # Java refuses a certificate with an empty list of hosts.
        chain, key = self.authority.issue(name, is_host=True)
        # It reads keys in this format only.
        pkcs8 = load_pem_private_key(key.encode(), None).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
        keystore.write_text(pkcs8.decode() + chain)
        lines = [
            "security.protocol=SSL",
            "ssl.truststore.type=PEM",
            f"ssl.truststore.location={self.authorities}",
            "ssl.keystore.type=PEM",
            f"ssl.keystore.location={keystore}",
        ]
        properties = self.directory / f"{name}.properties"
        properties.write_text("\n".join(lines))
        return properties
