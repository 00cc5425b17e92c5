"""The security settings of clients under librdkafka's names, and errors of TLS and SASL as advice.

The values of settings never appear in errors: some are secrets.
"""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.protocol.errors import ErrorCode
from penstock.sasl.settings import LIBRDKAFKA_NAMES as SASL_NAMES
from penstock.sasl.settings import SaslSettings, TokenSource
from penstock.tls.settings import LIBRDKAFKA_NAMES, TlsSettings, make_context
from penstock.tls.stream import plain_error
from penstock.wire.errors import BadSecurity, words_of

PROTOCOL = "security.protocol"
SECURITY_NAMES = (PROTOCOL, *LIBRDKAFKA_NAMES, *SASL_NAMES)
# Of what a broker says, for a line.
_WORDS_MAX = 200

# Java's names for the same things, which people copy from Java's clients.
_JAVA_NAMES = {
    "ssl.truststore.location": "ssl.ca.location",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.keystore.location": "ssl.certificate.location and ssl.key.location",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
    "sasl.jaas.config": "sasl.username and sasl.password",
}
_LIBRDKAFKA_ADVICE = (
    "ssl.ca.location",
    "ssl.certificate.location and ssl.key.location",
    "set ssl.endpoint.identification.algorithm=none",
)
_KAFKA_ADVICE = (
    "ssl.truststore.location",
    "ssl.keystore.location",
    "set ssl.endpoint.identification.algorithm to nothing",
)
# OpenSSL's numbers of what is wrong with a certificate (X509_V_ERR_*).
_NOT_YET_VALID = 9
_EXPIRED = 10
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)
_OTHER_HOST = (62, 64)


@dataclass(frozen=True, slots=True)
class Security:
    """How to connect: with TLS, with SASL, with both or neither."""

    tls: TlsSettings | None = None
    sasl: SaslSettings | None = None
    # Whether errors name settings as Java's clients do, and not as librdkafka.
    kafka_names: bool = False


def client_security(
    security: Mapping[str, str] | Security | TlsSettings | None, token: TokenSource | None = None
) -> Security:
    """What the settings mean. ``TlsSettings`` are for TLS alone; ``token`` is for OAUTHBEARER.

    Raises:
        BadSecurity: a setting is unknown, wrong, or not supported.
    """
    if isinstance(security, Security):
        return security
    if isinstance(security, TlsSettings):
        return Security(security, kafka_names=True)
    values = security or {}
    check_names(values, SECURITY_NAMES)
    if PROTOCOL not in values and values:
        # librdkafka would use plaintext, which nobody can mean who has named a certificate or a user.
        first = next(iter(values))
        wanted = "sasl_ssl" if first in SASL_NAMES else "ssl"
        raise BadSecurity(f"{PROTOCOL} is missing; {first} needs {PROTOCOL}={wanted}")
    protocol = values.get(PROTOCOL, "plaintext").strip().lower()
    if protocol not in ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl"):
        raise BadSecurity(f"{PROTOCOL}: not plaintext, ssl, sasl_plaintext or sasl_ssl: {protocol}")
    has_sasl = protocol.startswith("sasl_")
    # Plaintext has no use for files of TLS, but librdkafka accepts them too. A user who is not used is a mistake.
    for name in () if has_sasl else SASL_NAMES:
        if values.get(name):
            raise BadSecurity(f"{name} needs {PROTOCOL}=sasl_ssl or sasl_plaintext")
    if token is not None and not has_sasl:
        raise BadSecurity(f"a token needs {PROTOCOL}=sasl_ssl or sasl_plaintext")
    try:
        tls = TlsSettings.from_librdkafka(values) if protocol.endswith("ssl") else None
        sasl = SaslSettings.from_librdkafka(values, token) if has_sasl else None
    except ValueError as error:
        raise BadSecurity(str(error)) from None
    return Security(tls, sasl)


