"""The client listeners of a broker, from its settings: names, protocols, addresses, TLS and SASL.

``listeners`` and ``advertised.listeners`` are lists of ``NAME://HOST:PORT``. The name says which protocol the
listener speaks: it is that of a protocol, or ``listener.security.protocol.map`` has it. Kafka's rules, and these of
our own:

- A listener that ``advertised.listeners`` does not name is advertised with the address it listens on. Kafka does
  not advertise it, and a client that comes in there is told of no brokers.
- A name has letters, digits, ``-`` and ``_`` only, and is not INTERNAL or CONTROLLER, which are for nodes.

An address that other machines can reach needs ``--insecure`` unless every client has to prove over TLS who it is,
with a certificate or by SASL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.addresses import format_address, is_loopback, is_unspecified, parse_address
from penstock.broker.config import ConfigError
from penstock.broker.options import ServeOptions
from penstock.metadata.broker_settings import BROKER, LISTENER_PREFIX
from penstock.metadata.sasl_settings import MECHANISMS
from penstock.metadata.settings import parse, split_list
from penstock.protocol.listeners import CLIENTS, NODES, ListenerDescription, SecurityProtocol, client_listener
from penstock.sasl.tokens import Rules
from penstock.tls.pem import TlsSettingsError
from penstock.tls.principals import PrincipalMapping, PrincipalRulesError
from penstock.tls.settings import ClientAuth, TlsSettings

LISTENERS = "listeners"
ADVERTISED = "advertised.listeners"
PRINCIPALS = "ssl.principal.mapping.rules"
PROTOCOLS = "listener.security.protocol.map"
KEYS_URL = "sasl.oauthbearer.jwks.endpoint.url"
ALLOWED_URLS = "sasl.oauthbearer.allowed.urls"
ISSUER = "sasl.oauthbearer.expected.issuer"
AUDIENCE = "sasl.oauthbearer.expected.audience"
# Of a broker and its internal listener. The controller refuses more.
LISTENERS_MAX = 15
RESERVED_NAMES = (NODES.name, "CONTROLLER")

Address = tuple[str, int]

_is_name = re.compile(r"[A-Z0-9_-]+").fullmatch


@dataclass(frozen=True, slots=True)
class Tls:
    settings: TlsSettings
    # From the name in a client's certificate to its principal.
    principals: PrincipalMapping


@dataclass(frozen=True, slots=True)
class Tokens:
    """How tokens are checked (OAUTHBEARER)."""

    # A file: URL, or an https: URL that was allowed.
    keys_url: str
    rules: Rules
    refresh_ms: int


@dataclass(frozen=True, slots=True)
class Sasl:
    mechanisms: tuple[str, ...]
    # Of a request before authentication.
    receive_bytes_max: int
    # 0: no limit but that of the proof.
    session_ms_max: int
    # None without OAUTHBEARER.
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True)
class ClientListener:
    description: ListenerDescription
    address: Address
    # The address for clients; None when it is the one listened on.
    advertised: Address | None
    # None without TLS.
    tls: Tls | None
    # None without SASL.
    sasl: Sasl | None = None

    @property
    def is_closed_to_strangers(self) -> bool:
        """Whether every client has to prove who it is, and nobody on the way can listen or take its place."""
        return self.tls is not None and (
            self.sasl is not None or self.tls.settings.client_auth is ClientAuth.REQUIRED
        )

    @property
    def is_secured(self) -> bool:
        """Whether it is anything but plain text, so that clients may have an identity."""
        return self.description.security_protocol is not SecurityProtocol.PLAINTEXT


def client_listeners(options: ServeOptions, settings: Mapping[str, str]) -> tuple[ClientListener, ...]:
    """The listeners of a broker, in the order given. Raises ConfigError.

    ``settings`` are those that were set, as text.
    """
    protocols = _protocols(settings.get(PROTOCOLS, ""))
    if options.listen is None:
        addresses = _addresses(LISTENERS, settings.get(LISTENERS, BROKER[LISTENERS].default or ""))
    else:
        addresses = {CLIENTS.name: options.listen}
    if options.advertise is None:
        advertised = _addresses(ADVERTISED, settings.get(ADVERTISED, ""))
    else:
        advertised = {CLIENTS.name: options.advertise}
    _check_addresses(addresses)
    _check_advertised(addresses, advertised)
    _check_overrides(addresses, settings)
    return tuple(
        _listener(name, address, advertised.get(name), protocols, settings)
        for name, address in addresses.items()
    )


def check_reach(listeners: Iterable[ClientListener], options: ServeOptions) -> None:
    """Refuse an accidental listener for other machines. May look up names of hosts. Raises ConfigError."""
    for listener in listeners:
        name, address = listener.description.name, listener.address
        if address == options.internal and address[1] != 0:
            raise ConfigError(f"{LISTENERS}: {name} and --internal have the same address; they need one each")
        try:
            is_private = is_loopback(address[0])
        except ValueError as error:
            raise ConfigError(f"{LISTENERS}: {error}") from None
        if is_private or listener.is_closed_to_strangers or options.is_insecure:
            continue
        if listener.sasl is not None:
            raise ConfigError(
                f"{listener.description.url(address)} is open to other machines without encryption; listen on "
                "127.0.0.1, use SASL_SSL, or pass --insecure if the network is trusted"
            )
        raise ConfigError(
            f"{listener.description.url(address)} is open to other machines without authentication; listen on "
            "127.0.0.1, use SASL_SSL, set ssl.client.auth=required with SSL, or pass --insecure if the network is"
            " trusted"
        )


def unused_settings(listeners: Collection[ClientListener], settings: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning about settings that no listener uses. A node that is only a controller has none."""
    if not listeners and LISTENERS in settings:
        yield f"{LISTENERS} has no effect: this node is only a controller"
    for kind, is_used, protocols in (
        ("ssl", any(listener.tls is not None for listener in listeners), "SSL or SASL_SSL"),
        ("sasl", any(listener.sasl is not None for listener in listeners), "SASL_SSL or SASL_PLAINTEXT"),
    ):
        unused = [name for name in settings if _plain_name(name).startswith(f"{kind}.")]
        if unused and not is_used:
            yield f"{min(unused)} has no effect: no listener has the protocol {protocols}"
    for listener in listeners:
        if listener.tls is None and listener.sasl is not None:
            readable = [name for name in ("PLAIN", "OAUTHBEARER") if name in listener.sasl.mechanisms]
            if readable:
                name = listener.description.name
                yield f"listener {name}: without TLS, {readable[0]} sends passwords or tokens that others can read"


