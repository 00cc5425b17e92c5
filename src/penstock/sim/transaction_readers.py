"""Readers of topics that are written in transactions: of committed records, or of all.

A reader of committed records drops aborted batches as every client does: by the list of aborted transactions in the
response, until the marker of the producer. What it sees is compared with what the clients know, and in the end with
what a reader of all records makes of the markers.
"""

from __future__ import annotations

from crc32c import crc32c

from penstock.protocol.messages.fetch import PartitionData
from penstock.protocol.records import CRC_START, BatchHeader, Marker, batches, decode_marker, decode_records
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.readers import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    RECORDS_BYTES_MAX,
    Position,
    Reader,
    record_bytes,
)
from penstock.sim.report import Violation
from penstock.sim.topics import ACCOUNTS, OUTPUTS, Topics
from penstock.sim.transaction_checkers import TransactionCheckers

COMMIT = b"(commit)"
ABORT = b"(abort)"


class TransactionReader(Reader):
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
            isolation_level=READ_COMMITTED if is_committed else READ_UNCOMMITTED,
        )
        self._transactions = transactions
        self._is_committed = is_committed
        # The last stable offset from the leader of an epoch.
        self._stable: dict[tuple[Place, int], int] = {}
        # Records of each producer whose marker was not read yet; what a reader of all records makes of them.
        self._open: dict[tuple[Place, int], list[tuple[int, bytes]]] = {}

    def _names(self) -> list[str]:
        return list(self._topics.transactional)

    def _watermark_moved(self, place: Place, epoch: int, data: PartitionData) -> None:
        super()._watermark_moved(place, epoch, data)
        stable = data.last_stable_offset
        known = self._stable.get((place, epoch), 0)
        if not known <= stable <= data.high_watermark:
            raise Violation(
                f"{self.name}: the last stable offset of {place} in epoch {epoch} went from {known} to {stable}; "
                f"the high watermark is {data.high_watermark}"
            )
        self._stable[place, epoch] = stable

    def _read(self, place: Place, position: Position, data: PartitionData) -> None:
        records = record_bytes(data)
        limit = data.last_stable_offset if self._is_committed else data.high_watermark
        aborted = [(each.first_offset, each.producer_id) for each in data.aborted_transactions or []]
        if aborted != sorted(aborted):
            raise Violation(
                f"{self.name} was told of aborted transactions of {place} out of order: {aborted}"
            )
        # The producers whose records are aborted, until their marker.
        active: dict[int, None] = {}
        for at, header in batches(records):
            if header.size > len(records) - at:
                break  # cut off by the limit
            if crc32c(memoryview(records)[at + CRC_START : at + header.size]) != header.crc:
                raise Violation(f"{self.name} was served a damaged batch of {place} at {header.base_offset}")
            if header.last_offset >= limit:
                raise Violation(
                    f"{self.name} was served {place} to {header.last_offset}, beyond the "
                    f"{'last stable offset' if self._is_committed else 'high watermark'} {limit}"
                )
            if header.base_offset > position.offset:
                raise Violation(
                    f"poll skip: {self.name} expected {position.offset} of {place} and got {header.base_offset}"
                )
            # A late response: another broker has answered since then, and more.
            is_known = header.next_offset <= position.offset
            if header.leader_epoch < position.epoch and not is_known:
                raise Violation(
                    f"{place} at {header.base_offset}: epoch {header.leader_epoch} after {position.epoch}"
                )
            while aborted and aborted[0][0] <= header.last_offset:
                active[aborted.pop(0)[1]] = None
            if header.is_control:
                marker = decode_marker(records, at)
                if marker is None:
                    raise Violation(f"{self.name} read an unknown control record of {place}")
                if not is_known:
                    self._saw_marker(place, header, marker)
                if not marker.is_commit:
                    active.pop(header.producer_id, None)
            elif not (header.is_transactional and header.producer_id in active):
                self._saw_batch(place, position, header, records, at)
            if is_known:
                continue
            before = position.offset
            position.offset, position.epoch = header.next_offset, header.leader_epoch
            if self._is_committed:
                self._transactions.atomic.read_past(place, before, position.offset, self.name)

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

    def _saw_marker(self, place: Place, header: BatchHeader, marker: Marker) -> None:
        value = COMMIT if marker.is_commit else ABORT
        self._checkers.values.saw(place, header.base_offset, value, header.leader_epoch, self.name)
        if not self._is_committed:
            for offset, found in self._open.pop((place, header.producer_id), ()):
                self._transactions.view.ended(place, offset, found, is_commit=marker.is_commit)
