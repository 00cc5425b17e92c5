"""Fetch (4-18), with long poll and fetch sessions (KIP-227).

A fetch collects data from its partitions within its byte limits. If that is less than ``min_bytes`` it watches them
and tries again when one changes, until ``max_wait_ms`` is over. The ceiling is the high watermark for consumers,
the last stable offset with read_committed, and the end of the log for followers. A read_committed consumer also
gets the list of aborted transactions, and leaves out their records itself. A follower's fetch comes in on the
internal listener, and means that the follower has everything before the fetch offset. The data are file ranges: no
record is read here.

A consumer that names its rack is sent to an in-sync replica there (KIP-392). Followers serve only such consumers.

Departures from Kafka: a partition's last batch may be cut off, which every client expects (KIP-74); replica fetches
are refused on the client listener.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.handlers.leader_hints import endpoints_of, name_leader
from penstock.broker.network.authorization import Operation, ResourceType
from penstock.broker.network.connection import CLOSE, WAITING, Call
from penstock.broker.network.fetch_sessions import (
    SESSIONLESS_EPOCH,
    FetchPartition,
    FetchSession,
    Key,
    session_key,
)
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.replication.nearest_replica import nearest_replica
from penstock.log.log import OffsetOutOfRange
from penstock.log.reading import holds_records
from penstock.metadata.topics import CLUSTER_METADATA_ID
from penstock.model import NO_TOPIC_ID
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import (
    TOPIC_IDS_SINCE_VERSION,
    AbortedTransaction,
    EpochEndOffset,
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    PartitionData,
)

SESSIONS_SINCE_VERSION = 7
READ_COMMITTED = 1
# Of one partition in one answer. Reading so many takes some milliseconds.
RANGES_MAX = 256
# After these a client looks for the leader.
LEADER_ERRORS = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)

NONE = ErrorCode.NONE
READ, TOPIC = Operation.READ, ResourceType.TOPIC


def fetch(broker: Broker, request: FetchRequest, call: Call) -> Any:
    version = call.version
    replica = request.replica_state.replica_id if request.replica_state is not None else request.replica_id
    if replica >= 0:
        if not call.is_internal:
            if version < SESSIONS_SINCE_VERSION:
                return CLOSE
            return _refused(call, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
        if any(topic.topic_id == CLUSTER_METADATA_ID for topic in request.topics):
            return broker.consensus.handle(request, call)
        broker.replication.follower_activity.heard(replica, broker.environment.clock.now_ms())
    asked = _asked_partitions(broker, request, version)
    throttling = broker.throttling
    is_limited = throttling.limits_fetch and not call.is_internal
    # Over the quota of the client: a session goes on, but there is nothing in the response.
    is_over = is_limited and throttling.must_wait_to_fetch(call)
    session: FetchSession | None = None
    if version >= SESSIONS_SINCE_VERSION:
        sessions = broker.fetch_sessions
        if request.session_epoch > 0 or (request.session_id and request.session_epoch == SESSIONLESS_EPOCH):
            if request.session_epoch == SESSIONLESS_EPOCH:
                sessions.close(request.session_id)
            else:
                found = sessions.resume(request.session_id, request.session_epoch, is_replica=replica >= 0)
                if not isinstance(found, FetchSession):
                    return _refused(call, found)
                session = found
                session.update(asked, _forgotten_partitions(broker, request, version))
                session.resolve(lambda partition: _find(broker, partition))
        elif request.session_epoch == 0:
            sessions.close(request.session_id)
            # A client takes an empty response to its first fetch, with a throttle time, for no session (KIP-219).
            session = None if is_over else sessions.create(asked, is_replica=replica >= 0)
        if session is not None:
            # With other ACLs, partitions may have become readable, or have to be refused.
            acls = 0 if call.authorizer is None else call.authorizer.version
            session.look_again_if_changed((request.isolation_level, acls))
    if is_over:
        return FetchResponse(session_id=0 if session is None else session.id, responses=[])
    pending = PendingFetch(broker, call, request, session, asked)
    if is_limited:
        pending.limit(throttling.fetch_bytes_max(call))
    response = pending.try_now()
    if response is not None:
        return response
    pending.wait(max(0, request.max_wait_ms))
    return WAITING


def _refused(call: Call, error: ErrorCode) -> FetchResponse:
    call.route.counts.failed(error)
    return FetchResponse(error_code=error)


class PendingFetch:
    """A fetch that may wait for enough bytes, as a watcher of its partitions."""

    __slots__ = (
        "_broker",
        "_bytes_max",
        "_bytes_min",
        "_call",
        "_is_limited",
        "_is_scheduled",
        "_leaders",
        "_partitions",
        "_rack",
        "_read_committed",
        "_replica",
        "_replica_epoch",
        "_session",
        "_spawn",
        "_timer",
    )

    def __init__(
        self,
        broker: Broker,
        call: Call,
        request: FetchRequest,
        session: FetchSession | None,
        asked: list[FetchPartition],
    ) -> None:
        self._broker = broker
        self._call = call
        self._session = session
        state = request.replica_state
        # The follower's broker id and broker epoch; -1 for a consumer.
        self._replica = request.replica_id if state is None else state.replica_id
        self._replica_epoch = -1 if state is None else state.replica_epoch
        # The consumer's rack, if it names one.
        self._rack = request.rack_id
        # Leaders that the response names.
        self._leaders: dict[int, None] = {}
        self._spawn = broker.environment.spawn
        self._partitions = asked
        # With no time to wait, the response is what is available now.
        self._bytes_min = request.min_bytes if request.max_wait_ms > 0 else 0
        self._bytes_max = max(0, min(request.max_bytes, broker.config.fetch_max_bytes))
        self._read_committed = request.isolation_level == READ_COMMITTED
        # Whether the client has a quota.
        self._is_limited = False
        self._timer: Any = None
        self._is_scheduled = False

    def limit(self, bytes_max: int | None) -> None:
        """The client has a quota: one response is not larger than this, if batches are not."""
        if bytes_max is not None:
            self._is_limited = True
            self._bytes_max = min(self._bytes_max, bytes_max)
            self._bytes_min = min(self._bytes_min, bytes_max)

    def try_now(self) -> FetchResponse | None:
        """The response, if there is enough data for one now."""
        session = self._session
        candidates = self._partitions if session is None else session.candidates()
        found: list[tuple[FetchPartition, PartitionData]] = []
        total = 0
        has_error = False
        may_serve = self._broker.membership.is_serving()
        for partition in candidates:
            partition.is_changed = False
            data, size = self._collect(partition, self._bytes_max - total, total == 0, may_serve)
            total += size
            has_error = (
                has_error
                or bool(data.error_code)
                or data.diverging_epoch is not None
                or data.preferred_read_replica >= 0
            )
            if session is None or session.has_news(partition, data):
                found.append((partition, data))
        if total < self._bytes_min and not has_error and (session is not None or found):
            return None
        if self._is_limited and total:
            self._broker.throttling.fetched(self._call, total)
        return self._respond(found)

    def wait(self, max_wait_ms: int) -> None:
        self._timer = self._spawn.later(max_wait_ms, self._time_is_up)
        self._broker.waiting_requests.fetches += 1
        self._call.on_abandoned = self._stop
        if self._session is not None:
            self._session.waiting = self
            if self._session.has_changed:
                self._try_soon()
        else:
            for partition in self._partitions:
                if partition.hosted is not None:
                    partition.hosted.waiters.watch(self, is_replica=self._replica >= 0)

    def changed(self, hosted: HostedPartition) -> None:
        """Try again at the end of this turn, when all changes of the turn are done."""
        self._try_soon()

    def _try_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._spawn.soon(self._try_again)

    def mark_dirty(self, hosted: HostedPartition) -> None:
        """Nothing to do: the response will read the partition's current state."""

    def _try_again(self) -> None:
        self._is_scheduled = False
        if self._timer is None:
            return
        response = self._if_over() or self.try_now()
        if response is not None:
            self._stop()
            self._call.answer(response)

    def _time_is_up(self) -> None:
        if self._timer is None:
            return
        self._bytes_min = 0
        response = self._if_over() or self.try_now()
        self._stop()
        self._call.answer(response)

    def _if_over(self) -> FetchResponse | None:
        """The empty response, if the quota was used up by other fetches that have waited on this connection."""
        if not self._is_limited or not self._broker.throttling.must_end_empty(self._call):
            return None
        session = self._session
        if session is not None and session.is_new:
            # As in a first fetch that is over the quota when it comes.
            self._broker.fetch_sessions.close(session.id)
            return FetchResponse(responses=[])
        return FetchResponse(session_id=0 if session is None else session.id, responses=[])

    def _stop(self) -> None:
        # Otherwise this and the call refer to each other, and freeing them takes a pause of the garbage collector.
        self._call.on_abandoned = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._broker.waiting_requests.fetches -= 1
        if self._session is not None:
            if self._session.waiting is self:
                self._session.waiting = None
        else:
            for partition in self._partitions:
                if partition.hosted is not None:
                    partition.hosted.waiters.unwatch(self)

    def _collect(
        self, partition: FetchPartition, bytes_left: int, at_least_one: bool, may_serve: bool
    ) -> tuple[PartitionData, int]:
        """The data of one partition, and its size in bytes."""
        data = PartitionData(
            partition_index=partition.index,
            high_watermark=-1,
            last_stable_offset=-1,
            log_start_offset=-1,
            preferred_read_replica=-1,
            aborted_transactions=[] if self._read_committed else None,
            records=b"",
        )
        hosted = partition.hosted
        error = self._refusal(partition, may_serve)
        if error:
            data.error_code = error
            if error in LEADER_ERRORS:
                name_leader(self._broker, partition.topic, partition.index, data, self._leaders)
            return data, 0
        assert hosted is not None
        try:
            log = hosted.log
            data.log_start_offset = log.log_start_offset
            data.high_watermark = hosted.high_watermark
            data.last_stable_offset = log.last_stable_offset(hosted.high_watermark)
            if partition.last_fetched_epoch >= 0:
                known_epoch, end_offset = log.epochs.end_offset_for(
                    partition.last_fetched_epoch, log.log_end_offset
                )
                if end_offset < 0:
                    raise OffsetOutOfRange(partition.fetch_offset)
                if known_epoch < partition.last_fetched_epoch or end_offset < partition.fetch_offset:
                    data.diverging_epoch = EpochEndOffset(epoch=known_epoch, end_offset=end_offset)
                    return data, 0
            if self._replica >= 0:
                error = self._count(hosted, partition, log.log_end_offset)
                # This fetch may have moved the high watermark, and what waited for that may have been appended.
                partition.is_changed = False
                ceiling = log.log_end_offset
                data.high_watermark = hosted.high_watermark
                data.last_stable_offset = log.last_stable_offset(hosted.high_watermark)
                if error:
                    data.error_code = error
                    return data, 0
                if hosted.config.is_compact:
                    core = hosted.replication
                    data.replicated_before = core.replicated_before
                    data.partition_epoch = core.partition_epoch
            else:
                ceiling = data.last_stable_offset if self._read_committed else hosted.high_watermark
                if self._rack and hosted.is_leader:
                    data.preferred_read_replica = nearest_replica(
                        self._broker, hosted, self._rack, partition.fetch_offset, self._call.listener
                    )
                    if data.preferred_read_replica >= 0:
                        return data, 0
            partition.ceiling = ceiling
            limit = min(bytes_left, partition.bytes_max)
            if limit <= 0 and not at_least_one:
                return data, 0
            found = hosted.read(partition.fetch_offset, limit, at_least_one=at_least_one, ceiling=ceiling)
            if found is None:
                return data, 0
            ranges, size = [found], found.size
            # librdkafka takes an answer without a record for one that was cut: it asks for twice as much each time,
            # up to a gigabyte, and reports MSG_SIZE_TOO_LARGE then. Compaction leaves segments of empty batches.
            while self._replica < 0 and not holds_records(found) and len(ranges) < RANGES_MAX:
                found = hosted.read(
                    log.end_offset_of(found), max(limit - size, 0), at_least_one=at_least_one, ceiling=ceiling
                )
                if found is None:
                    break
                ranges.append(found)
                size += found.size
            partition.read_bytes = size
            if self._replica < 0:
                partition.read_end = log.end_offset_of(ranges[-1])
            if self._read_committed:
                end_offset = log.end_offset_of(ranges[-1])
                data.aborted_transactions = [
                    AbortedTransaction(producer_id=each.producer_id, first_offset=each.first_offset)
                    for each in log.aborted_transactions(partition.fetch_offset, end_offset)
                ]
        except OffsetOutOfRange:
            data.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
            return data, 0
        except OSError:
            data.error_code = ErrorCode.KAFKA_STORAGE_ERROR
            return data, 0
        data.records = ranges[0] if len(ranges) == 1 else list(ranges)
        return data, size

    def _refusal(self, partition: FetchPartition, may_serve: bool) -> ErrorCode:
        """The error if the partition cannot be read here, or not by this client.

        Checked for each response, also of a fetch that has waited or that belongs to a session: rights may be taken
        away meanwhile.
        """
        # Nobody has rights on a topic without a name: it does not exist here.
        if partition.topic and not self._call.allows(READ, TOPIC, partition.topic):
            return ErrorCode.TOPIC_AUTHORIZATION_FAILED
        hosted = partition.hosted
        if hosted is None or hosted.is_deleted:
            if self._broker.image.has_partition(partition.topic, partition.index):
                return ErrorCode.NOT_LEADER_OR_FOLLOWER
            return partition.unknown
        if not may_serve:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        epoch = partition.current_leader_epoch
        if epoch >= 0 and epoch != hosted.leader_epoch:
            if epoch < hosted.leader_epoch:
                return ErrorCode.FENCED_LEADER_EPOCH
            return ErrorCode.UNKNOWN_LEADER_EPOCH
        if not hosted.is_leader and (self._replica >= 0 or not self._rack):
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        return ErrorCode.KAFKA_STORAGE_ERROR if hosted.is_offline else NONE

    def _count(self, hosted: HostedPartition, partition: FetchPartition, end_offset: int) -> ErrorCode:
        """Report the follower's fetch offset to the partition, once per request. Raises OffsetOutOfRange."""
        if partition.is_counted:
            return NONE
        if not hosted.log.log_start_offset <= partition.fetch_offset <= end_offset:
            raise OffsetOutOfRange(partition.fetch_offset)
        partition.is_counted = True
        return hosted.fetched_by(
            self._replica, self._replica_epoch, partition.fetch_offset, partition.log_start_offset
        )

    def _respond(self, found: list[tuple[FetchPartition, PartitionData]]) -> FetchResponse:
        session = self._session
        by_topic: dict[tuple[str, bytes], FetchableTopicResponse] = {}
        for partition, data in found:
            topic = by_topic.get((partition.topic, partition.topic_id))
            if topic is None:
                topic = FetchableTopicResponse(
                    topic=partition.topic, topic_id=partition.topic_id, partitions=[]
                )
                by_topic[partition.topic, partition.topic_id] = topic
            topic.partitions.append(data)
            if data.error_code:
                self._call.route.counts.failed(data.error_code)
            elif data.records:
                assert partition.hosted is not None
                traffic = partition.hosted.traffic
                if self._replica >= 0:
                    traffic.replication_bytes_out += partition.read_bytes
                else:
                    traffic.bytes_out += partition.read_bytes
                    traffic.messages_out += partition.read_end - partition.fetch_offset
        if session is not None:
            session.answered(found)
        response = FetchResponse(
            session_id=0 if session is None else session.id, responses=list(by_topic.values())
        )
        if self._leaders:
            response.node_endpoints = endpoints_of(self._broker, self._call, self._leaders)
        return response


