"""Fetch sessions (KIP-227): the broker remembers a client's partitions, so that requests name only the changes.

A session watches its partitions and keeps the dirty ones in ``_dirty``, so a fetch over ten thousand quiet
partitions costs nothing. A partition is dirty when the client named it, when it changed, or when the last response
had no room for it. It is clean once it was read and had nothing new. Partitions are served in the order of
``_dirty``, and a served partition goes to its end, so that a busy partition cannot starve the rest.

The number of sessions is limited, and so is the number of partitions in all of them: a client may name any number
of partitions, and they must not fill the memory. A client that gets no session continues without one.
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
# A session unused for this long makes room for a new one; Kafka's min.incremental.fetch.session.eviction.ms.
EVICTABLE_AFTER_MS = 120_000
# In all sessions together; about 100 MB.
PARTITIONS_MAX = 250_000


Key: TypeAlias = tuple[str, bytes, int]


def session_key(topic: str, topic_id: bytes, index: int) -> Key:
    """The key of a partition in a session: the topic id if there is one, because the name may not be known yet."""
    return (topic if topic_id == NO_TOPIC_ID else ""), topic_id, index


class FetchPartition:
    """The fetch state of one partition: what the client requests, and what it was last sent."""

    __slots__ = (
        "bytes_max",
        "ceiling",
        "current_leader_epoch",
        "fetch_offset",
        "hosted",
        "index",
        "is_changed",
        "is_counted",
        "last_fetched_epoch",
        "log_start_offset",
        "read_bytes",
        "read_end",
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
        # The error to answer with while the partition is not hosted here.
        self.unknown = unknown
        self.fetch_offset = fetch_offset
        self.bytes_max = bytes_max
        self.current_leader_epoch = current_leader_epoch
        self.last_fetched_epoch = last_fetched_epoch
        # For a follower: the log start offset of its own log.
        self.log_start_offset = log_start_offset
        self.sent_high_watermark = -1
        self.sent_log_start_offset = -1
        # Exclusive. How far the client may read; below it there is more to send.
        self.ceiling = -1
        # Of the records that were read last: their size and, for a consumer, the offset behind them.
        self.read_bytes = 0
        self.read_end = -1
        # It has changed since the response that is being made has looked at it: what one partition commits may
        # append to another.
        self.is_changed = False
        # For a follower: its fetch offset was reported to the partition.
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
        "_view",
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
        # The client is a follower, which may read above the high watermark.
        self.is_replica = is_replica
        # The session epoch that the next request must have.
        self.epoch = 1
        self.last_used_ms = now_ms
        self._partitions: dict[Key, FetchPartition] = {}
        self._hosted: dict[HostedPartition, FetchPartition] = {}
        self._dirty: dict[FetchPartition, None] = {}
        # The response to a full fetch names every partition, also those with nothing new.
        self._is_new = True
        # The fetch that waits for a change, if there is one.
        self.waiting: Any = None
        # Of the last request.
        self._view: tuple[int, int] | None = None
        self.update(partitions, ())

    def update(self, asked: Iterable[FetchPartition], forgotten: Iterable[Key]) -> None:
        for partition in asked:
            key = partition.key
            known = self._partitions.get(key)
            if known is not None:
                partition.sent_high_watermark = known.sent_high_watermark
                # A follower reports its own log start offset. It may have dropped what it was sent, and it is not
                # in sync before its log begins where the leader's does.
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

    def look_again_if_changed(self, view: tuple[int, int]) -> None:
        """Look at all partitions again if what the client may see has changed since the last request.

        ``view`` is the isolation level, which clients may change from request to request, and the version of the
        ACLs.
        """
        if view != self._view:
            self._view = view
            self._dirty.update(dict.fromkeys(self._partitions.values()))

    def _remove(self, key: Key) -> None:
        partition = self._partitions.pop(key)
        self._sessions.partition_count -= 1
        self._dirty.pop(partition, None)
        if partition.hosted is not None:
            partition.hosted.waiters.unwatch(self)
            self._hosted.pop(partition.hosted, None)

    def resolve(self, find: Callable[[FetchPartition], HostedPartition | None]) -> None:
        """Look again for partitions that were missing or have been deleted: the client will not name them again.

        They are all dirty, because an error is repeated in every response.
        """
        for partition in self._dirty:
            if partition.hosted is None or partition.hosted.is_deleted:
                # It may also have moved here from another broker.
                found = find(partition)
                if partition.hosted is not None:
                    self._hosted.pop(partition.hosted, None)
                partition.hosted = found
                if found is not None:
                    partition.topic = found.topic
                    self._hosted[found] = partition
                    found.waiters.watch(self, is_replica=self.is_replica)

    @property
    def is_new(self) -> bool:
        """Whether its first fetch is not answered yet."""
        return self._is_new

    def candidates(self) -> list[FetchPartition]:
        return list(self._dirty)

    @property
    def has_changed(self) -> bool:
        """Whether a partition has changed since it was last looked at."""
        return any(partition.is_changed for partition in self._dirty)

    def changed(self, hosted: HostedPartition) -> None:
        partition = self._hosted.get(hosted)
        if partition is not None:
            self._dirty[partition] = None
            partition.is_changed = True
            if self.waiting is not None:
                self.waiting.changed(hosted)

    def mark_dirty(self, hosted: HostedPartition) -> None:
        partition = self._hosted.get(hosted)
        if partition is not None:
            self._dirty[partition] = None
            partition.is_changed = True

    def has_news(self, partition: FetchPartition, data: PartitionData) -> bool:
        """Whether the response has to name the partition. If not, it is clean until it changes."""
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
        if partition.fetch_offset >= partition.ceiling and not partition.is_changed:
            del self._dirty[partition]
        return False

    def answered(self, sent: Iterable[tuple[FetchPartition, PartitionData]]) -> None:
        """Record what the client was sent."""
        self._is_new = False
        for partition, data in sent:
            if data.error_code or data.diverging_epoch is not None:
                # The rest of such a response does not count: a follower truncates, a client looks for the leader.
                partition.sent_high_watermark = partition.sent_log_start_offset = -1
            else:
                partition.sent_high_watermark = data.high_watermark
                partition.sent_log_start_offset = data.log_start_offset
            # There is more to send, or the error has to be repeated.
            stays = (
                data.error_code
                or data.diverging_epoch is not None
                or data.preferred_read_replica >= 0
                or partition.fetch_offset < partition.ceiling
                or partition.is_changed
            )
            if not stays:
                del self._dirty[partition]
            elif data.records:
                # Only partitions that sent records go to the end. Those that sent only offsets keep their place, or
                # a busy topic would be served in the same order every time.
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
        # Least recently used first.
        self._sessions: dict[int, FetchSession] = {}
        # In all sessions together. Each session updates it.
        self.partition_count = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, partitions: list[FetchPartition], *, is_replica: bool = False) -> FetchSession | None:
        """None when there is no room: the client then continues without a session, with full requests."""
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

    def resume(self, session_id: int, epoch: int, *, is_replica: bool = False) -> FetchSession | ErrorCode:
        session = self._sessions.get(session_id)
        # A client that guesses the id of a follower's session must not move it.
        if session is None or session.is_replica != is_replica:
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        if session.epoch != epoch:
            return ErrorCode.INVALID_FETCH_SESSION_EPOCH
        if self.partition_count > PARTITIONS_MAX:
            # The sessions have grown too large. End each one that is used, until there is room again.
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
