"""The listeners of a node: what they are called, how their connections are secured, and what is asked there.

There are two, both without TLS and authentication. Their names stand in registrations and in the records of
brokers, so they stay as they are.
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
    # Whose requests are answered here: CLIENT or INTERNAL.
    serves: str
    # Clients that came here are told the brokers' endpoints of this name.
    advertises: str

    def url(self, address: tuple[str, int]) -> str:
        """As Kafka writes it in ``listeners`` and ``advertised.listeners``."""
        return f"{self.name}://{address[0]}:{address[1]}"


CLIENTS = ListenerDescription("PLAINTEXT", SecurityProtocol.PLAINTEXT, CLIENT, advertises="PLAINTEXT")
NODES = ListenerDescription("INTERNAL", SecurityProtocol.PLAINTEXT, INTERNAL, advertises=CLIENTS.name)
