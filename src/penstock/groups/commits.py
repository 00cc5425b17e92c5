"""OffsetCommit, TxnOffsetCommit, OffsetFetch and OffsetDelete, and expiry of unused offsets.

Versions: OffsetCommit 2-10, TxnOffsetCommit 0-5, OffsetFetch 1-10 (one group at a time here; the shell splits a
request by coordinator), OffsetDelete 0. Topics are identified by name: the shell translates the ids of version 10,
and handles topics that do not exist or may not be seen.

An offset belongs to a topic id: that of the topic that had the name at the commit. When that topic is deleted,
the offset becomes invisible and ``reconcile`` removes it, even if a new topic has the name. An offset whose
record has no id belongs to the topic that has the name when the record is read. An offset in a transaction is
dropped at the transaction's commit if its topic is gone by then.

Expiry (KIP-211): the retention of a group's offsets starts when the group becomes empty, not at the commit. While
there are consumers, only offsets of topics that none of them subscribes to can expire. Offsets of a group that
never had members expire by the time of their commit. One departure from Kafka: an offset committed to a group
that was already empty (by an administrator, or a consumer that assigns its partitions itself) is kept for the
retention time after that commit; in Kafka it would be lost together with the older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

from penstock.groups.changes import (
    GONE_TOPIC_ID,
    NO_TIMESTAMP,
    NO_TOPIC_ID,
    OffsetCommitted,
    OffsetRemoved,
)
from penstock.groups.group import Group
from penstock.groups.offset_answers import no_offset, offset_fetched
from penstock.groups.offsets import OffsetInTransaction, OffsetSettled
from penstock.groups.settings import GROUPS_MAX, NAME_BYTES_MAX, STRING_BYTES_MAX, GroupSettings
from penstock.groups.turn import Turn
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
    OffsetFetchRequestGroup,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartitions,
)
from penstock.protocol.messages.transactions import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)

DEFAULT_RETENTION = -1
TIMESTAMP_MAX = 2**63 - 1
# From this version on, a commit to a missing group gets GROUP_ID_NOT_FOUND; before, ILLEGAL_GENERATION.
COMMIT_KNOWS_MISSING_GROUP = 9

# Topic name -> id of the present topic with this name; None if there is none.
TopicIds: TypeAlias = Callable[[str], bytes | None]


class Commits:
    def __init__(self, settings: GroupSettings, topic_id: TopicIds) -> None:
        self._settings = settings
        self._topic_id = topic_id

    def commit(self, group: Group, request: OffsetCommitRequest, turn: Turn) -> OffsetCommitResponse:
        """Commit offsets; the caller has checked ``Group.commit_error``."""
        expire_timestamp = NO_TIMESTAMP
        if request.retention_time_ms != DEFAULT_RETENTION:
            expire_timestamp = max(0, min(turn.wall_ms + request.retention_time_ms, TIMESTAMP_MAX))
        topics = []
        for topic in request.topics:
            partitions = []
            topic_id = self._topic_id(topic.name)
            for partition in topic.partitions:
                change = self._committed(group, topic.name, topic_id, partition, expire_timestamp, turn)
                if isinstance(change, OffsetCommitted):
                    group.offsets.begin(change)
                    turn.decision.changes.append(change)
                partitions.append(
                    OffsetCommitResponsePartition(
                        partition_index=partition.partition_index, error_code=_error_of(change)
                    )
                )
            topics.append(
                OffsetCommitResponseTopic(name=topic.name, topic_id=topic.topic_id, partitions=partitions)
            )
        return OffsetCommitResponse(topics=topics)

    def commit_in_transaction(
        self, group: Group, request: TxnOffsetCommitRequest, turn: Turn
    ) -> TxnOffsetCommitResponse:
        """Commit offsets if the producer's transaction commits; the caller has checked ``Group.commit_error``."""
        turn.decision.producer = producer = (request.producer_id, request.producer_epoch)
        topics = []
        for topic in request.topics:
            partitions = []
            topic_id = self._topic_id(topic.name)
            for partition in topic.partitions:
                change = self._committed(group, topic.name, topic_id, partition, NO_TIMESTAMP, turn)
                if isinstance(change, OffsetCommitted):
                    group.offsets.begin(OffsetInTransaction(*producer, change))
                    turn.decision.changes.append(change)
                partitions.append(
                    TxnOffsetCommitResponsePartition(
                        partition_index=partition.partition_index, error_code=_error_of(change)
                    )
                )
            topics.append(TxnOffsetCommitResponseTopic(name=topic.name, partitions=partitions))
        return TxnOffsetCommitResponse(topics=topics)

    def _committed(
        self,
        group: Group,
        topic: str,
        topic_id: bytes | None,
        partition: OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition,
        expire_timestamp: int,
        turn: Turn,
    ) -> OffsetCommitted | ErrorCode:
        if topic_id is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        metadata = partition.committed_metadata or ""
        if self._is_too_large(metadata):
            return ErrorCode.OFFSET_METADATA_TOO_LARGE
        return OffsetCommitted(
            group.id,
            topic,
            partition.partition_index,
            partition.committed_offset,
            partition.committed_leader_epoch,
            metadata,
            turn.wall_ms,
            expire_timestamp,
            topic_id,
        )

    def end_transaction(self, group: Group, producer_id: int, is_commit: bool) -> list[OffsetSettled]:
        """Settle the offsets that the producer committed in its transaction.

        Also those whose topic is gone. A replay, in which the metadata are newer, must come to the same result; and
        in the log they are older than every offset of a new topic with the name, so they replace none.
        """
        settled = [
            OffsetSettled(group.id, opened.topic, opened.partition, producer_id, is_commit)
            for opened in group.offsets.open_of(producer_id)
        ]
        for change in settled:
            group.offsets.begin(change)
        return settled

    def _is_too_large(self, metadata: str) -> bool:
        if len(metadata) > self._settings.offset_metadata_max:
            return True
        # A character takes at most four bytes, so most metadata need not be encoded to check this.
        return 4 * len(metadata) > STRING_BYTES_MAX and len(metadata.encode()) > STRING_BYTES_MAX

    def fetch(
        self, group: Group | None, request: OffsetFetchRequestGroup, require_stable: bool
    ) -> OffsetFetchResponseGroup:
        """The committed offsets. A group that does not exist has none, which is not an error."""
        if request.topics is None:
            return OffsetFetchResponseGroup(
                group_id=request.group_id,
                topics=[]
                if group is None
                else [
                    offset_fetched(topic, [_fetched(group, offset, require_stable) for offset in current])
                    for topic, offsets in group.offsets.topics()
                    if (current := [offset for offset in offsets if self._is_current(offset)])
                ],
            )
        topics = []
        for topic in request.topics:
            partitions = []
            for index in topic.partition_indexes:
                offset = None if group is None else group.offsets.get(topic.name, index)
                if group is not None and offset is not None and self._is_current(offset):
                    partitions.append(_fetched(group, offset, require_stable))
                elif group is not None and require_stable and group.offsets.is_pending(topic.name, index):
                    partitions.append(no_offset(index, ErrorCode.UNSTABLE_OFFSET_COMMIT))
                else:
                    partitions.append(no_offset(index))
            topics.append(offset_fetched(topic, partitions))
        return OffsetFetchResponseGroup(group_id=request.group_id, topics=topics)

    def delete(self, group: Group | None, request: OffsetDeleteRequest, turn: Turn) -> OffsetDeleteResponse:
        error = ErrorCode.GROUP_ID_NOT_FOUND if group is None else group.offset_delete_error()
        if group is None or error is not ErrorCode.NONE:
            return OffsetDeleteResponse(error_code=error)
        topics = []
        for topic in request.topics:
            is_read = group.subscribes_to(topic.name)
            error = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if is_read else ErrorCode.NONE
            indexes = [partition.partition_index for partition in topic.partitions]
            if not is_read:
                self.remove(group, [(topic.name, index) for index in indexes], turn)
            topics.append(
                OffsetDeleteResponseTopic(
                    name=topic.name,
                    partitions=[
                        OffsetDeleteResponsePartition(partition_index=index, error_code=error)
                        for index in indexes
                    ],
                )
            )
        return OffsetDeleteResponse(topics=topics)

    def remove(self, group: Group, partitions: Iterable[tuple[str, int]], turn: Turn) -> None:
        for topic, partition in partitions:
            if group.offsets.holds(topic, partition):
                change = OffsetRemoved(group.id, topic, partition)
                group.offsets.begin(change)
                turn.decision.changes.append(change)

    def reconcile(self, group: Group, changes_max: int, turn: Turn) -> bool:
        """Remove offsets whose topic is gone, and write offsets again that were stored without a topic id.

        Neither while offsets in open transactions may count: a tombstone would remove them, and an offset that is
        written again would supersede them. An offset of a topic that is gone stays invisible until then.

        False when there is more to do.
        """
        changes = turn.decision.changes
        for topic, partition in group.offsets.partitions():
            offset = group.offsets.latest(topic, partition)
            opened = [one.offset for one in group.offsets.latest_open(topic, partition).values()]
            change: OffsetCommitted | OffsetRemoved
            if any(map(self._is_current, opened)):
                continue
            if offset is not None and self._is_current(offset):
                if not group.offsets.is_adopted(topic, partition):
                    continue
                change = offset
            elif offset is not None or opened:
                change = OffsetRemoved(group.id, topic, partition)
            else:
                continue
            if len(changes) >= changes_max:
                return False
            group.offsets.begin(change)
            changes.append(change)
        return True

    def restored(self, group: Group, change: OffsetCommitted) -> None:
        """Apply an offset read from the log."""
        if change.topic_id != NO_TOPIC_ID:
            group.offsets.apply(change)
        else:
            group.offsets.adopt(self._with_id(change))

    def restored_in_transaction(
        self, group: Group, change: OffsetCommitted, producer_id: int, producer_epoch: int
    ) -> None:
        """Apply an offset read from the log that is part of a transaction."""
        adopted = change.topic_id == NO_TOPIC_ID
        offset = self._with_id(change) if adopted else change
        group.offsets.apply(OffsetInTransaction(producer_id, producer_epoch, offset, is_adopted=adopted))

    def _with_id(self, change: OffsetCommitted) -> OffsetCommitted:
        return replace(change, topic_id=self._topic_id(change.topic) or GONE_TOPIC_ID)

    def _is_current(self, offset: OffsetCommitted) -> bool:
        return offset.topic_id == self._topic_id(offset.topic)

    def expired(self, group: Group, wall_ms: int) -> list[tuple[str, int]]:
        """The partitions whose offsets have been unused for the retention time."""
        return [
            (offset.topic, offset.partition)
            for offset in group.offsets.committed()
            if not group.offsets.is_pending(offset.topic, offset.partition)
            and self._is_expired(group, offset, wall_ms)
        ]

    def _is_expired(self, group: Group, offset: OffsetCommitted, wall_ms: int) -> bool:
        since = group.unused_since(offset)
        if since is None or group.subscribes_to(offset.topic):
            return False
        if offset.expire_timestamp != NO_TIMESTAMP:
            return wall_ms >= offset.expire_timestamp
        return wall_ms - since >= self._settings.offsets_retention_ms


