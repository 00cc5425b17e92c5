"""confluent-kafka (librdkafka) against the broker. Not in it: deleting single commits (OffsetDelete)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, TopicCollection
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]

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
    pass


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
