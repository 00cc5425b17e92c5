"""The committed offsets of one group, and those in open transactions.

Readers see committed state only, while the coordinator decides ahead: a commit *begins* when it is decided and is
*confirmed* (or *reverted*) when its change is known to be in the log (or not). Decisions in between are kept per
partition, in order. What the log will contain is the committed state with these decisions applied (``latest``,
``latest_open``).

An offset that was committed in a transaction is *open* until the marker that ends the transaction is in the log.
The marker's effect on one partition is an ``OffsetSettled``, which begins and is confirmed like the other changes.
The order of the log decides, not that of the markers: an open offset that is older than the committed one is
*superseded* and has no effect any more, however its transaction ends. As in Kafka, it makes the partition unstable
until then.

Careful: a commit supersedes even if it equals the committed offset in every field. The log is compacted, and of two
equal records the later one is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from penstock.groups.changes import OffsetCommitted, OffsetRemoved


@dataclass(frozen=True, slots=True)
class OffsetInTransaction:
    """An offset that a producer committed in its open transaction."""

    producer_id: int
    producer_epoch: int
    offset: OffsetCommitted
    # A newer offset of the partition is committed.
    is_superseded: bool = False
    # The record has no topic id; the id was added when it was read.
    is_adopted: bool = False

    @property
    def topic(self) -> str:
        return self.offset.topic

    @property
    def partition(self) -> int:
        return self.offset.partition


@dataclass(frozen=True, slots=True)
class OffsetSettled:
    """The end of a transaction, for one partition that it committed an offset of.

    In the log this is the transaction's marker: it has no record of its own.
    """

    group_id: str
    topic: str
    partition: int
    producer_id: int
    # False: the offset is dropped.
    is_commit: bool


OffsetChange: TypeAlias = OffsetCommitted | OffsetRemoved | OffsetInTransaction | OffsetSettled
# By producer id, in the order of the log.
OpenOffsets: TypeAlias = Mapping[int, OffsetInTransaction]

NONE_OPEN: OpenOffsets = {}


class GroupOffsets:
    __slots__ = ("_adopted", "_by_producer", "_committed", "_open", "_pending")

    def __init__(self) -> None:
        self._committed: dict[str, dict[int, OffsetCommitted]] = {}
        # Offsets in transactions, by partition. Never empty.
        self._open: dict[tuple[str, int], OpenOffsets] = {}
        # Producer id -> the partitions that it has an offset of in ``_open``, or in a decision not confirmed yet.
        self._by_producer: dict[int, dict[tuple[str, int], None]] = {}
        # Decided changes that are not confirmed yet, in order, by partition. The lists are never empty.
        self._pending: dict[tuple[str, int], list[OffsetChange]] = {}
        # Committed offsets whose records have no topic id; the id was added when they were read.
        self._adopted: set[tuple[str, int]] = set()

    @property
    def is_empty(self) -> bool:
        return not self._committed and not self._pending and not self._open

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @property
    def will_be_empty(self) -> bool:
        """Whether nothing is left once every decision is committed."""
        return not any(
            self.latest(topic, partition) or self.latest_open(topic, partition)
            for topic, partition in self.partitions()
        )

    def latest(self, topic: str, partition: int) -> OffsetCommitted | None:
        """The offset once every decision is committed: the state at the end of the log."""
        return self._decided(topic, partition)[0]

    def latest_open(self, topic: str, partition: int) -> OpenOffsets:
        """As ``latest``, the offsets in open transactions."""
        return self._decided(topic, partition)[1]

    def open_of(self, producer_id: int) -> Iterator[OffsetInTransaction]:
        """The offsets that a producer's transaction has at the end of the log."""
        for topic, partition in self._by_producer.get(producer_id, ()):
            opened = self.latest_open(topic, partition).get(producer_id)
            if opened is not None:
                yield opened

    def producer_ids(self) -> Iterable[int]:
        """The producers that ``knows`` is true for."""
        return self._by_producer

    def knows(self, producer_id: int) -> bool:
        """Whether the producer has an offset in an open transaction, or in a decision that is not confirmed."""
        return producer_id in self._by_producer

    def is_adopted(self, topic: str, partition: int) -> bool:
        """Whether the record in the log still lacks the topic id."""
        return (topic, partition) in self._adopted and (topic, partition) not in self._pending

    @property
    def count(self) -> int:
        return sum(map(len, self._committed.values())) + sum(map(len, self._open.values()))

    def get(self, topic: str, partition: int) -> OffsetCommitted | None:
        partitions = self._committed.get(topic)
        return None if partitions is None else partitions.get(partition)

    def topics(self) -> Iterator[tuple[str, list[OffsetCommitted]]]:
        """The committed offsets by topic, partitions in order."""
        for topic, partitions in self._committed.items():
            yield topic, [partitions[index] for index in sorted(partitions)]

    def committed(self) -> Iterator[OffsetCommitted]:
        for partitions in self._committed.values():
            yield from partitions.values()

    def partitions(self) -> list[tuple[str, int]]:
        """Every partition that has an offset or may get one."""
        found = {(offset.topic, offset.partition): None for offset in self.committed()}
        found.update(dict.fromkeys(self._open))
        found.update(dict.fromkeys(self._pending))
        return list(found)

    def is_pending(self, topic: str, partition: int) -> bool:
        """Whether the offset may change without another request: a decision or a transaction is under way."""
        return (topic, partition) in self._pending or (topic, partition) in self._open

    def holds(self, topic: str, partition: int) -> bool:
        """Whether a tombstone would remove something, now or when pending commits are confirmed."""
        return self.get(topic, partition) is not None or self.is_pending(topic, partition)

    def begin(self, change: OffsetChange) -> None:
        key = (change.topic, change.partition)
        self._pending.setdefault(key, []).append(change)
        if isinstance(change, OffsetInTransaction):
            self._by_producer.setdefault(change.producer_id, {})[key] = None

    def confirm(self, change: OffsetChange) -> None:
        self._drop(change)
        self.apply(change)

    def revert(self, change: OffsetChange) -> None:
        self._drop(change)
        if isinstance(change, OffsetInTransaction):
            self._release(change.producer_id, (change.topic, change.partition))

    def apply(self, change: OffsetChange) -> None:
        """Apply a change that is in the log. The last one wins, even with a lower offset."""
        key = (change.topic, change.partition)
        opened = self._open.get(key, NONE_OPEN)
        if isinstance(change, OffsetCommitted | OffsetRemoved):
            self._adopted.discard(key)
            if not opened:
                self._set(key, change if isinstance(change, OffsetCommitted) else None)
                return
        elif isinstance(change, OffsetSettled):
            settled = opened.get(change.producer_id)
            if settled is not None and change.is_commit and not settled.is_superseded:
                self._adopted.discard(key)
                if settled.is_adopted:
                    self._adopted.add(key)
        offset, still_open = _changed(self.get(*key), opened, change)
        self._set(key, offset)
        if still_open:
            self._open[key] = still_open
        else:
            self._open.pop(key, None)
        if isinstance(change, OffsetInTransaction):
            self._by_producer.setdefault(change.producer_id, {})[key] = None
        for producer_id in opened:
            if producer_id not in still_open:
                self._release(producer_id, key)

    def adopt(self, change: OffsetCommitted) -> None:
        """Apply a change whose record has no topic id; the change has one."""
        self.apply(change)
        self._adopted.add((change.topic, change.partition))

    def check(self) -> None:
        assert all(self._pending.values()) and all(self._open.values())
        assert all(self.get(topic, partition) is not None for topic, partition in self._adopted)
        for topic, partitions in self._committed.items():
            assert partitions, f"no offsets left in {topic}, but the topic is still listed"
            for index, offset in partitions.items():
                assert (offset.topic, offset.partition) == (topic, index)
        by_producer: dict[int, set[tuple[str, int]]] = {}
        for key, opened in self._open.items():
            # What is superseded is older than what is not.
            is_newer = [not one.is_superseded for one in opened.values()]
            assert is_newer == sorted(is_newer), key
            for producer_id, one in opened.items():
                assert (one.topic, one.partition) == key and one.producer_id == producer_id
                by_producer.setdefault(producer_id, set()).add(key)
        for key, changes in self._pending.items():
            for change in changes:
                assert (change.topic, change.partition) == key
                if isinstance(change, OffsetInTransaction):
                    by_producer.setdefault(change.producer_id, set()).add(key)
        assert {producer_id: set(keys) for producer_id, keys in self._by_producer.items()} == by_producer

    def _decided(self, topic: str, partition: int) -> tuple[OffsetCommitted | None, OpenOffsets]:
        offset = self.get(topic, partition)
        opened = self._open.get((topic, partition), NONE_OPEN)
        for change in self._pending.get((topic, partition), ()):
            offset, opened = _changed(offset, opened, change)
        return offset, opened

    def _set(self, key: tuple[str, int], offset: OffsetCommitted | None) -> None:
        topic, partition = key
        if offset is not None:
            self._committed.setdefault(topic, {})[partition] = offset
        elif (partitions := self._committed.get(topic)) is not None:
            partitions.pop(partition, None)
            if not partitions:
                del self._committed[topic]

    def _drop(self, change: OffsetChange) -> None:
        key = (change.topic, change.partition)
        pending = self._pending[key]
        pending.remove(change)
        if not pending:
            del self._pending[key]

    def _release(self, producer_id: int, key: tuple[str, int]) -> None:
        """Forget that a producer has an offset of a partition, unless it still has, or will."""
        if producer_id in self._open.get(key, NONE_OPEN) or any(
            isinstance(change, OffsetInTransaction) and change.producer_id == producer_id
            for change in self._pending.get(key, ())
        ):
            return
        keys = self._by_producer.get(producer_id)
        if keys is not None:
            keys.pop(key, None)
            if not keys:
                del self._by_producer[producer_id]


def _changed(
    offset: OffsetCommitted | None, opened: OpenOffsets, change: OffsetChange
) -> tuple[OffsetCommitted | None, OpenOffsets]:
    """The committed offset of a partition, and those in transactions, after a change."""
    match change:
        case OffsetCommitted():
            return change, {key: replace(one, is_superseded=True) for key, one in opened.items()}
        case OffsetRemoved():
            return None, NONE_OPEN
        case OffsetInTransaction():
            others = {key: one for key, one in opened.items() if key != change.producer_id}
            return offset, {**others, change.producer_id: change}
    settled = opened.get(change.producer_id)
    if settled is None:
        return offset, opened
    others = {key: one for key, one in opened.items() if key != change.producer_id}
    if not change.is_commit or settled.is_superseded:
        return offset, others
    older = True
    for key, one in opened.items():
        if key == change.producer_id:
            older = False
        elif older:
            others[key] = replace(one, is_superseded=True)
    return settled.offset, others
