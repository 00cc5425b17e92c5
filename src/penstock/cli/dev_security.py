"""What `penstock dev --secure` adds to a cluster: certificates, an administrator, and files for clients.

In the data directory:

    tls/                      an authority, and a certificate for each node (``certificates.py``)
    client.properties         how to connect as the administrator, with librdkafka's names
    client-java.properties    the same for Java's clients

Clients connect with TLS and a password (SASL_SSL, SCRAM), nodes know each other by certificates, and ACLs decide
what users other than the administrator may do. The password is random, and only in the two files, which nobody else
may read. The nodes get what is stored of it (``penstock-first-users``).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.cli.certificates import (
    CERTIFICATE_FILE,
    KEY_FILE,
    ORGANIZATION,
    DevelopmentAuthority,
    default_hosts,
)
from penstock.cli.connection import SERVERS, read_client_file
from penstock.cli.failures import Failure
from penstock.metadata import first_users
from penstock.sasl import jaas

ADMINISTRATOR = "admin"
CLIENT_FILE, JAVA_FILE = "client.properties", "client-java.properties"
TLS_DIRECTORY = "tls"
# Nobody renews the certificates of a laptop's cluster.
DAYS = 3650
NODE_DAYS = 1825
MECHANISM = first_users.MECHANISM.sasl_name
PASSWORD_BYTES = 24
AUTHORIZATION = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": f"User:{ADMINISTRATOR}",
}


class DevSecurity:
    """The files of a secure cluster, made when it begins and completed when it grows."""

    def __init__(self, directory: Path, nodes: Sequence[int], controllers: Sequence[int]) -> None:
        """Raises Failure if a cluster that has begun has lost its files."""
        self._directory = directory.absolute()
        self._nodes = list(nodes)
        tls = self._directory / TLS_DIRECTORY
        # Until then, a run that was killed leaves nothing that the next one cannot make again.
        has_begun = any(self._directory.glob("node-*/meta.properties"))
        if has_begun or (tls / CERTIFICATE_FILE).exists():
            self._authority = DevelopmentAuthority.load(tls)
        else:
            tls.mkdir(parents=True, exist_ok=True)
            (tls / KEY_FILE).unlink(missing_ok=True)
            self._authority = DevelopmentAuthority.create(tls, DAYS)
        self._password = self._remembered() if has_begun else secrets.token_urlsafe(PASSWORD_BYTES)
        for node in self._nodes:
            if not self._keystore(node).exists():
                self._authority.issue_node(self._name(node), default_hosts(), NODE_DAYS)
        if not has_begun:
            self._found(controllers)

    def _found(self, controllers: Sequence[int]) -> None:
        """Give the administrator to the nodes that may begin the cluster: the same to all of them."""
        made = first_users.credential(first_users.MECHANISM, self._password, secrets.token_bytes)
        content = first_users.encode({(ADMINISTRATOR, first_users.MECHANISM): made})
        for node in controllers:
            directory = self._directory / f"node-{node}"
            directory.mkdir(parents=True, exist_ok=True)
            _write_private(directory / first_users.FILE_NAME, content.decode())

    def write_clients(self, bootstrap: str) -> None:
        """The files for clients; the ports may be others than last time."""
        authority = str(self._authority.certificate_file)
        _write_private(
            self.client_file,
            _properties(
                {
                    SERVERS: bootstrap,
                    "security.protocol": "sasl_ssl",
                    "ssl.ca.location": authority,
                    "sasl.mechanism": MECHANISM,
                    "sasl.username": ADMINISTRATOR,
                    "sasl.password": self._password,
                }
            ),
        )
        java = {
            SERVERS: bootstrap,
            "security.protocol": "SASL_SSL",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": authority,
            "sasl.mechanism": MECHANISM,
            "sasl.jaas.config": jaas.line(MECHANISM, ADMINISTRATOR, self._password),
        }
        _write_private(self.java_file, _properties({name: _for_java(value) for name, value in java.items()}))

    def settings(self, node: int, address: str) -> list[str]:
        """Settings of a node, none of them secret."""
        principals = ";".join(f"User:CN={self._name(each)},O={ORGANIZATION}" for each in self._nodes)
        values = {
            "listeners": f"SASL_SSL://{address}",
            "listener.security.protocol.map": "INTERNAL:SSL",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512,SCRAM-SHA-256",
            "ssl.keystore.location": str(self._keystore(node)),
            "ssl.truststore.location": str(self._authority.certificate_file),
            "penstock.node.principals": principals,
            **AUTHORIZATION,
        }
        return [f"{name}={value}" for name, value in values.items()]

    def advice(self, bootstrap: str) -> list[str]:
        """How to connect, without the password."""
        file, java = self.client_file, self.java_file
        python = f"dict(line.strip().split('=', 1) for line in open({str(file)!r}))"
        return [
            f"user {ADMINISTRATOR}, password in {file}",
            f"penstock:   penstock topics list --config {file}",
            f"librdkafka: kcat -F {file} -L",
            f"Java:       kafka-topics.sh --bootstrap-server {bootstrap} --command-config {java} --list",
            f"Python:     confluent_kafka.Producer({python})",
        ]

    @property
    def client_file(self) -> Path:
        return self._directory / CLIENT_FILE

    @property
    def java_file(self) -> Path:
        return self._directory / JAVA_FILE

    def _name(self, node: int) -> str:
        return f"node{node}"

    def _keystore(self, node: int) -> Path:
        return self._directory / TLS_DIRECTORY / f"{self._name(node)}.pem"

    def _remembered(self) -> str:
        if not self.client_file.exists():
            raise Failure(
                f"{self.client_file} is gone, and with it the password of the cluster's administrator; "
                "restore it, or choose another --data-dir"
            )
        values: Mapping[str, str] = read_client_file(str(self.client_file)).values
        if not values.get("sasl.password"):
            raise Failure(
                f"{self.client_file} has no sasl.password, which is the administrator's; restore it"
            )
        return values["sasl.password"]


def _write_private(file: Path, content: str) -> None:
    """Replace a file at once, readable by its owner only."""
    beside = file.with_name(f"{file.name}.new")
    beside.unlink(missing_ok=True)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(content)
    os.replace(beside, file)


def _properties(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in values.items())


def _for_java(value: str) -> str:
    """A value as java.util.Properties reads it."""
    data = value.replace("\\", "\\\\").encode("utf-16-be", "surrogatepass")
    units = [int.from_bytes(data[at : at + 2]) for at in range(0, len(data), 2)]
    return "".join(chr(unit) if unit < 127 else f"\\u{unit:04x}" for unit in units)
