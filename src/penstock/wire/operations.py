"""The read operations: topics, offsets, fetches. Each function is one task, from the first request to the result;
``core.py`` runs them. ``groups.py`` and ``admin.py`` have the other operations.

All have the same shape: find the broker, send the request, sort the response into results, retriable errors and
final errors, back off, and repeat for what is left. The deadline is checked outside, so nothing here measures
time. An error caused by a moved leader is retried, and so is an unknown topic: the broker may not know it yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import Any, NamedTuple

from penstock.model import NO_TOPIC_ID, TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchPartition, FetchTopic
from penstock.protocol.messages.offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from penstock.protocol.messages.topics import MetadataRequest, MetadataRequestTopic
from penstock.protocol.records import HEADER_SIZE
from penstock.wire.cluster import PartitionInfo, TopicInfo
from penstock.wire.core import FIRST_CONTACT_MS, Core, Errand, Pause, Question, Steps, Task
from penstock.wire.errors import (
    BUSY,
    LEADER_MOVED,
    AuthenticationFailed,
    BrokerRefused,
    OffsetOutOfRange,
    TlsFailed,
    TopicReplaced,
    UnknownTopic,
    UnsupportedBroker,
    WireError,
    words_of,
)
from penstock.wire.links import Address, Answered, Ask, Channel, Failed
from penstock.wire.polling import FetchSettings, Polling, Want, fetch_ask

LIST_OFFSETS, METADATA = 2, 3

EARLIEST = -2
LATEST = -1
MAX_TIMESTAMP = -3

# The first versions of ListOffsets with isolation levels, and with MAX_TIMESTAMP (KIP-734).
LIST_COMMITTED = 2
LIST_MAX_TIMESTAMP = 7
# How long an unknown topic is retried: a broker may not know a new topic yet.
UNKNOWN_TOPIC_MS = 2_000
# A batch that does not fit is fetched again with twice the size, up to this limit.
FETCH_BYTES_MAX = 1024 * 1024 * 1024

_batch_head = Struct(">qi").unpack_from
_last_offset_delta = Struct(">i").unpack_from
_LENGTH_END = 12
_LAST_OFFSET_DELTA_AT = 23


class OffsetAt(NamedTuple):
    # -1 when every record is older.
    offset: int
    timestamp: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """One fetch response: whole record batches as stored in the log, perhaps followed by a partial one."""

    # The buffer is reused when no view of it is left.
    records: memoryview
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    # (producer id, first offset) of aborted transactions, for read_committed.
    aborted: list[tuple[int, int]]
    # The offset after the last whole batch; the requested offset if there is none.
    next_offset: int
    topic_id: bytes = NO_TOPIC_ID


# Metadata


def ask_anybody(core: Core, task: Task[Any], ask: Ask) -> Steps[Answered]:
    """Send to one broker after the other until one answers."""
    while True:
        all_tls, denied = True, ""
        for address in core.candidates():
            answer = (yield [Question(address, Channel.CONTROL, ask)])[0]
            if isinstance(answer, Answered):
                task.is_cut_off = False
                return answer
            if answer.is_unsupported:
                raise UnsupportedBroker(answer.why)
            task.trouble = answer.why
            all_tls &= answer.is_tls
            denied = answer.why if answer.is_denied else denied
        task.is_cut_off = True
        waited_ms = core.now_ms - task.begun_ms
        if denied and (not core.links.has_contact or waited_ms >= FIRST_CONTACT_MS):
            # Later it may be a broker that does not know a new password yet.
            raise AuthenticationFailed(denied)
        if all_tls and not core.links.has_contact:
            # Later it may be a certificate that is being replaced. The first time it is a wrong setting.
            raise TlsFailed(task.trouble)
        if not core.links.has_contact and waited_ms >= FIRST_CONTACT_MS:
            raise core.unreachable(task.trouble)
        task.failures += 1
        yield Pause(core.back_off_ms(task.failures + 1))


def refresh(
    core: Core,
    task: Task[Any],
    names: Iterable[str] | None,
    *,
    create: bool = False,
    refused: dict[str, WireError] | None = None,
) -> Steps[Any]:
    """Refresh the cached metadata of these topics (None: all topics). Returns the Metadata response.

    Topics that the broker refuses to describe go into ``refused``; without it they are an error.
    """
    wanted = None if names is None else [MetadataRequestTopic(name=name) for name in names]
    message = MetadataRequest(topics=wanted, allow_auto_topic_creation=create)
    while True:
        answer = yield from ask_anybody(core, task, Ask(METADATA, lambda _: message))
        response = answer.message
        if response.error_code == ErrorCode.NONE:
            break
        # REBOOTSTRAP_REQUIRED: the cache is of another cluster (KIP-1102).
        task.trouble = f"metadata: {words_of(response.error_code)}"
        core.cluster.start_over()
        yield from back_off(core, task)
    core.cluster.learn(response)
    if names is None:
        there = {topic.name for topic in response.topics}
        for name in [name for name in core.cluster.topics if name not in there]:
            core.cluster.forget(name)
    for topic in response.topics:
        error: WireError | None = None
        if topic.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION:
            error = UnknownTopic(f"invalid topic name {topic.name!r}")
        elif topic.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED:
            error = BrokerRefused(f"this client may not see the topic {topic.name}", topic.error_code)
        if error is not None:
            if refused is None:
                raise error
            refused[topic.name] = error
    return response


def topics(
    core: Core, task: Task[Any], names: Sequence[str] | None, *, create: bool = False
) -> Steps[dict[str, TopicInfo]]:
    while True:
        response = yield from refresh(core, task, names, create=create)
        unclear = [
            topic
            for topic in response.topics
            if topic.error_code not in (ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        ]
        if not unclear:
            return {
                topic.name: core.cluster.topics[topic.name]
                for topic in response.topics
                if topic.error_code == ErrorCode.NONE
            }
        task.trouble = f"topic {unclear[0].name}: {words_of(unclear[0].error_code)}"
        yield from back_off(core, task)


def topic(core: Core, task: Task[Any], name: str) -> Steps[TopicInfo]:
    yield from refresh(core, task, [name])
    yield from know_leaders(core, task, [TopicPartition(name, 0)])
    return core.cluster.topics[name]


def back_off(core: Core, task: Task[Any]) -> Steps[None]:
    """Wait longer after each failure of a task; not at all after the first."""
    task.failures += 1
    delay_ms = core.back_off_ms(task.failures)
    if delay_ms:
        yield Pause(delay_ms)


def know_leaders(
    core: Core, task: Task[Any], wanted: Iterable[TopicPartition]
) -> Steps[dict[TopicPartition, tuple[Address, TopicInfo, PartitionInfo]]]:
    """The leader of each partition. Refreshes metadata until all are known.

    Raises:
        UnknownTopic: a topic or a partition does not exist.
    """
    wanted = list(wanted)
    unknown_since_ms: int | None = None
    while True:
        places = {at: core.cluster.leader(at) for at in wanted}
        missing = [at for at, place in places.items() if place is None]
        if not missing:
            return {at: place for at, place in places.items() if place is not None}
        yield from refresh(core, task, dict.fromkeys(at.topic for at in missing))
        missing = [at for at in missing if core.cluster.leader(at) is None]
        if not missing:
            continue
        unknown = next((at for at in missing if not _exists(core, at)), None)
        if unknown is None:
            unknown_since_ms = None
            task.trouble = f"{missing[0]} has no leader"
        else:
            task.trouble = no_such(core, unknown)
            if unknown_since_ms is None:
                unknown_since_ms = core.now_ms
            elif core.now_ms - unknown_since_ms >= UNKNOWN_TOPIC_MS:
                raise UnknownTopic(task.trouble)
        task.failures += 1
        yield Pause(core.back_off_ms(task.failures + 1))


def _exists(core: Core, at: TopicPartition) -> bool:
    topic = core.cluster.topics.get(at.topic)
    return topic is not None and at.partition in topic.partitions


def no_such(core: Core, at: TopicPartition) -> str:
    topic = core.cluster.topics.get(at.topic)
    if topic is None:
        return f"there is no topic {at.topic}; create it or correct the name"
    return f"topic {at.topic} has no partition {at.partition}; it has {len(topic.partitions)}"


def recover(core: Core, task: Task[Any], names: Iterable[str]) -> Steps[None]:
    """After an error that a moved leader may have caused: wait, then refresh the metadata."""
    yield from back_off(core, task)
    yield from refresh(core, task, dict.fromkeys(names))


# Offsets


def list_offsets(
    core: Core, task: Task[Any], wanted: Mapping[TopicPartition, int], read_committed: bool
) -> Steps[dict[TopicPartition, OffsetAt]]:
    found: dict[TopicPartition, OffsetAt] = {}
    left = dict(wanted)
    while left:
        places = yield from know_leaders(core, task, left)
        by_broker: dict[Address, list[TopicPartition]] = {}
        for at in left:
            by_broker.setdefault(places[at][0], []).append(at)
        questions = [
            offsets_question(address, {at: left[at] for at in group}, places, read_committed)
            for address, group in by_broker.items()
        ]
        answers = yield questions
        stale: dict[str, None] = {}
        for group, answer in zip(by_broker.values(), answers):
            if isinstance(answer, Failed):
                if answer.is_unsupported:
                    raise UnsupportedBroker(answer.why)
                task.trouble = answer.why
                stale.update(dict.fromkeys(at.topic for at in group))
                continue
            for topic in answer.message.topics:
                for each in topic.partitions:
                    at = TopicPartition(topic.name, each.partition_index)
                    if each.error_code == ErrorCode.NONE:
                        found[at] = OffsetAt(each.offset, each.timestamp)
                        left.pop(at, None)
                    else:
                        _retry_or_raise(task, at, each.error_code)
                        stale[at.topic] = None
        if left:
            yield from recover(core, task, stale or dict.fromkeys(at.topic for at in left))
    return {at: found[at] for at in wanted}


def offsets_question(
    address: Address,
    group: Mapping[TopicPartition, int],
    places: Mapping[TopicPartition, tuple[Address, TopicInfo, PartitionInfo]],
    read_committed: bool,
) -> Question:
    by_topic: dict[str, list[ListOffsetsPartition]] = {}
    for at, timestamp in group.items():
        by_topic.setdefault(at.topic, []).append(
            ListOffsetsPartition(
                partition_index=at.partition,
                current_leader_epoch=places[at][2].leader_epoch,
                timestamp=timestamp,
            )
        )
    message = ListOffsetsRequest(
        replica_id=-1,
        isolation_level=int(read_committed),
        topics=[ListOffsetsTopic(name=name, partitions=listed) for name, listed in by_topic.items()],
        timeout_ms=30_000,
    )
    version_min = LIST_MAX_TIMESTAMP if MAX_TIMESTAMP in group.values() else LIST_COMMITTED * read_committed
    return Question(address, Channel.CONTROL, Ask(LIST_OFFSETS, lambda _: message, version_min=version_min))


def _retry_or_raise(task: Task[Any], at: TopicPartition, code: int, message: str | None = None) -> None:
    """Return when a retry may help; raise the final error otherwise."""
    if code not in LEADER_MOVED and code not in BUSY:
        raise BrokerRefused(f"{task.what}: the leader of {at} refuses: {words_of(code, message)}", code)
    task.trouble = f"{at}: {words_of(code, message)}"


# Fetching


def fetch(
    core: Core,
    task: Task[Any],
    at: TopicPartition,
    offset: int,
    settings: FetchSettings,
    topic_id: bytes | None = None,
    polling: Polling | None = None,
) -> Steps[Fetched]:
    """One response with records, or without any when ``wait_ms`` has passed.

    With a ``topic_id`` only that topic is read: its offsets are invalid in a recreated topic. With ``polling`` the
    request is shared with other fetches, so that none waits for the long poll of another.
    """
    other_since_ms: int | None = None
    while True:
        places = yield from know_leaders(core, task, [at])
        address, topic, partition = places[at]
        # A broker without topic ids cannot tell a recreated topic.
        is_told = topic_id is not None and NO_TOPIC_ID not in (topic_id, topic.topic_id)
        if is_told and topic.topic_id != topic_id:
            # The cached id may be the old topic's: outdated, or from a broker that is behind.
            task.trouble = f"topic {at.topic} was deleted and recreated while it was read"
            if other_since_ms is None:
                other_since_ms = core.now_ms
            elif core.now_ms - other_since_ms >= UNKNOWN_TOPIC_MS:
                raise TopicReplaced(task.trouble)
            yield from recover(core, task, [at.topic])
            continue
        other_since_ms = None
        if polling is None:
            ask = _fetch_ask(at, offset, settings, topic, partition)
            answer = (yield [Question(address, Channel.FETCH, ask)])[0]
        else:
            want = Want(address, at, topic.topic_id, offset, partition.leader_epoch, settings)
            answer = (yield Errand(partial(polling.add, want)))[0]
        if isinstance(answer, Failed):
            if answer.is_unsupported:
                raise UnsupportedBroker(answer.why)
            task.trouble = answer.why
            yield from recover(core, task, [at.topic])
            continue
        response = answer.message
        data = _only_partition(response)
        if data is None and not response.error_code and response.throttle_time_ms > 0:
            # KIP-219: nothing now. The broker handles the next request when the delay is over.
            task.trouble = f"the client is over its quota for another {response.throttle_time_ms} ms"
            continue
        code = response.error_code or (
            data.error_code if data is not None else ErrorCode.UNKNOWN_SERVER_ERROR
        )
        if code == ErrorCode.NONE and data is not None:
            fetched = _fetched(data, offset, topic.topic_id)
            if fetched.next_offset == offset and len(fetched.records) >= settings.bytes_max:
                # An old broker truncates a batch that is larger than the requested size.
                settings = settings._replace(bytes_max=settings.bytes_max * 2)
                if settings.bytes_max > FETCH_BYTES_MAX:
                    raise WireError(
                        f"a batch of {at} at offset {offset} is larger than {FETCH_BYTES_MAX} bytes"
                    )
                continue
            return fetched
        if code == ErrorCode.OFFSET_OUT_OF_RANGE:
            yield from _check_range(core, task, at, offset)
            continue
        _retry_or_raise(task, at, code)
        if data is not None and core.cluster.hint(at, data.current_leader, response.node_endpoints):
            continue
        yield from recover(core, task, [at.topic])


def _fetch_ask(
    at: TopicPartition, offset: int, settings: FetchSettings, topic: TopicInfo, partition: PartitionInfo
) -> Ask:
    wanted = FetchPartition(
        partition=at.partition,
        current_leader_epoch=partition.leader_epoch,
        fetch_offset=offset,
        partition_max_bytes=settings.bytes_max,
    )
    topics = [FetchTopic(topic=at.topic, topic_id=topic.topic_id, partitions=[wanted])]
    return fetch_ask(topics, settings, settings.wait_ms)


def _only_partition(response: Any) -> Any:
    for topic in response.responses:
        for data in topic.partitions:
            return data
    return None


def _fetched(data: Any, offset: int, topic_id: bytes) -> Fetched:
    records = data.records if data.records is not None else memoryview(b"")
    return Fetched(
        records,
        data.high_watermark,
        data.last_stable_offset,
        data.log_start_offset,
        [(each.producer_id, each.first_offset) for each in data.aborted_transactions or ()],
        max(offset, behind_last_batch(records, offset)),
        topic_id,
    )


def behind_last_batch(records: memoryview, offset: int) -> int:
    """The offset after the last whole batch; ``offset`` when there is none."""
    position, end = 0, len(records)
    last = -1
    base_offset = 0
    while end - position >= HEADER_SIZE:
        base, length = _batch_head(records, position)
        following = position + _LENGTH_END + length
        if length < HEADER_SIZE - _LENGTH_END or following > end:
            # The decoder reports a broken length, with more detail.
            break
        last, base_offset = position, base
        position = following
    if last < 0:
        return offset
    return int(base_offset) + int(_last_offset_delta(records, last + _LAST_OFFSET_DELTA_AT)[0]) + 1


def _check_range(core: Core, task: Task[Any], at: TopicPartition, offset: int) -> Steps[None]:
    """The leader answered OFFSET_OUT_OF_RANGE. Raises OffsetOutOfRange with the current range if it still is."""
    earliest = yield from list_offsets(core, task, {at: EARLIEST}, False)
    latest = yield from list_offsets(core, task, {at: LATEST}, False)
    if not earliest[at].offset <= offset <= latest[at].offset:
        raise OffsetOutOfRange(at, offset, earliest[at].offset, latest[at].offset)
    # It is in range now, or a leader that was behind has been replaced.
    task.trouble = f"{at}: offset {offset} was out of range"
    yield from recover(core, task, [at.topic])
