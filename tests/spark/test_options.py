"""Options of the source: what Spark's Kafka source takes is taken, and a mistake gets one line."""

from __future__ import annotations

import pickle

import pytest

from penstock.model import TopicPartition
from penstock.spark import sink
from penstock.spark.errors import SparkOptionError
from penstock.spark.options import NAMES, Mode, check, parse

BASE = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "events"}
SSL = {"kafka.security.protocol": "SSL"}


def test_defaults_are_those_of_sparks_kafka_source() -> None:
    batch, stream = parse(BASE, "batch"), parse(BASE, "stream")
    assert (batch.starting.kind, batch.ending.kind) == ("earliest", "latest")
    assert stream.starting.kind == "latest"
    assert stream.read.fail_on_data_loss
    assert not stream.read.headers
    assert not stream.read.read_committed
    assert stream.trigger_delay_ms_max == 15 * 60 * 1000
    assert (stream.offsets_max, stream.bytes_max, stream.partitions_min, stream.group) == (None,) * 4


def test_names_are_known_in_any_case() -> None:
    shouted = parse(
        {name.upper(): value for name, value in BASE.items()} | {"FAILONDATALOSS": "FALSE"}, "batch"
    )
    assert not shouted.read.fail_on_data_loss
    assert shouted.subscription.topics == ("events",)
    assert parse(BASE | {"INCLUDEHEADERS": "True"}, "batch").read.headers


def test_what_only_a_stream_or_only_a_batch_takes_passes_the_first_check() -> None:
    # Whoever starts a stream is told what is wrong with it, and not that it would be no batch.
    check(BASE | {"groupId": "g", "maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"})
    assert check(BASE | {"startingOffsets": "latest"}).starting.kind == "latest"
    assert check(BASE | {"endingTimestamp": "5"}).ending.kind == "time"
    with pytest.raises(SparkOptionError, match="maxOffsetsPerTrigger must be an integer"):
        check(BASE | {"maxOffsetsPerTrigger": "many"})


def test_every_option_arrives() -> None:
    options = parse(
        {
            "bootstrap": "a:1,b:2",
            "assign": '{"t": [1, 0], "u": [0]}',
            "startingOffsets": '{"t": {"0": -2, "1": 5}, "u": {"0": -1}}',
            "failOnDataLoss": "false",
            "includeHeaders": "true",
            "maxOffsetsPerTrigger": "100",
            "minOffsetsPerTrigger": "10",
            "maxTriggerDelay": "30s",
            "maxBytesPerTrigger": "128m",
            "minPartitions": "6",
            "maxRecordsPerPartition": "50",
            "groupId": "spark",
            "kafka.isolation.level": "read_committed",
            "kafka.client.id": "me",
            "kafka.request.timeout.ms": "1000",
            "kafka.default.api.timeout.ms": "2000",
            "kafka.max.partition.fetch.bytes": "4096",
            "kafka.security.protocol": "PLAINTEXT",
        },
        "stream",
    )
    t0, t1, u0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)
    assert options.subscription.assigned == (t0, t1, u0)
    assert options.subscription.named_topics == ("t", "u")
    assert options.starting.values == {t0: -2, t1: 5, u0: -1}
    assert (options.offsets_max, options.offsets_min, options.trigger_delay_ms_max) == (100, 10, 30_000)
    assert (options.bytes_max, options.partitions_min, options.records_max) == (128 * 2**20, 6, 50)
    assert options.group == "spark"
    read = options.read
    assert (read.bootstrap, read.headers, read.read_committed) == ("a:1,b:2", True, True)
    assert (read.fail_on_data_loss, read.client_id) == (False, "me")
    assert (read.request_timeout_ms, read.deadline_ms, read.fetch_bytes_max) == (1000, 2000, 4096)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("text", "ms"),
    [("900000", 900_000), ("500ms", 500), ("30 s", 30_000), ("2min", 120_000), ("1H", 3_600_000)],
)
def test_a_delay_is_written_as_spark_writes_times(text: str, ms: int) -> None:
    assert parse(BASE | {"maxTriggerDelay": text}, "stream").trigger_delay_ms_max == ms


def test_times_win_over_offsets_as_in_sparks_kafka_source() -> None:
    said = BASE | {
        "startingOffsets": "earliest",
        "startingOffsetsByTimestamp": '{"events": {"0": 5}}',
        "endingTimestamp": "7",
    }
    options = parse(said, "batch")
    assert (options.starting.kind, options.ending.kind, options.ending.time_ms) == ("times", "time", 7)
    assert not options.starting.is_late_latest
    assert options.ending.is_late_latest
    options = parse(
        said | {"startingTimestamp": "3", "startingOffsetsByTimestampStrategy": "latest"}, "batch"
    )
    assert (options.starting.kind, options.starting.time_ms) == ("time", 3)
    assert options.starting.is_late_latest


