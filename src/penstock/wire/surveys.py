"""Questions about many partitions and groups at once, for monitoring.

Unlike the operations of ``operations.py`` these do not insist. A cluster that is watched is often not well: what a
broker refuses, or cannot tell after a few tries, is a string with the reason in the place of the answer, and the
rest is answered. Requests are sent in portions, one at a time to each broker, so that the memory used does not grow
with the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from penstock.model import NO_TOPIC_ID, TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import TIME_UNKNOWN
from penstock.protocol.messages.cluster import DescribeClusterRequest
from penstock.protocol.messages.configs import DescribeConfigsRequest, DescribeConfigsResource
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    ListGroupsRequest,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
)
from penstock.protocol.messages.placement import DescribeLogDirsRequest
from penstock.protocol.records import CorruptBatch
from penstock.protocol.schema import VERSION_MAX
from penstock.wire.admin import DESCRIBE_CONFIGS, TOPIC_RESOURCE
from penstock.wire.coordinators import FIND_COORDINATOR, MANY_COORDINATORS, Kind
from penstock.wire.core import Core, Question, Steps, Task
from penstock.wire.errors import BUSY, COORDINATOR_MOVED, LEADER_MOVED, words_of
from penstock.wire.groups import BY_NAME_VERSION_MAX, OFFSET_FETCH
from penstock.wire.links import Address, Answer, Ask, Channel, Failed
from penstock.wire.log_dirs import DESCRIBE_LOG_DIRS, Replica, replica_of
from penstock.wire.operations import OffsetAt, ask_anybody, back_off, offsets_question, refresh
from penstock.wire.polling import FETCH, FETCH_BY_ID
from penstock.wire.transaction_admin import PartitionProducer, producer_of, producers_ask
from penstock.wire.unread import Nothing, Unread, next_unread

LIST_GROUPS, DESCRIBE_CLUSTER = 16, 60
# The first version of OffsetFetch with several groups (KIP-709), which Kafka has since 3.0.
MANY_GROUPS = 8
# How often one item is asked for. A leader that moves is found in the second.
TRIES = 3
# In one request.
PARTITIONS_MAX = 2_000
GROUPS_MAX = 100
TOPICS_MAX = 500
FETCHED_PARTITIONS_MAX = 256
# Of one partition, if there are others in the request, and of a whole response.
PARTITION_BYTES = 16 * 1024
RESPONSE_BYTES = 2 * 1024 * 1024
# Of a partition whose next batch is larger than that: a request for itself, a few of them at a time.
ALONE_MAX = 4
# How many fetches one reader's next record is looked for, if they return only markers and aborted records.
HOPS_MAX = 8

Key = TypeVar("Key")
Item = TypeVar("Item")
# Why there is no answer.
Reason: TypeAlias = str


@dataclass(frozen=True, slots=True)
class PartitionView:
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopicView:
    topic_id: bytes
    is_internal: bool
    partitions: Mapping[int, PartitionView]


@dataclass(frozen=True, slots=True)
class ListedGroup:
    name: str
    # Kafka's word, such as Stable or Empty; "" if the broker is too old to say.
    state: str


@dataclass(frozen=True, slots=True)
class BrokerView:
    id: int
    is_fenced: bool
    # Ahead of the median of all brokers' clocks; None if it does not say.
    clock_ahead_ms: int | None


@dataclass(frozen=True, slots=True)
class LogDirectory:
    broker: int
    path: str
    # None: the broker does not say.
    total_bytes: int | None
    usable_bytes: int | None
    is_offline: bool


@dataclass(frozen=True, slots=True)
class Disks:
    replicas: list[Replica]
    directories: list[LogDirectory]
    # By broker.
    refusals: dict[int, Reason]


class ReadAt(NamedTuple):
    """Where a reader is."""

    at: TopicPartition
    offset: int


# The cluster


def topic_views(core: Core, task: Task[Any]) -> Steps[dict[str, TopicView]]:
    """All topics that this client may see. Also finds the leaders for the other surveys."""
    response = yield from refresh(core, task, None)
    return {
        topic.name: TopicView(
            topic.topic_id,
            topic.is_internal,
            {
                each.partition_index: PartitionView(
                    each.leader_id, tuple(each.replica_nodes), tuple(each.isr_nodes)
                )
                for each in sorted(topic.partitions, key=lambda each: int(each.partition_index))
            },
        )
        for topic in sorted(response.topics, key=lambda topic: str(topic.name))
        if topic.error_code == ErrorCode.NONE and topic.name is not None
    }


def brokers(core: Core, task: Task[Any]) -> Steps[list[BrokerView] | Reason]:
    """The registered brokers, those that are stopped too if the cluster says so."""
    message = DescribeClusterRequest(include_fenced_brokers=True, include_clocks=True)
    answer = yield from ask_anybody(core, task, Ask(DESCRIBE_CLUSTER, lambda _: message))
    response = answer.message
    if response.error_code != ErrorCode.NONE:
        return words_of(response.error_code, response.error_message)
    return [
        BrokerView(
            each.broker_id,
            each.is_fenced,
            None if each.clock_ahead_ms == TIME_UNKNOWN else each.clock_ahead_ms,
        )
        for each in sorted(response.brokers, key=lambda each: int(each.broker_id))
    ]


def addresses(core: Core, task: Task[Any]) -> Steps[dict[int, Address]]:
    """Of the brokers that run, as they tell clients."""
    yield from refresh(core, task, [])
    return dict(core.cluster.brokers)


def disks(core: Core, task: Task[Any]) -> Steps[Disks]:
    """The log directories of all brokers, and the replicas in them."""
    message = DescribeLogDirsRequest(topics=None, include_cleaning=True)
    answers = yield from _ask_every_broker(core, task, Ask(DESCRIBE_LOG_DIRS, lambda _: message))
    found = Disks([], [], {})
    for broker, answer in answers.items():
        if isinstance(answer, Failed):
            found.refusals[broker] = answer.why
            continue
        if answer.message.error_code != ErrorCode.NONE:
            found.refusals[broker] = words_of(answer.message.error_code)
        for directory in answer.message.results:
            if directory.error_code not in (ErrorCode.NONE, ErrorCode.KAFKA_STORAGE_ERROR):
                found.refusals[broker] = words_of(directory.error_code)
                continue
            found.directories.append(
                LogDirectory(
                    broker,
                    directory.log_dir,
                    directory.total_bytes if directory.total_bytes >= 0 else None,
                    directory.usable_bytes if directory.usable_bytes >= 0 else None,
                    directory.error_code == ErrorCode.KAFKA_STORAGE_ERROR,
                )
            )
            found.replicas.extend(
                replica_of(topic.name, broker, each)
                for topic in directory.topics
                for each in topic.partitions
            )
    return found


def topic_settings(
    core: Core, task: Task[Any], topics: Iterable[str], names: Sequence[str]
) -> Steps[dict[str, dict[str, str] | Reason]]:
    """Some settings of each topic; those without a value are left out."""
    found: dict[str, dict[str, str] | Reason] = {}
    for portion in _portions(topics, TOPICS_MAX):
        message = DescribeConfigsRequest(
            resources=[
                DescribeConfigsResource(
                    resource_type=TOPIC_RESOURCE, resource_name=topic, configuration_keys=list(names)
                )
                for topic in portion
            ]
        )
        answer = yield from ask_anybody(core, task, _ask(DESCRIBE_CONFIGS, message))
        for each in answer.message.results:
            if each.error_code == ErrorCode.NONE:
                found[each.resource_name] = {
                    setting.name: setting.value for setting in each.configs if setting.value is not None
                }
            else:
                found[each.resource_name] = words_of(each.error_code, each.error_message)
    return found


# Groups


def list_groups(core: Core, task: Task[Any]) -> Steps[tuple[list[ListedGroup], dict[int, Reason]]]:
    """The groups that this client may see, in order; and the brokers that did not answer."""
    answers = yield from _ask_every_broker(core, task, _ask(LIST_GROUPS, ListGroupsRequest()))
    found: dict[str, ListedGroup] = {}
    refusals: dict[int, Reason] = {}
    for broker, answer in answers.items():
        if isinstance(answer, Failed):
            refusals[broker] = answer.why
            continue
        if answer.message.error_code != ErrorCode.NONE:
            refusals[broker] = words_of(answer.message.error_code)
        for each in answer.message.groups:
            found[each.group_id] = ListedGroup(each.group_id, each.group_state)
    return [found[name] for name in sorted(found)], refusals


def committed_offsets(
    core: Core, task: Task[Any], groups: Iterable[str]
) -> Steps[dict[str, dict[TopicPartition, int] | Reason]]:
    """All committed offsets of each group."""
    wanted = list(dict.fromkeys(groups))
    found: dict[str, dict[TopicPartition, int] | Reason] = {}
    left = wanted
    for attempt in range(TRIES):
        reasons = yield from _find_coordinators(core, task, left)
        found.update(reasons)
        by_coordinator: dict[Address, list[str]] = {}
        for name in left:
            if (address := core.cluster.coordinators.get(name)) is not None:
                by_coordinator.setdefault(address, []).append(name)
        again: list[str] = [name for name in left if name in reasons]

        def heard(asked: Sequence[str], answer: Answer, again: list[str] = again) -> None:
            if isinstance(answer, Failed):
                found.update((name, answer.why) for name in asked)
                again.extend(() if answer.is_unsupported else asked)
                return
            for group in answer.message.groups:
                code = group.error_code
                if code in COORDINATOR_MOVED or code in BUSY:
                    again.append(group.group_id)
                found[group.group_id] = _offsets_of(group) if code == ErrorCode.NONE else words_of(code)

        yield from _in_portions(by_coordinator, GROUPS_MAX, _offset_fetch, Channel.CONTROL, heard)
        if not again or attempt == TRIES - 1:
            break
        for name in again:
            core.cluster.coordinators.pop(name, None)
        left = again
        yield from back_off(core, task)
    return {name: found.get(name, "no answer") for name in wanted}


def _find_coordinators(core: Core, task: Task[Any], groups: Sequence[str]) -> Steps[dict[str, Reason]]:
    """Find those that are not known yet. Returns why some were not found."""
    reasons: dict[str, Reason] = {}
    unknown = [name for name in groups if name not in core.cluster.coordinators]
    for portion in _portions(unknown, PARTITIONS_MAX):
        message = FindCoordinatorRequest(key_type=Kind.GROUP, coordinator_keys=portion)
        ask = Ask(FIND_COORDINATOR, lambda _, message=message: message, version_min=MANY_COORDINATORS)  # type: ignore[misc]
        answer = yield from ask_anybody(core, task, ask)
        for each in answer.message.coordinators:
            if each.error_code == ErrorCode.NONE:
                core.cluster.coordinators[each.key] = Address(each.host, each.port)
            else:
                reasons[each.key] = words_of(each.error_code, each.error_message)
    return reasons


def _offset_fetch(groups: Sequence[str]) -> Ask:
    message = OffsetFetchRequest(
        groups=[OffsetFetchRequestGroup(group_id=name, topics=None) for name in groups]
    )
    return Ask(OFFSET_FETCH, lambda _: message, BY_NAME_VERSION_MAX, MANY_GROUPS)


def _offsets_of(group: Any) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic.name, each.partition_index): each.committed_offset
        for topic in group.topics
        for each in topic.partitions
        if each.error_code == ErrorCode.NONE and each.committed_offset >= 0
    }


# Partitions


def offsets(
    core: Core, task: Task[Any], wanted: Mapping[TopicPartition, int], *, read_committed: bool = False
) -> Steps[dict[TopicPartition, OffsetAt | Reason]]:
    """As ``operations.list_offsets``. Call ``topic_views`` first."""

    def ask(portion: Sequence[TopicPartition]) -> Ask:
        places = {at: place for at in portion if (place := core.cluster.leader(at)) is not None}
        address = next(iter(places.values()))[0]
        return offsets_question(address, {at: wanted[at] for at in places}, places, read_committed).ask

    return (
        yield from _ask_leaders(
            core,
            task,
            list(wanted),
            ask,
            lambda each: OffsetAt(each.offset, each.timestamp),
        )
    )


def producers(
    core: Core, task: Task[Any], wanted: Sequence[TopicPartition]
) -> Steps[dict[TopicPartition, list[PartitionProducer] | Reason]]:
    """As ``transaction_admin.partition_producers``. Call ``topic_views`` first."""
    return (
        yield from _ask_leaders(
            core,
            task,
            wanted,
            producers_ask,
            lambda each: [producer_of(producer) for producer in each.active_producers],
        )
    )


def _ask_leaders(
    core: Core,
    task: Task[Any],
    wanted: Sequence[TopicPartition],
    ask: Callable[[Sequence[TopicPartition]], Ask],
    result_of: Callable[[Any], Item],
) -> Steps[dict[TopicPartition, Item | Reason]]:
    """One answer for each partition, from its leader."""
    found: dict[TopicPartition, Item | Reason] = {}
    left = wanted
    for attempt in range(TRIES):
        by_leader = _by_leader(core, left, found)
        again: list[TopicPartition] = []

        def heard(
            asked: Sequence[TopicPartition], answer: Answer, again: list[TopicPartition] = again
        ) -> None:
            if isinstance(answer, Failed):
                found.update((at, answer.why) for at in asked)
                again.extend(() if answer.is_unsupported else asked)
                return
            for topic in answer.message.topics:
                for each in topic.partitions:
                    at = TopicPartition(topic.name, each.partition_index)
                    code = each.error_code
                    if code in LEADER_MOVED or code in BUSY:
                        again.append(at)
                    found[at] = result_of(each) if code == ErrorCode.NONE else words_of(code)

        yield from _in_portions(by_leader, PARTITIONS_MAX, ask, Channel.CONTROL, heard)
        if not again or attempt == TRIES - 1:
            break
        left = again
        yield from back_off(core, task)
        yield from refresh(core, task, None)
    return {at: found.get(at, "no answer") for at in wanted}


def unread(
    core: Core, task: Task[Any], wanted: Iterable[ReadAt], *, read_committed: bool = False
) -> Steps[dict[ReadAt, Unread | Reason | None]]:
    """The next record of each reader; None if there is none yet. Call ``topic_views`` first."""
    found: dict[ReadAt, Unread | Reason | None] = {}
    readers = list(dict.fromkeys(wanted))
    # Where each is looked for: behind the markers and aborted records that were passed already.
    places = {reader: reader.offset for reader in readers}
    for attempt in range(HOPS_MAX):
        passed: list[ReadAt] = []
        too_large: list[ReadAt] = []
        for wave in _one_of_each_partition(readers):
            waves = _by_leader(core, wave, found)
            hear = _Fetches(core, places, found, passed, too_large, read_committed)
            yield from _in_portions(waves, FETCHED_PARTITIONS_MAX, hear.ask_many, Channel.FETCH, hear)
        alone = _by_leader(core, too_large, found)
        # A first fetch is always answered with a whole batch.
        hear = _Fetches(core, places, found, passed, [], read_committed)
        pairs = [(address, [reader]) for address, group in alone.items() for reader in group]
        for portion in _portions(pairs, ALONE_MAX):
            answers = yield [
                Question(address, Channel.FETCH, hear.ask_many(asked)) for address, asked in portion
            ]
            for (_, asked), answer in zip(portion, answers):
                hear(asked, answer)
        readers = passed
        if not readers or attempt == HOPS_MAX - 1:
            break
    return {reader: found.get(reader, "it was not found in a few fetches") for reader in places}


class _Fetches:
    """Builds fetches for readers, and takes their answers."""

    def __init__(
        self,
        core: Core,
        places: dict[ReadAt, int],
        found: dict[ReadAt, Unread | Reason | None],
        passed: list[ReadAt],
        too_large: list[ReadAt],
        read_committed: bool,
    ) -> None:
        self._core = core
        self._places = places
        self._found = found
        self._passed = passed
        self._too_large = too_large
        self._read_committed = read_committed

    def ask_many(self, readers: Sequence[ReadAt]) -> Ask:
        by_topic: dict[str, list[FetchPartition]] = {}
        for reader in readers:
            by_topic.setdefault(reader.at.topic, []).append(
                FetchPartition(
                    partition=reader.at.partition,
                    fetch_offset=self._places[reader],
                    partition_max_bytes=PARTITION_BYTES,
                )
            )
        ids = {name: self._core.cluster.topics[name].topic_id for name in by_topic}
        message = FetchRequest(
            max_bytes=RESPONSE_BYTES,
            isolation_level=int(self._read_committed),
            topics=[
                FetchTopic(topic=name, topic_id=ids[name], partitions=each) for name, each in by_topic.items()
            ],
        )
        version_max = FETCH_BY_ID - 1 if NO_TOPIC_ID in ids.values() else VERSION_MAX
        return Ask(FETCH, lambda _: message, version_max)

    def __call__(self, asked: Sequence[ReadAt], answer: Answer) -> None:
        if isinstance(answer, Failed):
            self._found.update((reader, answer.why) for reader in asked)
            return
        if answer.message.error_code != ErrorCode.NONE:
            self._found.update((reader, words_of(answer.message.error_code)) for reader in asked)
            return
        names = self._core.cluster.names
        by_place = {
            (names.get(topic.topic_id, topic.topic), each.partition_index): each
            for topic in answer.message.responses
            for each in topic.partitions
        }
        for reader in asked:
            data = by_place.get(reader.at)
            if data is None:
                self._found[reader] = "no answer"
            elif data.error_code != ErrorCode.NONE:
                self._found[reader] = words_of(data.error_code)
            else:
                self._look(reader, data)

    def _look(self, reader: ReadAt, data: Any) -> None:
        place = self._places[reader]
        records = data.records if data.records is not None else memoryview(b"")
        aborted = [(each.producer_id, each.first_offset) for each in data.aborted_transactions or ()]
        try:
            found = next_unread(memoryview(records), place, aborted)
        except CorruptBatch as error:
            self._found[reader] = f"a damaged batch: {error}"
            return
        if isinstance(found, Unread):
            self._found[reader] = found
            return
        assert isinstance(found, Nothing)
        end = data.last_stable_offset if self._read_committed else data.high_watermark
        if max(found.next_offset, place) >= end:
            self._found[reader] = None
        elif found.next_offset > place:
            self._places[reader] = found.next_offset
            self._passed.append(reader)
        else:
            self._too_large.append(reader)


# Sending


def _ask(key: int, message: Any) -> Ask:
    return Ask(key, lambda _: message)


def _ask_every_broker(core: Core, task: Task[Any], ask: Ask) -> Steps[dict[int, Answer]]:
    known = yield from addresses(core, task)
    answers = yield [Question(address, Channel.CONTROL, ask) for address in known.values()]
    return dict(zip(known, answers))


def _in_portions(
    by_broker: Mapping[Address, Sequence[Item]],
    size: int,
    ask: Callable[[Sequence[Item]], Ask],
    channel: Channel,
    heard: Callable[[Sequence[Item], Answer], None],
) -> Steps[None]:
    """Send portions to all brokers, one at a time to each."""
    left = {address: list(_portions(items, size)) for address, items in by_broker.items()}
    while left:
        turn = {address: portions.pop(0) for address, portions in left.items()}
        left = {address: portions for address, portions in left.items() if portions}
        answers = yield [Question(address, channel, ask(portion)) for address, portion in turn.items()]
        for portion, answer in zip(turn.values(), answers):
            heard(portion, answer)


def _portions(items: Iterable[Item], size: int) -> Iterable[list[Item]]:
    whole = list(items)
    return (whole[first : first + size] for first in range(0, len(whole), size))


def _by_leader(core: Core, items: Iterable[Key], found: dict[Key, Any]) -> dict[Address, list[Key]]:
    """Partitions, or readers of them, by the leader. ``found`` gets the reason for those that have none."""
    by_leader: dict[Address, list[Key]] = {}
    for item in items:
        at: Any = item.at if isinstance(item, ReadAt) else item
        place = core.cluster.leader(at)
        if place is None:
            found[item] = "it has no leader" if at.topic in core.cluster.topics else "there is no such topic"
        else:
            by_leader.setdefault(place[0], []).append(item)
    return by_leader


def _one_of_each_partition(readers: Iterable[ReadAt]) -> list[list[ReadAt]]:
    """Portions in which each partition is once: a fetch cannot read it at two offsets."""
    waves: list[list[ReadAt]] = []
    seen: dict[TopicPartition, int] = {}
    for reader in readers:
        number = seen[reader.at] = seen.get(reader.at, -1) + 1
        if number == len(waves):
            waves.append([])
        waves[number].append(reader)
    return waves
