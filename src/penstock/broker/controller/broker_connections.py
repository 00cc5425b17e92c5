"""Notices at once that a broker's process has died: the connection of its heartbeats closes.

A closed connection proves nothing by itself: the broker may have opened another one. So the controller tries to
connect, and treats the broker as dead only when it is refused.
"""

from __future__ import annotations

from penstock.broker.controller.active_controller import ActiveController
from penstock.broker.network.connection import Connection
from penstock.broker.network.peers import Peers
from penstock.broker.quorum.consensus import Consensus


class BrokerConnections:
    """The connection on which each broker sends its heartbeats."""

    def __init__(
        self, consensus: Consensus, active_controller: ActiveController, peers: Peers, *, node_id: int
    ) -> None:
        self._consensus = consensus
        self._active_controller = active_controller
        self._peers = peers
        self._node_id = node_id
        # By broker: the connection of its last heartbeat, None when it has ended, and the broker epoch.
        self._known: dict[int, tuple[Connection | None, int]] = {}

    def heard(self, connection: Connection, broker_id: int, epoch: int) -> None:
        known = self._known.get(broker_id)
        if known is not None and known[0] is connection and known[1] == epoch:
            return
        self._known[broker_id] = (connection, epoch)
        connection.on_closed = lambda: self._ended(connection, broker_id, epoch)

    def registering(self, broker_id: int) -> None:
        """A process registers. If the previous process's connection has ended, that process is gone."""
        connection, epoch = self._known.get(broker_id, (None, -1))
        if connection is None and epoch >= 0:
            del self._known[broker_id]
            self._active_controller.broker_lost(broker_id, epoch)

    def probe_all(self) -> None:
        """Probe every active broker, because this controller has no heartbeat connections yet."""
        for known in self._consensus.image.brokers.values():
            if not known.fenced and known.id != self._node_id:
                self._probe(known.id, known.epoch)

    def _ended(self, connection: Connection, broker_id: int, epoch: int) -> None:
        if self._known.get(broker_id) != (connection, epoch):
            return
        self._known[broker_id] = (None, epoch)
        self._probe(broker_id, epoch)

    def _probe(self, broker_id: int, epoch: int) -> None:
        def probed(is_refused: bool) -> None:
            connection = self._known.get(broker_id, (None, epoch))[0]
            if is_refused and connection is None:
                self._active_controller.broker_lost(broker_id, epoch)

        if self._consensus.is_active:
            self._peers.probe(broker_id, probed)