def missing_group_error(group_id: str, generation: int, group_count: int) -> ErrorCode:
    """The error for a commit to a missing group; without an error, it creates a group that only stores offsets.

    From version COMMIT_KNOWS_MISSING_GROUP of OffsetCommit on, ILLEGAL_GENERATION becomes GROUP_ID_NOT_FOUND.
    """
    if generation >= 0:
        return ErrorCode.ILLEGAL_GENERATION
    # The empty name is allowed here, unlike in JoinGroup: clients without groups use it.
    if len(group_id.encode()) > NAME_BYTES_MAX:
        return ErrorCode.INVALID_GROUP_ID
    return ErrorCode.COORDINATOR_NOT_AVAILABLE if group_count >= GROUPS_MAX else ErrorCode.NONE


def _error_of(change: OffsetCommitted | ErrorCode) -> ErrorCode:
    return ErrorCode.NONE if isinstance(change, OffsetCommitted) else change


def _fetched(group: Group, offset: OffsetCommitted, require_stable: bool) -> OffsetFetchResponsePartitions:
    if require_stable and group.offsets.is_pending(offset.topic, offset.partition):
        return no_offset(offset.partition, ErrorCode.UNSTABLE_OFFSET_COMMIT)
    return OffsetFetchResponsePartitions(
        partition_index=offset.partition,
        committed_offset=offset.offset,
        committed_leader_epoch=offset.leader_epoch,
        metadata=offset.metadata,
    )
