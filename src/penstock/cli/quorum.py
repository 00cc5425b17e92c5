"""`penstock quorum`: the voters of the metadata quorum, their progress, and adding or removing one.

Voters elect the leader and commit; observers (all other brokers) only follow. A node must run as an observer before
it can become a voter, because the quorum identifies a voter by its node id and its data directory's id.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from penstock.addresses import format_address, parse_address
from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.numbers import parse_number
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json, Yes
from penstock.cli.output import confirm, show_json, show_table
from penstock.cli.raw import RawClient, refuse
from penstock.cli.subcommands import subcommands
from penstock.model import format_id, parse_id
from penstock.protocol.listeners import NODES
from penstock.protocol.messages.quorum import (
    AddRaftVoterRequest,
    DescribeQuorumRequest,
    DescribeQuorumRequestPartition,
    DescribeQuorumRequestTopic,
    DescribeQuorumResponsePartition,
    Endpoint,
    RemoveRaftVoterRequest,
)
from penstock.protocol.schema import NO_UUID

app = typer.Typer(
    add_completion=False,
    cls=subcommands("show"),
    help="Show and change the voters of the metadata quorum. Default command: show.",
)

METADATA_TOPIC = "__cluster_metadata"
ADD_TIMEOUT_MS = 30_000

Directory = Annotated[
    str | None,
    typer.Option(
        "--directory", metavar="ID", help="The id of its data directory, if the quorum does not know it."
    ),
]


@app.command()
def show(bootstrap: Bootstrap = BOOTSTRAP, _config: Config = None, as_json: Json = False) -> None:
    """Show the leader, the voters and the observers, and the lag of each."""
    with RawClient(bootstrap) as client:
        partition, addresses = _described(client)
    replicas = _replicas(partition, addresses)
    leader = None if partition.leader_id < 0 else partition.leader_id
    if as_json:
        show_json(
            {
                "leader": leader,
                "epoch": partition.leader_epoch,
                "high_watermark": partition.high_watermark,
                "nodes": replicas,
            }
        )
        return
    led = "no leader" if leader is None else f"leader {leader}"
    print(f"quorum  {led}  epoch {partition.leader_epoch}  high watermark {partition.high_watermark}")
    now_ms = time.time() * 1000
    show_table(
        ("NODE", "ROLE", "ADDRESS", "END", "LAG", "BEHIND", "DIRECTORY"),
        [
            (
                each["node"],
                each["role"],
                each["address"],
                each["end"],
                each["lag"],
                _behind_text(each["caught_up_ms"], now_ms),
                each["directory"],
            )
            for each in replicas
        ],
    )


@app.command()
def add(
    node: Annotated[
        str, typer.Argument(metavar="ID@HOST:PORT", help="The node's id and its --internal address.")
    ],
    directory: Directory = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Make a node a voter. It must be running and have the metadata already."""
    node_id, host, port = _node(node)
    named_directory = _directory(directory)
    with RawClient(bootstrap) as client:
        partition, _ = _described(client)
        if any(each.replica_id == node_id for each in partition.current_voters):
            raise Failure(f"node {node_id} is already a voter; see `penstock quorum show`")
        request = AddRaftVoterRequest(
            cluster_id=None,
            timeout_ms=ADD_TIMEOUT_MS,
            voter_id=node_id,
            voter_directory_id=named_directory
            or _known_directory(partition.observers, node_id, "running as an observer"),
            listeners=[Endpoint(name=NODES.name, host=host, port=port)],
        )
        answer = client.ask(request)
    refuse(answer.error_code, answer.error_message, f"could not make node {node_id} a voter")
    _report("added", node_id, as_json)


