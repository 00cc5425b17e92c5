"""`penstock brokers`: list brokers and their load, move partitions between them, unregister one.

A fenced broker is registered, but silent or not caught up yet; it leads nothing. OUT OF SYNC counts the broker's
replicas that are not in sync; anything but 0 on an idle cluster needs attention. CLOCK is how far the broker's
clock is ahead of the median of all brokers.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.addresses import format_address
from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.numbers import parse_numbers, refuse_missing
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json, Yes, check_topic
from penstock.cli.output import confirm, count_text, show_json, show_table
from penstock.cli.raw import RawClient, reason, refuse
from penstock.cli.subcommands import subcommands
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import TIME_UNKNOWN
from penstock.protocol.messages.brokers import UnregisterBrokerRequest
from penstock.protocol.messages.cluster import DescribeClusterBroker, DescribeClusterRequest
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    ElectLeadersRequest,
    ListPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
    TopicPartitions,
)
from penstock.protocol.messages.topics import MetadataRequest, MetadataRequestTopic, MetadataResponse

app = typer.Typer(
    add_completion=False,
    cls=subcommands("list"),
    help="List brokers, move partitions and leaders, unregister a broker. Default command: list.",
)

TIMEOUT_MS = 30_000
PREFERRED, UNCLEAN = 0, 1

Places = Annotated[
    list[str], typer.Argument(metavar="TOPIC[:PARTITION,...]", help="Default: all partitions of the topic.")
]


@app.command("list")
def list_brokers(bootstrap: Bootstrap = BOOTSTRAP, _config: Config = None, as_json: Json = False) -> None:
    """List the brokers with address, state, leaders and replicas."""
    with RawClient(bootstrap) as client:
        brokers = _brokers(client)
        metadata = client.ask(MetadataRequest(topics=None, allow_auto_topic_creation=False))
        moves = _moves(client)
    rows = [
        {
            "broker": each.broker_id,
            "address": format_address(each.host, each.port),
            "rack": each.rack,
            "state": "fenced" if each.is_fenced else "active",
            **_carried(metadata, each.broker_id),
            "moving": sum(each.broker_id in move["adding"] + move["removing"] for move in moves),
            "clock_ahead_ms": _clock_ahead_ms(each),
        }
        for each in brokers
    ]
    if as_json:
        show_json(rows)
        return
    columns = ("broker", "address", "rack", "state", "leaders", "replicas", "out_of_sync", "moving")
    show_table(
        [*(name.upper().replace("_", " ") for name in columns), "CLOCK"],
        [
            [*(row[name] for name in columns), _clock_text(_clock_ahead_ms(each))]
            for row, each in zip(rows, brokers)
        ],
    )


@app.command()
def moves(bootstrap: Bootstrap = BOOTSTRAP, _config: Config = None, as_json: Json = False) -> None:
    """List the partitions that are being moved."""
    with RawClient(bootstrap) as client:
        found = _moves(client)
    if as_json:
        show_json(found)
        return
    show_table(
        ("TOPIC", "PARTITION", "REPLICAS", "ADDING", "REMOVING"),
        [
            (
                each["topic"],
                each["partition"],
                *(_nodes(each[name]) or None for name in ("replicas", "adding", "removing")),
            )
            for each in found
        ],
    )


@app.command()
def reassign(
    places: Places,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="ID,...", help="The new replicas, preferred leader first."),
    ] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel a running move.")] = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Move partitions to other brokers, or cancel a move.

    The first partition gets the brokers in the given order; each next partition gets them rotated by one, which
    spreads the leaders. The command returns when the move has begun; `brokers moves` shows its progress.
    """
    if (to is None) == (not cancel):
        raise WrongUsage("pass --to ID,..., such as --to 1,2,3, or --cancel")
    brokers = None if to is None else _broker_ids(to)
    with RawClient(bootstrap) as client:
        chosen = _chosen(client, places)
        topics = [
            ReassignableTopic(
                name=topic,
                partitions=[
                    ReassignablePartition(
                        partition_index=number, replicas=None if brokers is None else _turned(brokers, turn)
                    )
                    for turn, number in enumerate(numbers)
                ],
            )
            for topic, numbers in chosen.items()
        ]
        answer = client.ask(AlterPartitionReassignmentsRequest(timeout_ms=TIMEOUT_MS, topics=topics))
    refuse(answer.error_code, answer.error_message, "could not move partitions")
    results = [
        (topic.name, each.partition_index, each.error_code, each.error_message)
        for topic in answer.responses
        for each in topic.partitions
    ]
    asked = {
        (topic.name, each.partition_index): each.replicas for topic in topics for each in topic.partitions
    }
    _refuse_first(results)
    if as_json:
        show_json([{"topic": t, "partition": n, "replicas": asked[t, n]} for t, n, _, _ in results])
    else:
        print(f"{'stopped' if cancel else 'began'} moving {count_text(len(results), 'partition')}")


