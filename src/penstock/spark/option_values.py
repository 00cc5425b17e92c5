"""Check the names and parse the values of the source's and the sink's options.

Spark passes option names in lower case, so the lookup ignores case. Every error is a ``SparkOptionError`` of one
line.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.protocol.listeners import SecurityProtocol
from penstock.sasl.settings import KAFKA_NAMES as SASL_NAMES
from penstock.sasl.settings import SaslSettings
from penstock.spark.errors import SparkOptionError
from penstock.tls.settings import TlsSettings, make_context
from penstock.wire import BadBootstrap, Security, parse_bootstrap

PLAIN, TLS = SecurityProtocol.PLAINTEXT.name, SecurityProtocol.SSL.name
# Limits of protocol fields and of Java's integers.
INT16_MAX, INT32_MAX, INT64_MAX = 2**15 - 1, 2**31 - 1, 2**63 - 1

SECURITY = (
    "kafka.security.protocol",
    "kafka.ssl.truststore.type",
    "kafka.ssl.truststore.location",
    "kafka.ssl.truststore.certificates",
    "kafka.ssl.keystore.type",
    "kafka.ssl.keystore.location",
    "kafka.ssl.key.password",
    "kafka.ssl.endpoint.identification.algorithm",
    "kafka.ssl.enabled.protocols",
    "kafka.ssl.protocol",
    "kafka.ssl.cipher.suites",
    *(f"kafka.{name}" for name in SASL_NAMES),
)
# Spark shows options in plans, and hides only those that are called password, secret or token.
_SHOWN = (
    "Spark may show it in plans and logs; put key and certificates into a file: kafka.ssl.keystore.location"
)
SECURITY_REFUSED = {
    "kafka.ssl.keystore.key": _SHOWN,
    "kafka.ssl.keystore.certificate.chain": _SHOWN,
    "kafka.ssl.keystore.password": "a PEM file has no password, only its key has: kafka.ssl.key.password",
    "kafka.ssl.truststore.password": "a PEM file has no password",
    "kafka.sasl.username": "it is a setting of librdkafka; use kafka.sasl.jaas.config",
    "kafka.sasl.password": "it is a setting of librdkafka; use kafka.sasl.jaas.config",
    "kafka.sasl.login.callback.handler.class": "classes of Java are not loaded",
    "kafka.sasl.client.callback.handler.class": "classes of Java are not loaded",
    "kafka.sasl.login.class": "classes of Java are not loaded",
}
# Java client settings that tune connections, retries and metrics which this client does not have.
OF_JAVA_CLIENTS = (
    "kafka.auto.include.jmx.reporter",
    "kafka.client.dns.lookup",
    "kafka.connections.max.idle.ms",
    "kafka.enable.metrics.push",
    "kafka.metadata.max.age.ms",
    "kafka.metadata.recovery.rebootstrap.trigger.ms",
    "kafka.metadata.recovery.strategy",
    "kafka.metric.reporters",
    "kafka.metrics.num.samples",
    "kafka.metrics.recording.level",
    "kafka.metrics.sample.window.ms",
    "kafka.receive.buffer.bytes",
    "kafka.reconnect.backoff.max.ms",
    "kafka.reconnect.backoff.ms",
    "kafka.retry.backoff.max.ms",
    "kafka.retry.backoff.ms",
    "kafka.send.buffer.bytes",
    "kafka.socket.connection.setup.timeout.max.ms",
    "kafka.socket.connection.setup.timeout.ms",
)


@dataclass(frozen=True, slots=True)
class Names:
    """The option names of the source or the sink."""

    # "source" or "sink", for messages.
    of: str
    # Implemented, as documented.
    meant: tuple[str, ...]
    # Accepted, because a job that moves here from Spark's Kafka connector may set them.
    without_effect: tuple[str, ...]
    # Options of that connector that contradict this one, and what to do instead.
    refused: Mapping[str, str]


# Of the jobs, which have parameters for everything else.
_SECURITY_ONLY = Names(of="job", meant=SECURITY, without_effect=(), refused={})


def parse_security(options: Mapping[str, str] | None) -> Security | None:
    """How a job connects, from options of the source. Raises SparkOptionError."""
    return OptionValues(options or {}, _SECURITY_ONLY).security()


class OptionValues:
    def __init__(self, options: Mapping[str, str], names: Names) -> None:
        """Raises SparkOptionError for an unknown or refused option."""
        self._values = {name.lower(): str(value).strip() for name, value in options.items()}
        _check_names(self._values, names)

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def get(self, name: str) -> str | None:
        return self._values.get(name.lower())

    def text(self, name: str, default: str) -> str:
        return self._values.get(name.lower(), default)

    # Values of one kind

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name, str(default)).lower()
        if text not in {"true", "false"}:
            raise SparkOptionError(f"{name} must be true or false, not {text!r}")
        return text == "true"

    def positive(self, name: str, highest: int = INT64_MAX) -> int | None:
        text = self.get(name)
        if text is None:
            return None
        if not text.isdecimal() or int(text) == 0:
            raise SparkOptionError(f"{name} must be an integer above 0, not {text!r}")
        return at_most(name, int(text), highest)

    # What the source and the sink both need

    def bootstrap(self) -> str:
        """The brokers' addresses."""
        text = self.get("kafka.bootstrap.servers") or self.get("bootstrap")
        if not text:
            raise SparkOptionError(
                "option kafka.bootstrap.servers is missing; give HOST:PORT of your brokers"
            )
        if "bootstrap" in self and self["bootstrap"] != text:
            raise SparkOptionError("bootstrap and kafka.bootstrap.servers differ; give one of them")
        try:
            parse_bootstrap(text)
        except BadBootstrap as error:
            raise SparkOptionError(f"kafka.bootstrap.servers {text}: {error}") from None
        return text

    def security(self) -> Security | None:
        """How to connect; None for plaintext. The files are checked here, and read again by the executors."""
        protocol = self.text("kafka.security.protocol", PLAIN).upper()
        if protocol not in SecurityProtocol.__members__:
            raise SparkOptionError(
                f"kafka.security.protocol must be one of {', '.join(SecurityProtocol.__members__)}"
            )
        given = {name.removeprefix("kafka."): self[name] for name in SECURITY[1:] if name in self}
        has_tls, has_sasl = protocol.endswith(TLS), protocol.startswith("SASL_")
        for name in given:
            # Also the files of TLS, unlike in librdkafka: a job that names them means TLS.
            is_used, wanted = (has_sasl, "SASL_SSL") if name in SASL_NAMES else (has_tls, TLS)
            if not is_used:
                raise SparkOptionError(
                    f"option kafka.{name} needs kafka.security.protocol {wanted}; set it, or omit the option"
                )
        if protocol == PLAIN:
            return None
        tls = sasl = None
        try:
            if has_tls:
                tls = TlsSettings.from_kafka(given)
                make_context(tls, server_side=False)
            if has_sasl:
                sasl = SaslSettings.from_kafka(given)
        except ValueError as error:
            raise SparkOptionError(f"kafka.{error}") from None
        return Security(tls, sasl, kafka_names=True)

    def client_id(self, default: str) -> str:
        text = self.text("kafka.client.id", default)
        if len(text.encode()) > INT16_MAX:
            raise SparkOptionError(f"kafka.client.id has more than {INT16_MAX} bytes; give a shorter name")
        return text


def at_most(name: str, value: int, highest: int) -> int:
    if value > highest:
        raise SparkOptionError(f"{name} needs at most {highest}, not {value}")
    return value


def _check_names(values: Mapping[str, str], names: Names) -> None:
    known = {name.lower(): name for name in (*names.meant, *names.without_effect)}
    reasons = {**names.refused, **SECURITY_REFUSED}
    refused = {name.lower(): (name, reason) for name, reason in reasons.items()}
    for name in values:
        if name in refused:
            spelling, reason = refused[name]
            raise SparkOptionError(f"option {spelling} is not supported: {reason}")
    for name in values:
        if name in known:
            continue
        if name.startswith(("kafka.sasl.kerberos.", "kafka.sasl.oauthbearer.")):
            raise SparkOptionError(f"option {name} is not supported: use SCRAM or PLAIN; omit it")
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise SparkOptionError(f"unknown option {name} of the {names.of}; did you mean {known[near[0]]}?")
