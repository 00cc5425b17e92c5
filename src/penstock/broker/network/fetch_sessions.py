"""Fetch sessions (KIP-227): the broker remembers a consumer's partitions, so that it names only what changed.

A session watches its partitions and keeps the ones worth looking at in ``dirty``; a fetch over ten thousand
quiet partitions costs nothing. A partition is dirty when the client named it, when it changed, or when the
last answer had no room for it; it is clean once it was looked at and had nothing to say. The order of
``dirty`` is the order of serving, and who was served goes to its end, so a busy partition cannot starve the
others.

Sessions are bounded in number and, all of them together, in partitions: a client names whatever it likes, and
what is remembered for it must not become all of our memory. Whoever gets no session goes on without.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.environment import Clock
from penstock.model import NO_TOPIC_ID
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import PartitionData

SESSIONLESS_EPOCH = -1
EPOCH_MAX = 2**31 - 1
# A session this long unused makes room for a new one; Kafka's min.incremental.fetch.session.eviction.ms.
EVICTABLE_AFTER_MS = 120_000
# Of all sessions together; about 100 MB.
PARTITIONS_MAX = 250_000


Key: TypeAlias = tuple[str, bytes, int]


def session_key(topic: str, topic_id: bytes, index: int) -> Key:
    """By which a session knows a partition: the id if it has one, because its name may not be known yet."""
    return (topic if topic_id == NO_TOPIC_ID else ""), topic_id, index


class FetchPartition:
    """What a client wants of one partition, and what it was last told about it."""

    __slots__ = (
        "bytes_max",
        "ceiling",
        "current_leader_epoch",
        "fetch_offset",
        "hosted",
        "index",
        "is_counted",
        "last_fetched_epoch",
        "log_start_offset",
        "sent_high_watermark",
        "sent_log_start_offset",
        "topic",
        "topic_id",
        "unknown",
    )

    def __init__(
        self,
        topic: str,
        topic_id: bytes,
        index: int,
        hosted: HostedPartition | None,
        unknown: ErrorCode,
        fetch_offset: int,
        bytes_max: int,
        current_leader_epoch: int,
        last_fetched_epoch: int,
        log_start_offset: int = -1,
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.hosted = hosted
        # What to answer while it is not hosted here.
        self.unknown = unknown
        self.fetch_offset = fetch_offset
        self.bytes_max = bytes_max
        self.current_leader_epoch = current_leader_epoch
        self.last_fetched_epoch = last_fetched_epoch
        # A follower's: where its own log begins.
        self.log_start_offset = log_start_offset
        self.sent_high_watermark = -1
        self.sent_log_start_offset = -1
        # Up to where the asker may read: below it there is more to send.
        self.ceiling = -1
        # A follower's: its position was taken note of.
        self.is_counted = False

    @property
    def key(self) -> Key:
        return session_key(self.topic, self.topic_id, self.index)


class FetchSession:
    __slots__ = (
        "_dirty",
        "_hosted",
        "_is_new",
        "_partitions",
        "_sessions",
        "epoch",
        "id",
        "is_replica",
        "last_used_ms",
        "waiting",
    )

    def __init__(
        self,
        sessions: FetchSessions,
        session_id: int,
        partitions: Iterable[FetchPartition],
        now_ms: int,
        is_replica: bool,
    ) -> None:
        self._sessions = sessions
        self.id = session_id
        # Of a follower, who sees what consumers do not.
        self.is_replica = is_replica
        # What the next request must say.
        self.epoch = 1
        self.last_used_ms = now_ms
        self._partitions: dict[Key, FetchPartition] = {}
        self._hosted: dict[HostedPartition, FetchPartition] = {}
        self._dirty: dict[FetchPartition, None] = {}
        # The answer to a full fetch names every partition, also those with nothing to say.
        self._is_new = True
        # The fetch that is waiting for a change, if one is.
        self.waiting: Any = None
        self.update(partitions, ())

    def update(self, asked: Iterable[FetchPartition], forgotten: Iterable[Key]) -> None:
        for partition in asked:
            key = partition.key
            known = self._partitions.get(key)
            if known is not None:
                partition.sent_high_watermark = known.sent_high_watermark
                # A follower says what it knows. It may have had to drop what it was told, and is not in sync
                # before it begins where the leader does.
                partition.sent_log_start_offset = (
                    partition.log_start_offset if self.is_replica else known.sent_log_start_offset
                )
                self._remove(key)
            self._partitions[key] = partition
            self._sessions.partition_count += 1
            self._dirty[partition] = None
            if partition.hosted is not None:
                self._hosted[partition.hosted] = partition
                partition.hosted.waiters.watch(self, is_replica=self.is_replica)
        for key in forgotten:
            if key in self._partitions:
                self._remove(key)

    def _remove(self, key: Key) -> None:
        partition = self._partitions.pop(key)
        self._sessions.partition_count -= 1
        self._dirty.pop(partition, None)
        if partition.hosted is not None:
            partition.hosted.waiters.unwatch(self)
            self._hosted.pop(partition.hosted, None)

    def resolve(self, find: Callable[[FetchPartition], HostedPartition | None]) -> None:
        """Look again for partitions that were not there, or have gone: the client will not name them again.

        They are all dirty, because an answer that is an error is said again every time.
        """
        for partition in self._dirty:
            if partition.hosted is None or partition.hosted.is_deleted:
                # Also when it moved here from another broker.
                found = find(partition)
                if partition.hosted is not None:
                    self._hosted.pop(partition.hosted, None)
                partition.hosted = found
                if found is not None:
                    partition.topic = found.topic
                    self._hosted[found] = partition
                    found.waiters.watch(self, is_replica=self.is_replica)

    def candidates(self) -> list[FetchPartition]:
        return list(self._dirty)

    def changed(self, hosted: HostedPartition) -> None:
        partition = self._hosted.get(hosted)
        if partition is not None:
            self._dirty[partition] = None
            if self.waiting is not None:
                self.waiting.changed(hosted)

    def mark_dirty(self, hosted: HostedPartition) -> None:
        partition = self._hosted.get(hosted)
        if partition is not None:
            self._dirty[partition] = None

    def has_news(self, partition: FetchPartition, data: PartitionData) -> bool:
        """Whether an answer would name the partition. One that has none is not looked at until it changes."""
        if (
            self._is_new
            or data.error_code
            or data.diverging_epoch is not None
            or data.preferred_read_replica >= 0
            or data.records
            or data.high_watermark != partition.sent_high_watermark
            or data.log_start_offset != partition.sent_log_start_offset
        ):
            return True
        if partition.fetch_offset >= partition.ceiling:
            del self._dirty[partition]
        return False

    def answered(self, sent: Iterable[tuple[FetchPartition, PartitionData]]) -> None:
        """Take note of what the client knows now."""
        self._is_new = False
        for partition, data in sent:
            if data.error_code or data.diverging_epoch is not None:
                # Nothing else in such an answer counts: a follower cuts its log, a client looks for another leader.
                partition.sent_high_watermark = partition.sent_log_start_offset = -1
            else:
                partition.sent_high_watermark = data.high_watermark
                partition.sent_log_start_offset = data.log_start_offset
            # There is more, or there was no room for it, or it has to be said again.
            stays = (
                data.error_code
                or data.diverging_epoch is not None
                or data.preferred_read_replica >= 0
                or partition.fetch_offset < partition.ceiling
            )
            if not stays:
                del self._dirty[partition]
            elif data.records:
                # Only who was given something goes to the end. Those who got a mere word of the news keep
                # their place, or a busy topic would be served in the same order every time.
                del self._dirty[partition]
                self._dirty[partition] = None

    def close(self) -> None:
        for key in list(self._partitions):
            self._remove(key)

    def check(self) -> None:
        for partition in self._dirty:
            assert self._partitions.get(partition.key) is partition
        for hosted, partition in self._hosted.items():
            assert partition.hosted is hosted
            assert self._partitions.get(partition.key) is partition


class FetchSessions:
    def __init__(self, slots: int, clock: Clock, randomness: random.Random) -> None:
        self._slots = slots
        self._clock = clock
        self._random = randomness
        # In order of last use.
        self._sessions: dict[int, FetchSession] = {}
        # Of all sessions together; they count themselves.
        self.partition_count = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, partitions: list[FetchPartition], *, is_replica: bool = False) -> FetchSession | None:
        """None when there is no room: the client then goes on without a session, at full length."""
        now_ms = self._clock.now_ms()
        while len(self._sessions) >= self._slots or self.partition_count + len(partitions) > PARTITIONS_MAX:
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or now_ms - oldest.last_used_ms < EVICTABLE_AFTER_MS:
                return None
            self.close(oldest.id)
        session_id = 0
        while not session_id or session_id in self._sessions:
            session_id = self._random.randrange(1, 2**31)
        session = FetchSession(self, session_id, partitions, now_ms, is_replica)
        self._sessions[session_id] = session
        return session

    def resume(self, session_id: int, epoch: int) -> FetchSession | ErrorCode:
        session = self._sessions.get(session_id)
        if session is None:
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        if session.epoch != epoch:
            return ErrorCode.INVALID_FETCH_SESSION_EPOCH
        if self.partition_count > PARTITIONS_MAX:
            # Somebody's session grew too large. Each that comes back is ended, until there is room again.
            self.close(session_id)
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        del self._sessions[session_id]
        self._sessions[session_id] = session
        session.epoch = 1 if epoch == EPOCH_MAX else epoch + 1
        session.last_used_ms = self._clock.now_ms()
        return session

    def close(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.close()
