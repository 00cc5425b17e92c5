"""`penstock consume`: print a topic's records.

It follows the topic until Ctrl-C, as kcat and kafka-console-consumer do; `--no-follow` stops at the topic's end as
of the start. It begins at the beginning, as kcat does, because an empty screen puzzles new users. With `--group`
it continues at the group's committed offsets, and commits records only after they are written out: after a crash a
record is printed twice rather than not at all. As kafka-console-consumer it prints records of open and aborted
transactions too, unless told otherwise.
"""

from __future__ import annotations

import signal
import sys
import time
import uuid
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock.cli import client, positions
from penstock.cli.completion import group_names
from penstock.cli.connection import Brokers
from penstock.cli.failures import WrongUsage
from penstock.cli.numbers import refuse_missing
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Topics, check_group
from penstock.cli.rendering import Columns, json_line, template, text_line

app = typer.Typer(add_completion=False)

POLL_TIMEOUT_S = 0.5
BATCH_RECORDS = 500
COMMIT_INTERVAL_S = 5.0
FOLLOW_WAIT_MS = 500
END_WAIT_MS = 20
# Partitions listed in one line.
ENDS_SHOWN_MAX = 3
TERMINATED = 128 + signal.SIGTERM

Place = tuple[str, int]


class Isolation(StrEnum):
    """Kafka's words."""

    UNCOMMITTED = "read_uncommitted"
    COMMITTED = "read_committed"


class Reading:
    """One consumer: its partitions, where it stops, and what may be committed."""

    def __init__(self, consumer: Consumer, *, commits: bool) -> None:
        self.consumer = consumer
        self._commits = commits
        # Partitions being read; None until the group has assigned some.
        self.assigned: set[Place] | None = None
        # Where to stop, by partition. Exclusive. A partition that is missing here stops at its end.
        self.ends: dict[Place, int] = {}
        self._done: set[Place] = set()
        # By partition, the next offset after the records written out, where not committed yet.
        self._written: dict[Place, int] = {}
        self._commit_at = time.monotonic() + COMMIT_INTERVAL_S

    @property
    def finished(self) -> bool:
        return self.assigned is not None and self.assigned <= self._done

    def batch(self) -> list[Message]:
        """The available records; waits a moment for the first. Notes partitions that reached their end."""
        first = self.consumer.poll(POLL_TIMEOUT_S)
        if first is None:
            return []
        records = []
        for message in [first, *self.consumer.consume(BATCH_RECORDS, 0)]:
            error = message.error()
            if error is None:
                records.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                self._done.add(_place(message))
            elif error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED and not self._commits:
                # librdkafka looks for the coordinator of its group id even when no group is joined.
                continue
            else:
                raise KafkaException(error)
        return records

    def wants(self, message: Message) -> bool:
        """Whether the record is before the end. Marks its partition as done when it is the last."""
        place = _place(message)
        end = self.ends.get(place)
        if end is None:
            return True
        if _offset(message) + 1 >= end:
            self._done.add(place)
        return _offset(message) < end

    def written(self, messages: list[Message]) -> None:
        """Note that records were written out. Commits them from time to time."""
        if not self._commits:
            return
        for message in messages:
            self._written[_place(message)] = _offset(message) + 1
        if time.monotonic() >= self._commit_at:
            self.commit()

    def commit(self) -> None:
        self._commit_at = time.monotonic() + COMMIT_INTERVAL_S
        if self._written:
            places = [TopicPartition(*place, offset) for place, offset in self._written.items()]
            self._written = {}
            self.consumer.commit(offsets=places, asynchronous=False)

    def on_assign(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.assigned = {(each.topic, each.partition) for each in partitions}
        self._done = set()

    def on_revoke(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        self.commit()
        self.assigned = None

    def on_lost(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        """Another member owns the partitions now, so their offsets must not be committed."""
        self._written = {}
        self.assigned = None


@app.command()
def consume(
    topics: Topics,
    *,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="Join a consumer group, which shares partitions and keeps offsets.",
            callback=check_group,
            autocompletion=group_names,
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="POSITION", help=f"{positions.HELP}. Default: beginning."),
    ] = None,
    partitions: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", min=0, metavar="N", help="Only this partition. Repeatable."),
    ] = None,
    records_max: Annotated[
        int | None, typer.Option("--max", "-n", min=1, metavar="N", help="Stop after N records.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Wait for new records, or stop at the end.")
    ] = True,
    isolation: Annotated[
        Isolation,
        typer.Option(
            "--isolation",
            help="Whether to print records of open and aborted transactions too, or only committed ones.",
        ),
    ] = Isolation.UNCOMMITTED,
    keys: Annotated[bool, typer.Option("--keys", help="Show keys.")] = False,
    headers: Annotated[bool, typer.Option("--headers", help="Show headers.")] = False,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Show times.")] = False,
    offsets: Annotated[bool, typer.Option("--offsets", help="Show topic, partition and offset.")] = False,
    format_text: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="TEXT",
            help="A template with {topic} {partition} {offset} {timestamp} {key} {value} {headers}.",
        ),
    ] = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each record.")] = False,
) -> None:
    """Print a topic's records from the beginning, then new ones as they arrive, until Ctrl-C.

    With --group it begins at the group's committed offsets and commits what it has printed; --from (beginning or
    end) is where a new group begins.
    """
    columns = Columns(keys=keys, headers=headers, timestamps=timestamps, offsets=offsets)
    render = _renderer(columns, format_text, as_json=as_json)
    try:
        position = positions.parse_position(start or "beginning")
    except ValueError as error:
        raise WrongUsage(f"--from: {error}") from None
    if group is not None:
        if partitions:
            raise WrongUsage("--partition cannot be used with --group; omit one of them")
        if position.kind not in {"beginning", "end"}:
            raise WrongUsage(
                "a group begins at its committed offsets; with --group use --from beginning or end, "
                f"or move it with `penstock groups offsets reset {group} --to {start}`"
            )
    signal.signal(signal.SIGTERM, _terminate)
    admin = client.connect(bootstrap)
    numbers = {topic: _partitions(admin, topic, partitions or []) for topic in dict.fromkeys(topics)}
    consumer = _consumer(bootstrap, group, position, isolation, follow=follow)
    reading = Reading(consumer, commits=group is not None)
    try:
        if group is None:
            _assign(admin, reading, numbers, position, isolation, follow=follow)
        else:
            reading.consumer.subscribe(
                list(numbers),
                on_assign=reading.on_assign,
                on_revoke=reading.on_revoke,
                on_lost=reading.on_lost,
            )
        _copy(reading, render, follow=follow, records_max=records_max)
    finally:
        # Also on Ctrl-C: printed records count as read.
        reading.commit()
        reading.consumer.close()


