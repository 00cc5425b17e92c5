"""`penstock groups`: consumer groups, their members, committed offsets and lag.

A committed offset is the next to read, so lag is the partition's end offset minus the committed offset.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConsumerGroupDescription

from penstock.cli import client, positions
from penstock.cli.client import REQUEST_TIMEOUT_S, settle
from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.lag import lag
from penstock.cli.numbers import refuse_missing
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Group, Groups, Json, Yes, check_topic
from penstock.cli.output import confirm, count_text, printable, show_json, show_table
from penstock.cli.subcommands import subcommands

app = typer.Typer(
    add_completion=False,
    cls=subcommands("list", {"reset": "`penstock groups offsets reset GROUP`"}),
    help="List, describe, reset and delete consumer groups, show their lag. Default command: list.",
)
app.command()(lag)
offsets = typer.Typer(help="Change a group's committed offsets.")
app.add_typer(offsets, name="offsets")


@app.command("list")
def list_groups(bootstrap: Bootstrap = BOOTSTRAP, _config: Config = None, as_json: Json = False) -> None:
    """List consumer groups and their states."""
    admin = client.connect(bootstrap)
    found = settle(admin.list_consumer_groups(request_timeout=REQUEST_TIMEOUT_S))
    if found.errors:
        raise KafkaException(found.errors[0])
    groups = [
        {"group": each.group_id, "state": _words(each.state), "type": _words(each.type)}
        for each in sorted(found.valid, key=lambda each: str(each.group_id))
    ]
    if as_json:
        show_json(groups)
    else:
        show_table(
            ("GROUP", "STATE", "TYPE"), [(each["group"], each["state"], each["type"]) for each in groups]
        )


@app.command()
def describe(
    group: Group, bootstrap: Bootstrap = BOOTSTRAP, _config: Config = None, as_json: Json = False
) -> None:
    """Show a group's state, its members, and for each partition the committed offset and the lag."""
    admin = client.connect(bootstrap)
    description = _existing(admin, group)
    members: list[dict[str, Any]] = [
        {
            "member": each.member_id,
            "client": each.client_id,
            "host": each.host,
            "partitions": [
                {"topic": place.topic, "partition": place.partition}
                for place in sorted(each.assignment.topic_partitions)
            ],
        }
        for each in description.members
    ]
    rows = _progress(admin, group, members)
    if as_json:
        show_json(
            {
                "group": group,
                "state": _words(description.state),
                "type": _words(description.type),
                "assignor": description.partition_assignor or None,
                "coordinator": description.coordinator.id,
                "members": members,
                "partitions": rows,
            }
        )
        return
    total = sum(row["lag"] or 0 for row in rows)
    print(
        f"group {printable(group)}  {_words(description.state)}  {count_text(len(members), 'member')}  "
        f"lag {total}  coordinator {description.coordinator.id}"
    )
    show_table(
        ("TOPIC", "PARTITION", "COMMITTED", "END", "LAG", "CLIENT", "HOST", "MEMBER"),
        [
            (
                *(row[name] for name in ("topic", "partition", "committed", "end", "lag")),
                *(_owner(members, row, name) for name in ("client", "host", "member")),
            )
            for row in rows
        ],
    )


