"""`penstock topics`: list, create, describe, grow, trim and delete topics, and see how far they are compacted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from penstock.cli import client
from penstock.cli.cleaning import cleaning
from penstock.cli.client import REQUEST_TIMEOUT_S, settle
from penstock.cli.configs import changed_settings
from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.numbers import refuse_missing
from penstock.cli.options import (
    BOOTSTRAP,
    PARTITIONS_MAX,
    Bootstrap,
    CommandConfig,
    Config,
    Json,
    Topic,
    Topics,
    Yes,
)
from penstock.cli.output import confirm, count_text, show_json, show_table
from penstock.cli.settings import parse_settings
from penstock.cli.subcommands import subcommands

app = typer.Typer(
    add_completion=False,
    cls=subcommands(
        "list",
        {
            "alter": "`penstock configs set TOPIC KEY=VALUE` for settings, "
            "`penstock topics add-partitions TOPIC --total N` for partitions",
            "set": "`penstock configs set TOPIC KEY=VALUE`",
            "reassign": "`penstock brokers reassign TOPIC --to ID,...`",
        },
    ),
    help="List, create, describe, change and delete topics. Default command: list.",
)

# Kafka's value for "the broker's default": KIP-464.
BROKER_DEFAULT = -1
REPLICAS_MAX = 2**15 - 1


@app.command("list")
def list_topics(
    internal: Annotated[bool, typer.Option("--internal", help="Include internal topics.")] = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """List topics with their partition counts and replication factors."""
    metadata = client.connect(bootstrap).list_topics(timeout=REQUEST_TIMEOUT_S)
    topics: list[dict[str, Any]] = [
        {
            "topic": name,
            "partitions": len(topic.partitions),
            "replication": max((len(each.replicas) for each in topic.partitions.values()), default=0),
        }
        for name, topic in sorted(metadata.topics.items())
        if internal or not name.startswith("__")
    ]
    if as_json:
        show_json(topics)
    else:
        show_table(("TOPIC", "PARTITIONS", "REPLICATION"), [tuple(topic.values()) for topic in topics])


@app.command()
def create(
    topic: Topic,
    *,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions",
            "-p",
            min=1,
            max=PARTITIONS_MAX,
            metavar="N",
            help="Partitions. Default: the broker's setting.",
        ),
    ] = None,
    replication: Annotated[
        int | None,
        typer.Option(
            "--replication",
            "-r",
            min=1,
            max=REPLICAS_MAX,
            metavar="N",
            help="Replicas of each partition. Default: the broker's setting.",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-c", metavar="KEY=VALUE", help="A topic setting. Repeatable."),
    ] = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Succeed if the topic exists already.")
    ] = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: CommandConfig = None,
    as_json: Json = False,
) -> None:
    """Create a topic."""
    for each in config or []:
        if "=" not in each and Path(each).is_file():
            raise WrongUsage(
                f"--config is a setting of the topic here; pass the file as --command-config {each}"
            )
    new = NewTopic(
        topic,
        num_partitions=partitions or BROKER_DEFAULT,
        replication_factor=replication or BROKER_DEFAULT,
        config=parse_settings("--config", config or []),
    )
    admin = client.connect(bootstrap)
    created = client.create_topic(admin, new)
    if not created and not if_not_exists:
        raise Failure(f"topic {topic} exists already; pass --if-not-exists to accept that")
    if as_json:
        show_json({"topic": topic, "created": created})
    else:
        print(f"created topic {topic}" if created else f"topic {topic} exists already")


@app.command()
def describe(
    topic: Topic, bootstrap: Bootstrap = BOOTSTRAP, _config: Config = None, as_json: Json = False
) -> None:
    """Show a topic's partitions, their offsets, and the settings made on the topic."""
    admin = client.connect(bootstrap)
    description = client.describe_topic(admin, topic)
    partitions = sorted(description.partitions, key=lambda partition: partition.id)
    # Asking a partition without a leader for its offsets would wait for a leader.
    led = [each.id for each in partitions if each.leader is not None and each.leader.id >= 0]
    starts = client.start_offsets(admin, topic, led)
    ends = client.end_offsets(admin, topic, led)
    rows: list[dict[str, Any]] = [
        {
            "partition": each.id,
            "leader": each.leader.id if each.id in ends else None,
            "replicas": [node.id for node in each.replicas],
            "isr": [node.id for node in each.isr],
            "start": starts.get(each.id),
            "end": ends.get(each.id),
        }
        for each in partitions
    ]
    configs = changed_settings(admin, topic)
    # librdkafka has the id in standard base64; Kafka's tools and our directories use the URL-safe alphabet.
    topic_id = str(description.topic_id).translate(str.maketrans("+/", "-_"))
    if as_json:
        show_json({"topic": topic, "id": topic_id, "partitions": rows, "configs": configs})
        return
    print(f"topic {topic}  id {topic_id}  {count_text(len(rows), 'partition')}")
    for key, value in configs.items():
        print(f"{key}={value}")
    show_table(
        ("PARTITION", "LEADER", "REPLICAS", "ISR", "START", "END", "RECORDS"),
        [
            (
                row["partition"],
                row["leader"],
                _nodes(row["replicas"]),
                _nodes(row["isr"]),
                row["start"],
                row["end"],
                None if row["end"] is None else row["end"] - row["start"],
            )
            for row in rows
        ],
    )


