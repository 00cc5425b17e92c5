"""The committed offsets of one group.

Readers see committed state only, while the coordinator decides ahead: a commit is *begun* when it is decided
and *confirmed* (or *reverted*) when its change is known to be in the log (or not). What is in between is
counted per partition, not kept: no decision depends on the value of an uncommitted offset, only on whether
there is one (OffsetFetch with require_stable, deleting, expiring).
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.groups.changes import OffsetCommitted, OffsetRemoved


class GroupOffsets:
    __slots__ = ("_committed", "_pending")

    def __init__(self) -> None:
        self._committed: dict[str, dict[int, OffsetCommitted]] = {}
        # How many decided changes of a partition are not confirmed yet; never 0.
        self._pending: dict[tuple[str, int], int] = {}

    @property
    def is_empty(self) -> bool:
        return not self._committed and not self._pending

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

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
        """Whether a tombstone would remove something, now or once pending commits are in."""
        return self.get(topic, partition) is not None or self.is_pending(topic, partition)

    def begin(self, change: OffsetCommitted | OffsetRemoved) -> None:
        key = (change.topic, change.partition)
        self._pending[key] = self._pending.get(key, 0) + 1

    def confirm(self, change: OffsetCommitted | OffsetRemoved) -> None:
        self.revert(change)
        self.apply(change)

    def revert(self, change: OffsetCommitted | OffsetRemoved) -> None:
        key = (change.topic, change.partition)
        count = self._pending[key] - 1
        if count:
            self._pending[key] = count
        else:
            del self._pending[key]

    def apply(self, change: OffsetCommitted | OffsetRemoved) -> None:
        """Take a change that is in the log. The last one wins, even with a lower offset."""
        if isinstance(change, OffsetCommitted):
            self._committed.setdefault(change.topic, {})[change.partition] = change
        elif (partitions := self._committed.get(change.topic)) is not None:
            partitions.pop(change.partition, None)
            if not partitions:
                del self._committed[change.topic]

    def check(self) -> None:
        assert all(count > 0 for count in self._pending.values())
        for topic, partitions in self._committed.items():
            assert partitions, f"no offsets left in {topic}, but the topic is still listed"
            for index, offset in partitions.items():
                assert (offset.topic, offset.partition) == (topic, index)
