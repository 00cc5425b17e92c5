"""What `penstock serve` was told, before any of it is acted on.

The command line fills ServeOptions in and hands it to ``server.run``; neither imports the other's libraries.
A newcomer may look for the broker's settings here: they stay text (Kafka's names, in ``settings`` and in the
configuration file) until the broker itself reads and checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BROKER = "broker"
CONTROLLER = "controller"


class ServeError(Exception):
    """The node cannot start or go on, and one line to the operator says why and what to do."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    node_id: int
    # In the order given; metadata lives in the first.
    data_dirs: tuple[str, ...]
    # A port of 0 lets the kernel choose; the ready line says which.
    listen: tuple[str, int]
    # The address clients are told; None when it is the one listened on.
    advertise: tuple[str, int] | None
    rack: str | None
    # From --set; they win over the configuration file.
    settings: Mapping[str, str]
    config_file: str | None
    # Where the other nodes of the cluster connect; None for a node that is a cluster by itself.
    internal: tuple[str, int] | None = None
    # The voters of the metadata quorum and where they listen to other nodes. Empty: this node is the quorum.
    controllers: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    roles: tuple[str, ...] = (BROKER, CONTROLLER)

    @property
    def internal_told(self) -> tuple[str, int] | None:
        """The internal address that the other nodes are told: ``internal`` may say "every interface"."""
        return self.controllers.get(self.node_id, self.internal)
