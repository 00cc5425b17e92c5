"""The Metadata answer for all topics: the same bytes as without the prepared pages, and no long turn for them."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.broker.network import metadata_pages
from penstock.broker.network.authorization import ALL_OPERATIONS, ResourceType
from penstock.broker.network.metadata_pages import EDITIONS_MAX, PARTITIONS_PER_TURN, MetadataPages
from penstock.environment import FileRange
from penstock.metadata.image import NO_LEADER, Delta, Image, TopicImage
from penstock.metadata.topics import CONSUMER_OFFSETS, is_internal
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import OPERATIONS_OMITTED
from penstock.protocol.messages.metadata_records import (
    BrokerEndpoint,
    FenceBrokerRecord,
    PartitionChangeRecord,
    PartitionRecord,
    RegisterBrokerRecord,
    RemoveTopicRecord,
    TopicRecord,
    UnfenceBrokerRecord,
)
from penstock.protocol.messages.topics import (
    MetadataRequest,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from penstock.protocol.schema import Message, encoder
from tests.broker.stage import ManualClock, ManualSpawn, Stage
from tests.broker.wire import encode_request

VERSIONS = range(14)
FLEXIBLE_SINCE = 9


def registered(*ids: int, listeners: Sequence[str] = ("PLAINTEXT",), epoch: int = 0) -> list[Message]:
    return [
        RegisterBrokerRecord(
            broker_id=id,
            broker_epoch=epoch,
            incarnation_id=bytes(16),
            end_points=[BrokerEndpoint(name=name, host=f"host-{id}-{name}", port=9092) for name in listeners],
            fenced=False,
            rack=None if id % 2 else "a",
        )
        for id in ids
    ]


def topic(number: int, name: str, partitions: int, *replicas: int) -> list[Message]:
    id = number.to_bytes(16, "big")
    made: list[Message] = [TopicRecord(name=name, topic_id=id)]
    return made + [
        PartitionRecord(
            partition_id=index,
            topic_id=id,
            replicas=list(replicas),
            isr=list(replicas),
            leader=replicas[0],
            leader_epoch=0,
            partition_epoch=0,
        )
        for index in range(partitions)
    ]


def random_batch(draw: Random, image: Image, number: int) -> list[Message]:
    """Something that can happen to this image."""
    brokers = list(image.brokers)
    topics = list(image.topics.values())
    match (
        draw.choice(("create", "create", "change", "change", "change", "remove", "fence", "listeners"))
        if topics
        else ""
    ):
        case "change":
            changed = draw.choice(topics)
            partition = draw.choice(changed.partitions)
            isr = draw.sample(partition.replicas, draw.randint(0, len(partition.replicas)))
            leader = draw.choice(isr) if isr else NO_LEADER
            return [
                PartitionChangeRecord(
                    topic_id=changed.id, partition_id=partition.index, isr=list(isr), leader=leader
                )
            ]
        case "remove":
            return [RemoveTopicRecord(topic_id=draw.choice(topics).id)]
        case "fence":
            known = image.brokers[draw.choice(brokers)]
            kind = UnfenceBrokerRecord if known.fenced else FenceBrokerRecord
            return [kind(id=known.id, epoch=known.epoch)]
        case "listeners":
            # The broker that is asked is the first, and it has the listener it is asked on.
            listeners = draw.choice((("PLAINTEXT",), ("PLAINTEXT", "TLS"), ("TLS",)))
            return registered(draw.choice(brokers[1:]), listeners=listeners, epoch=image.offset + 1)
    name = CONSUMER_OFFSETS if CONSUMER_OFFSETS not in image.topics else f"t{number}"
    name += "x" * (200 if draw.random() < 0.2 and name != CONSUMER_OFFSETS else 0)
    replicas = draw.sample(brokers, draw.choice((1, 2, 3, len(brokers))))
    return topic(number, name, draw.choice((1, 3, 10, 150) if len(replicas) < 10 else (1, 3)), *replicas)


def histories(seed: int) -> Iterator[tuple[Image, Delta]]:
    """An image and what becomes of it."""
    draw = Random(seed)
    # With 130 of them an array's length takes two bytes.
    brokers = (1, 2, 3, 70000) if seed % 4 else range(1, 131)
    image, delta = Image().apply(registered(*brokers))
    yield image, delta
    for number in range(1, 25):
        image, delta = image.apply(random_batch(draw, image, number))
        yield image, delta


def written(image: Image, request: MetadataRequest, version: int, controller_id: int) -> bytes:
    """The answer as the ordinary encoder writes it, from ordinary objects."""
    endpoints = {
        broker.id: endpoint
        for broker in image.brokers.values()
        for endpoint in broker.endpoints
        if endpoint.name == "PLAINTEXT"
    }
    listed = [broker for broker in image.brokers.values() if broker.id in endpoints]
    unlisted = set(image.brokers) - set(endpoints)
    online = [broker for broker in listed if not broker.fenced]
    offline = unlisted | {broker.id for broker in image.brokers.values() if broker.fenced}
    without_listener = ErrorCode.LISTENER_NOT_FOUND if version >= 6 else ErrorCode.LEADER_NOT_AVAILABLE
    response = MetadataResponse(
        brokers=[
            MetadataResponseBroker(
                node_id=broker.id,
                host=endpoints[broker.id].host,
                port=endpoints[broker.id].port,
                rack=broker.rack,
            )
            for broker in online or listed
        ],
        cluster_id="cluster",
        controller_id=controller_id,
        cluster_authorized_operations=(
            ALL_OPERATIONS[ResourceType.CLUSTER]
            if request.include_cluster_authorized_operations
            else OPERATIONS_OMITTED
        ),
        topics=[
            MetadataResponseTopic(
                name=topic.name,
                topic_id=topic.id,
                is_internal=is_internal(topic.name),
                topic_authorized_operations=(
                    ALL_OPERATIONS[ResourceType.TOPIC]
                    if request.include_topic_authorized_operations
                    else OPERATIONS_OMITTED
                ),
                partitions=[
                    MetadataResponsePartition(
                        error_code=(
                            ErrorCode.LEADER_NOT_AVAILABLE
                            if partition.leader < 0
                            else without_listener
                            if partition.leader in unlisted
                            else ErrorCode.NONE
                        ),
                        partition_index=partition.index,
                        leader_id=-1 if partition.leader in unlisted else partition.leader,
                        leader_epoch=partition.leader_epoch,
                        replica_nodes=list(partition.replicas),
                        isr_nodes=list(partition.isr),
                        offline_replicas=[id for id in partition.replicas if id in offline],
                    )
                    for partition in topic.partitions
                ],
            )
            for topic in image.topics.values()
        ],
    )
    (body,) = encoder(MetadataResponse, version)(response)
    assert not isinstance(body, FileRange)
    head = b"\0" if version >= FLEXIBLE_SINCE else b""
    return struct.pack(">ii", 4 + len(head) + len(body), 1) + head + bytes(body)


class Theatre:
    """A broker that is told an image, and a client that asks for all topics."""

    def __init__(self, directory: Path) -> None:
        self.stage = Stage(directory)
        self.stream = self.stage.connect()

    def tell(self, image: Image, delta: Delta) -> None:
        image, _ = image.apply([])
        object.__setattr__(image, "cluster_id", "cluster")
        self.stage.broker.consensus.committed.image = image
        self.stage.broker.metadata_pages.moved(delta)

    def ask(self, request: MetadataRequest, version: int) -> bytes:
        self.send(request, version)
        self.stage.spawn.run()
        return self.take()

    def send(self, request: MetadataRequest, version: int) -> None:
        self.stream.arrive(encode_request(request, version, correlation_id=1))

    def take(self) -> bytes:
        answer = bytes(self.stream.sent)
        self.stream.sent.clear()
        return answer


def everything(**flags: bool) -> MetadataRequest:
    return MetadataRequest(topics=None, **flags)


@pytest.mark.parametrize("seed", range(8))
def test_every_version_of_every_image_is_written_as_the_encoder_would(tmp_path: Path, seed: int) -> None:
    theatre = Theatre(tmp_path)
    draw = Random(seed)
    for image, delta in histories(seed):
        theatre.tell(image, delta)
        for version in draw.sample(VERSIONS, 5):
            request = MetadataRequest(
                topics=[] if version == 0 else None,
                include_topic_authorized_operations=version >= 8 and draw.random() < 0.5,
                include_cluster_authorized_operations=8 <= version <= 10 and draw.random() < 0.5,
            )
            assert theatre.ask(request, version) == written(image, request, version, 1), version


def test_who_asks_while_the_list_is_made_gets_the_list_of_that_moment(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path)
    before, delta = Image().apply([*registered(1, 2), *topic(1, "large", 2 * PARTITIONS_PER_TURN, 1, 2)])
    before, _ = before.apply([*topic(2, "other", 2 * PARTITIONS_PER_TURN, 2), *topic(3, "third", 1, 2)])
    theatre.tell(before, delta)
    theatre.send(everything(), 12)
    assert not theatre.take()
    after, delta = before.apply(
        [
            PartitionChangeRecord(topic_id=before.topics["other"].id, partition_id=0, isr=[], leader=-1),
            RemoveTopicRecord(topic_id=before.topics["third"].id),
        ]
    )
    theatre.tell(after, delta)
    theatre.send(everything(), 12)
    theatre.stage.spawn.run()
    expected = written(before, everything(), 12, 1) + written(after, everything(), 12, 1)
    assert theatre.take() == expected
    assert theatre.ask(everything(), 12) == written(after, everything(), 12, 1)


def test_many_who_ask_at_once_share_one_list(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path)
    image, delta = Image().apply([*registered(1), *topic(1, "large", 2 * PARTITIONS_PER_TURN, 1)])
    image, _ = image.apply(topic(2, "other", 1, 1))
    theatre.tell(image, delta)
    answers: list[list[bytes]] = []
    for _ in range(3):
        theatre.stage.broker.metadata_pages.list_topics(
            theatre.stage.broker.image, 12, 0, frozenset(), answers.append
        )
    assert not answers
    theatre.stage.spawn.run()
    assert len(answers) == 3
    assert answers[0] is answers[1] is answers[2]


def test_the_controller_is_the_one_of_the_moment_though_the_topics_are_kept(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path)
    image, delta = Image().apply([*registered(1, 2), *topic(1, "a", 1, 1)])
    theatre.tell(image, delta)
    assert theatre.ask(everything(), 12) == written(image, everything(), 12, 1)
    # Another leads the quorum, and nothing has been committed since.
    theatre.stage.broker.consensus._raft.role.leader_id = 2
    assert theatre.ask(everything(), 12) == written(image, everything(), 12, 2)


class CountingSpawn(ManualSpawn):
    turns = 0

    def run(self) -> None:
        while self._ready:
            self.turns += 1
            self._ready.pop(0)()


def test_a_turn_packs_a_portion_and_a_change_packs_what_changed() -> None:
    spawn = CountingSpawn(ManualClock())
    metadata_pages = MetadataPages(spawn)
    made = registered(1)
    for number in range(100):
        made += topic(number + 1, f"t{number}", PARTITIONS_PER_TURN // 10, 1)
    image, delta = Image().apply(made)
    metadata_pages.moved(delta)
    answers: list[list[bytes]] = []
    metadata_pages.list_topics(image, 12, 0, frozenset(), answers.append)
    spawn.run()
    assert len(answers) == 1
    assert spawn.turns >= 9
    image, delta = image.apply(
        [PartitionChangeRecord(topic_id=image.topics["t50"].id, partition_id=3, isr=[1], leader=1)]
    )
    metadata_pages.moved(delta)
    metadata_pages.list_topics(image, 12, 0, frozenset(), answers.append)
    # At once: all but one of them were there.
    assert len(answers) == 2
    assert spawn.turns < 20
    MetadataPages(spawn).list_topics(image, 12, 0, frozenset(), answers.append)
    spawn.run()
    assert b"".join(answers[1]) == b"".join(answers[2]) != b"".join(answers[0])


def test_only_a_few_versions_are_kept() -> None:
    metadata_pages = MetadataPages(ManualSpawn(ManualClock()))
    image, _ = Image().apply([*registered(1), *topic(1, "a", 1, 1)])
    for version in VERSIONS:
        for operations in (0, 1):
            metadata_pages.list_topics(image, version, operations, frozenset(), lambda pages: None)
    assert len(metadata_pages._editions) == EDITIONS_MAX


def test_what_became_of_a_topic_frees_what_was_kept_of_it() -> None:
    metadata_pages = MetadataPages(ManualSpawn(ManualClock()))
    image, _ = Image().apply([*registered(1), *topic(1, "a", 1, 1), *topic(2, "b", 1, 1)])
    metadata_pages.list_topics(image, 12, 0, frozenset(), lambda pages: None)
    _, delta = image.apply([RemoveTopicRecord(topic_id=image.topics["a"].id)])
    metadata_pages.moved(delta)
    (edition,) = metadata_pages._editions.values()
    assert list(edition.packed) == ["b"]


def test_requests_that_alternate_do_not_each_encode_all_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of two listeners and several versions, while brokers have different listeners."""
    image = Image()
    records = registered(1, 2)
    for number in range(1, 5):
        records += topic(number, f"t{number}", PARTITIONS_PER_TURN // 2, 1, 2)
    image, _ = image.apply(records)
    soon: deque[Callable[[], None]] = deque()
    spawn: Any = type("Spawn", (), {"soon": lambda _, callback: soon.append(callback)})()
    packed: list[str] = []
    make = metadata_pages.topic_packer

    def counted(*arguments: Any) -> Callable[[TopicImage], bytes]:
        pack = make(*arguments)

        def count(each: TopicImage) -> bytes:
            packed.append(each.name)
            return pack(each)

        return count

    monkeypatch.setattr(metadata_pages, "topic_packer", counted)
    pages = MetadataPages(spawn)
    keys = [
        (version, unlisted)
        for version in (1, 5, 9, 12)
        for unlisted in (frozenset(), frozenset({BrokerId(2)}))
    ]
    assert len(keys) > EDITIONS_MAX
    answered: list[list[bytes]] = []
    for number in range(40):
        version, unlisted = keys[number % len(keys)]
        pages.list_topics(image, version, OPERATIONS_OMITTED, unlisted, answered.append)
    while soon:
        soon.popleft()()
    assert len(answered) == 40
    # Once for each version and listener; not once for each request.
    assert len(packed) <= len(keys) * len(image.topics)
