"""`penstock produce`: send lines as records.

A record with a key goes to the Java client's partition (murmur2 of the key), so that tools and services in every
language agree; librdkafka's default is another hash. Records without a key go round-robin from a random
partition: librdkafka would stick to one partition for a while, which is cheaper for a service but surprising after
typing three lines.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient

from penstock.cli import client
from penstock.cli.client import CONNECT_TIMEOUT_S, RETRY_INTERVAL_S
from penstock.cli.configs import setting
from penstock.cli.connection import Brokers
from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.numbers import refuse_missing
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json, Topic
from penstock.cli.output import count_text, show_json, show_table

if TYPE_CHECKING:
    from penstock.cli.drawing import Bar

app = typer.Typer(add_completion=False)

BATCH_BYTES = 65_536
LINGER_MS = 5
# How long a record may wait for its acknowledgement, retries included.
DELIVERY_TIMEOUT_MS = 30_000
# The topic limits the size of records; this keeps the client's own limit out of the way.
RECORD_BYTES_MAX = 100 * 1024 * 1024
# Records between two polls for acknowledgements.
POLL_EVERY = 1_000
# A topic that is created on first produce appears a moment later.
TOPIC_TIMEOUT_S = 3.0
PASSING = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE))

INTERRUPTED = 130


class Compression(StrEnum):
    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


class Acks(StrEnum):
    NONE = "0"
    LEADER = "1"
    ALL = "all"


class Undelivered(NamedTuple):
    # Line number of the input, from 1, counted over all files.
    line: int
    # Key and value.
    size_bytes: int
    error: KafkaError


class Sending:
    """Passes records to librdkafka and counts the results."""

    def __init__(self, producer: Producer, topic: str, partition_count: int) -> None:
        self._producer = producer
        self._topic = topic
        self._partition_count = partition_count
        self._next = random.randrange(partition_count)
        self.acknowledged = 0
        self.failed = 0
        self.first_failure: Undelivered | None = None
        # Partition -> (first offset, last offset, count). Offsets are -1 with acks=0.
        self.partitions: dict[int, tuple[int, int, int]] = {}

    def send(
        self, line: int, key: bytes | None, value: bytes | None, headers: Any, partition: int | None
    ) -> None:
        if partition is None and key is None:
            partition = self._next
            self._next = (partition + 1) % self._partition_count
        while True:
            try:
                self._producer.produce(
                    self._topic,
                    value,
                    key,
                    -1 if partition is None else partition,
                    on_delivery=partial(self._delivered, line),
                    headers=headers,
                )
                return
            except BufferError:  # the queue is full: wait until some are acknowledged
                client.collect(self._producer, 1)

    def _delivered(self, line: int, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failed += 1
            if self.first_failure is None:
                size = sum(len(part) for part in (message.key(), message.value()) if part is not None)
                self.first_failure = Undelivered(line, size, error)
            return
        self.acknowledged += 1
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        offset = -1 if offset is None else offset
        first, last, count = self.partitions.get(partition, (offset, offset, 0))
        self.partitions[partition] = (min(first, offset), max(last, offset), count + 1)


@app.command()
def produce(
    topic: Topic,
    *,
    values: Annotated[
        list[str] | None, typer.Option("--value", "-v", metavar="TEXT", help="A record's value. Repeatable.")
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option("--file", "-f", metavar="FILE", help="A file with one record per line. Repeatable."),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="KEY", help="The key of every record.")
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(
            "--key-separator", "-K", metavar="TEXT", help="Separates key and value in a line; \\t is a tab."
        ),
    ] = None,
    headers: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header of every record. Repeatable."),
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, metavar="N", help="Send to this partition.")
    ] = None,
    compression: Annotated[Compression, typer.Option("--compression", "-z")] = Compression.NONE,
    acks: Annotated[
        Acks, typer.Option("--acks", help="Wait for no one (0), the leader (1), or all in-sync replicas.")
    ] = Acks.ALL,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> int:
    """Produce records to a topic: one per line of standard input or --file, or one per --value.

    With --acks all, the default, the producer is idempotent: retries make no duplicates.
    """
    if values and files:
        raise WrongUsage("--value and --file cannot be used together; use one of them, or standard input")
    if key is not None and key_separator is not None:
        raise WrongUsage("--key and --key-separator cannot be used together; use one of them")
    separator = None if key_separator is None else key_separator.replace("\\t", "\t").encode()
    if separator == b"":
        raise WrongUsage("--key-separator cannot be empty")
    record_headers = [_parse_header(text) for text in headers or []]
    admin = client.connect(bootstrap)
    if partition:
        _refuse_missing_partition(admin, topic, partition)
    count = await_topic(admin, topic)
    # The right to write does not include reading settings. The leader reports a record that is too large.
    batch_bytes_max = int(setting(admin, topic, "max.message.bytes") or BATCH_BYTES)
    producer = Producer(
        {
            **producer_settings(bootstrap, compression, acks),
            # librdkafka does not split a batch that the broker refuses as too large.
            "batch.size": max(1, min(BATCH_BYTES, batch_bytes_max)),
        }
    )
    sending = Sending(producer, topic, count)
    fixed_key = None if key is None else key.encode()
    interrupted = False
    try:
        with _bar(values or [], files or []) as bar:
            read = 0
            for number, line in enumerate(_lines(values or [], files or []), 1):
                record_key, value = (
                    (fixed_key, line) if separator is None else _split(line, separator, number)
                )
                sending.send(number, record_key, value, record_headers, partition)
                read += len(line) + 1
                if number % POLL_EVERY == 0:
                    client.collect(producer, 0)
                    if bar is not None:
                        bar.show(read if files else number)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        # Also when a line was bad or reading failed: records queued before that are sent.
        client.flush(producer, DELIVERY_TIMEOUT_MS / 1000 + CONNECT_TIMEOUT_S)
    _report(topic, sending, as_json=as_json)
    if sending.first_failure is not None:
        why = _explain(admin, topic, sending.first_failure)
        raise Failure(f"{count_text(sending.failed, 'record')} not delivered: {why}")
    return INTERRUPTED if interrupted else 0


def producer_settings(bootstrap: Brokers, compression: Compression, acks: Acks) -> dict[str, Any]:
    """librdkafka's settings for a producer that behaves like the Java client."""
    return client.settings(
        bootstrap,
        {
            "partitioner": "murmur2_random",
            "compression.type": compression.value,
            "acks": acks.value,
            # Idempotence requires acks=all (KIP-98).
            "enable.idempotence": acks is Acks.ALL,
            "batch.size": BATCH_BYTES,
            "linger.ms": LINGER_MS,
            "message.timeout.ms": DELIVERY_TIMEOUT_MS,
            "message.max.bytes": RECORD_BYTES_MAX,
        },
    )


