"""What the specification says of groups and delivery, tried with librdkafka where no other test does."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support import wait_until

Unique = Callable[[str], str]
RECORDS = 200
PATIENCE_S = 30

pytestmark = pytest.mark.interop


def create(bootstrap: str, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(PATIENCE_S)


def fill(bootstrap: str, topic: str, count: int = RECORDS) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for number in range(count):
        producer.produce(topic, str(number).encode())
    assert producer.flush(PATIENCE_S) == 0


def consumer(bootstrap: str, group: str, **settings: object) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 500,
            **settings,
        }
    )


def read(reader: Consumer, count: int) -> list[bytes]:
    values: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(values) < count:
        assert time.monotonic() < deadline, f"{len(values)} of {count} records"
        message: Message | None = reader.poll(0.2)
        if message is not None:
            assert message.error() is None
            values.append(message.value() or b"")
    return values


def expected(start: int = 0, end: int = RECORDS) -> list[bytes]:
    return [str(number).encode() for number in range(start, end)]


def test_every_group_gets_every_record_and_reading_deletes_nothing(bootstrap: str, unique: Unique) -> None:
    topic = unique("topic")
    create(bootstrap, topic, 1)
    fill(bootstrap, topic)
    for _ in range(3):
        reader = consumer(bootstrap, unique("group"))
        reader.subscribe([topic])
        assert read(reader, RECORDS) == expected()
        reader.close()


def test_members_beyond_the_partitions_are_idle_until_one_leaves(bootstrap: str, unique: Unique) -> None:
    topic, group = unique("topic"), unique("group")
    create(bootstrap, topic, 1)
    members = [consumer(bootstrap, group) for _ in range(2)]
    for member in members:
        member.subscribe([topic])

    def owners() -> list[int]:
        for member in members:
            member.poll(0.05)
        return [len(member.assignment()) for member in members]

    wait_until(lambda: sorted(owners()) == [0, 1], PATIENCE_S, "one of two members owns the only partition")
    owner = members.pop(owners().index(1))
    owner.close()
    wait_until(lambda: owners() == [1], PATIENCE_S, "the idle member takes over")
    members[0].close()


def test_committing_before_the_work_is_at_most_once_and_after_it_at_least_once(
    bootstrap: str, unique: Unique
) -> None:
    topic = unique("topic")
    create(bootstrap, topic, 1)
    fill(bootstrap, topic, 10)
    for commits_first, resumes_at in ((True, 5), (False, 0)):
        group = unique("group")
        crashed = consumer(bootstrap, group)
        crashed.subscribe([topic])
        read(crashed, 5)
        if commits_first:
            crashed.commit(offsets=[TopicPartition(topic, 0, 5)], asynchronous=False)
        # The work on the five never happens, and nothing is committed after it.
        crashed.close()
        successor = consumer(bootstrap, group)
        successor.subscribe([topic])
        assert read(successor, 10 - resumes_at) == expected(resumes_at, 10)
        successor.close()


def test_offsets_are_committed_from_time_to_time_by_themselves(bootstrap: str, unique: Unique) -> None:
    topic, group = unique("topic"), unique("group")
    create(bootstrap, topic, 1)
    fill(bootstrap, topic, 20)
    reader = consumer(bootstrap, group, **{"enable.auto.commit": True, "auto.commit.interval.ms": 100})
    reader.subscribe([topic])
    read(reader, 20)

    def committed() -> int:
        reader.poll(0.05)
        offset: int = reader.committed([TopicPartition(topic, 0)], PATIENCE_S)[0].offset
        return offset

    wait_until(lambda: committed() == 20, PATIENCE_S, "an automatic commit")
    reader.close()


def test_going_back_reads_the_same_again(bootstrap: str, unique: Unique) -> None:
    topic = unique("topic")
    create(bootstrap, topic, 1)
    fill(bootstrap, topic)
    reader = consumer(bootstrap, unique("group"))
    reader.assign([TopicPartition(topic, 0, 0)])
    assert read(reader, RECORDS) == expected()
    reader.seek(TopicPartition(topic, 0, 50))
    assert read(reader, RECORDS - 50) == expected(50)
    reader.close()


def test_a_consumer_that_stops_reading_holds_nobody_up(bootstrap: str, unique: Unique) -> None:
    topic = unique("topic")
    create(bootstrap, topic, 1)
    fill(bootstrap, topic, 5_000)
    stuck = consumer(bootstrap, unique("group"), **{"queued.max.messages.kbytes": 1})
    stuck.subscribe([topic])
    read(stuck, 1)
    lively = consumer(bootstrap, unique("group"))
    lively.subscribe([topic])
    assert read(lively, 5_000) == expected(0, 5_000)
    fill(bootstrap, topic, 10)
    assert read(lively, 10) == expected(0, 10)
    assert read(stuck, 5_009)[:4_999] == expected(1, 5_000)
    stuck.close()
    lively.close()


def test_a_topic_may_have_a_thousand_partitions(bootstrap: str, unique: Unique) -> None:
    topic = unique("topic")
    create(bootstrap, topic, 1000)
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for partition in range(1000):
        producer.produce(topic, str(partition).encode(), partition=partition)
    assert producer.flush(PATIENCE_S) == 0
    reader = consumer(bootstrap, unique("group"))
    reader.assign([TopicPartition(topic, partition, 0) for partition in range(1000)])
    assert sorted(read(reader, 1000)) == sorted(expected(0, 1000))
    reader.close()
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result(PATIENCE_S)
