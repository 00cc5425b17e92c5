"""A group's committed offsets: commit and fetch them at its coordinator.

A member commits with its id and generation, which the coordinator checks. A tool commits with generation -1 and no
member id, to a group without members. Topics are given by name (version 9 at most), because a group's offsets
belong to the topic's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from penstock.wire import coordinators
from penstock.wire.coordinators import Kind
from penstock.wire.core import Core, Steps, Task
from penstock.wire.errors import (
    BUSY,
    COORDINATOR_MOVED,
    BrokerRefused,
    GroupInUse,
    StaleMember,
    UnknownTopic,
    words_of,
)
from penstock.wire.transactions import NO_MEMBER, GroupMember

OFFSET_COMMIT, OFFSET_FETCH = 8, 9
BY_NAME_VERSION_MAX = 9
# The coordinator may not know a new topic yet, as in ``operations.UNKNOWN_TOPIC_MS``.
UNKNOWN_TOPIC_TRIES = 5

IN_USE = (
    ErrorCode.UNKNOWN_MEMBER_ID,
    ErrorCode.ILLEGAL_GENERATION,
    ErrorCode.REBALANCE_IN_PROGRESS,
    ErrorCode.STALE_MEMBER_EPOCH,
)

STALE = (*IN_USE, ErrorCode.FENCED_INSTANCE_ID)


def commit(
    core: Core,
    task: Task[Any],
    group: str,
    offsets: Mapping[TopicPartition, int],
    metadata: str,
    member: GroupMember = NO_MEMBER,
) -> Steps[None]:
    left = dict(offsets)
    unknown_tries = 0
    while left:
        by_topic: dict[str, list[OffsetCommitRequestPartition]] = {}
        for at, offset in left.items():
            by_topic.setdefault(at.topic, []).append(
                OffsetCommitRequestPartition(
                    partition_index=at.partition, committed_offset=offset, committed_metadata=metadata
                )
            )
        message = OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=member.generation,
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            topics=[OffsetCommitRequestTopic(name=name, partitions=each) for name, each in by_topic.items()],
        )
        response = yield from coordinators.ask(
            core, task, Kind.GROUP, group, OFFSET_COMMIT, message, version_max=BY_NAME_VERSION_MAX
        )
        if response is None:
            continue
        for topic in response.topics:
            for each in topic.partitions:
                at = TopicPartition(topic.name, each.partition_index)
                if each.error_code == ErrorCode.NONE:
                    left.pop(at, None)
                elif each.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    unknown_tries += 1
                    task.trouble = f"there is no partition {at} to commit an offset for"
                    if unknown_tries > UNKNOWN_TOPIC_TRIES:
                        raise UnknownTopic(task.trouble)
                else:
                    if member != NO_MEMBER and each.error_code in STALE:
                        raise StaleMember(
                            f"group {group} has gone on without this member: {words_of(each.error_code)}",
                            each.error_code,
                        )
                    _retry_or_raise(task, group, each.error_code)
        if left:
            yield from coordinators.forget(core, task, Kind.GROUP, group)


def committed(
    core: Core, task: Task[Any], group: str, wanted: Sequence[TopicPartition]
) -> Steps[dict[TopicPartition, int]]:
    by_topic: dict[str, list[int]] = {}
    for at in wanted:
        by_topic.setdefault(at.topic, []).append(at.partition)
    message = OffsetFetchRequest(
        group_id=group,
        topics=[
            OffsetFetchRequestTopic(name=name, partition_indexes=each) for name, each in by_topic.items()
        ],
        groups=[
            OffsetFetchRequestGroup(
                group_id=group,
                topics=[
                    OffsetFetchRequestTopics(name=name, partition_indexes=each)
                    for name, each in by_topic.items()
                ],
            )
        ],
        require_stable=True,
    )
    while True:
        response = yield from coordinators.ask(
            core, task, Kind.GROUP, group, OFFSET_FETCH, message, version_max=BY_NAME_VERSION_MAX
        )
        if response is None:
            continue
        answer = response.groups[0] if response.groups else response
        found: dict[TopicPartition, int] = {}
        codes = [answer.error_code]
        for topic in answer.topics:
            for each in topic.partitions:
                if each.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    continue  # a missing topic has no committed offset
                codes.append(each.error_code)
                if each.committed_offset >= 0:
                    found[TopicPartition(topic.name, each.partition_index)] = each.committed_offset
        code = next(filter(None, codes), ErrorCode.NONE)
        if code == ErrorCode.NONE:
            return found
        _retry_or_raise(task, group, code)
        yield from coordinators.forget(core, task, Kind.GROUP, group)


def _retry_or_raise(task: Task[Any], group: str, code: int, message: str | None = None) -> None:
    if code in IN_USE:
        raise GroupInUse(
            f"group {group} has members, and only they may commit offsets; choose another group",
            code,
        )
    if code not in COORDINATOR_MOVED and code not in BUSY:
        raise BrokerRefused(f"{task.what}: {words_of(code, message)}", code)
    task.trouble = f"the coordinator of group {group}: {words_of(code, message)}"
