"""What every client must see when it manages topics, settings and the cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.interop.client import PATIENCE_S, Client, ClientError, ConfigView
from tests.interop.records_contract import numbered
from tests.support import wait_until

Unique = Callable[[str], str]


class ManagingTopics:
    def test_a_topic_is_created_described_listed_and_deleted(self, client: Client, unique: Unique) -> None:
        topic = unique("topic")
        before = client.topics()
        assert topic not in before

        client.create_topic(topic, partitions=5, configs={"retention.ms": "123456789"})

        node = client.describe_cluster().brokers[0].node_id
        assert client.describe_topic(topic) == dict.fromkeys(range(5), (node, (node,), (node,)))
        assert topic in client.topics()
        with pytest.raises(ClientError) as exists:
            client.create_topic(topic)
        assert exists.value.name == "TOPIC_ALREADY_EXISTS"

        client.delete_topic(topic)
        wait_until(lambda: topic not in client.topics(), PATIENCE_S, "the topic's end")
        with pytest.raises(ClientError) as unknown:
            client.delete_topic(topic)
        assert unknown.value.name == "UNKNOWN_TOPIC_OR_PARTITION"

    def test_a_topic_deleted_and_created_again_is_empty(
        self, client: Client, reference: Client, unique: Unique
    ) -> None:
        topic = unique("topic")
        client.create_topic(topic)
        client.produce(topic, numbered(1, 10))
        client.delete_topic(topic)
        wait_until(lambda: topic not in client.topics(), PATIENCE_S, "the topic's end")

        client.create_topic(topic)

        wait_until(lambda: serves(reference, topic, 0), PATIENCE_S, "a leader at work")
        assert client.offset(topic, 0, "latest") == 0
        assert client.produce(topic, numbered(1, 1)) == [(0, 0)]

    @pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 250])
    def test_a_bad_name_is_refused(self, client: Client, name: str) -> None:
        with pytest.raises(ClientError) as refused:
            client.create_topic(name)

        assert refused.value.name == "INVALID_TOPIC_EXCEPTION"

    def test_bad_numbers_are_refused(self, client: Client, unique: Unique) -> None:
        with pytest.raises(ClientError) as refused:
            client.create_topic(unique("topic"), partitions=0)
        assert refused.value.name == "INVALID_PARTITIONS"
        with pytest.raises(ClientError) as refused:
            client.create_topic(unique("topic"), configs={"retention.ms": "soon"})
        assert refused.value.name == "INVALID_CONFIG"

    def test_partitions_are_added_and_never_taken_away(
        self, client: Client, reference: Client, unique: Unique
    ) -> None:
        topic = unique("topic")
        client.create_topic(topic, partitions=2)
        client.produce(topic, numbered(2, 10))

        client.create_partitions(topic, 4)

        wait_until(lambda: len(client.describe_topic(topic)) == 4, PATIENCE_S, "four partitions")
        wait_until(lambda: all(serves(reference, topic, p) for p in (2, 3)), PATIENCE_S, "leaders at work")
        assert client.produce(topic, numbered(4, 4)) == [(0, 5), (1, 5), (2, 0), (3, 0)]
        with pytest.raises(ClientError) as refused:
            client.create_partitions(topic, 3)
        assert refused.value.name == "INVALID_PARTITIONS"


def serves(client: Client, topic: str, partition: int) -> bool:
    """Whether the leader answers: in Kafka the metadata may be ahead of it for a moment."""
    try:
        return client.offset(topic, partition, "latest") is not None
    except ClientError:
        return False


class DeletingRecords:
    def test_deleted_records_are_gone_and_the_rest_stays(
        self, client: Client, reference: Client, unique: Unique
    ) -> None:
        topic = unique("topic")
        client.create_topic(topic, partitions=2)
        client.produce(topic, numbered(2, 40))

        client.delete_records(topic, {0: 15})

        assert reference.offset(topic, 0, "earliest") == 15
        assert client.offset(topic, 0, "earliest") == 15
        assert client.offset(topic, 0, "latest") == 20
        assert client.offset(topic, 1, "earliest") == 0
        assert [record.offset for record in client.consume(topic, {0: 15}, 5)] == list(range(15, 20))
        with pytest.raises(ClientError) as refused:
            client.delete_records(topic, {0: 21})
        assert refused.value.name == "OFFSET_OUT_OF_RANGE"


class ManagingConfigs:
    def test_settings_are_described_with_their_source(self, client: Client, unique: Unique) -> None:
        topic = unique("topic")
        client.create_topic(topic, configs={"retention.ms": "86400000", "max.message.bytes": "50000"})

        configs = client.describe_configs(topic)

        assert configs["retention.ms"] == ConfigView("86400000", is_default=False)
        assert configs["max.message.bytes"] == ConfigView("50000", is_default=False)
        assert configs["segment.bytes"] == ConfigView("1073741824", is_default=True)
        assert configs["cleanup.policy"] == ConfigView("delete", is_default=True)
        assert configs["compression.type"] == ConfigView("producer", is_default=True)

    def test_one_setting_changes_and_the_others_stay(self, client: Client, unique: Unique) -> None:
        topic = unique("topic")
        client.create_topic(topic, configs={"retention.ms": "86400000"})

        client.alter_config(topic, "max.message.bytes", "40000")

        def described() -> dict[str, ConfigView]:
            configs = client.describe_configs(topic)
            return {name: configs[name] for name in ("max.message.bytes", "retention.ms")}

        altered = {
            "max.message.bytes": ConfigView("40000", False),
            "retention.ms": ConfigView("86400000", False),
        }
        wait_until(lambda: described() == altered, PATIENCE_S, "the new setting")
        client.alter_config(topic, "max.message.bytes", None)
        back = {**altered, "max.message.bytes": ConfigView("1048588", True)}
        wait_until(lambda: described() == back, PATIENCE_S, "the default again")
        with pytest.raises(ClientError) as refused:
            client.alter_config(topic, "retention.ms", "soon")
        assert refused.value.name == "INVALID_CONFIG"


class SeeingTheCluster:
    def test_the_cluster_is_one_broker_that_is_its_own_controller(
        self, client: Client, bootstrap: str
    ) -> None:
        cluster = client.describe_cluster()

        host, _, port = bootstrap.rpartition(":")
        assert len(cluster.brokers) == 1
        assert cluster.brokers[0] == (1, host, int(port))
        assert cluster.controller_id == 1
        assert cluster.cluster_id is None or len(cluster.cluster_id) == 22
