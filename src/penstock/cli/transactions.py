"""`penstock transactions`: transactional ids and their state, and transactions that hang.

A transaction hangs when a partition's leader has it open and no coordinator will ever end it (KIP-664). It pins the
last stable offset: read-committed consumers of the partition stop there. `find-hanging` compares what leaders have
open with what coordinators know, and `abort` ends one in one partition. The requests are not in librdkafka, so this
command uses our own client.
"""

from __future__ import annotations

import re
import time
from typing import Annotated, Any

import typer

from penstock.cli.failures import Failure, WrongUsage, near_name
from penstock.cli.numbers import refuse_missing
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json, Topic, Yes, check_topic
from penstock.cli.output import confirm, count_text, printable, show_json, show_table
from penstock.cli.subcommands import subcommands
from penstock.cli.wire_client import connected, time_text
from penstock.monitoring.durations import UNITS_MS, duration_text
from penstock.monitoring.hanging import (
    UNFINISHED,
    Hanging,
    hanging_transactions,
    owners_of,
    producers_of,
    will_end,
)
from penstock.wire import Client, TopicPartition
from penstock.wire.transaction_admin import ListFilter

app = typer.Typer(
    add_completion=False,
    cls=subcommands("list"),
    help="List and describe transactions, find and abort hanging ones. Default command: list.",
)

# Kafka's names, without the ones that no coordinator stores.
STATES = (
    "Empty",
    "Ongoing",
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "PrepareEpochFence",
)
# Kafka's transaction.max.timeout.ms: no transaction of a coordinator is open for longer.
OPEN_FOR_DEFAULT = "15m"

TransactionalId = Annotated[str, typer.Argument(metavar="TRANSACTIONAL_ID")]


