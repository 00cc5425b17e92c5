"""A write that fewer replicas than ``min.insync.replicas`` would hold is refused, and not written."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from tests.cluster.cluster import Cluster
from tests.cluster.failover import create

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster


def written(cluster: Cluster, topic: str, value: bytes, acks: str) -> int:
    """The error that librdkafka is told, which would try again if it might."""
    told: list[int] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        told.append(KafkaError.NO_ERROR if error is None else error.code())

    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": acks, "message.send.max.retries": 0})
    producer.produce(topic, value, partition=0, on_delivery=delivered)
    assert producer.flush(TIMEOUT_S) == 0
    return told[0]


def read(cluster: Cluster, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": topic})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        return [message.value() for message in consumer.consume(count, TIMEOUT_S)]
    finally:
        consumer.close()


def test_a_write_is_refused_while_too_few_replicas_are_in_sync(
    cluster: Cluster, unique: Callable[[str], str]
) -> None:
    topic = unique("topic")
    create(cluster, topic, 1, replicas=2, min_insync_replicas="2")
    assert written(cluster, topic, b"held by two", "all") == KafkaError.NO_ERROR
    view = cluster.partition(topic, 0)
    (follower,) = (replica for replica in view.replicas if replica != view.leader)

    cluster.kill(follower)
    cluster.wait_for(topic, lambda view: len(view.in_sync_replicas) == 1, "one replica is in sync")
    assert written(cluster, topic, b"refused", "all") == KafkaError.NOT_ENOUGH_REPLICAS
    # The promise of acks=1 is not that of the others.
    assert written(cluster, topic, b"held by one", "1") == KafkaError.NO_ERROR

    cluster.start(follower)
    cluster.wait_in_sync(topic)
    assert written(cluster, topic, b"held by two again", "all") == KafkaError.NO_ERROR
    assert read(cluster, topic, 3) == [b"held by two", b"held by one", b"held by two again"]