@app.command()
def elect(
    places: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPIC[:PARTITION,...]]", help="Default: all partitions.")
    ] = None,
    unclean: Annotated[
        bool,
        typer.Option(
            "--unclean", help="If no replica is in sync, elect any live one; records it lacks are lost."
        ),
    ] = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Make the first replica the leader again, for example after a broker has come back."""
    with RawClient(bootstrap) as client:
        wanted = None
        if places:
            wanted = [TopicPartitions(topic=t, partitions=n) for t, n in _chosen(client, places).items()]
        elif unclean:
            raise WrongUsage("--unclean can lose records; name the partitions, such as orders:0,2")
        answer = client.ask(
            ElectLeadersRequest(
                election_type=UNCLEAN if unclean else PREFERRED,
                topic_partitions=wanted,
                timeout_ms=TIMEOUT_MS,
            )
        )
    refuse(answer.error_code, None, "could not elect leaders")
    results = [
        (topic.topic, each.partition_id, each.error_code, each.error_message)
        for topic in answer.replica_election_results
        for each in topic.partition_result
    ]
    # A partition that has the right leader already is not an error.
    _refuse_first([each for each in results if each[2] != ErrorCode.ELECTION_NOT_NEEDED])
    elected = [each for each in results if each[2] == ErrorCode.NONE]
    if as_json:
        show_json({"elected": [{"topic": t, "partition": n} for t, n, _, _ in elected]})
    elif elected:
        print(f"elected the leaders of {count_text(len(elected), 'partition')}")
    elif unclean:
        print("every partition named has a leader already")
    else:
        print("every partition already has its preferred leader")


@app.command()
def unregister(
    broker: Annotated[int, typer.Argument(metavar="ID", min=0)],
    yes: Yes = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Unregister a stopped broker that will not come back. Asks first.

    Its replicas are rebuilt on other brokers from the remaining copies. A partition without another copy is lost.
    """
    with RawClient(bootstrap) as client:
        known = next((each for each in _brokers(client) if each.broker_id == broker), None)
        if known is None:
            raise Failure(f"there is no broker {broker}; see `penstock brokers`")
        if not known.is_fenced:
            raise Failure(f"broker {broker} is running; stop it first")
        metadata = client.ask(MetadataRequest(topics=None, allow_auto_topic_creation=False))
        held = count_text(_carried(metadata, broker)["replicas"], "replica")
        only = sum(each.isr_nodes == [broker] for topic in metadata.topics or () for each in topic.partitions)
        warning = f", {only} of them the only copy in sync" if only else ""
        confirm(f"Unregister broker {broker}, which has {held}{warning}?", yes=yes)
        answer = client.ask(UnregisterBrokerRequest(broker_id=broker))
    refuse(answer.error_code, answer.error_message, f"could not unregister broker {broker}")
    if as_json:
        show_json({"unregistered": broker})
    else:
        print(f"unregistered broker {broker}")


