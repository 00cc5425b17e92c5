"""The listeners of a node: name, security protocol, and which requests they serve.

A broker may have several for clients; CLIENTS is the one that it has unless it is told otherwise. Nodes have one
for each other. Names are stored in registrations and in broker records, so those of these two must not change.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from penstock.protocol.apis import CLIENT, INTERNAL


class SecurityProtocol(IntEnum):
    """Kafka's numbers and names."""

    PLAINTEXT = 0
    SSL = 1
    SASL_PLAINTEXT = 2
    SASL_SSL = 3


class ListenerDescription(NamedTuple):
    name: str
    security_protocol: SecurityProtocol
    # CLIENT or INTERNAL.
    serves: str
    # Name of the brokers' endpoints that clients of this listener are told.
    advertises: str

    def url(self, address: tuple[str, int]) -> str:
        """The form Kafka uses in ``listeners`` and ``advertised.listeners``."""
        host, port = address
        return f"{self.name}://[{host}]:{port}" if ":" in host else f"{self.name}://{host}:{port}"


def client_listener(name: str, protocol: SecurityProtocol) -> ListenerDescription:
    return ListenerDescription(name, protocol, CLIENT, advertises=name)


CLIENTS = client_listener("PLAINTEXT", SecurityProtocol.PLAINTEXT)
NODES = ListenerDescription("INTERNAL", SecurityProtocol.PLAINTEXT, INTERNAL, advertises=CLIENTS.name)