def _copy(
    reading: Reading, render: Callable[[Message], bytes], *, follow: bool, records_max: int | None
) -> None:
    out = sys.stdout.buffer
    left = records_max
    while left != 0 and (follow or not reading.finished):
        records = [message for message in reading.batch() if reading.wants(message)][:left]
        if not records:
            continue
        out.write(b"".join(map(render, records)))
        out.flush()
        reading.written(records)
        left = None if left is None else left - len(records)


def _assign(
    admin: Any,
    reading: Reading,
    numbers: dict[str, list[int]],
    position: positions.Position,
    isolation: Isolation,
    *,
    follow: bool,
) -> None:
    """Read partitions without a group, from a position to their current ends."""
    read_committed = isolation is Isolation.COMMITTED
    begin: dict[Place, int] = {}
    for topic, listed in numbers.items():
        offsets = positions.resolve(admin, topic, listed, position, read_committed=read_committed)
        begin |= {(topic, number): offsets[number] for number in listed}
        if not follow:
            ends = client.end_offsets(admin, topic, listed, read_committed=read_committed)
            reading.ends |= {(topic, number): ends[number] for number in listed}
    if position.kind in {"offset", "time"}:
        _say_what_is_beyond(admin, begin, position, follow=follow)
    if not follow:
        begin = {place: offset for place, offset in begin.items() if offset < reading.ends[place]}
    reading.assigned = set(begin)
    if begin:
        reading.consumer.assign([TopicPartition(*place, offset) for place, offset in begin.items()])


def _say_what_is_beyond(
    admin: Any, begin: dict[Place, int], position: positions.Position, *, follow: bool
) -> None:
    """Say that the position is past every end; otherwise the empty output looks like a failure."""
    ends: dict[Place, int] = {}
    for topic in dict.fromkeys(topic for topic, _ in begin):
        found = client.end_offsets(admin, topic, [number for each, number in begin if each == topic])
        ends |= {(topic, number): end for number, end in found.items()}
    if any(begin[place] < ends[place] for place in begin):
        return
    where = "that time" if position.kind == "time" else f"offset {position.value}"
    last = ", ".join(
        f"{topic}-{number} at {end}" for (topic, number), end in list(ends.items())[:ENDS_SHOWN_MAX]
    )
    more = f" and {len(ends) - ENDS_SHOWN_MAX} more" if len(ends) > ENDS_SHOWN_MAX else ""
    now = "waiting for new records" if follow else "nothing to print"
    print(f"there are no records at or after {where}; the ends are {last}{more}; {now}", file=sys.stderr)


def _partitions(admin: Any, topic: str, wanted: list[int]) -> list[int]:
    existing = client.partition_numbers(admin, topic)
    refuse_missing(topic, wanted, existing)
    return sorted(set(wanted)) or existing


def _consumer(
    bootstrap: Brokers,
    group: str | None,
    position: positions.Position,
    isolation: Isolation,
    *,
    follow: bool,
) -> Consumer:
    return Consumer(
        client.settings(
            bootstrap,
            {
                # librdkafka requires a group id even when no group is joined; nothing is committed under it.
                "group.id": group or f"penstock-cli-{uuid.uuid4()}",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                # librdkafka's own default is read_committed, Kafka's is not.
                "isolation.level": isolation.value,
                "auto.offset.reset": "latest" if position.kind == "end" else "earliest",
                # The end of a partition is noticed when a fetch returns empty, so keep it short when it matters.
                "fetch.wait.max.ms": FOLLOW_WAIT_MS if follow else END_WAIT_MS,
            },
        )
    )


def _renderer(columns: Columns, format_text: str | None, *, as_json: bool) -> Callable[[Message], bytes]:
    if as_json:
        if format_text is not None:
            raise WrongUsage("--json and --format cannot be used together")
        return json_line
    if format_text is None:
        return lambda message: text_line(message, columns)
    try:
        return template(format_text)
    except ValueError as error:
        raise WrongUsage(f"--format: {error}") from None


def _terminate(_signal: int, _frame: object) -> NoReturn:
    """SIGTERM ends as Ctrl-C does: the offsets of printed records are committed."""
    raise SystemExit(TERMINATED)


def _place(message: Message) -> Place:
    topic, partition = message.topic(), message.partition()
    assert topic is not None and partition is not None
    return topic, partition


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset
