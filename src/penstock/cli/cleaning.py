"""`penstock topics cleaning`: how far the replicas of compacted topics are compacted.

Each broker compacts its own replicas, so the rows of one partition may differ. DIRTY is what may be compacted and
is not yet, RATIO its share of all that may be: at min.cleanable.dirty.ratio the log is compacted.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.cli.completion import topic_names
from penstock.cli.failures import Failure, near_name
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json, check_topic
from penstock.cli.output import Cell, bytes_text, show_json, show_table
from penstock.cli.wire_client import connected, time_text
from penstock.wire import Client, TopicPartition
from penstock.wire.log_dirs import Cleaning, Replica

COLUMNS = (
    *("TOPIC", "PARTITION", "BROKER", "SIZE", "DIRTY", "RATIO", "LAST RUN", "TOOK", "BYTES", "RECORDS"),
    "SET ASIDE",
)
POLICY = "cleanup.policy"


def cleaning(
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TOPIC]",
            callback=check_topic,
            autocompletion=topic_names,
            help="Default: all compacted topics.",
        ),
    ] = None,
    internal: Annotated[bool, typer.Option("--internal", help="Include internal topics.")] = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Show how far each replica of compacted topics is compacted, and the last run of the cleaner."""
    with connected(bootstrap) as client:
        found = _of(client, topics) if topics else _all(client, internal=internal)
    if as_json:
        show_json([_document(each) for each in found])
    else:
        show_table(COLUMNS, [_row(each) for each in found])


def _all(client: Client, *, internal: bool) -> list[Replica]:
    return [
        each
        for each in client.replicas()
        if each.cleaning is not None and (internal or not each.topic.startswith("__"))
    ]


def _of(client: Client, names: list[str]) -> list[Replica]:
    """The replicas of these topics. Raises Failure unless each topic is there and compacted."""
    known = client.topics(names)
    for name in names:
        if name not in known:
            near = near_name(name, client.topics())
            hint = f"did you mean {near}?" if near is not None else "see `penstock topics list`"
            raise Failure(f"there is no topic {name}; {hint}")
    for name, settings in client.topic_configs(names).items():
        policy = settings.get(POLICY) or "empty"
        if "compact" not in policy.split(","):
            raise Failure(
                f"topic {name} is not compacted, its {POLICY} is {policy}; "
                f"to change that: `penstock configs set {name} {POLICY}=compact`"
            )
    return client.replicas(
        TopicPartition(name, number) for name, topic in known.items() for number in topic.partitions
    )


def _document(replica: Replica) -> dict[str, Any]:
    told = replica.cleaning
    return {
        "topic": replica.topic,
        "partition": replica.partition,
        "broker": replica.broker,
        "size_bytes": replica.size_bytes,
        "cleaning": None if told is None else {**asdict(told), "dirty_ratio": round(told.dirty_ratio, 4)},
    }


def _row(replica: Replica) -> list[Cell]:
    place: list[Cell] = [replica.topic, replica.partition, replica.broker, bytes_text(replica.size_bytes)]
    told = replica.cleaning
    return place + (
        [None] * (len(COLUMNS) - len(place)) if told is None else [*_progress(told), *_last_run(told)]
    )


def _progress(told: Cleaning) -> list[Cell]:
    return [bytes_text(told.dirty_bytes), f"{told.dirty_ratio:.0%}"]


def _last_run(told: Cleaning) -> list[Cell]:
    run = told.last_run
    if run is None:
        return [None, None, None, None, told.set_aside]
    return [
        time_text(run.ended_ms),
        f"{run.duration_ms / 1000:.1f} s",
        f"{bytes_text(run.bytes_before)} to {bytes_text(run.bytes_after)}",
        f"{run.records_before} to {run.records_after}",
        told.set_aside,
    ]
