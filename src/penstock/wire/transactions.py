"""The requests of a transactional producer, each retried until its outcome is known. See ``transacting.py``.

There are two generations. In the classic one the producer names each partition and each group to the coordinator
before it writes there, and keeps its epoch from one transaction to the next. In transactions v2 (KIP-890) a Produce
or TxnOffsetCommit adds its partitions itself, and every end gives the producer a new epoch. Which generation is
meant, the broker tells from the requests' versions, so each function here limits them.

A retry is safe: the coordinator recognises a repeated end, and an InitProducerId whose answer was lost (KIP-360).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.protocol.messages.transactions import (
    ADD_PARTITIONS_BATCHED,
    END_TXN_V2,
    TXN_OFFSET_COMMIT_V2,
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    EndTxnRequest,
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from penstock.protocol.schema import VERSION_MAX
from penstock.wire import coordinators
from penstock.wire.coordinators import Kind
from penstock.wire.core import Core, Steps, Task
from penstock.wire.errors import (
    BUSY,
    COORDINATOR_MOVED,
    BrokerRefused,
    ProducerFenced,
    TransactionFailed,
    UnknownTopic,
    words_of,
)
from penstock.wire.operations import back_off
from penstock.wire.sequences import Identity

INIT_PRODUCER_ID, ADD_PARTITIONS, ADD_OFFSETS, END, COMMIT_OFFSETS = 22, 24, 25, 26, 28
# The first version of InitProducerId that names the current producer id and epoch (KIP-360).
INIT_WITH_EPOCH = 3
# The first version of TxnOffsetCommit that names the group's member (KIP-447).
OFFSETS_OF_MEMBER = 3
# A coordinator or leader may not know a new topic yet.
UNKNOWN_TOPIC_TRIES = 5

FENCED = (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH)
# The coordinator is still ending the previous transaction: ask again.
RETRIED = frozenset((*BUSY, ErrorCode.CONCURRENT_TRANSACTIONS))
# These end the producer; anything else a coordinator refuses ends only the transaction.
FATAL = frozenset(
    (
        *FENCED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    )
)


class GroupMember(NamedTuple):
    """The member that consumed the offsets (KIP-447): a commit of an earlier generation is refused."""

    generation: int
    member_id: str
    instance_id: str | None = None


# What a producer that is no member of a group commits as.
NO_MEMBER = GroupMember(-1, "")


def init_producer_id(
    core: Core, task: Task[Any], transactional_id: str, timeout_ms: int, current: Identity | None
) -> Steps[Identity]:
    """Get a producer id and epoch, which fences older producers of the id and aborts their transaction.

    With ``current`` the same producer gets its next epoch, unless it has been fenced.
    """
    message = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=timeout_ms)
    if current is not None:
        message.producer_id, message.producer_epoch = current
    version_min = 0 if current is None else INIT_WITH_EPOCH
    while True:
        response = yield from _ask(
            core, task, transactional_id, INIT_PRODUCER_ID, message, version_min=version_min
        )
        if response.error_code == ErrorCode.NONE:
            return Identity(response.producer_id, response.producer_epoch)
        yield from _again(core, task, transactional_id, response.error_code)


def add_partitions(
    core: Core,
    task: Task[Any],
    transactional_id: str,
    identity: Identity,
    partitions: Iterable[TopicPartition],
) -> Steps[None]:
    """Classic: name partitions before the first write to them."""
    by_topic: dict[str, list[int]] = {}
    for at in partitions:
        by_topic.setdefault(at.topic, []).append(at.partition)
    message = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=transactional_id,
        v3_and_below_producer_id=identity.producer_id,
        v3_and_below_producer_epoch=identity.epoch,
        v3_and_below_topics=[
            AddPartitionsToTxnTopic(name=name, partitions=numbers) for name, numbers in by_topic.items()
        ],
    )
    unknown_tries = 0
    while True:
        response = yield from _ask(
            core,
            task,
            transactional_id,
            ADD_PARTITIONS,
            message,
            version_max=ADD_PARTITIONS_BATCHED - 1,
        )
        results = [
            (TopicPartition(topic.name, each.partition_index), each.partition_error_code)
            for topic in response.results_by_topic_v3_and_below
            for each in topic.results_by_partition
        ]
        # If one partition is refused, the others say OPERATION_NOT_ATTEMPTED.
        causes = [each for each in results if each[1] not in (0, ErrorCode.OPERATION_NOT_ATTEMPTED)]
        if not causes:
            return
        at, code = causes[0]
        if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            unknown_tries += 1
            task.trouble = f"there is no partition {at} to write to"
            if unknown_tries > UNKNOWN_TOPIC_TRIES:
                raise UnknownTopic(task.trouble)
            yield from back_off(core, task)
        else:
            yield from _again(core, task, transactional_id, code)


def add_offsets(
    core: Core, task: Task[Any], transactional_id: str, identity: Identity, group: str
) -> Steps[None]:
    """Classic: name a group before the first offsets are sent to it."""
    message = AddOffsetsToTxnRequest(
        transactional_id=transactional_id,
        producer_id=identity.producer_id,
        producer_epoch=identity.epoch,
        group_id=group,
    )
    while True:
        response = yield from _ask(core, task, transactional_id, ADD_OFFSETS, message)
        if response.error_code == ErrorCode.NONE:
            return
        yield from _again(core, task, transactional_id, response.error_code)


def commit_offsets(
    core: Core,
    task: Task[Any],
    transactional_id: str,
    identity: Identity,
    group: str,
    offsets: Mapping[TopicPartition, int],
    member: GroupMember,
    is_v2: bool,
) -> Steps[None]:
    """Send offsets to the group's coordinator, where they wait for the end of the transaction."""
    left = dict(offsets)
    unknown_tries = 0
    version_min = OFFSETS_OF_MEMBER if member != NO_MEMBER else 0
    while left:
        message = _offsets_request(transactional_id, identity, group, left, member)
        response = yield from coordinators.ask(
            core,
            task,
            Kind.GROUP,
            group,
            COMMIT_OFFSETS,
            message,
            version_min=TXN_OFFSET_COMMIT_V2 if is_v2 else version_min,
            version_max=VERSION_MAX if is_v2 else TXN_OFFSET_COMMIT_V2 - 1,
        )
        if response is None:
            continue
        has_moved = False
        for topic in response.topics:
            for each in topic.partitions:
                at, code = TopicPartition(topic.name, each.partition_index), each.error_code
                has_moved = has_moved or code in COORDINATOR_MOVED
                if code == ErrorCode.NONE:
                    left.pop(at, None)
                elif code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    unknown_tries += 1
                    task.trouble = f"there is no partition {at} to commit an offset for"
                    if unknown_tries > UNKNOWN_TOPIC_TRIES:
                        raise UnknownTopic(task.trouble)
                elif code in COORDINATOR_MOVED or code in RETRIED:
                    task.trouble = f"the coordinator of group {group}: {words_of(code)}"
                else:
                    raise refusal(task.what, code)
        if has_moved:
            yield from coordinators.forget(core, task, Kind.GROUP, group)
        elif left:
            yield from back_off(core, task)


