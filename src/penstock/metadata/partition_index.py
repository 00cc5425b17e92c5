"""Partitions by broker and by state, so that the controller need not look at every partition.

A broker that dies is in the ISR of a third of all partitions, and a heartbeat comes every few milliseconds, so
neither may cost a scan of a hundred thousand partitions. The index is built from an image and updated with each
step from one image to the next. Only ``follow`` writes it. It uses dictionaries instead of sets, because a set
has no order and a run must be repeatable.
"""

from __future__ import annotations

from typing import TypeAlias

from penstock.metadata.image import NO_LEADER, Delta, Image, PartitionImage
from penstock.model import BrokerId, TopicId

Key: TypeAlias = tuple[TopicId, int]


class PartitionIndex:
    def __init__(self, image: Image) -> None:
        # The partitions whose ISR a broker is in, including those it leads.
        self.in_isr: dict[BrokerId, dict[Key, None]] = {}
        # How many partitions a broker leads.
        self.led: dict[BrokerId, int] = {}
        self.leaderless: dict[Key, None] = {}
        # With a reassignment under way.
        self.reassigned: dict[Key, None] = {}
        # Led by a replica other than the first.
        self.astray: dict[Key, None] = {}
        for topic in image.topics.values():
            for partition in topic.partitions:
                self._put((topic.id, partition.index), None, partition)

    def follow(self, before: Image, after: Image, delta: Delta) -> None:
        """Update the index from one image to the next."""
        for deleted in delta.deleted:
            known = before.topics_by_id.get(deleted.id)
            if known is not None:
                for partition in known.partitions:
                    self._remove((known.id, partition.index), partition)
        for name in delta.created:
            topic = after.topics[name]
            for partition in topic.partitions:
                self._put((topic.id, partition.index), None, partition)
        for name, index in delta.partitions_changed:
            topic = after.topics[name]
            old = before.topics[name].partitions
            self._put((topic.id, index), old[index] if index < len(old) else None, topic.partitions[index])

    def check(self, image: Image) -> None:
        """Assert that the index equals one freshly built from the image."""
        fresh = PartitionIndex(image)
        assert {broker: keys for broker, keys in self.in_isr.items() if keys} == fresh.in_isr
        assert {broker: count for broker, count in self.led.items() if count} == fresh.led
        assert self.leaderless == fresh.leaderless
        assert self.reassigned == fresh.reassigned
        assert self.astray == fresh.astray

    def _put(self, key: Key, old: PartitionImage | None, new: PartitionImage) -> None:
        old_isr = () if old is None else old.isr
        if old_isr != new.isr:
            for broker in old_isr:
                if broker not in new.isr:
                    del self.in_isr[broker][key]
            for broker in new.isr:
                if broker not in old_isr:
                    self.in_isr.setdefault(broker, {})[key] = None
        leader = new.leader
        if old is None or old.leader != leader:
            if old is not None and old.leader != NO_LEADER:
                self.led[old.leader] -= 1
            if leader == NO_LEADER:
                self.leaderless[key] = None
            else:
                self.led[leader] = self.led.get(leader, 0) + 1
                self.leaderless.pop(key, None)
        if leader not in (NO_LEADER, new.replicas[0]):
            self.astray[key] = None
        else:
            self.astray.pop(key, None)
        if new.adding_replicas or new.removing_replicas:
            self.reassigned[key] = None
        else:
            self.reassigned.pop(key, None)

    def _remove(self, key: Key, old: PartitionImage) -> None:
        for broker in old.isr:
            del self.in_isr[broker][key]
        if old.leader != NO_LEADER:
            self.led[old.leader] -= 1
        for keys in (self.leaderless, self.reassigned, self.astray):
            keys.pop(key, None)
