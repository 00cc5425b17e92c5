"""Kafka's own Java clients against the broker: the newest, and the 3.9 that Spark 4 ships."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import java
from tests.interop.adapters.program import ProgramClient
from tests.interop.admin_contract import (
    DeletingRecords,
    ManagingConfigs,
    ManagingTopics,
    SeeingTheCluster,
    Unique,
)
from tests.interop.client import PATIENCE_S, ClientError
from tests.interop.groups_contract import (
    AlteringCommits,
    Cooperating,
    DeletingCommits,
    DeletingGroups,
    ManagingGroups,
    Sharing,
    StayingStatic,
)
from tests.interop.records_contract import AskingNewest, Reading, Writing, numbered
from tests.support import wait_until
from tests.tools import Missing, skip_or_fail

SOURCE = Path(__file__).parent / "java" / "JavaClient.java"
BESIDES = ("com.fasterxml.jackson.core:jackson-databind:2.18.2", "org.slf4j:slf4j-nop:1.7.36")
# C1 only: the JVM lives for seconds, on a machine that also runs the broker.
JVM = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


def program(version: str, *options: str) -> list[str]:
    """The command that runs the client with this version of Kafka's library."""
    class_path = java.classpath(f"org.apache.kafka:kafka-clients:{version}", *BESIDES)
    try:
        classes = java.compiled(SOURCE, class_path)
    except Missing as missing:
        skip_or_fail(missing)
    return ["java", *JVM, *options, "-cp", f"{classes}:{class_path}", "JavaClient"]


@pytest.fixture(scope="module", params=java.CLIENTS_VERSIONS)
def client(bootstrap: str, request: pytest.FixtureRequest) -> Iterator[ProgramClient]:
    client = ProgramClient(program(request.param), bootstrap)
    yield client
    client.close()


class TestRecords(Writing, Reading, AskingNewest):
    def test_every_place_in_the_log_that_the_client_knows_has_an_offset(
        self, client: ProgramClient, unique: Unique
    ) -> None:
        topic = unique("topic")
        client.create_topic(topic)
        client.produce(topic, numbered(1, 10))
        client.delete_records(topic, {0: 4})
        # Nothing is tiered here (KIP-405), so all that is left is local and nothing waits for an upload.
        offsets = {
            "earliest": 4,
            "earliest_local": 4,
            "latest": 10,
            "latest_tiered": -1,
            "earliest_pending_upload": -1,
        }

        asked = set(client.call("offset_specs")) - {"max_timestamp"}

        assert asked >= {"earliest", "latest", "earliest_local", "latest_tiered"}
        for when in asked:
            assert client.call("offset", topic=topic, partition=0, when=when) == offsets[when], when


class TestGroups(
    Sharing, Cooperating, StayingStatic, ManagingGroups, DeletingGroups, AlteringCommits, DeletingCommits
):
    pass


class TestAdministration(ManagingTopics, ManagingConfigs, DeletingRecords, SeeingTheCluster):
    def test_an_unknown_topic_is_not_described(self, client: ProgramClient, unique: Unique) -> None:
        with pytest.raises(ClientError) as unknown:
            client.describe_topic(unique("topic"))

        assert unknown.value.name == "UNKNOWN_TOPIC_OR_PARTITION"

    def test_a_brokers_settings_are_described(self, client: ProgramClient) -> None:
        configs = {name: value for name, value, _ in client.call("describe_broker", broker="1")}

        assert configs["log.segment.bytes"] == "1073741824"
        assert configs["num.partitions"] == "1"
        assert configs["group.initial.rebalance.delay.ms"] == "0"

    def test_a_list_is_appended_to_and_subtracted_from(self, client: ProgramClient, unique: Unique) -> None:
        topic, name = unique("topic"), "leader.replication.throttled.replicas"
        client.create_topic(topic, configs={name: "0:1"})

        client.call("alter_config", topic=topic, name=name, value="1:1", operation="APPEND")
        wait_until(lambda: client.describe_configs(topic)[name].value == "0:1,1:1", PATIENCE_S, "two values")
        client.call("alter_config", topic=topic, name=name, value="0:1", operation="SUBTRACT")
        wait_until(lambda: client.describe_configs(topic)[name].value == "1:1", PATIENCE_S, "one value")
