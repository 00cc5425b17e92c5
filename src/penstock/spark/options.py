"""The options of ``format("penstock")`` as a source: those of Spark's Kafka source, and a few of ours.

A job migrates by changing the format's name, so every option of Spark's Kafka source is accepted: implemented, or
without effect if it only tunes the Java consumer. Any other option is an error that suggests the nearest known one.
``load()`` parses options before Spark knows whether a batch or a stream is meant, so options that only one of them
takes are refused later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from penstock.model import TopicPartition
from penstock.spark.errors import SparkOptionError
from penstock.spark.option_values import (
    INT32_MAX,
    INT64_MAX,
    OF_JAVA_CLIENTS,
    SECURITY,
    Names,
    OptionValues,
    at_most,
)
from penstock.spark.ranges import Offsets, StreamOffset, from_json
from penstock.spark.reading import (
    CLIENT_ID,
    DEADLINE_MS,
    FETCH_BYTES_MAX,
    REQUEST_TIMEOUT_MS,
    ReadSettings,
)

Mode: TypeAlias = Literal["batch", "stream"]

NAMES = Names(
    of="source",
    meant=(
        "kafka.bootstrap.servers",
        "bootstrap",
        "subscribe",
        "subscribePattern",
        "assign",
        "startingOffsets",
        "startingTimestamp",
        "startingOffsetsByTimestamp",
        "startingOffsetsByTimestampStrategy",
        "endingOffsets",
        "endingTimestamp",
        "endingOffsetsByTimestamp",
        "failOnDataLoss",
        "includeHeaders",
        "maxOffsetsPerTrigger",
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
        "maxBytesPerTrigger",
        "minPartitions",
        "maxRecordsPerPartition",
        "groupId",
        "kafka.isolation.level",
        "kafka.client.id",
        "kafka.request.timeout.ms",
        "kafka.default.api.timeout.ms",
        "kafka.max.partition.fetch.bytes",
        *SECURITY,
    ),
    # They tune the Java consumer's polling, groups, caching and retries. There is no such consumer here.
    without_effect=(
        *OF_JAVA_CLIENTS,
        "kafkaConsumer.pollTimeoutMs",
        "fetchOffset.numRetries",
        "fetchOffset.retryIntervalMs",
        "groupIdPrefix",
        "kafka.group.id",
        "kafka.group.instance.id",
        "kafka.group.protocol",
        "kafka.group.remote.assignor",
        "kafka.fetch.min.bytes",
        "kafka.fetch.max.bytes",
        "kafka.fetch.max.wait.ms",
        "kafka.max.poll.records",
        "kafka.max.poll.interval.ms",
        "kafka.session.timeout.ms",
        "kafka.heartbeat.interval.ms",
        "kafka.partition.assignment.strategy",
        "kafka.auto.commit.interval.ms",
        "kafka.client.rack",
        "kafka.check.crcs",  # always checked
        "kafka.allow.auto.create.topics",
        "kafka.exclude.internal.topics",
    ),
    # Spark decides where a source reads.
    refused={
        "kafka.auto.offset.reset": "use startingOffsets",
        "kafka.key.deserializer": "keys arrive as bytes; cast the column",
        "kafka.value.deserializer": "values arrive as bytes; cast the column",
        "kafka.enable.auto.commit": "Spark keeps the offsets; groupId mirrors them into a consumer group",
        "kafka.interceptor.classes": "Java classes cannot run here",
        "topic": "it is for writing; choose what to read with subscribe, subscribePattern or assign",
        "path": "choose what to read with subscribe, subscribePattern or assign, and load() without a path",
        # A property of tables in Spark's catalog. The options of such a table never reach a Python source.
        "provider": (
            "a topic cannot be a table of Spark's catalog; use CREATE TEMPORARY VIEW ... USING penstock "
            "OPTIONS (...) instead of CREATE TABLE"
        ),
    },
)

# Without a unit these are milliseconds and bytes, as Spark reads them.
_TIME_UNITS_MS = {"": 1, "ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
TRIGGER_DELAY_MS_MAX = 15 * 60_000  # the default of Spark's Kafka source
# The brokers' internal topics are read only by name, never by a pattern.
INTERNAL_TOPICS = ("__consumer_offsets", "__transaction_state", "__share_group_state")


@dataclass(frozen=True, slots=True)
class Subscription:
    """What to read. Exactly one of the three is set."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: tuple[TopicPartition, ...] = ()

    @property
    def named_topics(self) -> tuple[str, ...] | None:
        """The topics to look up; None for all, from which the pattern selects."""
        if self.pattern is not None:
            return None
        return self.topics or tuple(dict.fromkeys(each.topic for each in self.assigned))