app.command()(cleaning)


@app.command()
def delete(
    topics: Topics,
    yes: Yes = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Delete topics and all their records. Asks first."""
    admin = client.connect(bootstrap)
    for topic in topics:
        client.describe_topic(admin, topic)
    confirm(f"Delete {', '.join(topics)} and all records?", yes=yes)
    answers = admin.delete_topics(topics, request_timeout=REQUEST_TIMEOUT_S)
    for topic in topics:
        settle(answers[topic])
    if as_json:
        show_json({"deleted": topics})
    else:
        print(f"deleted {count_text(len(topics), 'topic')}: {', '.join(topics)}")


@app.command("add-partitions")
def add_partitions(
    topic: Topic,
    total: Annotated[
        int,
        typer.Option(
            "--total", "-t", min=1, max=PARTITIONS_MAX, metavar="N", help="The new number of partitions."
        ),
    ],
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Increase a topic's number of partitions. It cannot be decreased.

    Afterwards a key may go to another partition than before.
    """
    admin = client.connect(bootstrap)
    before = len(client.partition_numbers(admin, topic))
    if total <= before:
        raise Failure(f"topic {topic} has {before} partitions; --total must be larger")
    settle(admin.create_partitions([NewPartitions(topic, total)], request_timeout=REQUEST_TIMEOUT_S)[topic])
    if as_json:
        show_json({"topic": topic, "partitions": total, "before": before})
    else:
        print(f"topic {topic} now has {total} partitions; it had {before}")


@app.command()
def trim(
    topic: Topic,
    before: Annotated[
        list[str],
        typer.Option(
            "--before",
            metavar="[PARTITION:]OFFSET",
            help="Delete records before this offset (`end`: all), in one partition or in each. Repeatable.",
        ),
    ],
    yes: Yes = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Delete a topic's oldest records. Asks first.

    An offset past a partition's end means its end.
    """
    wanted = [_parse_before(text) for text in before]
    admin = client.connect(bootstrap)
    partitions = client.partition_numbers(admin, topic)
    cuts = _cuts(admin, topic, partitions, wanted)
    question = ", ".join(f"before {offset} in partition {number}" for number, offset in cuts.items())
    confirm(f"Delete the records of {topic} {question}?", yes=yes)
    answers = admin.delete_records(
        [TopicPartition(topic, number, offset) for number, offset in cuts.items()],
        request_timeout=REQUEST_TIMEOUT_S,
    )
    starts = {place.partition: settle(answer).low_watermark for place, answer in answers.items()}
    if as_json:
        show_json(
            {"topic": topic, "partitions": [{"partition": n, "start": starts[n]} for n in sorted(starts)]}
        )
    else:
        show_table(("PARTITION", "START"), sorted(starts.items()), title=f"trimmed {topic}")


def _parse_before(text: str) -> tuple[int | None, int | None]:
    """(partition, offset); None means every partition, and the end offset."""
    partition, colon, place = text.rpartition(":")
    if (place != "end" and not place.isdecimal()) or (colon and not partition.isdecimal()):
        raise WrongUsage(f"--before takes [PARTITION:]OFFSET or [PARTITION:]end, such as 3:500; got {text!r}")
    return int(partition) if colon else None, None if place == "end" else int(place)


def _cuts(
    admin: AdminClient, topic: str, partitions: list[int], wanted: list[tuple[int | None, int | None]]
) -> dict[int, int]:
    """The new start offset of each partition; a later --before wins over an earlier one."""
    offsets: dict[int, int | None] = {}
    for partition, offset in wanted:
        if partition is not None:
            refuse_missing(topic, [partition], partitions)
        offsets.update(dict.fromkeys(partitions if partition is None else [partition], offset))
    ends = client.end_offsets(admin, topic, offsets)
    return {
        number: ends[number] if offset is None else min(offset, ends[number])
        for number, offset in sorted(offsets.items())
    }


def _nodes(ids: list[int]) -> str:
    return ",".join(map(str, ids))
