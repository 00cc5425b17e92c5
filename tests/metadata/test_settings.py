"""Settings: Kafka's names, types, limits and defaults, and what is said about those without meaning."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.metadata import broker_settings
from penstock.metadata.broker_settings import BROKER, OPTIONS
from penstock.metadata.settings import (
    DOUBLE_MAX,
    INT_MAX,
    LONG_MAX,
    InvalidSetting,
    Kind,
    Setting,
    Status,
    check,
    documentation,
    format_value,
    parse,
)
from penstock.metadata.topic_settings import SYNONYMS, TOPIC

TABLE = Path(__file__).with_name("kafka_settings.tsv")

# Every default that differs from Kafka's, so that a new departure has to be written down here.
OTHER_DEFAULTS = {
    "broker.heartbeat.interval.ms": "3000",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "leader.imbalance.check.interval.seconds": "30",
    "listener.security.protocol.map": "null",
    "listeners": "PLAINTEXT://127.0.0.1:9092",
    "offsets.topic.replication.factor": "1",
    "queued.max.request.bytes": str(256 << 20),
    "ssl.cipher.suites": "null",
    "ssl.keystore.type": "PEM",
    # There is no Kerberos.
    "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
    "ssl.truststore.type": "PEM",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.replication.factor": "1",
}
OTHER_LIMITS = {
    # Kafka 4 asks for a mebibyte.
    "segment.bytes",
    "log.segment.bytes",
    # Kafka asks for 1, but they become a segment.bytes.
    "offsets.topic.segment.bytes",
    "transaction.state.log.segment.bytes",
    # Kafka allows 0, which would never rest.
    "log.flush.offset.checkpoint.interval.ms",
    "log.cleaner.backoff.ms",
    # Kafka excludes 0; it has no meaning here anyway.
    "compression.gzip.level",
    # Kafka allows any, but a connection that failed to log in must not stay long.
    "connection.failed.authentication.delay.ms",
}
# Kafka changes listeners, their TLS and their SASL while it runs; here only the files that the settings name are
# read again.
FIXED_PREFIXES = ("listener", "sasl.", "ssl.")
NUMBERS = (Kind.SHORT, Kind.INT, Kind.LONG, Kind.DOUBLE)


class KafkaSetting(NamedTuple):
    name: str
    kind: str
    default: str
    limits: str
    is_dynamic: bool


def kafka_settings(owner: str) -> list[KafkaSetting]:
    rows = [line.split("\t") for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return [
        KafkaSetting(name, kind, default, limits, change == "dynamic")
        for whose, name, kind, default, limits, change in rows
        if whose == owner
    ]


@pytest.mark.parametrize("kafka", kafka_settings("topic"), ids=lambda kafka: kafka.name)
def test_topic_setting_is_as_in_kafka(kafka: KafkaSetting) -> None:
    ours = TOPIC[kafka.name]
    assert (ours.kind.name, ours.default) == (kafka.kind, kafka.default)
    assert_same_limits(ours, kafka)
    if ours.choices:
        assert set(ours.choices) == set(kafka.limits.strip("[]").split(", "))


def test_no_topic_setting_is_ours_alone() -> None:
    assert TOPIC.keys() == {kafka.name for kafka in kafka_settings("topic")}


@pytest.mark.parametrize("kafka", kafka_settings("broker"), ids=lambda kafka: kafka.name)
def test_broker_setting_of_kafka_is_known(kafka: KafkaSetting) -> None:
    ours = broker_settings.find(kafka.name)
    assert ours is not None
    if ours.status is not Status.IMPLEMENTED or kafka.name in OPTIONS:
        return
    expected = OTHER_DEFAULTS.get(kafka.name, kafka.default)
    assert (ours.kind.name, ours.default or "null") == (kafka.kind, expected or "null")
    # What is implemented and can be changed in Kafka while it runs can be changed here.
    assert ours.is_dynamic == (kafka.is_dynamic and not kafka.name.startswith(FIXED_PREFIXES))
    assert_same_limits(ours, kafka)


def test_settings_of_our_own_say_so_in_their_names() -> None:
    # In Kafka they exist only while they are set, so they are not in its table of settings.
    only_while_running = {"follower.replication.throttled.rate", "leader.replication.throttled.rate"}
    # In Kafka they belong to the authorizer.
    of_authorizer = {"super.users", "allow.everyone.if.no.acl.found"}
    # In Kafka it is a property of the JVM.
    of_jvm = {"sasl.oauthbearer.allowed.urls"}
    others = only_while_running | of_authorizer | of_jvm
    ours = BROKER.keys() - {kafka.name for kafka in kafka_settings("broker")} - others
    assert ours == {
        "penstock.durability",
        "penstock.internal.secret.file",
        "penstock.internal.security",
        "penstock.node.principals",
        "penstock.rebalance.delay.ms",
        "penstock.rebalance.enable",
        "penstock.rebalance.partitions.max",
        "penstock.replica.rebuild.delay.ms",
    }


def assert_same_limits(ours: Setting, kafka: KafkaSetting) -> None:
    """Where Kafka states limits, ours are the same; where it states none, it may check them in its code."""
    if ours.kind in NUMBERS and kafka.limits != "null" and kafka.name not in OTHER_LIMITS:
        low, _, high = kafka.limits.strip("[]").partition(",...")
        assert (ours.low, ours.high) == (float(low), float(high[1:]) if high else None)


@pytest.mark.parametrize("setting", [*TOPIC.values(), *BROKER.values()], ids=lambda setting: setting.name)
def test_default_is_a_value_the_setting_may_have(setting: Setting) -> None:
    if setting.default is not None:
        check(setting, setting.default)
        assert format_value(parse(setting, setting.default)) == setting.default


@pytest.mark.parametrize("setting", [*TOPIC.values(), *BROKER.values()], ids=lambda setting: setting.name)
def test_every_setting_is_documented_and_says_why_it_does_nothing(setting: Setting) -> None:
    assert documentation(setting).endswith(".")
    assert "\n" not in documentation(setting)
    assert (setting.status is Status.IMPLEMENTED) == (not setting.reason)


def test_every_synonym_of_a_topic_setting_is_a_broker_setting() -> None:
    for name, synonyms in SYNONYMS.items():
        assert name in TOPIC
        for synonym in synonyms:
            default = BROKER[synonym.name].default
            if default is not None:
                assert synonym.convert(default) == TOPIC[name].default


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Kind.BOOLEAN, "TRUE", True),
        (Kind.BOOLEAN, " false ", False),
        (Kind.INT, " +7 ", 7),
        (Kind.INT, "-2147483648", -(2**31)),
        (Kind.LONG, "9223372036854775807", LONG_MAX),
        (Kind.LONG, "00000000000000000000000000007", 7),
        (Kind.SHORT, "-32768", -(2**15)),
        (Kind.DOUBLE, "1e-1", 0.1),
        (Kind.DOUBLE, " .5 ", 0.5),
        (Kind.STRING, "  a b ", "a b"),
        (Kind.LIST, " a, b ,,a", ("a", "b")),
        (Kind.LIST, "", ()),
    ],
)
def test_text_is_read_as_kafka_reads_it(kind: Kind, text: str, value: object) -> None:
    assert parse(Setting("a.setting", kind, None, ""), text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((Kind.BOOLEAN, text) for text in ("yes", "1", "")),
        *((Kind.INT, text) for text in ("", "-", "1_000", "1e3", "0x10", "1.0", "2147483648", "\u0663")),
        *((Kind.LONG, text) for text in ("9223372036854775808", "-9223372036854775809", "9" * 5000)),
        (Kind.SHORT, "32768"),
        *((Kind.DOUBLE, text) for text in ("", "nan", "1_0", "half")),
    ],
)
def test_text_that_is_no_value_of_its_type_is_refused(kind: Kind, text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^a\.setting=") as caught:
        parse(Setting("a.setting", kind, None, ""), text)
    assert len(str(caught.value)) < 200


def test_numbers_outside_the_limits_are_refused() -> None:
    setting = Setting("a.setting", Kind.INT, "5", "", low=1, high=9)
    assert [parse(setting, text) for text in ("1", "9")] == [1, 9]
    with pytest.raises(InvalidSetting, match="at least 1"):
        parse(setting, "0")
    with pytest.raises(InvalidSetting, match="at most 9"):
        parse(setting, "10")


def test_words_that_are_no_choice_are_refused_with_the_choices() -> None:
    with pytest.raises(InvalidSetting, match="CreateTime, LogAppendTime"):
        parse(TOPIC["message.timestamp.type"], "createtime")
    with pytest.raises(InvalidSetting, match="compact, delete"):
        parse(TOPIC["cleanup.policy"], "delete,shred")


@pytest.mark.parametrize("codec", ["zstd", "lz4", "snappy", "gzip", "uncompressed"])
def test_broker_side_compression_is_refused_with_the_reason(codec: str) -> None:
    check(TOPIC["compression.type"], "producer")
    with pytest.raises(InvalidSetting, match="as the producer compressed them"):
        check(TOPIC["compression.type"], codec)


# As Kafka 4.3.1 reads them.
@pytest.mark.parametrize(
    ("text", "policies"),
    [
        (" delete ", ("delete",)),
        ("compact", ("compact",)),
        (" compact , delete", ("compact", "delete")),
        ("delete,compact", ("delete", "compact")),
        ("compact,compact", ("compact",)),
        ("", ()),
    ],
)
def test_policies_are_any_of_compact_and_delete(text: str, policies: tuple[str, ...]) -> None:
    check(TOPIC["cleanup.policy"], text)
    assert parse(TOPIC["cleanup.policy"], text) == policies


@pytest.mark.parametrize("text", [",", "compact,", ",delete", "compact,,delete"])
def test_a_list_of_choices_has_no_empty_elements(text: str) -> None:
    with pytest.raises(InvalidSetting, match="must not have empty elements"):
        check(TOPIC["cleanup.policy"], text)


def test_large_numbers_are_shown_as_java_shows_them() -> None:
    assert format_value(DOUBLE_MAX) == "1.7976931348623157E308"
    assert [format_value(number) for number in (0.5, 1.5e-7)] == ["0.5", "1.5E-07"]


def test_refused_secrets_are_not_repeated() -> None:
    setting = broker_settings.find("ssl.keystore.password")
    assert setting is not None
    with pytest.raises(InvalidSetting) as caught:
        check(setting, "hunter2")
    assert "hunter2" not in str(caught.value)


def test_int_max_is_javas() -> None:
    assert parse(BROKER["max.connections"], str(INT_MAX)) == INT_MAX
