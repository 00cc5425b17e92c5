"""confluent-kafka (librdkafka) against the broker. Not in it: deleting single commits (OffsetDelete)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import ConfigResource, ResourceType

from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.admin_contract import (
    DeletingRecords,
    ManagingConfigs,
    ManagingTopics,
    SeeingTheCluster,
    Unique,
)
from tests.interop.client import PATIENCE_S
from tests.interop.groups_contract import (
    AlteringCommits,
    Cooperating,
    DeletingGroups,
    ManagingGroups,
    Sharing,
    StayingStatic,
)
from tests.interop.records_contract import AskingNewest, Reading, Writing
from tests.support import wait_until


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Iterator[ConfluentClient]:
    client = ConfluentClient(bootstrap)
    yield client
    client.close()


class TestRecords(Writing, Reading, AskingNewest):
    def test_an_idempotent_producer_lives_on_when_its_topic_is_made_again(
        self, bootstrap: str, client: ConfluentClient, unique: Unique
    ) -> None:
        """librdkafka gives up for good when it hears that the first batch in flight is out of order."""
        topic = unique("topic")
        producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0})
        errors: list[KafkaError | None] = []

        def delivered(error: KafkaError | None, _: Message) -> None:
            errors.append(error)

        for incarnation in range(3):
            client.create_topic(topic)
            for number in range(200):
                producer.produce(topic, f"{incarnation} {number}".encode(), on_delivery=delivered)
                producer.poll(0)
            assert producer.flush(PATIENCE_S) == 0
            assert errors == [None] * 200
            errors.clear()
            consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": unique("group")})
            consumer.assign([TopicPartition(topic, 0, 0)])
            records = consumer.consume(200, PATIENCE_S)
            consumer.close()
            assert [record.value() for record in records] == [
                f"{incarnation} {number}".encode() for number in range(200)
            ]
            client.delete_topic(topic)


class TestGroups(Sharing, Cooperating, StayingStatic, ManagingGroups, DeletingGroups, AlteringCommits):
    def test_a_member_of_the_consumer_protocol_is_told_that_there_is_none(
        self, bootstrap: str, client: ConfluentClient, unique: Unique
    ) -> None:
        topic = unique("topic")
        client.create_topic(topic)
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": unique("group"),
                "group.protocol": "consumer",
                "log_level": 0,
            }
        )
        consumer.subscribe([topic])
        try:
            answer = consumer.poll(PATIENCE_S)
        finally:
            consumer.close()

        assert answer is not None
        error = answer.error()
        assert error is not None and error.code() == KafkaError._FATAL
        assert "ConsumerGroupHeartbeat" in error.str()


class TestAdministration(ManagingTopics, ManagingConfigs, DeletingRecords, SeeingTheCluster):
    def test_topics_are_described_with_their_ids(self, client: ConfluentClient, unique: Unique) -> None:
        topics = [unique("topic"), unique("topic")]
        for topic in topics:
            client.create_topic(topic, partitions=2)

        asked = TopicCollection(topics)
        described = [each.result() for each in client.admin.describe_topics(asked).values()]

        assert [each.name for each in described] == topics
        assert len({str(each.topic_id) for each in described}) == 2
        for each in described:
            assert [partition.id for partition in each.partitions] == [0, 1]
            assert all(partition.leader.id == 1 for partition in each.partitions)

    def test_all_settings_are_replaced_by_the_old_call(self, client: ConfluentClient, unique: Unique) -> None:
        topic = unique("topic")
        client.create_topic(topic, configs={"retention.ms": "86400000"})

        resource = ConfigResource(ResourceType.TOPIC, topic, set_config={"max.message.bytes": "30000"})
        with pytest.warns(DeprecationWarning, match="incremental_alter_configs"):
            client.admin.alter_configs([resource])[resource].result()

        def own() -> dict[str, str | None]:
            described = client.describe_configs(topic)
            return {name: each.value for name, each in described.items() if not each.is_default}

        wait_until(lambda: own() == {"max.message.bytes": "30000"}, PATIENCE_S, "only the new setting")
