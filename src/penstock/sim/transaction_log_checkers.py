"""Checkers that look into the partitions of transactions on the nodes.

They read the committed batches directly from the simulated disks of the leaders, and keep a second, deliberately
dumb account of transactions: which are open, and how each ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from crc32c import crc32c

from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.metadata.topics import CONSUMER_OFFSETS
from penstock.protocol.records import CRC_START, BatchHeader, CorruptBatch, batches, decode_marker
from penstock.sim.cluster import Cluster, Machine
from penstock.sim.disk import Content
from penstock.sim.report import Violation
from penstock.sim.topics import RECEIPTS, TRANSACTIONAL, Topics

WATCHED = (*TRANSACTIONAL, RECEIPTS, CONSUMER_OFFSETS)


@dataclass(slots=True)
class _Account:
    """The transactions of one partition, as far as it was read."""

    # Exclusive.
    read_to: int = 0
    # By producer: the first offset of its open transaction, and its epoch.
    open: dict[int, tuple[int, int]] = field(default_factory=dict)
    # By producer: the newest epoch.
    epochs: dict[int, int] = field(default_factory=dict)
    # By producer: when its open transaction was first seen.
    since_ms: dict[int, float] = field(default_factory=dict)


class CommittedTransactions:
    """11, 13, 15: the last stable offset is what the batches say, epochs rise, and each has one outcome."""

    def __init__(self, cluster: Cluster, classic: Mapping[int, None], topics: Topics) -> None:
        self._cluster = cluster
        self._topics = topics
        # Producers of classic clients, which have many transactions in one epoch.
        self._classic = classic
        self._accounts: dict[tuple[bytes, int], _Account] = {}
        # By (start of a node, file): an offset and its position in the file, which compaction may replace.
        self._positions: dict[tuple[str, int, str], tuple[int, int, Content]] = {}
        # By (producer id, epoch of the data), if each epoch has one transaction: how it ended, and where.
        self._outcomes: dict[tuple[int, int], tuple[bool, str]] = {}
        self.markers = 0
        self.compared = 0

    def look(self) -> None:
        for machine in self._cluster.running:
            if machine.node is None or not machine.node.is_ready:
                continue
            for hosted in machine.node.led():
                if hosted.topic in WATCHED:
                    self._saw(machine, hosted)

    def _saw(self, machine: Machine, hosted: HostedPartition) -> None:
        account = self._accounts.setdefault((hosted.topic_id, hosted.index), _Account())
        high_watermark = hosted.high_watermark
        if account.read_to < high_watermark:
            self._read(machine, hosted, account, high_watermark)
        if account.read_to != high_watermark or not hosted.replication.has_established:
            return  # this leader does not know yet how much is committed
        expected = min([high_watermark, *(first for first, _ in account.open.values())])
        expected = max(expected, hosted.log.log_start_offset)
        self.compared += 1
        if hosted.last_stable_offset != expected:
            raise Violation(
                f"the last stable offset of {hosted.topic}-{hosted.index} on its leader {machine.host} is "
                f"{hosted.last_stable_offset} and should be {expected}; the high watermark is {high_watermark}, "
                f"open are (first offset, epoch) by producer {account.open}"
            )

    def _read(
        self, machine: Machine, hosted: HostedPartition, account: _Account, high_watermark: int
    ) -> None:
        segments = hosted.log._segments.items
        for number, segment in enumerate(segments):
            if number + 1 < len(segments) and segments[number + 1].base_offset <= account.read_to:
                continue
            content = machine.disk.find(segment.path)
            if not isinstance(content, Content):
                return
            key = (machine.host, machine.starts, segment.path)
            offset, start, of = self._positions.get(key, (segment.base_offset, 0, content))
            if offset > account.read_to or of is not content:
                start = 0
            data = bytes(content.data[start:])
            for at, header in _sound(data):
                if header.next_offset > high_watermark or header.base_offset > account.read_to:
                    return
                if account.read_to < header.next_offset:
                    self._saw_batch(hosted, account, header, data, at)
                    account.read_to = header.next_offset
                self._positions[key] = (header.next_offset, start + at + header.size, content)

    def _saw_batch(
        self, hosted: HostedPartition, account: _Account, header: BatchHeader, data: bytes, at: int
    ) -> None:
        where = f"{hosted.topic}-{hosted.index}"
        producer_id, epoch = header.producer_id, header.producer_epoch
        if producer_id < 0:
            return
        newest = account.epochs.get(producer_id, -1)
        if epoch < newest:
            raise Violation(
                f"zombie: {where} at {header.base_offset} has {'a marker' if header.is_control else 'a batch'} of "
                f"producer {producer_id} in epoch {epoch}, after epoch {newest}"
            )
        account.epochs[producer_id] = epoch
        if not header.is_transactional:
            return
        if not header.is_control:
            first, of_epoch = account.open.setdefault(producer_id, (header.base_offset, epoch))
            account.since_ms.setdefault(producer_id, self._cluster.loop.now_ms)
            if of_epoch != epoch:
                raise Violation(
                    f"zombie: {where} at {header.base_offset} has a batch of producer {producer_id} in epoch "
                    f"{epoch}, within the transaction of epoch {of_epoch} that began at {first}"
                )
            return
        marker = decode_marker(data, at)
        assert marker is not None
        self.markers += 1
        opened = account.open.pop(producer_id, None)
        account.since_ms.pop(producer_id, None)
        if opened is not None and producer_id not in self._classic:
            key = (producer_id, opened[1])
            is_commit, elsewhere = self._outcomes.setdefault(key, (marker.is_commit, where))
            if is_commit != marker.is_commit:
                raise Violation(
                    f"torn transaction: that of producer {producer_id} in epoch {opened[1]} is "
                    f"{'committed' if is_commit else 'aborted'} in {elsewhere}, and the opposite in {where} at "
                    f"{header.base_offset}"
                )

    def open_since(self, before_ms: float) -> list[str]:
        """14: transactions that were open at this time and still are."""
        return [
            f"producer {producer_id} in partition {index} of {topic_id.hex()} from "
            f"{account.open[producer_id][0]} on, epoch {account.open[producer_id][1]}"
            for (topic_id, index), account in self._accounts.items()
            if topic_id not in self._topics.deleting
            for producer_id, since_ms in account.since_ms.items()
            if since_ms < before_ms
        ]


def _sound(data: bytes) -> Iterator[tuple[int, BatchHeader]]:
    """The batches and their positions, up to the first damaged one."""
    with suppress(CorruptBatch):
        for at, header in batches(data):
            end = at + header.size
            if end > len(data) or crc32c(memoryview(data)[at + CRC_START : end]) != header.crc:
                return
            yield at, header
