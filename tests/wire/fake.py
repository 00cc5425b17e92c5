"""A cluster in a dictionary, and a shell without sockets: conversations of the core, one step at a time.

``FakeCluster`` answers requests as brokers do, from one log per partition that never loses anything, with the
broker's own judgement of sequences. ``FakeShell`` does the core's effects. Nothing moves by itself: a request is
acted on when a test says ``act``, its answer arrives with ``deliver``, and in between a connection may be cut or
a leader moved. ``run`` does both until a task is done.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.log.producers import TRY_AGAIN, Duplicate, ProducerStates
from penstock.log.refused_batches import RefusedBatches
from penstock.model import TopicPartition
from penstock.protocol.apis import API_VERSIONS, APIS
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.cluster import ApiVersion, ApiVersionsResponse
from penstock.protocol.messages.fetch import (
    FetchableTopicResponse,
    FetchResponse,
    PartitionData,
)
from penstock.protocol.messages.groups import (
    Coordinator,
    FindCoordinatorResponse,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from penstock.protocol.messages.leader_hints import LeaderIdAndEpoch, NodeEndpoint
from penstock.protocol.messages.offsets import (
    ListOffsetsPartitionResponse,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from penstock.protocol.messages.produce import (
    InitProducerIdResponse,
    PartitionProduceResponse,
    ProduceResponse,
    TopicProduceResponse,
)
from penstock.protocol.messages.topics import (
    CreatableTopicResult,
    CreateTopicsResponse,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from penstock.protocol.records import check_produced, encode_batch, patch
from penstock.wire.core import Core, Task
from penstock.wire.links import Address, Connect, Disconnect, Effect, Send
from penstock.wire.producing import Producing

WALL_MS = 1_000_000


@dataclass
class FakePartition:
    leader: int
    epoch: int = 0
    log_start_offset: int = 0
    # (base offset, bytes), in order.
    batches: list[tuple[int, bytes]] = field(default_factory=list)
    log_end_offset: int = 0
    producers: ProducerStates = field(default_factory=lambda: ProducerStates(10**12))
    refused_batches: RefusedBatches = field(default_factory=RefusedBatches)

    def append(self, batch: bytearray, count: int) -> int:
        base_offset = self.log_end_offset
        patch(batch, 0, base_offset, self.epoch)
        self.batches.append((base_offset, bytes(batch)))
        self.log_end_offset += count
        return base_offset


class FakeCluster:
    def __init__(self, brokers: int = 3, *, version_max: dict[int, int] | None = None) -> None:
        self.addresses = {number: Address(f"broker-{number}", 9092) for number in range(1, brokers + 1)}
        self.down: set[int] = set()
        self.topics: dict[str, tuple[bytes, dict[int, FakePartition]]] = {}
        # Newest version served, where that is less than ours.
        self.version_max = version_max or {}
        self.has_topic_ids = True
        self.has_hints = True
        self.max_message_bytes = 1_000_000
        self.producer_ids = 0
        self.topics_made = 0
        # (broker, api key, version, request) in the order in which they were acted on.
        self.asked: list[tuple[int, int, int, Any]] = []
        # Called first for each request; what it returns is the answer.
        self.interfere: Callable[[int, int, int, Any], Any] = lambda broker, key, version, request: None
        self.offsets: dict[tuple[str, TopicPartition], int] = {}
        self.coordinator = 1

    def make_topic(self, name: str, leaders: list[int]) -> None:
        self.topics_made += 1
        partitions = {number: FakePartition(leader) for number, leader in enumerate(leaders)}
        for partition in partitions.values():
            partition.producers.log_was_empty = True
        self.topics[name] = (self.topics_made.to_bytes(16, "big"), partitions)

    def partition(self, at: TopicPartition) -> FakePartition:
        return self.topics[at.topic][1][at.partition]

    def fill(self, at: TopicPartition, batches: int, records: int = 3) -> None:
        for number in range(batches):
            values = [
                (WALL_MS + number, None, b"value-%d-%d" % (number, place), ()) for place in range(records)
            ]
            self.partition(at).append(encode_batch(values), records)

    def move(self, at: TopicPartition, leader: int) -> None:
        partition = self.partition(at)
        partition.leader = leader
        partition.epoch += 1

    # Answering

    def answer(self, broker: int, key: int, version: int, request: Any) -> Any:
        self.asked.append((broker, key, version, request))
        interfered = self.interfere(broker, key, version, request)
        if interfered is not None:
            return interfered
        name = APIS[key].name.lower()
        return getattr(self, f"_{name}")(broker, version, request)

    def _apiversions(self, broker: int, version: int, request: Any) -> ApiVersionsResponse:
        return ApiVersionsResponse(
            api_keys=[
                ApiVersion(
                    api_key=api.key,
                    min_version=api.advertised_min,
                    max_version=self.version_max.get(api.key, api.version_max),
                )
                for api in APIS.values()
                if self.version_max.get(api.key, 0) >= 0
            ]
        )

    def _metadata(self, broker: int, version: int, request: Any) -> MetadataResponse:
        names = list(self.topics) if request.topics is None else [topic.name for topic in request.topics]
        topics = []
        for name in names:
            if name not in self.topics:
                topics.append(
                    MetadataResponseTopic(error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name=name)
                )
                continue
            topic_id, partitions = self.topics[name]
            topics.append(
                MetadataResponseTopic(
                    name=name,
                    topic_id=topic_id if self.has_topic_ids else bytes(16),
                    partitions=[
                        MetadataResponsePartition(
                            partition_index=number, leader_id=each.leader, leader_epoch=each.epoch
                        )
                        for number, each in partitions.items()
                    ],
                )
            )
        return MetadataResponse(
            brokers=[
                MetadataResponseBroker(node_id=number, host=address.host, port=address.port)
                for number, address in self.addresses.items()
                if number not in self.down
            ],
            controller_id=1,
            topics=topics,
        )

    def _find(self, broker: int, name: str, number: int, epoch: int) -> FakePartition | ErrorCode:
        if name not in self.topics or number not in self.topics[name][1]:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        partition = self.topics[name][1][number]
        if partition.leader != broker:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if 0 <= epoch < partition.epoch:
            return ErrorCode.FENCED_LEADER_EPOCH
        if epoch > partition.epoch:
            return ErrorCode.UNKNOWN_LEADER_EPOCH
        return partition

    def _name(self, topic: Any, by_id: bool, name: str) -> str | None:
        if not by_id:
            return name
        return next((name for name, (topic_id, _) in self.topics.items() if topic_id == topic.topic_id), None)

    def _listoffsets(self, broker: int, version: int, request: Any) -> ListOffsetsResponse:
        topics = []
        for topic in request.topics:
            results = []
            for each in topic.partitions:
                found = self._find(broker, topic.name, each.partition_index, each.current_leader_epoch)
                result = ListOffsetsPartitionResponse(partition_index=each.partition_index)
                if isinstance(found, ErrorCode):
                    result.error_code = found
                elif each.timestamp == -2:
                    result.offset = found.log_start_offset
                else:
                    result.offset = found.log_end_offset
                results.append(result)
            topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=results))
        return ListOffsetsResponse(topics=topics)

    def _fetch(self, broker: int, version: int, request: Any) -> FetchResponse:
        responses, endpoints = [], {}
        for topic in request.topics:
            name = self._name(topic, version >= 13, topic.topic)
            results = []
            for wanted in topic.partitions:
                data = PartitionData(partition_index=wanted.partition, records=b"", high_watermark=-1)
                results.append(data)
                if name is None:
                    data.error_code = ErrorCode.UNKNOWN_TOPIC_ID
                    continue
                found = self._find(broker, name, wanted.partition, wanted.current_leader_epoch)
                if isinstance(found, ErrorCode):
                    data.error_code = found
                    if self.has_hints and found == ErrorCode.NOT_LEADER_OR_FOLLOWER:
                        leader = self.topics[name][1][wanted.partition]
                        data.current_leader = LeaderIdAndEpoch(
                            leader_id=leader.leader, leader_epoch=leader.epoch
                        )
                        endpoints[leader.leader] = self.addresses[leader.leader]
                elif not found.log_start_offset <= wanted.fetch_offset <= found.log_end_offset:
                    data.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
                else:
                    data.high_watermark = data.last_stable_offset = found.log_end_offset
                    data.log_start_offset = found.log_start_offset
                    data.records = self._records(found, wanted.fetch_offset, wanted.partition_max_bytes)
            responses.append(
                FetchableTopicResponse(topic=topic.topic, topic_id=topic.topic_id, partitions=results)
            )
        return FetchResponse(responses=responses, node_endpoints=self._endpoints(endpoints))

    @staticmethod
    def _endpoints(addresses: dict[int, Address]) -> list[NodeEndpoint]:
        return [
            NodeEndpoint(node_id=number, host=address.host, port=address.port)
            for number, address in addresses.items()
        ]

    @staticmethod
    def _records(partition: FakePartition, offset: int, bytes_max: int) -> bytes:
        """From the batch that holds the offset on; the last one cut where the room ends, but not the first."""
        following = [base for base, _ in partition.batches[1:]] + [partition.log_end_offset]
        wanted = [data for (_, data), end in zip(partition.batches, following) if end > offset]
        return b"".join(wanted)[: max(bytes_max, len(wanted[0]))] if wanted else b""

    def _initproducerid(self, broker: int, version: int, request: Any) -> InitProducerIdResponse:
        self.producer_ids += 1
        return InitProducerIdResponse(producer_id=self.producer_ids, producer_epoch=0)

    def _produce(self, broker: int, version: int, request: Any) -> ProduceResponse:
        responses, endpoints = [], {}
        for topic in request.topic_data:
            name = self._name(topic, version >= 13, topic.name)
            results = []
            for data in topic.partition_data:
                result = PartitionProduceResponse(index=data.index, base_offset=-1)
                results.append(result)
                if name is None:
                    result.error_code = ErrorCode.UNKNOWN_TOPIC_ID
                    continue
                found = self._find(broker, name, data.index, -1)
                if isinstance(found, ErrorCode):
                    result.error_code = found
                    if self.has_hints and found == ErrorCode.NOT_LEADER_OR_FOLLOWER:
                        leader = self.topics[name][1][data.index]
                        result.current_leader = LeaderIdAndEpoch(
                            leader_id=leader.leader, leader_epoch=leader.epoch
                        )
                        endpoints[leader.leader] = self.addresses[leader.leader]
                    continue
                result.error_code, result.base_offset = self.write(found, bytearray(data.records))
            responses.append(
                TopicProduceResponse(name=topic.name, topic_id=topic.topic_id, partition_responses=results)
            )
        return ProduceResponse(responses=responses, node_endpoints=self._endpoints(endpoints))

    def write(self, partition: FakePartition, batch: bytearray) -> tuple[int, int]:
        """What a leader does with a batch; (error code, base offset)."""
        header = check_produced(memoryview(batch), max_message_bytes=self.max_message_bytes)
        if isinstance(header, ErrorCode):
            return header, -1
        verdict = partition.producers.check(header, WALL_MS, partition.refused_batches)
        if isinstance(verdict, Duplicate):
            return ErrorCode.NONE, verdict.base_offset
        if verdict is TRY_AGAIN:
            partition.refused_batches.add(header, verdict, WALL_MS)
        if verdict is not None:
            return verdict, -1
        base_offset = partition.append(batch, header.count)
        partition.producers.log_was_empty = False
        partition.producers.update(header, base_offset, WALL_MS)
        return ErrorCode.NONE, base_offset

    def _findcoordinator(self, broker: int, version: int, request: Any) -> FindCoordinatorResponse:
        address = self.addresses[self.coordinator]
        key = request.coordinator_keys[0] if version >= 4 else request.key
        found = Coordinator(key=key, node_id=self.coordinator, host=address.host, port=address.port)
        return FindCoordinatorResponse(
            coordinators=[found], node_id=found.node_id, host=found.host, port=found.port
        )

    def _offsetcommit(self, broker: int, version: int, request: Any) -> OffsetCommitResponse:
        error = ErrorCode.NONE if broker == self.coordinator else ErrorCode.NOT_COORDINATOR
        topics = []
        for topic in request.topics:
            results = []
            for each in topic.partitions:
                if not error:
                    at = TopicPartition(topic.name, each.partition_index)
                    self.offsets[request.group_id, at] = each.committed_offset
                results.append(
                    OffsetCommitResponsePartition(partition_index=each.partition_index, error_code=error)
                )
            topics.append(OffsetCommitResponseTopic(name=topic.name, partitions=results))
        return OffsetCommitResponse(topics=topics)

    def _offsetfetch(self, broker: int, version: int, request: Any) -> OffsetFetchResponse:
        error = ErrorCode.NONE if broker == self.coordinator else ErrorCode.NOT_COORDINATOR
        many = version >= 8
        group = request.groups[0] if many else request
        one: Any
        each_topic: Any
        one, each_topic = (
            (OffsetFetchResponsePartitions, OffsetFetchResponseTopics)
            if many
            else (OffsetFetchResponsePartition, OffsetFetchResponseTopic)
        )
        topics = [
            each_topic(
                name=topic.name,
                partitions=[
                    one(
                        partition_index=number,
                        committed_offset=self.offsets.get(
                            (group.group_id, TopicPartition(topic.name, number)), -1
                        ),
                        error_code=0,
                    )
                    for number in topic.partition_indexes
                ],
            )
            for topic in group.topics
        ]
        if many:
            answer = OffsetFetchResponseGroup(group_id=group.group_id, topics=topics, error_code=error)
            return OffsetFetchResponse(groups=[answer])
        return OffsetFetchResponse(topics=topics, error_code=error)

    def _createtopics(self, broker: int, version: int, request: Any) -> CreateTopicsResponse:
        wanted = request.topics[0]
        error = ErrorCode.NONE
        if wanted.name in self.topics:
            error = ErrorCode.TOPIC_ALREADY_EXISTS
        else:
            self.make_topic(wanted.name, [1] * max(1, wanted.num_partitions))
        return CreateTopicsResponse(
            topics=[CreatableTopicResult(name=wanted.name, error_code=error, error_message=None)]
        )


class FakeLink:
    def __init__(self, broker: int) -> None:
        self.broker = broker
        self.unread = bytearray()
        # Answers that have not arrived yet, as bytes.
        self.answers: deque[bytes] = deque()

    def next_request(self) -> tuple[int, int, int, Any] | None:
        """Take the next whole request: api key, version, correlation id, message."""
        if len(self.unread) < 4:
            return None
        (size,) = struct.unpack_from(">i", self.unread)
        if len(self.unread) < 4 + size:
            return None
        frame = bytes(self.unread[4 : 4 + size])
        del self.unread[: 4 + size]
        key, version, correlation_id, length = struct.unpack_from(">hhih", frame)
        start = 10 + length + (APIS[key].request_header_version(version) == 2)
        message, end = APIS[key].decode_request[version](memoryview(frame), start)
        assert end == len(frame)
        return key, version, correlation_id, message


class FakeShell:
    def __init__(self, cluster: FakeCluster, *, bootstrap: str = "broker-1:9092", **settings: Any) -> None:
        self.cluster = cluster
        self.core = Core(bootstrap, random.Random(0), **settings)
        self.now_ms = 1_000
        self.links: dict[int, FakeLink] = {}
        # Brokers whose connections are accepted and never answered.
        self.silent: set[int] = set()
        # Brokers that nobody can connect to, although the cluster has not noticed.
        self.refusing: set[int] = set()
        self.effects: list[Effect] = []
        # How many bytes of an answer arrive at a time.
        self.piece_bytes = 1 << 30

    def start(self, what: str, steps: Any) -> Task[Any]:
        task = self.core.start(what, steps, self.now_ms)
        self.do_effects()
        return task

    def do_effects(self) -> None:
        self.core.check()
        while effects := self.core.take_effects():
            self.effects += effects
            for effect in effects:
                match effect:
                    case Connect(link, address):
                        self._connect(link, address)
                    case Send(link, buffers):
                        if link in self.links:
                            for buffer in buffers:
                                self.links[link].unread += buffer
                    case Disconnect(link):
                        self.links.pop(link, None)
            self.core.check()

    def _connect(self, link: int, address: Address) -> None:
        broker = next((number for number, each in self.cluster.addresses.items() if each == address), None)
        if broker is None or broker in self.cluster.down or broker in self.refusing:
            self.core.lost(link, "connection refused", self.now_ms)
            return
        self.links[link] = FakeLink(broker)
        self.core.connected(link, self.now_ms)

    # One step of what may happen

    def can_act(self) -> list[int]:
        return [
            number
            for number, link in self.links.items()
            if len(link.unread) >= 4 and link.broker not in self.silent
        ]

    def act(self, number: int) -> None:
        """The broker acts on the next request of a link."""
        link = self.links[number]
        taken = link.next_request()
        assert taken is not None
        key, version, correlation_id, request = taken
        response = self.cluster.answer(link.broker, key, version, request)
        if response is SILENCE:
            return
        if isinstance(response, bytes):
            link.answers.append(response)
            return
        api = APIS[key]
        tags = b"\0" if api.response_header_version(version) else b""
        if key == API_VERSIONS and response.error_code == ErrorCode.UNSUPPORTED_VERSION:
            version = 0
        body = b"".join(bytes(part) for part in api.encode_response[version](response))
        content = struct.pack(">i", correlation_id) + tags + body
        link.answers.append(struct.pack(">i", len(content)) + content)

    def can_deliver(self) -> list[int]:
        return [number for number, link in self.links.items() if link.answers]

    def deliver(self, number: int) -> None:
        """The next answer of a link arrives."""
        data = self.links[number].answers.popleft()
        while data:
            space = self.core.space(number)
            if space is None:
                break
            count = min(len(space), len(data), self.piece_bytes)
            space[:count] = data[:count]
            space.release()
            data = data[count:]
            self.core.received(number, count, self.now_ms)
        self.do_effects()

    def lose(self, number: int) -> None:
        self.links.pop(number, None)
        self.core.lost(number, "connection reset by peer", self.now_ms)
        self.do_effects()

    def stop_broker(self, broker: int) -> None:
        """It is gone, and with it all its connections; those who had asked hear of that."""
        self.cluster.down.add(broker)
        for number in [number for number, link in self.links.items() if link.broker == broker]:
            self.lose(number)

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.core.tick(self.now_ms)
        self.do_effects()

    # All of it

    def run(self, done: Callable[[], bool], *, until_ms: int = 1_000_000) -> None:
        """Act on and deliver everything, in order, letting time pass only when nothing else can happen."""
        end_ms = self.now_ms + until_ms
        while not done():
            acting, delivering = self.can_act(), self.can_deliver()
            if acting:
                self.act(acting[0])
            elif delivering:
                self.deliver(delivering[0])
            else:
                due_ms = self.core.due_ms()
                assert due_ms is not None, "nothing will ever happen"
                self.wait(max(0, due_ms - self.now_ms))
            assert self.now_ms <= end_ms, "it takes too long"

    def result(self, task: Task[Any]) -> Any:
        self.run(lambda: task.is_done)
        return task.outcome()

    def ask(self, steps: Callable[..., Any], *arguments: Any) -> Any:
        """Run one operation to its end; its result, or its error raised."""
        return self.result(self.start("asking", lambda core, task: steps(core, task, *arguments)))


# What ``interfere`` returns for a request that is never answered.
SILENCE = object()


class Writing:
    """A producer on a fake cluster, and what it heard."""

    def __init__(self, cluster: FakeCluster, **settings: Any) -> None:
        self.cluster = cluster
        self.shell = FakeShell(cluster, bootstrap="broker-2:9092,broker-3:9092", **settings)
        self.producing = Producing(self.shell.core, acks=-1, in_flight=5)
        self.made = 0
        # (number of the batch, its offset), as acknowledged.
        self.acked: list[tuple[int, int]] = []

    def send(self, at: TopicPartition, *, records: int = 1, size: int = 10) -> int:
        number = self.made
        self.made += 1
        batch = encode_batch([(1000, b"%d" % number, b"x" * size, ())] * records)
        self.producing.add(at, batch, lambda offset: self.acked.append((number, offset)), self.shell.now_ms)
        self.shell.wait(0)
        self.call_back()
        return number

    def call_back(self) -> None:
        acked, self.producing.acked = self.producing.acked, []
        for on_ack, offset in acked:
            on_ack(offset)

    def flush(self) -> None:
        producing = self.producing
        self.shell.run(lambda: not producing.unacknowledged or producing.error is not None)
        self.call_back()
        if producing.error is not None:
            raise producing.error

    def flying(self) -> list[int]:
        """The sequences in flight to each partition, in order."""
        return [
            batch.sequence
            for queue in self.producing._queues.values()
            for batch in queue.batches
            if batch.is_in_flight
        ]