@app.command()
def delete(
    groups: Groups,
    yes: Yes = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Delete groups without members, and their committed offsets. Asks first."""
    admin = client.connect(bootstrap)
    for group in groups:
        _refuse_members(_existing(admin, group), "delete it")
    confirm(f"Delete {', '.join(groups)} and the committed offsets?", yes=yes)
    answers = admin.delete_consumer_groups(groups, request_timeout=REQUEST_TIMEOUT_S)
    for group in groups:
        settle(answers[group])
    if as_json:
        show_json({"deleted": groups})
    else:
        print(f"deleted {count_text(len(groups), 'group')}: {', '.join(groups)}")


@offsets.command()
def reset(
    group: Group,
    *,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC[:PARTITION,...]",
            help="Default: every topic with committed offsets. Repeatable.",
        ),
    ] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="PLACE", help=f"To {positions.HELP}.")] = None,
    shift: Annotated[
        int | None, typer.Option("--shift", metavar="N", help="Move by N records; -N moves back.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the new offsets, commit nothing.")] = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Set a group's committed offsets, to read again or to skip. The group must have no members."""
    if (to is None) == (shift is None):
        raise WrongUsage(f"pass --to ({positions.HELP}) or --shift N")
    try:
        position = None if to is None else positions.parse_position(to)
    except ValueError as error:
        raise WrongUsage(f"--to: {error}") from None
    admin = client.connect(bootstrap)
    _refuse_members(client.describe_group(admin, group), "change its offsets")
    committed = _committed(admin, group)
    wanted = _wanted(admin, group, topics or [], committed)
    moves: list[dict[str, Any]] = []
    for topic, numbers in wanted.items():
        if position is not None:
            targets = positions.resolve(admin, topic, numbers, position)
        else:
            targets = _shifted(admin, topic, numbers, committed, shift or 0)
        moves += [
            {
                "topic": topic,
                "partition": number,
                "before": committed.get((topic, number)),
                "after": targets[number],
            }
            for number in numbers
        ]
    if not dry_run:
        _commit(admin, group, moves)
    if as_json:
        show_json({"group": group, "dry_run": dry_run, "partitions": moves})
    else:
        show_table(
            ("TOPIC", "PARTITION", "BEFORE", "AFTER"),
            [(move["topic"], move["partition"], move["before"], move["after"]) for move in moves],
            title=f"would reset {group}" if dry_run else f"reset {group}",
        )


def _existing(admin: AdminClient, group: str) -> ConsumerGroupDescription:
    description = client.describe_group(admin, group)
    # Kafka describes an unknown group as dead.
    if description.state == ConsumerGroupState.DEAD:
        raise Failure(f"there is no group {group}; see `penstock groups list`")
    return description


def _refuse_members(description: ConsumerGroupDescription, purpose: str) -> None:
    count = len(description.members)
    if count:
        raise Failure(
            f"group {description.group_id} has {count_text(count, 'member')}; stop them first, then {purpose}"
        )


def _committed(admin: AdminClient, group: str) -> dict[tuple[str, int], int]:
    """Committed offsets by topic and partition. Call describe_group first (see there)."""
    request = [ConsumerGroupTopicPartitions(group)]
    answer = settle(admin.list_consumer_group_offsets(request, request_timeout=REQUEST_TIMEOUT_S)[group])
    return {
        (place.topic, place.partition): place.offset
        for place in sorted(answer.topic_partitions)
        if place.offset >= 0
    }


def _progress(admin: AdminClient, group: str, members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Committed offset, end and lag of every partition that is committed or assigned."""
    committed = _committed(admin, group)
    assigned = {(place["topic"], place["partition"]) for each in members for place in each["partitions"]}
    by_topic: dict[str, list[int]] = {}
    for topic, number in sorted(assigned | set(committed)):
        by_topic.setdefault(topic, []).append(number)
    rows: list[dict[str, Any]] = []
    for topic, numbers in by_topic.items():
        ends = _ends_if_any(admin, topic, numbers)
        for number in numbers:
            offset, end = committed.get((topic, number)), ends.get(number)
            lag = None if offset is None or end is None else max(0, end - offset)
            rows.append(
                {"topic": topic, "partition": number, "committed": offset, "end": end, "lag": lag},
            )
    return rows


def _ends_if_any(admin: AdminClient, topic: str, numbers: list[int]) -> dict[int, int]:
    """The end offsets; none for a deleted topic, whose committed offsets may remain."""
    try:
        existing = set(client.partition_numbers(admin, topic))
    except Failure:
        return {}
    return client.end_offsets(admin, topic, [number for number in numbers if number in existing])


def _owner(members: list[dict[str, Any]], row: dict[str, Any], name: str) -> str | None:
    place = {"topic": row["topic"], "partition": row["partition"]}
    return next((str(each[name]) for each in members if place in each["partitions"]), None)


def _wanted(
    admin: AdminClient, group: str, topics: list[str], committed: dict[tuple[str, int], int]
) -> dict[str, list[int]]:
    """The partitions to reset, by topic."""
    if not topics:
        names = {topic for topic, _ in committed}
        if not names:
            raise Failure(f"group {group} has no committed offsets; name a topic with --topic TOPIC")
        return {
            topic: [number for each, number in sorted(committed) if each == topic] for topic in sorted(names)
        }
    wanted: dict[str, list[int]] = {}
    for text in topics:
        topic, colon, listed = text.partition(":")
        check_topic(topic)
        existing = client.partition_numbers(admin, topic)
        if not colon:
            wanted[topic] = existing
            continue
        if not all(number.isdecimal() for number in listed.split(",")):
            raise WrongUsage(f"--topic takes TOPIC or TOPIC:PARTITION,..., such as orders:0,2; got {text!r}")
        numbers = sorted({int(number) for number in listed.split(",")})
        refuse_missing(topic, numbers, existing)
        wanted[topic] = numbers
    return wanted


def _shifted(
    admin: AdminClient, topic: str, numbers: list[int], committed: dict[tuple[str, int], int], shift: int
) -> dict[int, int]:
    starts = client.start_offsets(admin, topic, numbers)
    ends = client.end_offsets(admin, topic, numbers)
    targets = {}
    for number in numbers:
        if (offset := committed.get((topic, number))) is None:
            raise Failure(
                f"no offset is committed for {topic} partition {number}; use --to instead of --shift"
            )
        targets[number] = min(max(starts[number], offset + shift), ends[number])
    return targets


def _commit(admin: AdminClient, group: str, moves: list[dict[str, Any]]) -> None:
    places = [TopicPartition(move["topic"], move["partition"], move["after"]) for move in moves]
    request = [ConsumerGroupTopicPartitions(group, places)]
    try:
        done = client.when_ready(
            lambda: settle(
                admin.alter_consumer_group_offsets(request, request_timeout=REQUEST_TIMEOUT_S)[group]
            )
        )
    except KafkaException as error:
        # A member may have joined since we looked.
        if client.code_of(error) in {KafkaError.UNKNOWN_MEMBER_ID, KafkaError.NON_EMPTY_GROUP}:
            raise Failure(f"group {group} has members; stop them first, then change its offsets") from None
        raise
    for place in done.topic_partitions:
        if place.error is not None:
            raise Failure(f"{place.topic} partition {place.partition}: {client.explain_error(place.error)}")


def _words(state: Any) -> str:
    """PREPARING_REBALANCING becomes "preparing rebalancing"."""
    return str(state.name).lower().replace("_", " ")