def _refuse_missing_partition(admin: AdminClient, topic: str, partition: int) -> None:
    """Check before any request that would create the topic."""
    if topic not in admin.list_topics(timeout=CONNECT_TIMEOUT_S).topics:
        raise Failure(
            f"there is no topic {topic} with a partition {partition}; create it: "
            f"`penstock topics create {topic} --partitions {partition + 1}`"
        )
    refuse_missing(topic, [partition], client.partition_numbers(admin, topic))


def _explain(admin: AdminClient, topic: str, failure: Undelivered) -> str:
    if failure.error.code() != KafkaError.MSG_SIZE_TOO_LARGE:
        return client.explain_error(failure.error)
    limit = setting(admin, topic, "max.message.bytes")
    batches = "smaller batches" if limit is None else f"batches of at most {limit}"
    return (
        f"line {failure.line} is too large: {failure.size_bytes} bytes, and {topic} takes {batches} "
        f"(raise it: `penstock configs set {topic} max.message.bytes=N`)"
    )


def await_topic(asked: Producer | AdminClient, topic: str) -> int:
    """The topic's number of partitions. Creates the topic if the broker auto-creates topics."""
    deadline = time.monotonic() + TOPIC_TIMEOUT_S
    while True:
        found = asked.list_topics(topic, timeout=CONNECT_TIMEOUT_S).topics[topic]
        error = found.error
        if error is None and found.partitions:
            return len(found.partitions)
        if error is not None and error.code() not in PASSING:
            raise Failure(f"topic {topic}: {client.explain_error(error)}")
        if time.monotonic() >= deadline:
            raise client.no_topic(asked, topic)
        time.sleep(RETRY_INTERVAL_S)


def _lines(values: list[str], files: list[str]) -> Iterator[bytes]:
    if values:
        yield from (value.encode() for value in values)
    elif not files:
        yield from _without_ends(sys.stdin.buffer)
    for name in files:
        if name == "-":
            yield from _without_ends(sys.stdin.buffer)
        else:
            with Path(name).open("rb") as file:
                yield from _without_ends(file)


def _without_ends(lines: Iterable[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield line.removesuffix(b"\n")


def _split(line: bytes, separator: bytes, number: int) -> tuple[bytes, bytes]:
    key, found, value = line.partition(separator)
    if not found:
        raise Failure(
            f"line {number} has no key separator {separator.decode()!r}; the lines before it were sent"
        )
    return key, value


def _parse_header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise WrongUsage(f"--header takes NAME=VALUE, such as trace=7; got {text!r}")
    return name, value.encode()


def _bar(values: list[str], files: list[str]) -> AbstractContextManager[Bar | None]:
    """A bar unless the records are typed on a terminal; in bytes if the files' sizes are known."""
    is_typing = sys.stdin.isatty() and (not files or "-" in files)
    if values or is_typing or not sys.stderr.isatty():
        return nullcontext()
    from penstock.cli.drawing import progress_bar  # noqa: PLC0415  # rich, only to draw

    paths = [Path(name) for name in files]
    if files and all(path.is_file() for path in paths):
        return progress_bar("producing", sum(path.stat().st_size for path in paths), of_bytes=True)
    return progress_bar("producing", None, of_bytes=bool(files))


def _report(topic: str, sending: Sending, *, as_json: bool) -> None:
    partitions = [
        {"partition": number, "records": count, "first": first, "last": last}
        if first >= 0
        else {"partition": number, "records": count, "first": None, "last": None}
        for number, (first, last, count) in sorted(sending.partitions.items())
    ]
    if as_json:
        show_json(
            {
                "topic": topic,
                "records": sending.acknowledged,
                "failed": sending.failed,
                "partitions": partitions,
            }
        )
    elif sending.acknowledged:
        show_table(
            ("PARTITION", "RECORDS", "FIRST", "LAST"),
            [(each["partition"], each["records"], each["first"], each["last"]) for each in partitions],
            title=f"produced {count_text(sending.acknowledged, 'record')} to {topic}",
        )
    else:
        print(f"produced 0 records to {topic}")
