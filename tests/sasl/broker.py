"""A broker with users, on a listener without TLS and on one with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.metadata import first_users
from penstock.metadata.security import ScramMechanism
from tests.sasl.issuer import AUDIENCE, NAME, Issuer
from tests.support import BrokerProcess
from tests.tls.files import TlsFiles

USER, PASSWORD = "alice, of =Wonderland", "hunter2 żółć"


@dataclass(frozen=True, slots=True)
class SaslBroker:
    process: BrokerProcess
    files: TlsFiles
    issuer: Issuer

    def address(self, listener: str = "SASL_PLAINTEXT") -> str:
        host, port = self.process.addresses[listener]
        return f"{host}:{port}"

    def librdkafka(
        self, listener: str = "SASL_PLAINTEXT", mechanism: str = "SCRAM-SHA-256", **changed: str
    ) -> dict[str, str]:
        """The settings of a client; ``sasl_password`` and the like change them."""
        tls = self.files.librdkafka() if listener == "SASL_SSL" else {}
        return {
            **tls,
            "security.protocol": listener.lower(),
            "sasl.mechanism": mechanism,
            "sasl.username": USER,
            "sasl.password": PASSWORD,
            **{name.replace("_", "."): value for name, value in changed.items()},
        }


@contextmanager
def sasl_broker(directory: Path, settings: Mapping[str, str]) -> Iterator[SaslBroker]:
    files, issuer = TlsFiles(directory), Issuer()
    data = directory / "data"
    data.mkdir()
    users = {
        (USER, mechanism): first_users.credential(mechanism, PASSWORD, os.urandom, 4096)
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
    }
    (data / first_users.FILE_NAME).write_bytes(first_users.encode(users))
    own = {
        "listeners": "SASL_PLAINTEXT://127.0.0.1:0,SASL_SSL://127.0.0.1:0",
        "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
        "listener.name.sasl_ssl.sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN,OAUTHBEARER",
        "sasl.oauthbearer.jwks.endpoint.url": issuer.write(directory),
        "sasl.oauthbearer.expected.issuer": NAME,
        "sasl.oauthbearer.expected.audience": AUDIENCE,
        **files.settings("none"),
    }
    with BrokerProcess({**settings, **own}, data_dir=data) as process:
        yield SaslBroker(process, files, issuer)
