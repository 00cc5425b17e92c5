"""Security settings between librdkafka's names, which our commands take, and those of Spark's Kafka source.

Spark's are Java's with ``kafka.`` before them. Where one side has no word for what the other says, that is an error
that tells what to do, because leaving it out would weaken the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.sasl import jaas
from penstock.sasl.settings import SaslSettings
from penstock.spark.errors import SparkOptionError

_PROTOCOL = "security.protocol"
_HOST_CHECK = "ssl.endpoint.identification.algorithm"
_VERIFICATION = "enable.ssl.certificate.verification"
_KEYSTORE, _TRUSTSTORE = "kafka.ssl.keystore.location", "kafka.ssl.truststore.location"


def spark_options(security: Mapping[str, str]) -> dict[str, str]:
    """Options of the source, from librdkafka's settings. Raises SparkOptionError."""
    if not security:
        return {}
    options = {f"kafka.{_PROTOCOL}": security[_PROTOCOL].upper()}
    if security.get(_VERIFICATION, "true").lower() != "true":
        raise SparkOptionError(
            f"jobs on Spark always check the broker's certificate; omit {_VERIFICATION}, "
            "and set ssl.ca.location to the authority that signed it"
        )
    if location := security.get("ssl.ca.location"):
        options |= {"kafka.ssl.truststore.type": "PEM", _TRUSTSTORE: _absolute(location)}
    if text := security.get("ssl.ca.pem"):
        options |= {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.certificates": text}
    for name in ("ssl.certificate.pem", "ssl.key.pem"):
        if security.get(name):
            # Spark shows options in plans.
            raise SparkOptionError(
                f"jobs on Spark read certificates and keys from files; put both into one file, and name it in "
                f"ssl.certificate.location and ssl.key.location instead of {name}"
            )
    if certificate := security.get("ssl.certificate.location"):
        if Path(certificate).absolute() != Path(security.get("ssl.key.location", "")).absolute():
            raise SparkOptionError(
                "jobs on Spark read a certificate and its key from one file; put both into it, and name it in "
                "ssl.certificate.location and ssl.key.location"
            )
        options |= {"kafka.ssl.keystore.type": "PEM", _KEYSTORE: _absolute(certificate)}
        if password := security.get("ssl.key.password"):
            options["kafka.ssl.key.password"] = password
    if suites := security.get("ssl.cipher.suites"):
        options["kafka.ssl.cipher.suites"] = suites.replace(":", ",")
    if options[f"kafka.{_PROTOCOL}"].startswith("SASL_"):
        sasl = SaslSettings.from_librdkafka(security)
        options["kafka.sasl.mechanism"] = sasl.mechanism
        options["kafka.sasl.jaas.config"] = jaas.line(sasl.mechanism, sasl.user, sasl.password)
    if security.get(_HOST_CHECK) == "none":
        # Java's word for it.
        options[f"kafka.{_HOST_CHECK}"] = ""
    return options


def librdkafka_settings(options: Mapping[str, str] | None) -> dict[str, str]:
    """librdkafka's settings, from options of the source that were checked."""
    given = {name.lower(): value.strip() for name, value in (options or {}).items()}
    found = {}
    for name, value in given.items():
        match name.removeprefix("kafka."):
            case "security.protocol":
                found[_PROTOCOL] = value.lower()
            case "ssl.truststore.location":
                found["ssl.ca.location"] = value
            case "ssl.truststore.certificates":
                found["ssl.ca.pem"] = value
            case "ssl.keystore.location":
                found |= {"ssl.certificate.location": value, "ssl.key.location": value}
            case "ssl.key.password":
                found["ssl.key.password"] = value
            case "ssl.cipher.suites":
                found["ssl.cipher.suites"] = value.replace(",", ":")
            case "sasl.mechanism":
                found["sasl.mechanism"] = value.upper()
            case "sasl.jaas.config":
                login = jaas.parse(value)
                found |= {"sasl.username": login.user, "sasl.password": login.password}
            case "ssl.endpoint.identification.algorithm":
                found[_HOST_CHECK] = value or "none"
    return found


def _absolute(path: str) -> str:
    # Spark's workers run in other directories.
    return str(Path(path).absolute())
