"""The addresses of the metadata quorum's nodes.

An address comes from the command line, a voters record, a leader that announced itself, or an operator. The
command line is newer than what was recorded once, and takes precedence.
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
        """``controllers`` come from the command line; the log has the rest."""
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
        """Pass the log's addresses on to ``peers``; they may have changed."""
        if self._peers is not None:
            for id, address in self._log.addresses.items():
                if id != self._node_id and id not in self._controllers:
                    self._peers.set_address(id, *address)