@dataclass(frozen=True, slots=True)
class Place:
    """Where to begin or end, as given by the user."""

    option: str  # its name, for messages
    kind: Literal["earliest", "latest", "offsets", "time", "times"]
    # By partition: offsets (-1 latest, -2 earliest) for "offsets", milliseconds since 1970 for "times".
    values: Offsets = field(default_factory=dict)
    # The ids of the offsets' topics, if given: offsets copied from a checkpoint have them.
    topic_ids: dict[str, bytes] = field(default_factory=dict)
    time_ms: int = 0  # for "time"
    # Whether a time after every record means the end of the log; otherwise it is an error.
    is_late_latest: bool = True

    @property
    def moves(self) -> bool:
        """Whether it may resolve to a later offset the next time."""
        if self.kind in ("time", "times"):
            return self.is_late_latest
        return self.kind == "latest" or -1 in self.values.values()


@dataclass(frozen=True, slots=True)
class SourceOptions:
    read: ReadSettings
    subscription: Subscription
    starting: Place
    ending: Place
    partitions_min: int | None = None
    records_max: int | None = None
    # Of streams only
    offsets_max: int | None = None
    offsets_min: int | None = None
    trigger_delay_ms_max: int = TRIGGER_DELAY_MS_MAX
    bytes_max: int | None = None
    group: str | None = None


def parse(options: Mapping[str, str], mode: Mode) -> SourceOptions:
    """Raises SparkOptionError for the first error."""
    values = OptionValues(options, NAMES)
    parsed = _parse(values, mode)
    if mode == "batch":
        _check_batch(parsed, values)
    else:
        _check_stream(parsed, values)
    return parsed


def check(options: Mapping[str, str]) -> SourceOptions:
    """As ``parse``, when it is not known yet whether a batch or a stream is meant."""
    return _parse(OptionValues(options, NAMES), "batch")


_DEFAULT_START: dict[Mode, Literal["earliest", "latest"]] = {"batch": "earliest", "stream": "latest"}


def _parse(values: OptionValues, mode: Mode) -> SourceOptions:
    return SourceOptions(
        read=_read_settings(values),
        subscription=_subscription(values),
        starting=_place(values, "starting", Place("startingOffsets", _DEFAULT_START[mode])),
        ending=_place(values, "ending", Place("endingOffsets", "latest")),
        partitions_min=values.positive("minPartitions"),
        records_max=values.positive("maxRecordsPerPartition"),
        offsets_max=values.positive("maxOffsetsPerTrigger"),
        offsets_min=values.positive("minOffsetsPerTrigger"),
        trigger_delay_ms_max=_duration_ms(values, "maxTriggerDelay", TRIGGER_DELAY_MS_MAX),
        bytes_max=_size(values, "maxBytesPerTrigger"),
        group=_group(values),
    )


# What to read


def _subscription(values: OptionValues) -> Subscription:
    said = [name for name in ("subscribe", "subscribePattern", "assign") if name in values]
    if len(said) != 1:
        found = f"both {said[0]} and {said[1]}" if said else "none of them"
        raise SparkOptionError(f"give exactly one of subscribe, subscribePattern and assign; found {found}")
    name = said[0]
    text = values[name]
    if name == "subscribe":
        topics = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        if not topics:
            raise SparkOptionError("subscribe is empty; give one or more topics, separated by commas")
        return Subscription(topics=topics)
    if name == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise SparkOptionError(
                f"subscribePattern {text!r} is not a regular expression: {error}"
            ) from None
        if not text:
            raise SparkOptionError("subscribePattern is empty; give a regular expression for topic names")
        return Subscription(pattern=text)
    return Subscription(assigned=_assigned(text))


def _assigned(text: str) -> tuple[TopicPartition, ...]:
    wanted = f'assign needs JSON like {{"topic": [0, 1]}}, not {text!r}'
    nested = _json_object(text, wanted)
    partitions: list[TopicPartition] = []
    for topic, numbers in nested.items():
        if not isinstance(numbers, list) or not all(type(each) is int and each >= 0 for each in numbers):
            raise SparkOptionError(wanted)
        partitions += [TopicPartition(topic, number) for number in numbers]
    if not partitions:
        raise SparkOptionError(wanted)
    return tuple(sorted(set(partitions)))


# Where to begin and to end


def _place(values: OptionValues, side: Literal["starting", "ending"], default: Place) -> Place:
    """With the precedence of Spark's Kafka source: one time for all, times, then offsets."""
    is_late_latest = side == "ending" or _strategy_is_latest(values)
    one_time, times, offsets = f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"
    if one_time in values:
        return Place(one_time, "time", time_ms=_time_ms(values, one_time), is_late_latest=is_late_latest)
    if times in values:
        times_ms = _offsets_json(values[times], times, '{"topic": {"0": 1700000000000}}').offsets
        if min(times_ms.values()) < 0:
            raise SparkOptionError(f"{times} needs times in milliseconds since 1970, none below 0")
        return Place(times, "times", times_ms, is_late_latest=is_late_latest)
    text = values.get(offsets)
    if text is None:
        return default
    if text.lower() == "earliest":
        return Place(offsets, "earliest")
    if text.lower() == "latest":
        return Place(offsets, "latest")
    parsed = _offsets_json(text, offsets, '{"topic": {"0": 23, "1": -1}} (-2 earliest, -1 latest)')
    if min(parsed.offsets.values()) < -2:
        raise SparkOptionError(f"{offsets} has an offset below -2; -2 is earliest, -1 is latest")
    return Place(offsets, "offsets", parsed.offsets, parsed.topic_ids)


