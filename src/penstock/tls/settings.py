"""What the ``ssl.*`` settings mean, and the OpenSSL context they make.

Two spellings: Kafka's, with PEM files or inline PEM, for listeners and clients, and librdkafka's for clients. Every
error is one line that names the setting and the file.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from penstock.tls.pem import Pem, TlsSettingsError, conversion, load_key

# The settings that the two constructors read. Others that start with ``ssl.`` are the caller's business.
KAFKA_NAMES = (
    "ssl.keystore.type",
    "ssl.keystore.location",
    "ssl.keystore.password",
    "ssl.keystore.certificate.chain",
    "ssl.keystore.key",
    "ssl.key.password",
    "ssl.truststore.type",
    "ssl.truststore.location",
    "ssl.truststore.password",
    "ssl.truststore.certificates",
    "ssl.client.auth",
    "ssl.enabled.protocols",
    "ssl.protocol",
    "ssl.cipher.suites",
    "ssl.endpoint.identification.algorithm",
)
LIBRDKAFKA_NAMES = (
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.key.location",
    "ssl.key.pem",
    "ssl.key.password",
    "ssl.cipher.suites",
    "ssl.endpoint.identification.algorithm",
    "enable.ssl.certificate.verification",
)
# Values of these never appear in logs, errors or answers.
SECRET_NAMES = (
    "ssl.keystore.key",
    "ssl.keystore.password",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.truststore.password",
)

_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_TLS_1_3_SUITES = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
# The key exchanges and ciphers of TLS 1.2 that are still good, as Java and as OpenSSL call them.
_EXCHANGES = {"ECDHE_ECDSA": "ECDHE-ECDSA", "ECDHE_RSA": "ECDHE-RSA", "DHE_RSA": "DHE-RSA"}
_CIPHERS = {
    "AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "CHACHA20_POLY1305_SHA256": "CHACHA20-POLY1305",
}
_SUITES = {
    f"TLS_{exchange}_WITH_{cipher}": f"{_EXCHANGES[exchange]}-{_CIPHERS[cipher]}"
    for exchange in _EXCHANGES
    for cipher in _CIPHERS
}


class ClientAuth(Enum):
    """Whether a listener asks clients for a certificate."""

    NONE = "none"
    REQUESTED = "requested"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    # Our certificate, the ones that vouch for it, and its key; a listener needs them.
    chain: Pem | None = None
    key: Pem | None = None
    key_password: str | None = field(default=None, repr=False)
    # The authorities whose certificates are accepted. None: for clients, those that the system trusts.
    trusted: Pem | None = None
    client_auth: ClientAuth = ClientAuth.NONE
    protocols: tuple[str, ...] = ("TLSv1.2", "TLSv1.3")
    # As the user wrote them; empty: OpenSSL's choice.
    cipher_suites: tuple[str, ...] = ()
    # For clients: whether the broker's certificate must be valid, and must be for the host that was asked for.
    verifies: bool = True
    checks_hostname: bool = True

    @classmethod
    def from_kafka(cls, values: Mapping[str, str]) -> TlsSettings:
        """From Kafka's names; the caller has taken off ``listener.name.<name>.`` already.

        Raises TlsSettingsError.
        """
        for store in ("keystore", "truststore"):
            kind = values.get(f"ssl.{store}.type", "PEM").strip().upper() or "PEM"
            file = _either(values, f"ssl.{store}.location", None)
            if kind in ("JKS", "PKCS12"):
                raise TlsSettingsError(
                    f"ssl.{store}.type={kind} is not supported, use PEM. "
                    f"{conversion(kind, (file and file.path) or f'{store}.{kind.lower()}')}"
                )
            if kind != "PEM":
                raise TlsSettingsError(f"ssl.{store}.type: not a supported type: {kind}. Use PEM.")
            if values.get(f"ssl.{store}.password"):
                raise TlsSettingsError(
                    f"ssl.{store}.password: a PEM file has no password of its own, "
                    "only its key has: ssl.key.password"
                )
        chain = key = _either(values, "ssl.keystore.location", None)
        inline_chain = _either(values, None, "ssl.keystore.certificate.chain")
        inline_key = _either(values, None, "ssl.keystore.key")
        if chain is not None and (inline_chain or inline_key):
            raise TlsSettingsError(
                "ssl.keystore.location and ssl.keystore.certificate.chain or ssl.keystore.key: set one or the other"
            )
        if chain is None:
            chain, key = inline_chain, inline_key
        if (chain is None) != (key is None):
            missing = "ssl.keystore.certificate.chain" if chain is None else "ssl.keystore.key"
            raise TlsSettingsError(f"{missing} is missing: a certificate and its key are set together")
        return cls(
            chain=chain,
            key=key,
            key_password=values.get("ssl.key.password") or None,
            trusted=_either(values, "ssl.truststore.location", "ssl.truststore.certificates"),
            client_auth=_client_auth(values.get("ssl.client.auth", "")),
            protocols=_protocols(values.get("ssl.enabled.protocols", ""), values.get("ssl.protocol", "")),
            cipher_suites=_list(values.get("ssl.cipher.suites", ""), ","),
            checks_hostname=_checks_hostname(
                values.get("ssl.endpoint.identification.algorithm", "https"), ""
            ),
        )

    @classmethod
    def from_librdkafka(cls, values: Mapping[str, str]) -> TlsSettings:
        """From the names of librdkafka's clients. Raises TlsSettingsError."""
        chain = _either(values, "ssl.certificate.location", "ssl.certificate.pem")
        key = _either(values, "ssl.key.location", "ssl.key.pem")
        if (chain is None) != (key is None):
            missing = "ssl.certificate.location" if chain is None else "ssl.key.location"
            raise TlsSettingsError(f"{missing} is missing: a certificate and its key are set together")
        verification = values.get("enable.ssl.certificate.verification", "true").strip().lower()
        if verification not in ("true", "false"):
            raise TlsSettingsError("enable.ssl.certificate.verification: not true or false")
        return cls(
            chain=chain,
            key=key,
            key_password=values.get("ssl.key.password") or None,
            trusted=_either(values, "ssl.ca.location", "ssl.ca.pem"),
            cipher_suites=_list(values.get("ssl.cipher.suites", ""), ":"),
            verifies=verification == "true",
            checks_hostname=_checks_hostname(
                values.get("ssl.endpoint.identification.algorithm", "https"), "none"
            ),
        )

    @property
    def files(self) -> tuple[Pem, ...]:
        """The files that these settings name, each once."""
        found: dict[str, Pem] = {}
        for pem in (self.chain, self.key, self.trusted):
            if pem is not None and pem.path is not None:
                found.setdefault(pem.path, pem)
        return tuple(found.values())


