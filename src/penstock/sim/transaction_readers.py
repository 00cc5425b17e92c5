"""Readers of topics that are written in transactions: of committed records, or of all.

What a reader of committed records sees is compared with what the clients know, and in the end with what a reader of
all records makes of the markers.
"""

from __future__ import annotations

from penstock.protocol.records import BatchHeader, Marker, decode_records
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.isolated_readers import IsolatedReader
from penstock.sim.readers import (
    RECORDS_BYTES_MAX,
    Position,
)
from penstock.sim.report import Violation
from penstock.sim.topics import ACCOUNTS, OUTPUTS, Topics
from penstock.sim.transaction_checkers import TransactionCheckers

COMMIT = b"(commit)"
ABORT = b"(abort)"


class TransactionReader(IsolatedReader):
    def __init__(
        self,
        client: Client,
        checkers: ClientCheckers,
        transactions: TransactionCheckers,
        topics: Topics,
        name: str,
        *,
        rack: str | None = None,
        by_id: bool = False,
        is_committed: bool,
    ) -> None:
        super().__init__(
            client,
            checkers,
            topics,
            name,
            rack=rack,
            by_id=by_id,
            is_committed=is_committed,
        )
        self._transactions = transactions
        # Records of each producer whose marker was not read yet; what a reader of all records makes of them.
        self._open: dict[tuple[Place, int], list[tuple[int, bytes]]] = {}

    def _names(self) -> list[str]:
        return list(self._topics.transactional)

    def _moved(self, place: Place, before: int, after: int) -> None:
        if self._is_committed:
            self._transactions.atomic.read_past(place, before, after, self.name)

    def _saw_batch(
        self, place: Place, position: Position, header: BatchHeader, records: bytes, at: int
    ) -> None:
        for record in decode_records(records, at, bytes_max=RECORDS_BYTES_MAX):
            if record.offset < position.offset:
                continue  # the batch begins before the requested offset
            assert record.value is not None
            self._checkers.values.saw(place, record.offset, record.value, header.leader_epoch, self.name)
            if self._is_committed:
                self._saw_committed(place, record.offset, record.value)
            else:
                opened = self._open.setdefault((place, header.producer_id), [])
                opened.append((record.offset, record.value))

    def _saw_committed(self, place: Place, offset: int, value: bytes) -> None:
        transactions = self._transactions
        transactions.atomic.read(place, offset, value, self.name)
        words = value.decode().split()
        if place.topic == ACCOUNTS:
            transactions.money.saw(words[1], int(words[2]), self.name)
        elif place.topic == OUTPUTS:
            transactions.outputs.saw(int(words[1]), int(words[2]), value, self.name)

    def _saw_marker(self, place: Place, header: BatchHeader, marker: Marker | None, *, is_new: bool) -> None:
        if marker is None:
            raise Violation(f"{self.name} read an unknown control record of {place}")
        if not is_new:
            return
        value = COMMIT if marker.is_commit else ABORT
        self._checkers.values.saw(place, header.base_offset, value, header.leader_epoch, self.name)
        if not self._is_committed:
            for offset, found in self._open.pop((place, header.producer_id), ()):
                self._transactions.view.ended(place, offset, found, is_commit=marker.is_commit)
