"""Readers that honour an isolation level: of committed records, or of all.

A reader of committed records drops aborted batches as every client does: by the list of aborted transactions in the
response, until the marker of the producer.
"""

from __future__ import annotations

from abc import abstractmethod

from crc32c import crc32c

from penstock.protocol.messages.fetch import PartitionData
from penstock.protocol.records import CRC_START, BatchHeader, Marker, batches, decode_marker
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.readers import READ_COMMITTED, READ_UNCOMMITTED, Position, Reader, record_bytes
from penstock.sim.report import Violation
from penstock.sim.topics import Topics


class IsolatedReader(Reader):
    def __init__(
        self,
        client: Client,
        checkers: ClientCheckers,
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
        self._is_committed = is_committed
        # The last stable offset from the leader of an epoch.
        self._stable: dict[tuple[Place, int], int] = {}

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
            # Otherwise a late response: another broker has answered since then, and more.
            is_new = header.next_offset > position.offset
            if is_new and header.leader_epoch < position.epoch:
                raise Violation(
                    f"{self.name}: {place} at {header.base_offset} has epoch {header.leader_epoch} after "
                    f"{position.epoch}"
                )
            while aborted and aborted[0][0] <= header.last_offset:
                active[aborted.pop(0)[1]] = None
            if header.is_control:
                marker = decode_marker(records, at) if header.count else None
                self._saw_marker(place, header, marker, is_new=is_new)
                if marker is not None and not marker.is_commit:
                    active.pop(header.producer_id, None)
            elif not (header.is_transactional and header.producer_id in active):
                self._saw_batch(place, position, header, records, at)
            if is_new:
                before = position.offset
                position.offset, position.epoch = header.next_offset, header.leader_epoch
                self._moved(place, before, position.offset)

    @abstractmethod
    def _saw_marker(self, place: Place, header: BatchHeader, marker: Marker | None, *, is_new: bool) -> None:
        """A control batch was read; ``marker`` is None if it has no record, or an unknown one."""

    @abstractmethod
    def _saw_batch(
        self, place: Place, position: Position, header: BatchHeader, records: bytes, at: int
    ) -> None:
        """A batch was read that is visible at this isolation level. It may begin before the position."""

    def _moved(self, place: Place, before: int, after: int) -> None:
        """The position moved."""