@pytest.mark.parametrize("name", NAMES.without_effect)
def test_what_tunes_the_java_consumer_is_accepted(name: str) -> None:
    assert parse(BASE | {name: "1"}, "batch") == parse(BASE, "batch")


@pytest.mark.parametrize("name", NAMES.refused)
def test_what_contradicts_a_source_is_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(SparkOptionError, match=r"is not supported: ."):
        parse(BASE | {name: "1"}, "batch")


def test_no_option_is_known_twice() -> None:
    for known in (NAMES, sink.NAMES):
        names = [name.lower() for name in (*known.meant, *known.without_effect, *known.refused)]
        assert len(names) == len(set(names))


STREAM, BATCH = "stream", "batch"


@pytest.mark.parametrize(
    ("mode", "changes", "message"),
    [
        (
            BATCH,
            {"startingOffset": "earliest"},
            "unknown option startingoffset of the source; did you mean startingOffsets?",
        ),
        (BATCH, {"subscribepatern": "x"}, "did you mean subscribePattern?"),
        (BATCH, {"kafka.isolation": "x"}, "did you mean kafka.isolation.level?"),
        (BATCH, {"kafka.bootstrap.servers": None}, "kafka.bootstrap.servers is missing"),
        (BATCH, {"kafka.bootstrap.servers": "localhost"}, "write HOST:PORT"),
        (BATCH, {"kafka.bootstrap.servers": "a:1,b:99999"}, "'b:99999' is not a port"),
        (BATCH, {"kafka.bootstrap.servers": "::1:9092"}, "write an IPv6 address as [::1]:9092"),
        (BATCH, {"kafka.bootstrap.servers": "SSL://a:1"}, "write a:1, and set security.protocol to ssl"),
        (BATCH, {"kafka.client.id": "x" * 40_000}, "kafka.client.id has more than 32767 bytes"),
        (BATCH, {"bootstrap": "other:1"}, "differ"),
        (BATCH, {"subscribe": None}, "exactly one of subscribe, subscribePattern and assign; found none"),
        (BATCH, {"assign": '{"t": [0]}'}, "found both subscribe and assign"),
        (BATCH, {"subscribe": " , "}, "subscribe is empty"),
        (BATCH, {"subscribe": None, "subscribePattern": "a("}, "not a regular expression"),
        (BATCH, {"subscribe": None, "subscribePattern": ""}, "subscribePattern is empty"),
        (BATCH, {"subscribe": None, "assign": "t"}, "assign needs JSON like"),
        (BATCH, {"subscribe": None, "assign": '{"t": 0}'}, "assign needs JSON like"),
        (BATCH, {"subscribe": None, "assign": '{"t": [-1]}'}, "assign needs JSON like"),
        (BATCH, {"subscribe": None, "assign": "{}"}, "assign needs JSON like"),
        (BATCH, {"startingOffsets": "begin"}, "startingOffsets needs earliest, latest or JSON like"),
        (BATCH, {"startingOffsets": '{"t": {"0": "1"}}'}, "t-0 needs a whole number, not '1'"),
        (BATCH, {"startingOffsets": '{"t": {"0": -3}}'}, "below -2"),
        (BATCH, {"startingOffsets": "{}"}, "it has no partition"),
        (BATCH, {"startingOffsets": "latest"}, "cannot be latest"),
        (BATCH, {"startingOffsets": '{"t": {"0": -1}}'}, "cannot be latest"),
        (BATCH, {"endingOffsets": "earliest"}, "cannot be earliest"),
        (BATCH, {"endingOffsets": '{"t": {"0": -2}}'}, "cannot be earliest"),
        (BATCH, {"startingTimestamp": "yesterday"}, "milliseconds since 1970, not 'yesterday'"),
        (BATCH, {"startingOffsetsByTimestamp": '{"t": {"0": -2}}'}, "none below 0"),
        (BATCH, {"endingOffsetsByTimestamp": "latest"}, "endingOffsetsByTimestamp needs JSON like"),
        (BATCH, {"startingOffsetsByTimestampStrategy": "first"}, "must be error or latest, not 'first'"),
        (BATCH, {"groupId": "g"}, "omit it in a batch read"),
        (STREAM, {"groupId": ""}, "groupId is empty"),
        (STREAM, {"endingOffsets": "latest"}, "a stream has no end"),
        (STREAM, {"endingTimestamp": "5"}, "a stream has no end"),
        (STREAM, {"maxOffsetsPerTrigger": "0"}, "integer above 0, not '0'"),
        (
            STREAM,
            {"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"},
            "6 is above maxOffsetsPerTrigger 5",
        ),
        (STREAM, {"maxTriggerDelay": "soon"}, "such as 30s, 15m or 1h, not 'soon'"),
        (STREAM, {"maxBytesPerTrigger": "much"}, "needs bytes, such as 134217728, 128m or 1g"),
        (BATCH, {"minPartitions": "-2"}, "minPartitions must be an integer above 0"),
        (BATCH, {"maxRecordsPerPartition": "1.5"}, "maxRecordsPerPartition must be an integer above 0"),
        (BATCH, {"failOnDataLoss": "maybe"}, "failOnDataLoss must be true or false, not 'maybe'"),
        (BATCH, {"includeHeaders": "1"}, "includeHeaders must be true or false, not '1'"),
        (BATCH, {"kafka.isolation.level": "serializable"}, "must be read_committed or read_uncommitted"),
        (
            BATCH,
            {"kafka.security.protocol": "TLS"},
            "kafka.security.protocol must be one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL",
        ),
        (
            BATCH,
            {"kafka.security.protocol": "SASL_SSL"},
            "kafka.sasl.mechanism is missing; use SCRAM-SHA-512",
        ),
        (
            BATCH,
            {"kafka.sasl.mechanism": "PLAIN"},
            "kafka.sasl.mechanism needs kafka.security.protocol SASL_SSL",
        ),
        (BATCH, {"kafka.sasl.kerberos.service.name": "kafka"}, "is not supported: use SCRAM or PLAIN"),
        (BATCH, {"kafka.sasl.password": "x"}, "setting of librdkafka; use kafka.sasl.jaas.config"),
        (BATCH, {"kafka.sasl.login.class": "x"}, "classes of Java are not loaded"),
        (BATCH, {"kafka.ssl.truststore.location": "x"}, "needs kafka.security.protocol SSL"),
        (
            BATCH,
            {**SSL, "kafka.ssl.truststore.location": "/none"},
            "kafka.ssl.truststore.location /none: No such file",
        ),
        (
            BATCH,
            {**SSL, "kafka.ssl.truststore.type": "JKS"},
            "kafka.ssl.truststore.type=JKS is not supported, use PEM",
        ),
        (
            BATCH,
            {**SSL, "kafka.ssl.truststore.certificates": "hunter2"},
            "kafka.ssl.truststore.certificates: not PEM",
        ),
        (BATCH, {**SSL, "kafka.ssl.keystore.key": "hunter2"}, "put key and certificates into a file"),
        (
            BATCH,
            {**SSL, "kafka.ssl.keystore.password": "hunter2"},
            "only its key has: kafka.ssl.key.password",
        ),
        (BATCH, {**SSL, "kafka.ssl.trustore.location": "x"}, "did you mean kafka.ssl.truststore.location?"),
        (BATCH, {"kafka.max.partition.fetch.bytes": "big"}, "must be an integer above 0, not 'big'"),
        (BATCH, {"option.subscribe": "t", "provider": "penstock"}, "use CREATE TEMPORARY VIEW"),
        # Numbers that no field of the protocol, and no number of Java's, holds.
        (BATCH, {"kafka.max.partition.fetch.bytes": str(2**31)}, f"fetch.bytes needs at most {2**31 - 1}"),
        (BATCH, {"kafka.request.timeout.ms": "9" * 20}, f"timeout.ms needs at most {2**31 - 1}"),
        (STREAM, {"maxOffsetsPerTrigger": str(2**63)}, f"maxOffsetsPerTrigger needs at most {2**63 - 1}"),
        (BATCH, {"startingTimestamp": str(2**63)}, f"startingTimestamp needs at most {2**63 - 1}"),
        (
            BATCH,
            {"startingOffsetsByTimestamp": f'{{"t": {{"0": {2**63}}}}}'},
            "t-0 needs a number of 64 bits",
        ),
        (BATCH, {"startingOffsets": f'{{"t": {{"0": {2**63}}}}}'}, "t-0 needs a number of 64 bits"),
    ],
)
def test_a_mistake_gets_one_clear_line(mode: Mode, changes: dict[str, str | None], message: str) -> None:
    options = {name: value for name, value in (BASE | changes).items() if value is not None}
    with pytest.raises(SparkOptionError) as caught:
        parse(options, mode)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
