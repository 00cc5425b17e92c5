from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.conftest import Penstock

Unique = Callable[[str], str]

pytestmark = pytest.mark.interop


@pytest.fixture
def topic(kafka: Penstock, unique: Unique) -> str:
    """A topic of two partitions."""
    name = unique("topic")
    kafka("topics", "create", name, "--partitions", "2")
    return name


def test_a_created_topic_is_listed(kafka: Penstock, unique: Unique) -> None:
    name = unique("topic")
    assert kafka("topics", "create", name, "--partitions", "3").out == f"created topic {name}\n"
    assert [name, "3", "1"] in kafka("topics", "list").rows
    assert {"topic": name, "partitions": 3, "replication": 1} in kafka("topics", "list", "--json").json


def test_creating_a_topic_twice_is_a_failure_that_says_how_not(kafka: Penstock, topic: str) -> None:
    again = kafka("topics", "create", topic, code=1)
    assert again.err == (f"penstock: topic {topic} exists already; pass --if-not-exists to accept that\n")
    assert kafka("topics", "create", topic, "--if-not-exists", "--json").json == {
        "topic": topic,
        "created": False,
    }


def test_a_setting_that_does_not_exist_is_refused_by_name(kafka: Penstock, unique: Unique) -> None:
    assert (
        "no.such.setting"
        in kafka("topics", "create", unique("topic"), "--config", "no.such.setting=1", code=1).err
    )


def test_a_name_that_cannot_be_is_refused(kafka: Penstock) -> None:
    kafka("topics", "create", "no spaces", code=2)


def test_more_copies_than_brokers_are_refused(kafka: Penstock, unique: Unique) -> None:
    refused = kafka("topics", "create", unique("topic"), "--replication", "9", code=1)
    assert "brokers" in refused.err or "broker(s)" in refused.err


def test_a_description_shows_partitions_offsets_and_own_settings(kafka: Penstock, unique: Unique) -> None:
    name = unique("topic")
    kafka("topics", "create", name, "--partitions", "2", "--config", "retention.ms=3600000")
    kafka("produce", name, "--partition", "1", "--value", "a", "--value", "b")
    document = kafka("topics", "describe", name, "--json").json
    assert document["topic"] == name
    assert document["configs"] == {"retention.ms": "3600000"}
    first, second = document["partitions"]
    assert (first["start"], first["end"]) == (0, 0)
    assert (second["partition"], second["start"], second["end"]) == (1, 0, 2)
    assert second["leader"] in second["isr"] and second["isr"] == second["replicas"]
    table = kafka("topics", "describe", name)
    assert "retention.ms=3600000" in table.out
    node = str(first["leader"])
    assert ["1", node, node, node, "0", "2", "2"] in table.rows


def test_a_topic_that_is_not_there_is_said_to_be_missing(kafka: Penstock, unique: Unique) -> None:
    name = unique("topic")
    advice = f"see `penstock topics list`, or create it: `penstock topics create {name}`"
    missing = f"penstock: there is no topic {name}; {advice}\n"
    for words in (
        ["topics", "describe", name],
        ["topics", "delete", name, "--yes"],
        ["topics", "add-partitions", name, "--total", "2"],
        ["topics", "trim", name, "--before", "end", "--yes"],
        ["configs", "describe", name],
        ["consume", name],
    ):
        assert kafka(*words, code=1).err == missing
    assert name not in kafka("topics", "list").out


def test_a_topic_is_deleted_only_when_asked_for_twice(kafka: Penstock, topic: str) -> None:
    assert "--yes" in kafka("topics", "delete", topic, code=1).err
    assert topic in kafka("topics", "list").out
    assert kafka("topics", "delete", topic, "--yes").out == f"deleted 1 topic: {topic}\n"
    assert topic not in kafka("topics", "list").out


def test_partitions_can_be_added_and_never_taken(kafka: Penstock, topic: str) -> None:
    assert kafka("topics", "add-partitions", topic, "--total", "5", "--json").json == {
        "topic": topic,
        "partitions": 5,
        "before": 2,
    }
    for total in ("5", "3"):
        refused = kafka("topics", "add-partitions", topic, "--total", total, code=1)
        assert "--total must be larger" in refused.err
    assert len(kafka("topics", "describe", topic, "--json").json["partitions"]) == 5


def starts(kafka: Penstock, topic: str) -> list[int]:
    return [each["start"] for each in kafka("topics", "describe", topic, "--json").json["partitions"]]


def test_trimming_deletes_what_is_before_an_offset(kafka: Penstock, topic: str) -> None:
    values = [word for number in range(5) for word in ("--value", str(number))]
    kafka("produce", topic, "--partition", "0", *values)
    kafka("produce", topic, "--partition", "1", *values[:4])
    assert "--yes" in kafka("topics", "trim", topic, "--before", "3", code=1).err
    assert starts(kafka, topic) == [0, 0]
    kafka("topics", "trim", topic, "--before", "3", "--yes")
    assert starts(kafka, topic) == [3, 2]
    trimmed = kafka("topics", "trim", topic, "--before", "0:end", "--yes", "--json").json
    assert trimmed == {"topic": topic, "partitions": [{"partition": 0, "start": 5}]}
    assert starts(kafka, topic) == [5, 2]


def test_trimming_a_partition_that_is_not_there_is_refused(kafka: Penstock, topic: str) -> None:
    assert "has no partition 7" in kafka("topics", "trim", topic, "--before", "7:1", "--yes", code=1).err
    assert "--before takes" in kafka("topics", "trim", topic, "--before", "some", "--yes", code=2).err