def _brokers(client: RawClient) -> list[DescribeClusterBroker]:
    described = client.ask(DescribeClusterRequest(include_fenced_brokers=True, include_clocks=True))
    refuse(described.error_code, described.error_message, "could not describe the cluster")
    return sorted(described.brokers, key=lambda broker: broker.broker_id)


def _clock_ahead_ms(broker: DescribeClusterBroker) -> int | None:
    return None if broker.clock_ahead_ms == TIME_UNKNOWN else broker.clock_ahead_ms


def _clock_text(ahead_ms: int | None) -> str | None:
    """+0s for a correct clock, -35s for one that is behind, +10d for one that is ahead."""
    if ahead_ms is None:
        return None
    ahead_s = round(ahead_ms / 1000)
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if abs(ahead_s) >= 2 * seconds:
            return f"{round(ahead_s / seconds):+d}{unit}"
    return f"{ahead_s:+d}s"


def _carried(metadata: MetadataResponse, broker: int) -> dict[str, int]:
    partitions = [each for topic in metadata.topics or () for each in topic.partitions]
    held = [each for each in partitions if broker in each.replica_nodes]
    return {
        "leaders": sum(each.leader_id == broker for each in partitions),
        "replicas": len(held),
        "out_of_sync": sum(broker not in each.isr_nodes for each in held),
    }


def _moves(client: RawClient) -> list[dict[str, Any]]:
    answer = client.ask(ListPartitionReassignmentsRequest(timeout_ms=TIMEOUT_MS, topics=None))
    refuse(answer.error_code, answer.error_message, "could not list the moves")
    return [
        {
            "topic": topic.name,
            "partition": each.partition_index,
            "replicas": each.replicas,
            "adding": each.adding_replicas,
            "removing": each.removing_replicas,
        }
        for topic in sorted(answer.topics, key=lambda topic: topic.name)
        for each in sorted(topic.partitions, key=lambda partition: partition.partition_index)
    ]


def _chosen(client: RawClient, places: list[str]) -> dict[str, list[int]]:
    """The chosen partitions by topic; all partitions of a topic by default."""
    chosen: dict[str, list[int]] = {}
    for text in places:
        topic, colon, listed = text.partition(":")
        try:
            numbers = sorted(set(parse_numbers(listed))) if colon else None
        except ValueError as error:
            raise WrongUsage(f"write TOPIC or TOPIC:PARTITION,..., such as orders:0,2; {error}") from None
        check_topic(topic)
        existing = _partitions(client, topic)
        if numbers is None:
            chosen[topic] = existing
            continue
        refuse_missing(topic, numbers, existing)
        chosen[topic] = sorted({*chosen.get(topic, ()), *numbers})
    return chosen


def _partitions(client: RawClient, topic: str) -> list[int]:
    request = MetadataRequest(topics=[MetadataRequestTopic(name=topic)], allow_auto_topic_creation=False)
    (found,) = client.ask(request).topics
    if found.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        raise Failure(f"there is no topic {topic}; see `penstock topics list`")
    refuse(found.error_code, None, f"topic {topic}")
    return sorted(each.partition_index for each in found.partitions)


def _broker_ids(text: str) -> list[int]:
    try:
        ids = parse_numbers(text)
    except ValueError as error:
        raise WrongUsage(f"--to takes different broker ids, such as 1,2,3; {error}") from None
    if len(set(ids)) < len(ids):
        raise WrongUsage(f"--to takes different broker ids, such as 1,2,3; got {text!r}")
    return ids


def _turned(brokers: list[int], turn: int) -> list[int]:
    cut = turn % len(brokers)
    return brokers[cut:] + brokers[:cut]


def _refuse_first(results: list[tuple[str, int, int, str | None]]) -> None:
    refused = [each for each in results if each[2] != ErrorCode.NONE]
    if refused:
        topic, partition, code, message = refused[0]
        besides = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise Failure(f"{topic}-{partition}: {reason(code, message)}{besides}")


def _nodes(ids: list[int]) -> str:
    return ",".join(map(str, ids))