def _listener(
    name: str,
    address: Address,
    advertised: Address | None,
    protocols: Mapping[str, SecurityProtocol],
    settings: Mapping[str, str],
) -> ClientListener:
    protocol = protocols.get(name, SecurityProtocol.__members__.get(name))
    if protocol is None:
        raise ConfigError(
            f"{PROTOCOLS} has no protocol for the listener {name}; add {name}:SSL or {name}:PLAINTEXT"
        )
    has_tls = protocol in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL)
    has_sasl = protocol in (SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL)
    return ClientListener(
        client_listener(name, protocol),
        address,
        advertised,
        _tls(name, settings) if has_tls else None,
        _sasl(name, settings) if has_sasl else None,
    )


def _of_listener(name: str, settings: Mapping[str, str]) -> dict[str, str]:
    """The settings that count for one listener: its own win over those of the broker."""
    prefix = f"{LISTENER_PREFIX}{name.lower()}."
    own = {key.removeprefix(prefix): text for key, text in settings.items() if key.startswith(prefix)}
    return {**settings, **own}


def _plain_name(setting: str) -> str:
    """The name of a setting without that of a listener."""
    if setting.startswith(LISTENER_PREFIX):
        return setting.removeprefix(LISTENER_PREFIX).partition(".")[2]
    return setting


def _tls(name: str, settings: Mapping[str, str]) -> Tls:
    values = {key: text for key, text in _of_listener(name, settings).items() if key.startswith("ssl.")}
    try:
        return Tls(TlsSettings.from_kafka(values), PrincipalMapping(values.get(PRINCIPALS) or "DEFAULT"))
    except (TlsSettingsError, PrincipalRulesError) as error:
        raise ConfigError(f"listener {name}: {error}") from None


def _sasl(name: str, settings: Mapping[str, str]) -> Sasl:
    values = _of_listener(name, settings)

    def value(setting: str) -> Any:
        text = values.get(setting, BROKER[setting].default)
        return None if text is None else parse(BROKER[setting], text)

    mechanisms = value("sasl.enabled.mechanisms")
    if not mechanisms:
        raise ConfigError(
            f"listener {name}: sasl.enabled.mechanisms is empty; choose of {', '.join(MECHANISMS)}"
        )
    return Sasl(
        mechanisms,
        receive_bytes_max=value("sasl.server.max.receive.size"),
        session_ms_max=value("connections.max.reauth.ms"),
        tokens=_tokens(name, value) if "OAUTHBEARER" in mechanisms else None,
    )


