"""The committed offsets of one group.

Readers see committed state only, while the coordinator decides ahead: a commit *begins* when it is decided and is
*confirmed* (or *reverted*) when its change is known to be in the log (or not). Decisions in between are kept per
partition, in order. The last one is what the log will contain (``latest``).
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.groups.changes import OffsetCommitted, OffsetRemoved


class GroupOffsets:
    __slots__ = ("_adopted", "_committed", "_pending")

    def __init__(self) -> None:
        self._committed: dict[str, dict[int, OffsetCommitted]] = {}
        # Decided changes that are not confirmed yet, in order, by partition. The lists are never empty.
        self._pending: dict[tuple[str, int], list[OffsetCommitted | OffsetRemoved]] = {}
        # Committed offsets whose records have no topic id; the id was added when they were read.
        self._adopted: set[tuple[str, int]] = set()

    @property
    def is_empty(self) -> bool:
        return not self._committed and not self._pending

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def latest(self, topic: str, partition: int) -> OffsetCommitted | None:
        """The offset once every decision is committed: the state at the end of the log."""
        pending = self._pending.get((topic, partition))
        if pending is None:
            return self.get(topic, partition)
        change = pending[-1]
        return change if isinstance(change, OffsetCommitted) else None

    def logged(self) -> Iterator[OffsetCommitted]:
        """All offsets at the end of the log."""
        for topic, partition in self.partitions():
            offset = self.latest(topic, partition)
            if offset is not None:
                yield offset

    def is_adopted(self, topic: str, partition: int) -> bool:
        """Whether the record in the log still lacks the topic id."""
        return (topic, partition) in self._adopted and not self.is_pending(topic, partition)

    @property
    def count(self) -> int:
        return sum(map(len, self._committed.values()))

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
        """Every partition that has an offset or is about to get one."""
        found = {(offset.topic, offset.partition): None for offset in self.committed()}
        found.update(dict.fromkeys(self._pending))
        return list(found)

    def is_pending(self, topic: str, partition: int) -> bool:
        return (topic, partition) in self._pending

    def holds(self, topic: str, partition: int) -> bool:
        """Whether a tombstone would remove something, now or when pending commits are confirmed."""
        return self.get(topic, partition) is not None or self.is_pending(topic, partition)

    def begin(self, change: OffsetCommitted | OffsetRemoved) -> None:
        self._pending.setdefault((change.topic, change.partition), []).append(change)

    def confirm(self, change: OffsetCommitted | OffsetRemoved) -> None:
        self.revert(change)
        self.apply(change)

    def revert(self, change: OffsetCommitted | OffsetRemoved) -> None:
        key = (change.topic, change.partition)
        pending = self._pending[key]
        pending.remove(change)
        if not pending:
            del self._pending[key]

    def apply(self, change: OffsetCommitted | OffsetRemoved) -> None:
        """Apply a change that is in the log. The last one wins, even with a lower offset."""
        self._adopted.discard((change.topic, change.partition))
        if isinstance(change, OffsetCommitted):
            self._committed.setdefault(change.topic, {})[change.partition] = change
        elif (partitions := self._committed.get(change.topic)) is not None:
            partitions.pop(change.partition, None)
            if not partitions:
                del self._committed[change.topic]

    def adopt(self, change: OffsetCommitted) -> None:
        """Apply a change whose record has no topic id; the change has one."""
        self.apply(change)
        self._adopted.add((change.topic, change.partition))

    def check(self) -> None:
        assert all(self._pending.values())
        assert all(self.get(topic, partition) is not None for topic, partition in self._adopted)
        for topic, partitions in self._committed.items():
            assert partitions, f"no offsets left in {topic}, but the topic is still listed"
            for index, offset in partitions.items():
                assert (offset.topic, offset.partition) == (topic, index)
