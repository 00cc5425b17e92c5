"""The security settings of clients under librdkafka's names, and TLS errors as advice.

The values of settings never appear in errors: some are secrets.
"""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Iterable, Mapping

from penstock.tls.settings import LIBRDKAFKA_NAMES, TlsSettings, make_context
from penstock.tls.stream import plain_error
from penstock.wire.errors import BadSecurity

PROTOCOL = "security.protocol"
SECURITY_NAMES = (PROTOCOL, *LIBRDKAFKA_NAMES)

# Java's names for the same things, which people copy from Java's clients.
_JAVA_NAMES = {
    "ssl.truststore.location": "ssl.ca.location",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.keystore.location": "ssl.certificate.location and ssl.key.location",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
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


def client_context(security: Mapping[str, str] | TlsSettings) -> ssl.SSLContext | None:
    """The TLS context that the settings ask for; None for plaintext. ``TlsSettings`` always mean TLS.

    Raises:
        BadSecurity: a setting is unknown, wrong, or not supported.
    """
    if isinstance(security, TlsSettings):
        return _context(security)
    check_names(security, SECURITY_NAMES)
    if PROTOCOL not in security and security:
        # librdkafka would use plaintext, which nobody can mean who has named a certificate.
        raise BadSecurity(f"{PROTOCOL} is missing; {next(iter(security))} needs {PROTOCOL}=ssl")
    protocol = security.get(PROTOCOL, "plaintext").strip().lower()
    if protocol.startswith("sasl_"):
        raise BadSecurity(f"{PROTOCOL}={protocol}: SASL is not supported yet; use plaintext or ssl")
    if protocol not in ("plaintext", "ssl"):
        raise BadSecurity(f"{PROTOCOL}: not plaintext or ssl: {protocol}")
    try:
        settings = TlsSettings.from_librdkafka(security)
    except ValueError as error:
        raise BadSecurity(str(error)) from None
    # Plaintext has no use for the others, but librdkafka accepts them too.
    return _context(settings) if protocol == "ssl" else None


def _context(settings: TlsSettings) -> ssl.SSLContext:
    try:
        return make_context(settings, server_side=False)
    except ValueError as error:
        raise BadSecurity(str(error)) from None


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse settings that are not known, with the name that was probably meant. Raises BadSecurity."""
    known = list(known)
    for name in given:
        if name in known:
            continue
        if name.startswith(("sasl.", "enable.sasl.")):
            raise BadSecurity(f"{name}: SASL is not supported yet; use {PROTOCOL}=plaintext or ssl")
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


_NOT_TLS = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
# The second is what TLS 1.2 has for it.
_WANTS_CERTIFICATE = ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE")