@app.command("list")
def list_transactions(
    *,
    states: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help=f"One of {', '.join(STATES)}. Repeatable."),
    ] = None,
    producer_ids: Annotated[
        list[int] | None,
        typer.Option("--producer-id", metavar="N", min=0, help="Only of this producer id. Repeatable."),
    ] = None,
    open_for: Annotated[
        str | None,
        typer.Option("--open-for", metavar="TIME", help="Only those open for longer than this, such as 30s."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option("--pattern", metavar="REGEX", help="Only transactional ids that match as a whole."),
    ] = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """List the transactional ids that the coordinators know, and their states."""
    wanted = ListFilter(
        states=tuple(map(_state, states or ())),
        producer_ids=tuple(producer_ids or ()),
        open_ms_min=-1 if open_for is None else _duration_ms("--open-for", open_for),
        pattern=None if pattern is None else _pattern(pattern),
    )
    with connected(bootstrap) as client:
        found = client.list_transactions(wanted)
    if open_for is not None:
        # Brokers pass ids without an open transaction through this filter.
        found = [each for each in found if each.state in UNFINISHED]
    if as_json:
        show_json(
            [
                {
                    "transactional_id": each.transactional_id,
                    "producer_id": each.producer_id,
                    "state": each.state,
                    "coordinator": each.coordinator,
                }
                for each in found
            ]
        )
        return
    show_table(
        ("TRANSACTIONAL-ID", "STATE", "PRODUCER-ID", "COORDINATOR"),
        [(each.transactional_id, each.state, each.producer_id, each.coordinator) for each in found],
    )


@app.command()
def describe(
    transactional_id: TransactionalId,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Show the state of a transactional id, its producer, and the partitions of its open transaction."""
    with connected(bootstrap) as client:
        found = client.describe_transaction(transactional_id) if transactional_id else None
        if found is None:
            raise _no_transaction(client, transactional_id)
    # Coordinators keep the start of the last transaction when it has ended.
    started_ms = found.started_ms if found.state in UNFINISHED else None
    open_ms = None if started_ms is None else max(0, _wall_ms() - started_ms)
    if as_json:
        show_json(
            {
                "transactional_id": found.transactional_id,
                "state": found.state,
                "producer_id": found.producer_id,
                "producer_epoch": found.producer_epoch,
                "timeout_ms": found.timeout_ms,
                "started": time_text(started_ms),
                "open_ms": open_ms,
                "partitions": [_place(at) for at in found.partitions],
            }
        )
        return
    since = "" if open_ms is None else f"  open for {duration_text(open_ms)}"
    print(
        f"{printable(found.transactional_id)}  {found.state}  "
        f"producer {found.producer_id} epoch {found.producer_epoch}  "
        f"timeout {duration_text(found.timeout_ms)}{since}"
    )
    if found.partitions:
        show_table(("TOPIC", "PARTITION"), found.partitions)


@app.command("find-hanging")
def find_hanging(
    *,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", metavar="TOPIC", help="Only this topic. Repeatable. Default: all topics."),
    ] = None,
    partitions: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", min=0, metavar="N", help="Only this partition. Repeatable."),
    ] = None,
    open_for: Annotated[
        str,
        typer.Option(
            "--open-for",
            metavar="TIME",
            help="Only those without a record for longer than this. Not below the brokers' longest timeout, "
            "transaction.max.timeout.ms.",
        ),
    ] = OPEN_FOR_DEFAULT,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> int:
    """Find transactions that are open in a partition though no coordinator will end them. Exit code 1 if any."""
    if partitions and not topics:
        raise WrongUsage("--partition needs --topic; all topics have a partition 0")
    for topic in topics or ():
        check_topic(topic)
    open_ms_min = _duration_ms("--open-for", open_for)
    with connected(bootstrap) as client:
        places = _partitions(client, topics, partitions or [])
        found = hanging_transactions(client, producers_of(client, places), _wall_ms() - open_ms_min)
    if as_json:
        show_json([_hanging_row(each) for each in found])
    elif found:
        show_table(
            ("TOPIC", "PARTITION", "START-OFFSET", "PRODUCER-ID", "EPOCH", "LAST-RECORD", "TRANSACTIONAL-ID"),
            [
                (
                    *each.at,
                    each.producer.open_since_offset,
                    each.producer.producer_id,
                    each.producer.producer_epoch,
                    time_text(each.producer.last_timestamp),
                    each.transactional_id,
                )
                for each in found
            ],
        )
    else:
        print(f"no hanging transactions in {count_text(len(places), 'partition')}")
    return 1 if found else 0


@app.command()
def abort(
    topic: Topic,
    *,
    partition: Annotated[int, typer.Option("--partition", "-p", min=0, metavar="N", help="The partition.")],
    start_offset: Annotated[
        int,
        typer.Option(
            "--start-offset",
            min=0,
            metavar="OFFSET",
            help="The transaction's first offset, from find-hanging.",
        ),
    ],
    yes: Yes = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Abort a hanging transaction in one partition. Its records there are never read by read_committed consumers.

    A transaction that its coordinator still has open is refused: stop its producer, and it ends by its timeout.
    """
    at = TopicPartition(topic, partition)
    with connected(bootstrap) as client:
        _partitions(client, [topic], [partition])
        producers = client.partition_producers([at])[at]
        producer = next((each for each in producers if each.open_since_offset == start_offset), None)
        if producer is None:
            raise Failure(f"no transaction that begins at offset {start_offset} is open in {at}")
        owner = owners_of(client, [producer.producer_id]).get(producer.producer_id)
        if owner is not None and will_end(client.describe_transaction(owner.transactional_id), at, producer):
            raise Failure(
                f"the transaction is not hanging: transactional id {owner.transactional_id} has it open; "
                "stop its producer, and the coordinator aborts it after its timeout"
            )
        confirm(
            f"Abort the transaction of producer {producer.producer_id} in {at} from offset {start_offset} on? "
            "Its records there are lost for read_committed consumers.",
            yes=yes,
        )
        client.abort_in_partition(at, producer)
    if as_json:
        name = None if owner is None else owner.transactional_id
        show_json({"aborted": _hanging_row(Hanging(at, producer, name))})
    else:
        print(
            f"aborted the transaction of producer {producer.producer_id} in {at} from offset {start_offset} on"
        )


# Finding


def _partitions(client: Client, topics: list[str] | None, wanted: list[int]) -> list[TopicPartition]:
    """The partitions of these topics, or of all. Raises Failure for one that does not exist."""
    found = client.topics(topics)
    for topic in topics or ():
        if topic not in found:
            near = near_name(topic, client.topics())
            hint = f"did you mean {near}?" if near is not None else "see `penstock topics list`"
            raise Failure(f"there is no topic {topic}; {hint}")
        refuse_missing(topic, wanted, found[topic].partitions)
    return sorted(
        TopicPartition(name, number)
        for name, topic in found.items()
        for number in topic.partitions
        if not wanted or number in wanted
    )


# Text


def _state(word: str) -> str:
    by_lower = {name.lower(): name for name in STATES}
    name = by_lower.get(word.lower().replace("_", "").replace("-", "").replace(" ", ""))
    if name is None:
        raise WrongUsage(f"--state: {word!r} is not a state; use one of {', '.join(STATES)}")
    return name


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise WrongUsage(f"--pattern: {text!r} is not a regular expression: {error}") from None


def _duration_ms(option: str, text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})\s*(ms|s|m|h|d)", text.strip().lower())
    if found is None:
        raise WrongUsage(f"{option}: {text!r} is not a time; write 500ms, 30s, 15m, 2h or 1d")
    duration_ms = int(found[1]) * UNITS_MS[found[2]]
    if duration_ms > 2**63 - 1:
        raise WrongUsage(f"{option}: {text!r} is too long")
    return duration_ms


def _place(at: TopicPartition) -> dict[str, Any]:
    return {"topic": at.topic, "partition": at.partition}


def _hanging_row(each: Hanging) -> dict[str, Any]:
    return {
        **_place(each.at),
        "start_offset": each.producer.open_since_offset,
        "producer_id": each.producer.producer_id,
        "producer_epoch": each.producer.producer_epoch,
        "coordinator_epoch": each.producer.coordinator_epoch,
        "last_record": time_text(each.producer.last_timestamp),
        "transactional_id": each.transactional_id,
    }


def _no_transaction(client: Client, transactional_id: str) -> Failure:
    if not transactional_id:
        return Failure("no transactional id is empty; see `penstock transactions list`")
    near = near_name(transactional_id, [each.transactional_id for each in client.list_transactions()])
    if near is not None:
        return Failure(f"there is no transactional id {transactional_id}; did you mean {near}?")
    return Failure(f"there is no transactional id {transactional_id}; see `penstock transactions list`")


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
