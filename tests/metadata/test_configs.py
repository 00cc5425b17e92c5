"""Which value of a setting counts, and what DescribeConfigs tells about it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.metadata import configs
from penstock.metadata.broker_settings import BROKER
from penstock.metadata.configs import Layers, Source, describe_configs, topic_entries, topic_value
from penstock.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, ConfigResource, Image, config_record
from penstock.metadata.settings import LONG_MAX, Status, format_value
from penstock.metadata.topic_settings import CREATED, TOPIC
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
)
from penstock.protocol.schema import decode, encode
from tests.metadata.test_image import topic

HOUR_MS = 3600 * 1000


def layers(
    static: Mapping[str, str] | None = None,
    all_brokers: Mapping[str, str] | None = None,
    broker: Mapping[str, str] | None = None,
) -> Layers:
    return Layers(broker or {}, all_brokers or {}, static or {})


def test_what_nobody_set_is_kafkas_default() -> None:
    for name, setting in TOPIC.items():
        assert format_value(topic_value(name, {}, layers())) == setting.default


def test_milliseconds_win_over_minutes_and_minutes_over_hours() -> None:
    static = {"log.retention.hours": "3"}
    assert topic_value("retention.ms", {}, layers(static)) == 3 * HOUR_MS
    static["log.retention.minutes"] = "2"
    assert topic_value("retention.ms", {}, layers(static)) == 2 * 60_000
    static["log.retention.ms"] = "1"
    assert topic_value("retention.ms", {}, layers(static)) == 1


def test_negative_hours_keep_forever() -> None:
    assert topic_value("retention.ms", {}, layers({"log.retention.hours": "-1"})) == -1
    assert topic_value("retention.ms", {}, layers({"log.retention.minutes": "-1"})) == -1


def test_nearer_place_wins_whichever_name_it_uses() -> None:
    static = {"log.roll.ms": "1"}
    assert topic_value("segment.ms", {}, layers(static)) == 1
    assert topic_value("segment.ms", {}, layers(static, {"log.roll.hours": "2"})) == 2 * HOUR_MS
    assert topic_value("segment.ms", {}, layers(static, {"log.roll.hours": "2"}, {"log.roll.ms": "3"})) == 3
    assert topic_value("segment.ms", {"segment.ms": "4"}, layers(static, {}, {"log.roll.ms": "3"})) == 4


def test_flushing_falls_back_to_the_scheduler() -> None:
    assert topic_value("flush.ms", {}, layers({"log.flush.scheduler.interval.ms": "9"})) == 9
    assert topic_value("flush.ms", {}, layers({"log.flush.interval.ms": "8"})) == 8


def test_flushed_mode_is_flushing_every_message_unless_somebody_said_otherwise() -> None:
    flushed = {"penstock.durability": "flushed"}
    assert topic_value("flush.messages", {}, layers(flushed)) == 1
    assert topic_value("flush.messages", {}, layers({"penstock.durability": "replicated"})) == LONG_MAX
    assert topic_value("flush.messages", {"flush.messages": "100"}, layers(flushed)) == 100
    both = {**flushed, "log.flush.interval.messages": "50"}
    assert topic_value("flush.messages", {}, layers(both)) == 50


def test_value_that_an_older_release_has_stored_does_not_stop_the_broker() -> None:
    assert topic_value("retention.ms", {"retention.ms": "nonsense"}, layers({"log.retention.ms": "5"})) == 5


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["topic", "broker", "all_brokers", "static"]),
            st.sampled_from(["log.retention.ms", "log.retention.minutes", "log.retention.hours"]),
            st.integers(-1, 5),
        ),
        max_size=8,
    )
)
@settings(deadline=None)
def test_retention_agrees_with_a_naive_model(given_settings: list[tuple[str, str, int]]) -> None:
    factors = {"log.retention.ms": 1, "log.retention.minutes": 60_000, "log.retention.hours": HOUR_MS}
    places: dict[str, dict[str, str]] = {"topic": {}, "broker": {}, "all_brokers": {}, "static": {}}
    for place, name, value in given_settings:
        places[place]["retention.ms" if place == "topic" else name] = str(value)

    expected = 168 * HOUR_MS
    for place in ("static", "all_brokers", "broker"):
        for name in ("log.retention.hours", "log.retention.minutes", "log.retention.ms"):
            if name in places[place]:
                expected = max(-1, int(places[place][name]) * factors[name])
    if places["topic"]:
        expected = int(places["topic"]["retention.ms"])

    found = layers(places["static"], places["all_brokers"], places["broker"])
    assert topic_value("retention.ms", places["topic"], found) == expected
    entry = next(
        entry for entry in topic_entries(places["topic"], found) if entry.setting.name == "retention.ms"
    )
    assert entry.value == str(expected)


# DescribeConfigs.


def image_with(*settings: tuple[int, str, str, str], topics: str = "a") -> Image:
    made = [change for id, name in enumerate(topics, 1) for change in topic(name, id)]
    records = [config_record(ConfigResource(type, name), key, value) for type, name, key, value in settings]
    image, _ = Image().apply([*made, *records])
    return image


def describe(
    image: Image,
    type: int,
    name: str,
    keys: list[str] | None = None,
    *,
    static: Mapping[str, str] | None = None,
    synonyms: bool = False,
    documentation: bool = False,
) -> DescribeConfigsResult:
    request = DescribeConfigsRequest(
        resources=[DescribeConfigsResource(resource_type=type, resource_name=name, configuration_keys=keys)],
        include_synonyms=synonyms,
        include_documentation=documentation,
    )
    response = describe_configs(request, image, 1, static or {})
    for version in (1, 2, 3, 4):
        encode(response, version)
    assert decode(DescribeConfigsResponse, 4, encode(response, 4)) == response
    (result,) = response.results
    assert (result.resource_type, result.resource_name) == (type, name)
    return result


def by_name(result: DescribeConfigsResult) -> dict[str, DescribeConfigsResourceResult]:
    assert result.error_code == ErrorCode.NONE, result.error_message
    return {config.name: config for config in result.configs}


def test_topic_is_described_with_every_setting_and_its_source() -> None:
    image = image_with(
        (TOPIC_RESOURCE, "a", "retention.ms", "1"),
        (BROKER_RESOURCE, "1", "log.segment.bytes", "2097152"),
        (BROKER_RESOURCE, "", "message.max.bytes", "3"),
    )
    told = by_name(describe(image, TOPIC_RESOURCE, "a", static={"log.roll.hours": "4"}))
    assert told.keys() == TOPIC.keys()
    assert (told["retention.ms"].value, told["retention.ms"].config_source) == ("1", Source.TOPIC)
    assert (told["segment.bytes"].value, told["segment.bytes"].config_source) == ("2097152", Source.BROKER)
    assert (told["max.message.bytes"].value, told["max.message.bytes"].config_source) == (
        "3",
        Source.ALL_BROKERS,
    )
    assert (told["segment.ms"].value, told["segment.ms"].config_source) == (str(4 * HOUR_MS), Source.STATIC)
    assert (told["flush.ms"].value, told["flush.ms"].config_source) == (str(LONG_MAX), Source.DEFAULT)
    assert not any(config.read_only or config.is_sensitive for config in told.values())
    assert not any(config.synonyms or config.documentation for config in told.values())


def test_synonyms_are_told_in_their_own_units_when_asked_for() -> None:
    image = image_with((TOPIC_RESOURCE, "a", "retention.ms", "1"))
    result = describe(image, TOPIC_RESOURCE, "a", static={"log.retention.minutes": "2"}, synonyms=True)
    told = [
        (synonym.name, synonym.value, synonym.source) for synonym in by_name(result)["retention.ms"].synonyms
    ]
    assert told == [
        ("retention.ms", "1", Source.TOPIC),
        ("log.retention.minutes", "2", Source.STATIC),
    ]


def test_the_replication_factor_is_shown_as_it_applies() -> None:
    def shown(**static: str) -> list[tuple[str | None, int]]:
        request = DescribeConfigsRequest(
            resources=[DescribeConfigsResource(resource_type=BROKER_RESOURCE, resource_name="1")],
            include_synonyms=True,
        )
        given = {name.replace("_", "."): text for name, text in static.items()}
        told = by_name(describe_configs(request, image_with(), 1, given, brokers_expected=5).results[0])
        return [
            (told[name].value, told[name].config_source)
            for name in ("default.replication.factor", "offsets.topic.replication.factor")
        ]

    # Three of five brokers unless it is set; the offsets topic as the others.
    assert shown() == [("3", Source.DEFAULT), ("3", Source.DEFAULT)]
    assert shown(default_replication_factor="2") == [("2", Source.STATIC), ("2", Source.DEFAULT)]
    assert shown(offsets_topic_replication_factor="4") == [("3", Source.DEFAULT), ("4", Source.STATIC)]


def test_types_and_documentation_are_told() -> None:
    told = by_name(describe(image_with(), TOPIC_RESOURCE, "a", documentation=True))
    assert told["retention.ms"].config_type == 5
    assert told["cleanup.policy"].config_type == 7
    assert "deleted; -1: never" in (told["retention.ms"].documentation or "")
    assert "without effect" in (told["preallocate"].documentation or "")


@pytest.mark.parametrize(
    ("keys", "names"), [(["retention.ms", "nonsense"], {"retention.ms"}), (["x"], set())]
)
def test_only_the_settings_asked_for_are_told(keys: list[str], names: set[str]) -> None:
    assert by_name(describe(image_with(), TOPIC_RESOURCE, "a", keys)).keys() == names


@pytest.mark.parametrize("keys", [None, []])
def test_no_names_mean_all_settings(keys: list[str] | None) -> None:
    assert by_name(describe(image_with(), TOPIC_RESOURCE, "a", keys)).keys() == TOPIC.keys()


def test_creation_time_is_told_and_cannot_be_set() -> None:
    created = by_name(describe(image_with((TOPIC_RESOURCE, "a", CREATED, "99")), TOPIC_RESOURCE, "a"))[
        CREATED
    ]
    assert (created.value, created.read_only, created.config_source) == ("99", True, Source.DEFAULT)


@pytest.mark.parametrize(
    ("type", "name", "error"),
    [
        (TOPIC_RESOURCE, "missing", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (TOPIC_RESOURCE, "a/b", ErrorCode.INVALID_TOPIC_EXCEPTION),
        (BROKER_RESOURCE, "2", ErrorCode.INVALID_REQUEST),
        (BROKER_RESOURCE, "one", ErrorCode.INVALID_REQUEST),
        (8, "1", ErrorCode.INVALID_REQUEST),
        (16, "metrics", ErrorCode.INVALID_REQUEST),
        (32, "group", ErrorCode.INVALID_REQUEST),
        (0, "", ErrorCode.INVALID_REQUEST),
    ],
)
def test_what_has_no_settings_here_is_refused(type: int, name: str, error: ErrorCode) -> None:
    result = describe(image_with(), type, name)
    assert (result.error_code, result.configs) == (error, [])


def test_broker_is_described_with_what_it_implements_and_what_was_set() -> None:
    image = image_with((BROKER_RESOURCE, "1", "log.retention.ms", "7"))
    static = {"node.id": "1", "num.io.threads": "3", "num.partitions": "4"}
    told = by_name(describe(image, BROKER_RESOURCE, "1", static=static))
    implemented = {name for name, setting in BROKER.items() if setting.status is Status.IMPLEMENTED}
    assert told.keys() == implemented | {"num.io.threads"}
    assert (told["log.retention.ms"].value, told["log.retention.ms"].config_source) == ("7", Source.BROKER)
    assert (told["num.partitions"].value, told["num.partitions"].config_source) == ("4", Source.STATIC)
    assert (told["node.id"].value, told["node.id"].read_only) == ("1", True)
    assert not told["log.retention.ms"].read_only
    assert told["fetch.max.bytes"].config_source == Source.DEFAULT


def test_all_brokers_are_described_with_what_was_set_on_them_while_running() -> None:
    image = image_with(
        (BROKER_RESOURCE, "", "log.retention.ms", "7"), (BROKER_RESOURCE, "1", "log.roll.ms", "8")
    )
    told = by_name(describe(image, BROKER_RESOURCE, "", static={"num.partitions": "4"}))
    assert {name: (config.value, config.config_source) for name, config in told.items()} == {
        "log.retention.ms": ("7", Source.ALL_BROKERS)
    }


def test_topics_that_set_the_same_share_what_is_told() -> None:
    image = image_with((TOPIC_RESOURCE, "c", "retention.ms", "1"), topics="abc")
    asked = [
        DescribeConfigsResource(resource_type=TOPIC_RESOURCE, resource_name=name, configuration_keys=None)
        for name in "abc"
    ]
    first, second, third = describe_configs(DescribeConfigsRequest(resources=asked), image, 1, {}).results
    assert first.configs is second.configs
    assert first.configs is not third.configs


def test_answer_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "ENTRIES_MAX", 2 * len(TOPIC))
    asked = [
        DescribeConfigsResource(resource_type=TOPIC_RESOURCE, resource_name="a", configuration_keys=None)
        for _ in range(3)
    ]
    results = describe_configs(DescribeConfigsRequest(resources=asked), image_with(), 1, {}).results
    assert [result.error_code for result in results] == [0, 0, ErrorCode.POLICY_VIOLATION]


def test_secrets_are_described_without_their_values() -> None:
    static = {
        "ssl.key.password": "hunter2",
        "listener.name.tls.ssl.keystore.key": "-----BEGIN hunter2",
        "listener.name.tls.ssl.client.auth": "required",
    }
    request = DescribeConfigsRequest(
        resources=[DescribeConfigsResource(resource_type=BROKER_RESOURCE, resource_name="1")],
        include_synonyms=True,
        include_documentation=True,
    )
    response = describe_configs(request, Image(), 1, static)
    found = {config.name: config for config in response.results[0].configs}
    for name in ("ssl.key.password", "listener.name.tls.ssl.keystore.key"):
        assert (found[name].is_sensitive, found[name].value) == (True, None)
        assert [synonym.value for synonym in found[name].synonyms] == [None]
        assert found[name].config_source == Source.STATIC
    assert "hunter2" not in repr(response)
    assert found["listener.name.tls.ssl.client.auth"].value == "required"
    assert not found["listeners"].is_sensitive