def _tokens(name: str, value: Callable[[str], Any]) -> Tokens:
    """What a token is checked by has to be set: without one of them, tokens for others would be accepted."""
    for setting in (KEYS_URL, ISSUER, AUDIENCE):
        if not value(setting):
            raise ConfigError(f"listener {name}: OAUTHBEARER needs {setting}")
    url = value(KEYS_URL)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"listener {name}: {KEYS_URL} is not a URL") from None
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ConfigError(f"listener {name}: {KEYS_URL}: write file:///path/to/keys.json")
    elif "@" in parts.netloc:
        raise ConfigError(f"listener {name}: {KEYS_URL}: a URL with a user or password is not supported")
    elif parts.scheme != "https" or not parts.netloc:
        raise ConfigError(f"listener {name}: {KEYS_URL}: only file: and https: URLs are read")
    elif url not in value(ALLOWED_URLS):
        raise ConfigError(f"listener {name}: {KEYS_URL} is not in {ALLOWED_URLS}; add it there")
    return Tokens(
        url,
        Rules(
            issuer=value(ISSUER),
            audience=value(AUDIENCE),
            subject=value("sasl.oauthbearer.sub.claim.name"),
            skew_s=value("sasl.oauthbearer.clock.skew.seconds"),
        ),
        refresh_ms=value("sasl.oauthbearer.jwks.endpoint.refresh.ms"),
    )


def _protocols(text: str) -> dict[str, SecurityProtocol]:
    found: dict[str, SecurityProtocol] = {}
    for entry in split_list(text):
        name, colon, protocol = (part.strip() for part in entry.partition(":"))
        name, protocol = name.upper(), protocol.upper()
        if not colon or not _is_name(name) or protocol not in SecurityProtocol.__members__:
            raise ConfigError(f"{PROTOCOLS}: write NAME:PROTOCOL, such as TLS:SSL; got {entry!r}")
        if name in found:
            raise ConfigError(f"{PROTOCOLS}: {name} is given twice")
        found[name] = SecurityProtocol[protocol]
    return found


def _addresses(setting: str, text: str) -> dict[str, Address]:
    """Parse NAME://HOST:PORT,... into addresses by name."""
    found: dict[str, Address] = {}
    for entry in split_list(text):
        name, slashes, where = entry.partition("://")
        name = name.upper()
        if not slashes:
            raise ConfigError(
                f"{setting}: write NAME://HOST:PORT, such as SSL://127.0.0.1:9093; got {entry!r}"
            )
        if not _is_name(name):
            raise ConfigError(
                f"{setting}: the name of a listener has letters, digits, - and _ only; got {name!r}"
            )
        if name in RESERVED_NAMES:
            raise ConfigError(f"{setting}: the name {name} is for connections between nodes; choose another")
        if name in found:
            raise ConfigError(f"{setting}: the listener {name} is given twice")
        # Kafka's way to write every interface.
        where = f"0.0.0.0{where}" if where.startswith(":") and where[1:].isdigit() else where
        try:
            found[name] = parse_address(where)
        except ValueError as error:
            raise ConfigError(f"{setting}: {error}") from None
    return found


def _check_addresses(addresses: Mapping[str, Address]) -> None:
    if not addresses:
        raise ConfigError(f"{LISTENERS}: a broker needs at least one, such as PLAINTEXT://127.0.0.1:9092")
    if len(addresses) > LISTENERS_MAX:
        raise ConfigError(f"{LISTENERS}: a broker has at most {LISTENERS_MAX}, not {len(addresses)}")
    taken: dict[tuple[int, bool], str] = {}
    for name, (host, port) in addresses.items():
        # As in Kafka: a port is given once, or once for IPv4 and once for IPv6.
        other = taken.setdefault((port, ":" in host), name)
        if port and other != name:
            raise ConfigError(f"{LISTENERS}: {other} and {name} have the same port, {port}")


def _check_advertised(addresses: Mapping[str, Address], advertised: Mapping[str, Address]) -> None:
    for name, (host, port) in advertised.items():
        if name not in addresses:
            raise ConfigError(f"{ADVERTISED}: there is no listener {name} in {LISTENERS}")
        if port == 0 or is_unspecified(host):
            raise ConfigError(
                f"{ADVERTISED}: clients cannot connect to {format_address(host, port)}; give a host and a port"
            )
    for name, (host, port) in addresses.items():
        if name not in advertised and is_unspecified(host):
            raise ConfigError(
                f"{ADVERTISED}: clients cannot connect to {host}; add {name}://HOST:{port} with this machine's name"
            )


def internal_protocol(settings: Mapping[str, str]) -> SecurityProtocol:
    """The protocol between nodes. Raises ConfigError."""
    return _protocols(settings.get(PROTOCOLS, "")).get(NODES.name, NODES.security_protocol)


def internal_tls(settings: Mapping[str, str]) -> Tls:
    """The TLS between nodes. Raises ConfigError."""
    return _tls(NODES.name, settings)


def _check_overrides(addresses: Mapping[str, Address], settings: Mapping[str, str]) -> None:
    names = {name.lower() for name in (*addresses, NODES.name)}
    for setting in settings:
        if setting.startswith(LISTENER_PREFIX):
            name = setting.removeprefix(LISTENER_PREFIX).partition(".")[0]
            if name not in names:
                raise ConfigError(f"{setting}: there is no listener {name.upper()} in {LISTENERS}")
