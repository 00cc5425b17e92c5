"""Where the nodes of the metadata quorum listen for each other.

An address comes from several places: the command line, a record of the voters, a leader that made itself
known, an operator. What this node was told at start is newer than what somebody wrote down once, and counts
first.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.broker.network.peers import Peers
from penstock.broker.quorum.metadata_log import MetadataLog


class AddressBook:
    def __init__(
        self,
        node_id: int,
        controllers: Mapping[int, tuple[str, int]],
        log: MetadataLog,
        peers: Peers | None,
    ) -> None:
        """``controllers`` are what this node was told at start; the log has the rest."""
        self._node_id = node_id
        self._controllers = dict(controllers)
        self._log = log
        self._peers = peers

    def all(self) -> dict[int, tuple[str, int]]:
        return {**self._log.addresses, **self._controllers}

    def start(self) -> None:
        if self._peers is not None:
            for id, address in self.all().items():
                if id != self._node_id:
                    self._peers.set_address(id, *address)

    def learn(self, node_id: int, address: tuple[str, int]) -> None:
        self._log.addresses[node_id] = address
        self.announce()

    def announce(self) -> None:
        """The log may name others than before."""
        if self._peers is not None:
            for id, address in self._log.addresses.items():
                if id != self._node_id and id not in self._controllers:
                    self._peers.set_address(id, *address)