def client_context(security: Mapping[str, str] | Security | TlsSettings | None) -> ssl.SSLContext | None:
    """The TLS context that the settings ask for; None without TLS. Raises BadSecurity."""
    tls = client_security(security).tls
    if tls is None:
        return None
    try:
        return make_context(tls, server_side=False)
    except ValueError as error:
        raise BadSecurity(str(error)) from None


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse settings that are not known, with the name that was probably meant. Raises BadSecurity."""
    known = list(known)
    for name in given:
        if name in known:
            continue
        if name.startswith(("sasl.kerberos.", "sasl.oauthbearer.", "enable.sasl.")):
            raise BadSecurity(
                f"{name} is not supported; use sasl.mechanism=SCRAM-SHA-512, SCRAM-SHA-256 or PLAIN"
            )
        if name in _JAVA_NAMES:
            raise BadSecurity(f"{name} is a setting of Java's clients; use {_JAVA_NAMES[name]}")
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise BadSecurity(f"unknown setting {name}; did you mean {near}?")


def tls_advice(error: OSError | ValueError, host: str, *, kafka_names: bool = False) -> str:
    """What is wrong with the TLS connection to a broker, and what to do about it, in one line.

    It names the settings as librdkafka does, or as Kafka's own clients do.
    """
    authorities, certificate, off = _KAFKA_ADVICE if kafka_names else _LIBRDKAFKA_ADVICE
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _UNKNOWN_AUTHORITY:
            return (
                "the broker's certificate is from an authority that is not trusted here; "
                f"set {authorities} to the certificate of that authority"
            )
        if error.verify_code == _EXPIRED:
            return "the broker's certificate has expired, or the clock of this machine is wrong"
        if error.verify_code == _NOT_YET_VALID:
            return "the broker's certificate is not valid yet; is the clock of this machine right?"
        if error.verify_code in _OTHER_HOST:
            return (
                f"the broker's certificate is not for {host}; connect to a name that is in it, "
                f"or {off} to accept any name"
            )
        return f"the broker's certificate is not accepted: {error.verify_message}"
    if isinstance(error, (ssl.SSLEOFError, ConnectionError)):
        return "the broker closed the connection during the TLS handshake; is it a plaintext listener?"
    if isinstance(error, ssl.SSLError):
        if error.reason in _NOT_TLS:
            return f"the broker does not speak TLS there; use the port of an SSL listener, or {PROTOCOL}=plaintext"
        if error.reason in _WANTS_CERTIFICATE:
            return f"the broker requires a certificate of the client; set {certificate}"
        if error.reason == "TLSV1_ALERT_UNKNOWN_CA":
            return (
                f"the broker does not trust the authority of our certificate; see {certificate} here and the "
                "truststore of the broker"
            )
    return str(plain_error(error))


def no_sasl(*, has_tls: bool) -> str:
    """The line for a listener that does not know SASL."""
    return f"the broker has no SASL there; use {PROTOCOL}={'ssl' if has_tls else 'plaintext'}, or another listener"


def no_mechanism(mechanism: str, offered: Iterable[str]) -> str:
    """The line for a listener that has other mechanisms."""
    names = ", ".join(plain_words(name) for name in list(offered)[:10])
    return f"the broker does not offer {mechanism} there; set sasl.mechanism to one of: {names or 'none'}"


def not_accepted(settings: SaslSettings, why: str) -> str:
    """The line for an exchange that failed."""
    return f"the broker did not accept {settings.who} with {settings.mechanism}: {plain_words(why)}"


def handshake_advice(error_code: int, mechanism: str, offered: Iterable[str], *, has_tls: bool) -> str:
    """The line for a SaslHandshake with an error."""
    if error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM:
        return no_mechanism(mechanism, offered)
    if error_code == ErrorCode.ILLEGAL_SASL_STATE:
        return no_sasl(has_tls=has_tls)
    return f"the broker refused to authenticate: {words_of(error_code)}"


def plain_words(text: str) -> str:
    """What a broker says, as part of a line: printable and not too long."""
    words = "".join(each if each.isprintable() else " " for each in text).strip().rstrip(".")
    return words if len(words) <= _WORDS_MAX else words[:_WORDS_MAX] + "..."


_NOT_TLS = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
# The second is what TLS 1.2 has for it.
_WANTS_CERTIFICATE = ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE")
