"""A broker with everything closed: passwords over TLS, certificates, and an authorizer.

Its one super user is an administrator with a password, in the metadata from the beginning. Who else is to do
anything is given a password and ACLs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from penstock.cli.main import run
from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.client import PATIENCE_S, Security
from tests.support import BrokerProcess
from tests.tls.files import TlsFiles

ADMINISTRATOR = "admin"
PASSWORD = "in wonderland"
SASL_SSL, MUTUAL = "SASL_SSL", "MUTUAL"
LOGIN_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


@dataclass(frozen=True, slots=True)
class SecuredBroker:
    process: BrokerProcess
    files: TlsFiles

    def address(self, listener: str) -> str:
        host, port = self.process.addresses[listener]
        return f"{host}:{port}"

    def with_password(
        self, user: str, mechanism: str = "SCRAM-SHA-512", password: str = PASSWORD
    ) -> Security:
        """For SASL_SSL."""
        return {
            **self.with_certificate(None),
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": password,
        }

    def with_certificate(self, name: str | None) -> Security:
        """For MUTUAL, which lets in nobody without a name."""
        return {**self.files.librdkafka(name), "security.protocol": "SSL"}

    def properties(self, user: str, password: str = PASSWORD) -> Path:
        """The settings of one of Kafka's tools for SASL_SSL, in a file."""
        lines = [
            "security.protocol=SASL_SSL",
            "ssl.truststore.type=PEM",
            f"ssl.truststore.location={self.files.authorities}",
            "sasl.mechanism=SCRAM-SHA-512",
            f'sasl.jaas.config={LOGIN_MODULE} required username="{user}" password="{password}";',
        ]
        file = self.files.directory / f"{user}-java.properties"
        file.write_text("\n".join(lines))
        return file

    def client(self, user: str) -> ConfluentClient:
        return ConfluentClient(self.address(SASL_SSL), self.with_password(user))


@contextmanager
def secured_broker(directory: Path) -> Iterator[SecuredBroker]:
    files, data, password = TlsFiles(directory), directory / "data", directory / "password"
    data.mkdir()
    password.write_text(PASSWORD)
    told = ("--data-dir", str(data), "--password-file", str(password), "--mechanism", "both")
    assert run(["users", "bootstrap", ADMINISTRATOR, *told]) == 0
    settings = {
        "listeners": f"{SASL_SSL}://127.0.0.1:0,{MUTUAL}://127.0.0.1:0",
        "listener.security.protocol.map": f"{MUTUAL}:SSL",
        **files.settings("none"),
        f"listener.name.{MUTUAL.lower()}.ssl.client.auth": "required",
        "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
        "authorizer.class.name": "acls",
        "super.users": f"User:{ADMINISTRATOR}",
        "group.initial.rebalance.delay.ms": "0",
    }
    with BrokerProcess(settings, data_dir=data) as process:
        yield SecuredBroker(process, files)


def put_user(admin: Any, user: str, password: str = PASSWORD) -> None:
    """A user with both kinds of SCRAM."""
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        change = UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), password.encode())
        admin.alter_user_scram_credentials([change])[user].result(PATIENCE_S)


def allow(admin: Any, principal: str, kind: ResourceType, prefix: str, *operations: AclOperation) -> None:
    """What a principal may do with everything whose name begins like this."""
    acls = [
        AclBinding(
            kind,
            prefix,
            ResourcePatternType.PREFIXED,
            principal,
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        for operation in operations
    ]
    for each in admin.create_acls(acls).values():
        each.result(PATIENCE_S)