def _asked_partitions(broker: Broker, request: FetchRequest, version: int) -> list[FetchPartition]:
    asked = []
    for topic in request.topics:
        name, unknown = _name(broker, topic, version)
        for wanted in topic.partitions:
            asked.append(
                FetchPartition(
                    name,
                    topic.topic_id,
                    wanted.partition,
                    broker.partitions.get(name, wanted.partition),
                    unknown,
                    wanted.fetch_offset,
                    wanted.partition_max_bytes,
                    wanted.current_leader_epoch,
                    wanted.last_fetched_epoch,
                    wanted.log_start_offset,
                )
            )
    return asked


def _find(broker: Broker, partition: FetchPartition) -> HostedPartition | None:
    """Find a session's partition again. One named by topic id is found only under the same id."""
    name = partition.topic
    if partition.topic_id != NO_TOPIC_ID:
        name = broker.image.topic_name(partition.topic_id)
    return broker.partitions.get(name, partition.index)


def _forgotten_partitions(broker: Broker, request: FetchRequest, version: int) -> Iterable[Key]:
    for topic in request.forgotten_topics_data:
        name, _ = _name(broker, topic, version)
        for index in topic.partitions:
            yield session_key(name, topic.topic_id, index)


def _name(broker: Broker, topic: Any, version: int) -> tuple[str, ErrorCode]:
    """The topic's name, and the error if it has no such partition."""
    if version < TOPIC_IDS_SINCE_VERSION:
        return topic.topic, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    name = broker.image.topic_name(topic.topic_id)
    return name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if name else ErrorCode.UNKNOWN_TOPIC_ID