@app.command()
def remove(
    node_id: Annotated[int, typer.Argument(metavar="ID", min=0)],
    directory: Directory = None,
    yes: Yes = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Remove a voter; the node continues as an observer. Asks first."""
    named_directory = _directory(directory)
    with RawClient(bootstrap) as client:
        partition, _ = _described(client)
        directory_id = _known_directory(partition.current_voters, node_id, "a voter")
        left = len(partition.current_voters) - 1
        if left == 0:
            raise Failure(f"node {node_id} is the only voter; add another voter first")
        confirm(f"Remove voter {node_id}, leaving {left}?", yes=yes)
        answer = client.ask(
            RemoveRaftVoterRequest(
                cluster_id=None, voter_id=node_id, voter_directory_id=named_directory or directory_id
            )
        )
    refuse(answer.error_code, answer.error_message, f"could not remove voter {node_id}")
    _report("removed", node_id, as_json)


def _node(text: str) -> tuple[int, str, int]:
    """ID@HOST:PORT."""
    id, at, where = text.partition("@")
    try:
        if not at:
            raise ValueError(f"{text!r} has no address")
        node_id = parse_number(id)
        host, port = parse_address(where)
    except ValueError as error:
        raise WrongUsage(f"write ID@HOST:PORT, such as 4@127.0.0.1:9094: {error}") from None
    if port == 0:
        raise WrongUsage(f"name the port where other nodes reach it; got port 0 in {text!r}")
    return node_id, host, port


def _described(client: RawClient) -> tuple[DescribeQuorumResponsePartition, dict[int, str]]:
    """The metadata log's single partition, and the addresses of its voters."""
    partition = DescribeQuorumRequestPartition(partition_index=0)
    topic = DescribeQuorumRequestTopic(topic_name=METADATA_TOPIC, partitions=[partition])
    answer = client.ask(DescribeQuorumRequest(topics=[topic]))
    refuse(answer.error_code, answer.error_message, "could not describe the quorum")
    described: DescribeQuorumResponsePartition = answer.topics[0].partitions[0]
    refuse(described.error_code, described.error_message, "could not describe the quorum")
    addresses = {
        node.node_id: format_address(node.listeners[0].host, node.listeners[0].port)
        for node in answer.nodes
        if node.listeners
    }
    return described, addresses


def _replicas(partition: DescribeQuorumResponsePartition, addresses: dict[int, str]) -> list[dict[str, Any]]:
    """Voters first. Lag is measured from the leader's log end offset."""
    ends = {each.replica_id: each.log_end_offset for each in partition.current_voters}
    leader_end = ends.get(partition.leader_id, -1)
    rows = []
    for role, replicas in (("voter", partition.current_voters), ("observer", partition.observers)):
        for each in sorted(replicas, key=lambda replica: replica.replica_id):
            known = each.log_end_offset >= 0
            rows.append(
                {
                    "node": each.replica_id,
                    "role": "leader" if each.replica_id == partition.leader_id else role,
                    "address": addresses.get(each.replica_id),
                    "end": each.log_end_offset if known else None,
                    "lag": max(0, leader_end - each.log_end_offset) if known and leader_end >= 0 else None,
                    "caught_up_ms": each.last_caught_up_timestamp
                    if each.last_caught_up_timestamp >= 0
                    else None,
                    "directory": format_id(each.replica_directory_id)
                    if each.replica_directory_id != NO_UUID
                    else None,
                }
            )
    return rows


def _behind_text(caught_up_ms: int | None, now_ms: float) -> str | None:
    """How long ago a replica was caught up, to a tenth of a second."""
    return None if caught_up_ms is None else f"{max(0.0, now_ms - caught_up_ms) / 1000:.1f} s"


def _known_directory(replicas: list[Any], node_id: int, what: str) -> bytes:
    found = [each for each in replicas if each.replica_id == node_id]
    if not found:
        raise Failure(f"node {node_id} is not {what}; see `penstock quorum show`")
    # A node with a replaced disk may be listed with both directories for a moment.
    newest = max(found, key=lambda each: each.last_fetch_timestamp)
    return bytes(newest.replica_directory_id)


def _directory(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        return parse_id(text)
    except ValueError:
        raise WrongUsage(f"--directory: {text!r} is not a directory id; see `penstock quorum show`") from None


def _report(done: str, node_id: int, as_json: bool) -> None:
    if as_json:
        show_json({done: node_id})
    else:
        print(f"{done} voter {node_id}")
