"""The client listeners of a broker, from its settings: names, protocols, addresses and TLS.

``listeners`` and ``advertised.listeners`` are lists of ``NAME://HOST:PORT``. The name says which protocol the
listener speaks: it is that of a protocol, or ``listener.security.protocol.map`` has it. Kafka's rules, and these of
our own:

- A listener that ``advertised.listeners`` does not name is advertised with the address it listens on. Kafka does
  not advertise it, and a client that comes in there is told of no brokers.
- A name has letters, digits, ``-`` and ``_`` only, and is not INTERNAL or CONTROLLER, which are for nodes.

An address that other machines can reach needs ``--insecure`` unless every client has to have a certificate.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from penstock.addresses import format_address, is_loopback, is_unspecified, parse_address
from penstock.broker.config import ConfigError
from penstock.broker.options import ServeOptions
from penstock.metadata.broker_settings import BROKER, LISTENER_PREFIX
from penstock.metadata.settings import split_list
from penstock.protocol.listeners import CLIENTS, NODES, ListenerDescription, SecurityProtocol, client_listener
from penstock.tls.pem import TlsSettingsError
from penstock.tls.principals import PrincipalMapping, PrincipalRulesError
from penstock.tls.settings import ClientAuth, TlsSettings

LISTENERS = "listeners"
ADVERTISED = "advertised.listeners"
PRINCIPALS = "ssl.principal.mapping.rules"
PROTOCOLS = "listener.security.protocol.map"
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
class ClientListener:
    description: ListenerDescription
    address: Address
    # The address for clients; None when it is the one listened on.
    advertised: Address | None
    # None without TLS.
    tls: Tls | None

    @property
    def is_secured(self) -> bool:
        """Whether it is anything but plain text, so that clients may have an identity."""
        return self.description.security_protocol is not SecurityProtocol.PLAINTEXT

    @property
    def needs_certificate(self) -> bool:
        """Whether every client has to have a certificate."""
        return self.tls is not None and self.tls.settings.client_auth is ClientAuth.REQUIRED


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
        if not is_private and not listener.needs_certificate and not options.is_insecure:
            raise ConfigError(
                f"{listener.description.url(address)} is open to other machines without authentication; "
                "listen on 127.0.0.1, set ssl.client.auth=required with SSL, or pass --insecure if the network is"
                " trusted"
            )


def unused_settings(listeners: Collection[ClientListener], settings: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning about settings that no listener uses. A node that is only a controller has none."""
    if not listeners and LISTENERS in settings:
        yield f"{LISTENERS} has no effect: this node is only a controller"
    if all(listener.tls is None for listener in listeners):
        unused = sorted(name for name in settings if name.startswith(("ssl.", LISTENER_PREFIX)))
        if unused:
            yield f"{unused[0]} has no effect: no listener has the protocol SSL"


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
    _check_supported(LISTENERS, name, protocol)
    tls = _tls(name, settings) if protocol is SecurityProtocol.SSL else None
    return ClientListener(client_listener(name, protocol), address, advertised, tls)


def _tls(name: str, settings: Mapping[str, str]) -> Tls:
    """The settings of TLS for one listener: its own win over those of the broker."""
    prefix = f"{LISTENER_PREFIX}{name.lower()}."
    of_broker = {key: text for key, text in settings.items() if key.startswith("ssl.")}
    own = {key.removeprefix(prefix): text for key, text in settings.items() if key.startswith(prefix)}
    values = {**of_broker, **own}
    try:
        return Tls(TlsSettings.from_kafka(values), PrincipalMapping(values.get(PRINCIPALS) or "DEFAULT"))
    except (TlsSettingsError, PrincipalRulesError) as error:
        raise ConfigError(f"listener {name}: {error}") from None


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


def _check_supported(setting: str, name: str, protocol: SecurityProtocol) -> None:
    if protocol in (SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL):
        raise ConfigError(
            f"{setting}: {name} has the protocol {protocol.name}, which is not supported yet; use SSL"
        )


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


def _check_overrides(addresses: Mapping[str, Address], settings: Mapping[str, str]) -> None:
    names = {name.lower() for name in addresses}
    for setting in settings:
        if setting.startswith(LISTENER_PREFIX):
            name = setting.removeprefix(LISTENER_PREFIX).partition(".")[0]
            if name not in names:
                raise ConfigError(f"{setting}: there is no listener {name.upper()} in {LISTENERS}")