def end(
    core: Core, task: Task[Any], transactional_id: str, identity: Identity, is_commit: bool, is_v2: bool
) -> Steps[Identity]:
    """Commit or abort. Returns the identity for the next transaction."""
    message = EndTxnRequest(
        transactional_id=transactional_id,
        producer_id=identity.producer_id,
        producer_epoch=identity.epoch,
        committed=is_commit,
    )
    while True:
        response = yield from _ask(
            core,
            task,
            transactional_id,
            END,
            message,
            version_min=END_TXN_V2 if is_v2 else 0,
            version_max=VERSION_MAX if is_v2 else END_TXN_V2 - 1,
        )
        if response.error_code == ErrorCode.NONE:
            return Identity(response.producer_id, response.producer_epoch) if is_v2 else identity
        yield from _again(core, task, transactional_id, response.error_code)


def refusal(what: str, code: int, message: str | None = None) -> BrokerRefused:
    """The error for a code that no retry changes."""
    words = words_of(code, message)
    if code in FENCED:
        return ProducerFenced(
            f"{what}: a newer producer has the transactional id, or the transaction was open for longer than its "
            f"timeout ({words})",
            code,
        )
    if code in FATAL:
        return BrokerRefused(f"{what}: {words}", code)
    return TransactionFailed(f"{what}: {words}; abort the transaction", code)


def _ask(
    core: Core,
    task: Task[Any],
    transactional_id: str,
    key: int,
    message: Any,
    *,
    version_min: int = 0,
    version_max: int = VERSION_MAX,
) -> Steps[Any]:
    while True:
        response = yield from coordinators.ask(
            core,
            task,
            Kind.TRANSACTION,
            transactional_id,
            key,
            message,
            version_min=version_min,
            version_max=version_max,
        )
        if response is not None:
            return response


def _again(core: Core, task: Task[Any], transactional_id: str, code: int) -> Steps[None]:
    """Wait before the next try. Raises the error when no retry helps."""
    if code in COORDINATOR_MOVED:
        task.trouble = f"the coordinator of transactional id {transactional_id}: {words_of(code)}"
        yield from coordinators.forget(core, task, Kind.TRANSACTION, transactional_id)
    elif code in RETRIED:
        task.trouble = words_of(code)
        yield from back_off(core, task)
    else:
        raise refusal(task.what, code)


def _offsets_request(
    transactional_id: str,
    identity: Identity,
    group: str,
    offsets: Mapping[TopicPartition, int],
    member: GroupMember,
) -> TxnOffsetCommitRequest:
    by_topic: dict[str, list[TxnOffsetCommitRequestPartition]] = {}
    for at, offset in offsets.items():
        by_topic.setdefault(at.topic, []).append(
            TxnOffsetCommitRequestPartition(
                partition_index=at.partition, committed_offset=offset, committed_metadata=""
            )
        )
    return TxnOffsetCommitRequest(
        transactional_id=transactional_id,
        group_id=group,
        producer_id=identity.producer_id,
        producer_epoch=identity.epoch,
        generation_id=member.generation,
        member_id=member.member_id,
        group_instance_id=member.instance_id,
        topics=[
            TxnOffsetCommitRequestTopic(name=name, partitions=partitions)
            for name, partitions in by_topic.items()
        ],
    )