def make_context(
    settings: TlsSettings, server_side: bool, *, warn: Callable[[str], None] | None = None
) -> ssl.SSLContext:
    """An OpenSSL context for new connections. ``warn`` gets a line for each setting that is unwise.

    Raises TlsSettingsError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.options |= ssl.OP_NO_RENEGOTIATION
    versions = [_VERSIONS[protocol] for protocol in settings.protocols]
    context.minimum_version, context.maximum_version = min(versions), max(versions)
    _restrict_suites(context, settings, warn)
    if settings.chain is not None and settings.key is not None:
        _load_certificate(context, settings, warn)
    elif server_side:
        raise TlsSettingsError(
            "ssl.keystore.location is missing: a listener with TLS needs a certificate and key"
        )
    if server_side:
        # No sessions to resume, so that every client's certificate is checked. For TLS 1.2 Python cannot switch
        # them off: a client may resume one for two hours, but not in another context, and OpenSSL keeps 20,000.
        context.num_tickets = 0
        context.verify_mode = {
            ClientAuth.NONE: ssl.CERT_NONE,
            ClientAuth.REQUESTED: ssl.CERT_OPTIONAL,
            ClientAuth.REQUIRED: ssl.CERT_REQUIRED,
        }[settings.client_auth]
        if settings.client_auth is ClientAuth.NONE:
            return context
        if settings.trusted is None:
            raise TlsSettingsError(
                f"ssl.truststore.location is missing: ssl.client.auth={settings.client_auth.value} "
                "needs the authorities of the clients' certificates"
            )
    else:
        context.check_hostname = settings.verifies and settings.checks_hostname
        # Only the alternative names are names of hosts. The subject is whatever a client asked its authority for.
        context.hostname_checks_common_name = False
        context.verify_mode = ssl.CERT_REQUIRED if settings.verifies else ssl.CERT_NONE
        if not settings.verifies:
            return context
    if settings.trusted is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        text = "".join(block.text for block in settings.trusted.certificates())
        try:
            context.load_verify_locations(cadata=text)
        except ssl.SSLError as error:
            raise TlsSettingsError(f"{settings.trusted}: {_reason(error)}") from None
    return context


def _load_certificate(
    context: ssl.SSLContext, settings: TlsSettings, warn: Callable[[str], None] | None
) -> None:
    assert settings.chain is not None and settings.key is not None
    chain, key = settings.chain.certificates(), settings.key.key()
    if key.is_encrypted and settings.key_password is None:
        raise TlsSettingsError(f"{settings.key}: the key is encrypted, and ssl.key.password is not set")
    if warn is not None and settings.key.is_exposed():
        warn(f"{settings.key}: others on this machine may read the key; chmod 600 {settings.key.path}")
    try:
        load_key(context, chain, key, settings.key_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsSettingsError(
                f"{settings.key}: the key does not belong to the first certificate of {settings.chain}"
            ) from None
        if key.is_encrypted:
            raise TlsSettingsError(
                f"{settings.key}: the key cannot be decrypted with ssl.key.password"
            ) from None
        raise TlsSettingsError(f"{settings.chain}: {_reason(error)}") from None
    except OSError as error:
        # Of this machine, such as too many open files. It says nothing of the key or its password.
        raise TlsSettingsError(f"{settings.key}: {error.strerror or 'cannot be loaded'}") from None


def _restrict_suites(
    context: ssl.SSLContext, settings: TlsSettings, warn: Callable[[str], None] | None
) -> None:
    if not settings.cipher_suites:
        return
    newer = [suite for suite in settings.cipher_suites if suite in _TLS_1_3_SUITES]
    older = [_SUITES.get(suite, suite) for suite in settings.cipher_suites if suite not in _TLS_1_3_SUITES]
    for suite in older:
        try:
            # One name at a time, because OpenSSL ignores what it does not know if it knows another.
            context.set_ciphers(suite)
        except ssl.SSLError:
            raise TlsSettingsError(f"ssl.cipher.suites: unknown or too weak: {suite}") from None
    if older:
        context.set_ciphers(":".join(older))
    # Python cannot choose among the three suites of TLS 1.3, which are all good; but none of them means no TLS 1.3.
    if not newer:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    elif set(newer) != set(_TLS_1_3_SUITES) and "TLSv1.3" in settings.protocols and warn is not None:
        warn("ssl.cipher.suites: TLS 1.3 is used with all of its suites, not only the listed ones")
    if not older:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    if context.minimum_version > context.maximum_version:
        raise TlsSettingsError("ssl.cipher.suites has no suite for a version of ssl.enabled.protocols")


def _either(values: Mapping[str, str], location: str | None, inline: str | None) -> Pem | None:
    """What the two settings say, of which one names a file and one is the text."""
    path = values.get(location, "").strip() if location else ""
    text = values.get(inline, "").strip() if inline else ""
    if path and text:
        raise TlsSettingsError(f"{location} and {inline}: set one or the other")
    if path:
        assert location is not None
        return Pem(location, path=path)
    if text:
        assert inline is not None
        return Pem(inline, inline=text)
    return None


def _client_auth(text: str) -> ClientAuth:
    try:
        return ClientAuth(text.strip().lower() or "none")
    except ValueError:
        raise TlsSettingsError(f"ssl.client.auth: not none, requested or required: {text}") from None


def _protocols(enabled: str, newest: str) -> tuple[str, ...]:
    """``ssl.protocol`` is the newest version offered, and the only one if no others are enabled, as in Kafka."""
    for setting, names in (
        ("ssl.enabled.protocols", _list(enabled, ",")),
        ("ssl.protocol", _list(newest, ",")),
    ):
        for name in names:
            if name not in _VERSIONS and not (setting == "ssl.protocol" and name == "TLS"):
                raise TlsSettingsError(f"{setting}: not TLSv1.2 or TLSv1.3: {name}")
    found = [name for name in _VERSIONS if name in (_list(enabled, ",") or tuple(_VERSIONS))]
    if newest.strip() == "TLSv1.2":
        found = [name for name in found if name == "TLSv1.2"]
    if not found:
        raise TlsSettingsError("ssl.protocol=TLSv1.2 leaves none of ssl.enabled.protocols")
    return tuple(found)


def _checks_hostname(algorithm: str, off: str) -> bool:
    name = algorithm.strip().lower()
    if name not in ("https", "", off):
        raise TlsSettingsError(
            f"ssl.endpoint.identification.algorithm: not https or {off or 'empty'}: {algorithm}"
        )
    return name == "https"


def _list(text: str, separator: str) -> tuple[str, ...]:
    return tuple(part for part in (part.strip() for part in text.split(separator)) if part)


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "OpenSSL cannot read it").replace("_", " ").lower()
