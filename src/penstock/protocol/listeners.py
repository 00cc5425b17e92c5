"""The listeners of a node: name, security protocol, and which requests they serve.

There are two, both without TLS and authentication. Their names are stored in registrations and in broker records,
so they must not change.
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
        return f"{self.name}://{address[0]}:{address[1]}"


CLIENTS = ListenerDescription("PLAINTEXT", SecurityProtocol.PLAINTEXT, CLIENT, advertises="PLAINTEXT")
NODES = ListenerDescription("INTERNAL", SecurityProtocol.PLAINTEXT, INTERNAL, advertises=CLIENTS.name)
