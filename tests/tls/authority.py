"""A certificate authority, and contexts with its certificates."""

from __future__ import annotations

import functools
import ssl
from datetime import UTC, datetime, timedelta

import trustme

from penstock.tls.settings import TlsSettings, make_context

HOST = "broker.test"


class Authority:
    def __init__(self) -> None:
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.pem: str = self._ca.cert_pem.bytes().decode()

    @functools.cache  # noqa: B019  lives as long as the tests
    def issue(self, name: str, *, is_host: bool = False, valid_days: int = 365) -> tuple[str, str]:
        """A certificate with its chain, and its key. Negative days: it has expired."""
        now = datetime.now(UTC)
        issued = self._ca.issue_cert(
            *([name] if is_host else []),
            common_name=name,
            organization_name="y",
            organization_unit_name="x",
            not_before=now - timedelta(days=400),
            not_after=now + timedelta(days=valid_days),
            key_type=trustme.KeyType.ECDSA,
        )
        chain = "".join(blob.bytes().decode() for blob in issued.cert_chain_pems)
        return chain, issued.private_key_pem.bytes().decode()

    def broker(self, *, is_host: bool = True, valid_days: int = 365, **settings: str) -> ssl.SSLContext:
        """The context of a listener. Settings are Kafka's, with underscores for dots.

        Without ``is_host`` its certificate has the host in the subject only, and no alternative names (SAN).
        """
        chain, key = self.issue(HOST, is_host=is_host, valid_days=valid_days)
        values = {
            "ssl.keystore.certificate.chain": chain,
            "ssl.keystore.key": key,
            "ssl.truststore.certificates": self.pem,
        }
        values |= {name.replace("_", "."): value for name, value in settings.items()}
        return make_context(TlsSettings.from_kafka(values), True)

    def client(
        self,
        name: str | None = None,
        *,
        trusts: Authority | None = None,
        valid_days: int = 365,
        **settings: str,
    ) -> ssl.SSLContext:
        """The context of a client, with a certificate if it has a name. Settings are librdkafka's."""
        values = {"ssl.ca.pem": (trusts or self).pem}
        if name is not None:
            values["ssl.certificate.pem"], values["ssl.key.pem"] = self.issue(name, valid_days=valid_days)
        values |= {setting.replace("_", "."): value for setting, value in settings.items()}
        return make_context(TlsSettings.from_librdkafka(values), False)