def _strategy_is_latest(values: OptionValues) -> bool:
    name = "startingOffsetsByTimestampStrategy"
    strategy = values.text(name, "error").lower()
    if strategy not in {"error", "latest"}:
        raise SparkOptionError(f"{name} must be error or latest, not {strategy!r}")
    return strategy == "latest"


def _offsets_json(text: str, name: str, example: str) -> StreamOffset:
    words = "" if name.endswith("ByTimestamp") else "earliest, latest or "
    wanted = f"{name} needs {words}JSON like {example}"
    nested = _json_object(text, f"{wanted}, not {text!r}")
    try:
        found = from_json(nested)
    except ValueError as error:
        raise SparkOptionError(f"{wanted}: {error}") from None
    if not found.offsets:
        raise SparkOptionError(f"{wanted}; it has no partition")
    return found


def _check_batch(parsed: SourceOptions, values: OptionValues) -> None:
    starting, ending = parsed.starting, parsed.ending
    if starting.kind == "latest" or (starting.kind == "offsets" and -1 in starting.values.values()):
        raise SparkOptionError("startingOffsets cannot be latest (-1) in a batch read: it would read nothing")
    if ending.kind == "earliest" or (ending.kind == "offsets" and -2 in ending.values.values()):
        raise SparkOptionError("endingOffsets cannot be earliest (-2): the read would end before it begins")
    if "groupId" in values:
        raise SparkOptionError("groupId mirrors a stream's progress; omit it in a batch read")


def _check_stream(parsed: SourceOptions, values: OptionValues) -> None:
    for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
        if name in values:
            raise SparkOptionError(f"{name} is for batch reads: a stream has no end; omit it")
    smallest, largest = parsed.offsets_min, parsed.offsets_max
    if smallest is not None and largest is not None and smallest > largest:
        raise SparkOptionError(f"minOffsetsPerTrigger {smallest} is above maxOffsetsPerTrigger {largest}")


# How to read


def _read_settings(values: OptionValues) -> ReadSettings:
    isolation = values.text("kafka.isolation.level", "read_uncommitted").lower()
    if isolation not in {"read_committed", "read_uncommitted"}:
        raise SparkOptionError(
            f"kafka.isolation.level must be read_committed or read_uncommitted, not {isolation!r}"
        )
    return ReadSettings(
        bootstrap=values.bootstrap(),
        security=values.security(),
        headers=values.flag("includeHeaders", False),
        read_committed=isolation == "read_committed",
        fail_on_data_loss=values.flag("failOnDataLoss", True),
        client_id=values.client_id(CLIENT_ID),
        request_timeout_ms=values.positive("kafka.request.timeout.ms", INT32_MAX) or REQUEST_TIMEOUT_MS,
        deadline_ms=values.positive("kafka.default.api.timeout.ms", INT32_MAX) or DEADLINE_MS,
        fetch_bytes_max=values.positive("kafka.max.partition.fetch.bytes", INT32_MAX) or FETCH_BYTES_MAX,
    )


def _group(values: OptionValues) -> str | None:
    group = values.get("groupId")
    if group == "":
        raise SparkOptionError("groupId is empty; give a consumer group or omit it")
    return group


# Values


def _time_ms(values: OptionValues, name: str) -> int:
    text = values[name]
    if not text.isdecimal():
        raise SparkOptionError(f"{name} needs milliseconds since 1970, not {text!r}")
    return at_most(name, int(text), INT64_MAX)


def _duration_ms(values: OptionValues, name: str, default: int) -> int:
    text = values.get(name)
    if text is None:
        return default
    found = re.fullmatch(r"(\d+)\s*(|ms|s|m|min|h|d)", text.lower())
    if found is None:
        raise SparkOptionError(f"{name} needs a time such as 30s, 15m or 1h, not {text!r}")
    return int(found[1]) * _TIME_UNITS_MS[found[2]]


def _size(values: OptionValues, name: str) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)b?", text.lower())
    if found is None or int(found[1]) == 0:
        raise SparkOptionError(f"{name} needs bytes, such as 134217728, 128m or 1g, not {text!r}")
    return at_most(name, int(found[1]) * _SIZE_UNITS[found[2]], INT64_MAX)


def _json_object(text: str, wanted: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError:
        raise SparkOptionError(wanted) from None
    if not isinstance(parsed, dict):
        raise SparkOptionError(wanted)
    return parsed
