"""The options of `penstock serve`.

The command line fills in ServeOptions and passes it to ``process.run``; neither imports the other's libraries. The
broker's settings (Kafka's names, in ``settings`` and in the configuration file) stay text here: ``config.py`` reads
and checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BROKER = "broker"
CONTROLLER = "controller"


class ServeError(Exception):
    """The node cannot start or continue. The message is one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    node_id: int
    # In the order given; the first holds the metadata.
    data_dirs: tuple[str, ...]
    # The only listener for clients, without TLS. None: the settings say it, or the default. With port 0 the kernel
    # chooses one; the ready line shows it.
    listen: tuple[str, int] | None
    # The address that clients of this listener get; None when the settings say it, or it is the one listened on.
    advertise: tuple[str, int] | None
    rack: str | None
    # From --set; they win over the configuration file.
    settings: Mapping[str, str] = field(repr=False)
    config_file: str | None
    # Where the other nodes of the cluster connect; None for a single node.
    internal: tuple[str, int] | None = None
    # The voters of the metadata quorum and their internal addresses. Empty: this node is the quorum.
    controllers: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    roles: tuple[str, ...] = (BROKER, CONTROLLER)
    # Other machines may connect without authentication.
    is_insecure: bool = False
    # Where metrics and health are served; None: nowhere.
    metrics: tuple[str, int] | None = None
    # USER:PASSWORD of the first administrator, for a cluster that does not exist yet.
    admin: str | None = field(default=None, repr=False)

    @property
    def internal_told(self) -> tuple[str, int] | None:
        """The internal address that the other nodes get: ``internal`` may mean "every interface"."""
        return self.controllers.get(self.node_id, self.internal)
