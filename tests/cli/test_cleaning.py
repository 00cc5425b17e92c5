"""`penstock topics cleaning`: against answers made up here, and against a broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
)
from penstock.protocol.messages.placement import (
    DescribeLogDirsPartition,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
    LastCleaning,
    LogCleaning,
)
from penstock.protocol.messages.topics import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from tests.cli.conftest import Outcome, Penstock
from tests.cli.fake_broker import FakeBroker

Ask = Callable[..., Outcome]
Unique = Callable[[str], str]

METADATA, CONFIGS, LOG_DIRS = 3, 32, 35
POLICIES = {"orders": "compact", "clicks": "delete", "__consumer_offsets": "compact"}

RUN = LastCleaning(
    ended_ms=1_700_000_000_000,
    duration_ms=12_345,
    bytes_before=1_500_000_000,
    bytes_after=300_000_000,
    records_before=10_000_000,
    records_after=2_000_000,
)
CLEANED = LogCleaning(
    cleanable_bytes=400_000_000, dirty_bytes=100_000_000, first_dirty_offset=77, last_run=RUN
)
NEVER = LogCleaning(cleanable_bytes=0, dirty_bytes=0, first_dirty_offset=0)
ASIDE = LogCleaning(
    cleanable_bytes=10, dirty_bytes=10, first_dirty_offset=0, set_aside="cannot read offset 5: damaged"
)


class Scene:
    """Two brokers, each with a replica of `orders-0`; the second also has other partitions."""

    def __init__(self) -> None:
        self.replicas: dict[int, list[tuple[str, int, int, LogCleaning | None]]] = {
            1: [("orders", 0, 450_000_000, CLEANED)],
            2: [
                ("orders", 0, 1_700_000_000, NEVER),
                ("clicks", 0, 5, None),
                ("__consumer_offsets", 3, 20, ASIDE),
            ],
        }
        self.error = ErrorCode.NONE
        self.newest: dict[int, int] = {}
        self.brokers: dict[int, FakeBroker] = {}

    def start(self, stack: ExitStack) -> str:
        for id in self.replicas:
            answers: dict[str, Any] = {
                f"api_{METADATA}": self._metadata,
                f"api_{CONFIGS}": self._configs,
                f"api_{LOG_DIRS}": lambda request, id=id: self._log_dirs(request, id),
            }
            self.brokers[id] = stack.enter_context(FakeBroker(newest=self.newest, **answers))
        return self.brokers[1].bootstrap

    def asked(self) -> list[Any]:
        return [
            request for broker in self.brokers.values() for request in broker.asked if request.KEY == LOG_DIRS
        ]

    def _metadata(self, request: Any) -> MetadataResponse:
        names = list(POLICIES) if request.topics is None else [topic.name for topic in request.topics]
        return MetadataResponse(
            brokers=[
                MetadataResponseBroker(
                    node_id=id, host="127.0.0.1", port=int(broker.bootstrap.rpartition(":")[2])
                )
                for id, broker in self.brokers.items()
            ],
            controller_id=1,
            topics=[
                MetadataResponseTopic(
                    name=name,
                    topic_id=name.encode()[:1] * 16,
                    partitions=[MetadataResponsePartition(partition_index=0, leader_id=1, leader_epoch=0)],
                )
                if name in POLICIES
                else MetadataResponseTopic(name=name, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                for name in names
            ],
        )

    def _configs(self, request: Any) -> DescribeConfigsResponse:
        return DescribeConfigsResponse(
            results=[
                DescribeConfigsResult(
                    error_message="",
                    resource_type=2,
                    resource_name=each.resource_name,
                    configs=[
                        DescribeConfigsResourceResult(
                            name="cleanup.policy", value=POLICIES[each.resource_name], documentation=None
                        )
                    ],
                )
                for each in request.resources
            ]
        )

    def _log_dirs(self, request: Any, id: int) -> DescribeLogDirsResponse:
        wanted = (
            None
            if request.topics is None
            else {(topic.topic, number) for topic in request.topics for number in topic.partitions}
        )
        topics = [
            DescribeLogDirsTopic(
                name=topic,
                partitions=[
                    DescribeLogDirsPartition(partition_index=number, partition_size=size, cleaning=told)
                ],
            )
            for topic, number, size, told in self.replicas[id]
            if wanted is None or (topic, number) in wanted
        ]
        offline = DescribeLogDirsResult(error_code=ErrorCode.KAFKA_STORAGE_ERROR, log_dir="/b")
        return DescribeLogDirsResponse(
            error_code=self.error, results=[DescribeLogDirsResult(log_dir="/a", topics=topics), offline]
        )


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def ask(penstock: Penstock, scene: Scene) -> Iterator[Ask]:
    with ExitStack() as stack:

        def invoke(*words: str, code: int = 0) -> Outcome:
            bootstrap = scene.brokers[1].bootstrap if scene.brokers else scene.start(stack)
            outcome = penstock("topics", "cleaning", *words, "--bootstrap", bootstrap)
            assert outcome.code == code, outcome
            if code:
                assert outcome.err.startswith("penstock: ") and outcome.err.count("\n") == 1, outcome.err
            return outcome

        yield invoke


def test_every_replica_of_compacted_topics_has_a_row(ask: Ask, scene: Scene) -> None:
    heading, first, second = ask().rows
    assert " ".join(heading) == (
        "TOPIC PARTITION BROKER SIZE DIRTY RATIO LAST RUN TOOK BYTES RECORDS SET ASIDE"
    )
    assert " ".join(first) == (
        "orders 0 1 450 MB 100 MB 25% 2023-11-14T22:13:20Z 12.3 s 1.5 GB to 300 MB 10000000 to 2000000 -"
    )
    assert " ".join(second) == "orders 0 2 1.7 GB 0 B 0% - - - - -"
    assert [(request.topics, request.include_cleaning) for request in scene.asked()] == [(None, True)] * 2


def test_internal_topics_are_shown_when_asked_for(ask: Ask) -> None:
    rows = ask("--internal").out.splitlines()
    assert rows[1].split()[:7] == ["__consumer_offsets", "3", "2", "20", "B", "10", "B"]
    assert rows[1].endswith("cannot read offset 5: damaged")


def test_a_document_has_exact_numbers(ask: Ask) -> None:
    first, second = ask("--json").json
    assert first == {
        "topic": "orders",
        "partition": 0,
        "broker": 1,
        "size_bytes": 450_000_000,
        "cleaning": {
            "cleanable_bytes": 400_000_000,
            "dirty_bytes": 100_000_000,
            "first_dirty_offset": 77,
            "last_run": {
                "ended_ms": 1_700_000_000_000,
                "duration_ms": 12_345,
                "bytes_before": 1_500_000_000,
                "bytes_after": 300_000_000,
                "records_before": 10_000_000,
                "records_after": 2_000_000,
            },
            "set_aside": None,
            "dirty_ratio": 0.25,
        },
    }
    assert second["cleaning"]["last_run"] is None and second["cleaning"]["dirty_ratio"] == 0


def test_only_the_topics_named_are_asked_for(ask: Ask, scene: Scene) -> None:
    assert len(ask("orders").out.splitlines()) == 3
    assert [[(topic.topic, topic.partitions) for topic in request.topics] for request in scene.asked()] == [
        [("orders", [0])]
    ] * 2


def test_a_replica_without_a_report_has_its_size_only(ask: Ask, scene: Scene) -> None:
    scene.replicas[2] = [("orders", 0, 7, None)]
    assert ask("orders").rows[2] == ["orders", "0", "2", "7", "B", *"-------"]
    assert ask("orders", "--json").json[1]["cleaning"] is None


def test_a_topic_that_is_not_compacted_is_said_to_be_so(ask: Ask) -> None:
    assert ask("orders", "clicks", code=1).err == (
        "penstock: topic clicks is not compacted, its cleanup.policy is delete; to change that: "
        "`penstock configs set clicks cleanup.policy=compact`\n"
    )


def test_a_topic_that_is_missing_is_said_to_be_so(ask: Ask) -> None:
    assert ask("order", code=1).err == "penstock: there is no topic order; did you mean orders?\n"
    assert ask("xyz", code=1).err == "penstock: there is no topic xyz; see `penstock topics list`\n"
    ask("no spaces", code=2)


def test_a_refusal_is_told_in_one_line(ask: Ask, scene: Scene) -> None:
    scene.error = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert "broker 1: cluster authorization failed" in ask(code=1).err


def test_a_broker_that_is_too_old_is_said_to_be_so(ask: Ask, scene: Scene) -> None:
    scene.newest = {LOG_DIRS: 1}
    assert "DescribeLogDirs" in ask(code=1).err


@pytest.mark.interop
def test_a_compacted_topic_of_a_broker_is_shown(kafka: Penstock, unique: Unique) -> None:
    name = unique("topic")
    kafka("topics", "create", name, "--partitions", "2", "--config", "cleanup.policy=compact")
    kafka("produce", name, "--partition", "1", "--key-separator", ":", "--value", "k:v")
    (row,) = kafka("topics", "cleaning", name, "--json").json
    assert (row["topic"], row["partition"]) == (name, 1)
    assert row["size_bytes"] > 60
    assert kafka("topics", "cleaning", name).rows[1][:2] == [name, "1"]
