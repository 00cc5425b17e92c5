"""`penstock brokers` against answers made up here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.cli.brokers import _clock_text
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import UnregisterBrokerRequest, UnregisterBrokerResponse
from penstock.protocol.messages.cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ElectLeadersRequest,
    ElectLeadersResponse,
    ListPartitionReassignmentsResponse,
    OngoingPartitionReassignment,
    OngoingTopicReassignment,
    PartitionResult,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
    ReplicaElectionResult,
)
from penstock.protocol.messages.topics import (
    MetadataRequest,
    MetadataResponse,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from tests.cli.conftest import Penstock
from tests.cli.fake_broker import FakeBroker

CLUSTER = DescribeClusterResponse(
    brokers=[
        DescribeClusterBroker(broker_id=3, host="c.example", port=9092, rack="r2", is_fenced=True),
        DescribeClusterBroker(broker_id=1, host="::1", port=9092, rack="r1", clock_ahead_ms=-4),
        DescribeClusterBroker(broker_id=2, host="b.example", port=9092, clock_ahead_ms=864_003_000),
    ]
)
# leader, replicas, in sync
ORDERS = [(1, [1, 2], [1, 2]), (2, [2, 3], [2]), (-1, [3], [])]
MOVES = ListPartitionReassignmentsResponse(
    error_message=None,
    topics=[
        OngoingTopicReassignment(
            name="orders",
            partitions=[
                OngoingPartitionReassignment(
                    partition_index=0, replicas=[1, 2], adding_replicas=[1], removing_replicas=[2]
                )
            ],
        )
    ],
)


def metadata(request: MetadataRequest) -> MetadataResponse:
    assert request.allow_auto_topic_creation is False
    if request.topics is not None and request.topics[0].name != "orders":
        missing = MetadataResponseTopic(
            name=request.topics[0].name, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        )
        return MetadataResponse(topics=[missing])
    partitions = [
        MetadataResponsePartition(partition_index=index, leader_id=leader, replica_nodes=held, isr_nodes=isr)
        for index, (leader, held, isr) in enumerate(ORDERS)
    ]
    return MetadataResponse(topics=[MetadataResponseTopic(name="orders", partitions=partitions)])


def moved(request: AlterPartitionReassignmentsRequest) -> AlterPartitionReassignmentsResponse:
    return AlterPartitionReassignmentsResponse(
        error_message=None,
        responses=[
            ReassignableTopicResponse(
                name=topic.name,
                partitions=[
                    ReassignablePartitionResponse(partition_index=each.partition_index, error_message=None)
                    for each in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )


def elected(*codes: int) -> ElectLeadersResponse:
    results = [
        PartitionResult(partition_id=number, error_code=code, error_message=None)
        for number, code in enumerate(codes)
    ]
    return ElectLeadersResponse(
        replica_election_results=[ReplicaElectionResult(topic="orders", partition_result=results)]
    )


@pytest.fixture
def cluster() -> Iterator[FakeBroker]:
    answers = elected(ErrorCode.NONE, ErrorCode.ELECTION_NOT_NEEDED)
    forgotten = UnregisterBrokerResponse(error_message=None)
    with FakeBroker(CLUSTER, MOVES, answers, forgotten, api_3=metadata, api_45=moved) as fake:
        yield fake


def test_brokers_are_listed_with_their_state_and_what_they_carry(
    penstock: Penstock, cluster: FakeBroker
) -> None:
    document = penstock("brokers", "--json", "--bootstrap", cluster.bootstrap).json
    keys = ["broker", "address", "rack", "state", "leaders", "replicas", "out_of_sync", "moving"]
    keys += ["clock_ahead_ms"]
    assert [tuple(row[key] for key in keys) for row in document] == [
        (1, "[::1]:9092", "r1", "active", 1, 1, 0, 1, -4),
        (2, "b.example:9092", None, "active", 1, 2, 0, 1, 864_003_000),
        (3, "c.example:9092", "r2", "fenced", 0, 2, 2, 0, None),
    ]
    assert cluster.asked[0].include_fenced_brokers is True and cluster.asked[0].include_clocks is True


def test_brokers_are_drawn_as_a_table(penstock: Penstock, cluster: FakeBroker) -> None:
    outcome = penstock("brokers", "--bootstrap", cluster.bootstrap)
    assert outcome.out.startswith(
        "BROKER  ADDRESS         RACK  STATE   LEADERS  REPLICAS  OUT OF SYNC  MOVING  CLOCK\n"
    )
    assert outcome.rows[2] == ["2", "b.example:9092", "-", "active", "1", "2", "0", "1", "+10d"]
    assert [row[-1] for row in outcome.rows[1:]] == ["+0s", "+10d", "-"]


@pytest.mark.parametrize(
    ("ahead_ms", "text"),
    [(0, "+0s"), (-35_000, "-35s"), (180_000, "+3min"), (-7_200_000, "-2h"), (864_000_000, "+10d")],
)
def test_a_clock_is_told_in_the_unit_that_fits(ahead_ms: int, text: str) -> None:
    assert _clock_text(ahead_ms) == text


def test_moves_show_where_from_and_where_to(penstock: Penstock, cluster: FakeBroker) -> None:
    outcome = penstock("brokers", "moves", "--bootstrap", cluster.bootstrap)
    assert outcome.rows[1:] == [["orders", "0", "1,2", "1", "2"]]
    assert penstock("brokers", "moves", "--json", "--bootstrap", cluster.bootstrap).json == [
        {"topic": "orders", "partition": 0, "replicas": [1, 2], "adding": [1], "removing": [2]}
    ]


def asked_to_move(cluster: FakeBroker) -> dict[int, list[int] | None]:
    request = cluster.asked[-1]
    assert isinstance(request, AlterPartitionReassignmentsRequest)
    return {each.partition_index: each.replicas for each in request.topics[0].partitions}


def test_leaders_are_spread_when_a_whole_topic_is_moved(penstock: Penstock, cluster: FakeBroker) -> None:
    outcome = penstock("brokers", "reassign", "orders", "--to", "1,3", "--bootstrap", cluster.bootstrap)
    assert (outcome.code, outcome.out) == (0, "began moving 3 partitions\n")
    assert asked_to_move(cluster) == {0: [1, 3], 1: [3, 1], 2: [1, 3]}


def test_one_partition_gets_the_brokers_in_the_order_given(penstock: Penstock, cluster: FakeBroker) -> None:
    words = ("orders:1", "--to", "3,1", "--json", "--bootstrap", cluster.bootstrap)
    assert penstock("brokers", "reassign", *words).json == [
        {"topic": "orders", "partition": 1, "replicas": [3, 1]}
    ]
    assert asked_to_move(cluster) == {1: [3, 1]}


def test_a_move_is_cancelled_with_null(penstock: Penstock, cluster: FakeBroker) -> None:
    outcome = penstock("brokers", "reassign", "orders:0", "--cancel", "--bootstrap", cluster.bootstrap)
    assert outcome.out == "stopped moving 1 partition\n"
    assert asked_to_move(cluster) == {0: None}


def test_electing_counts_those_that_changed(penstock: Penstock, cluster: FakeBroker) -> None:
    outcome = penstock("brokers", "elect", "--bootstrap", cluster.bootstrap)
    assert outcome.out == "elected the leaders of 1 partition\n"
    assert cluster.asked[-1] == ElectLeadersRequest(topic_partitions=None, timeout_ms=30_000)


def test_an_unclean_election_names_its_partitions(penstock: Penstock, cluster: FakeBroker) -> None:
    words = ("orders:2,1", "--unclean", "--json", "--bootstrap", cluster.bootstrap)
    assert penstock("brokers", "elect", *words).json == {"elected": [{"topic": "orders", "partition": 0}]}
    request = cluster.asked[-1]
    assert (request.election_type, request.topic_partitions[0].partitions) == (1, [1, 2])


def test_nothing_to_elect_is_said(penstock: Penstock) -> None:
    with FakeBroker(elected(ErrorCode.ELECTION_NOT_NEEDED)) as cluster:
        outcome = penstock("brokers", "elect", "--bootstrap", cluster.bootstrap)
    assert outcome.out == "every partition already has its preferred leader\n"


def test_an_unclean_election_of_a_partition_with_a_leader_says_so(penstock: Penstock) -> None:
    with FakeBroker(CLUSTER, elected(ErrorCode.ELECTION_NOT_NEEDED), api_3=metadata) as cluster:
        outcome = penstock("brokers", "elect", "orders:0", "--unclean", "--bootstrap", cluster.bootstrap)
    assert (outcome.code, outcome.out) == (0, "every partition named has a leader already\n")


def test_the_first_refusal_is_told_and_the_others_counted(penstock: Penstock) -> None:
    unavailable = ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    with FakeBroker(elected(ErrorCode.NONE, unavailable, unavailable)) as cluster:
        outcome = penstock("brokers", "elect", "--bootstrap", cluster.bootstrap)
    assert outcome.err == "penstock: orders-1: preferred leader not available, and 1 more\n"


def test_a_broker_that_was_stopped_is_forgotten(penstock: Penstock, cluster: FakeBroker) -> None:
    outcome = penstock("brokers", "unregister", "3", "--yes", "--bootstrap", cluster.bootstrap)
    assert (outcome.code, outcome.out) == (0, "unregistered broker 3\n")
    assert cluster.asked[-1] == UnregisterBrokerRequest(broker_id=3)
    words = ("brokers", "unregister", "3", "--yes", "--json", "--bootstrap", cluster.bootstrap)
    assert penstock(*words).json == {"unregistered": 3}


def test_forgetting_a_broker_says_first_what_it_has(penstock: Penstock) -> None:
    partitions = [
        MetadataResponsePartition(partition_index=0, leader_id=1, replica_nodes=[1, 3], isr_nodes=[1]),
        MetadataResponsePartition(partition_index=1, leader_id=-1, replica_nodes=[1, 3], isr_nodes=[3]),
    ]
    topics = MetadataResponse(topics=[MetadataResponseTopic(name="orders", partitions=partitions)])
    with FakeBroker(CLUSTER, topics, UnregisterBrokerResponse(error_message=None)) as cluster:
        outcome = penstock("brokers", "unregister", "3", "--bootstrap", cluster.bootstrap)
    assert outcome.code == 1
    question = "Unregister broker 3, which has 2 replicas, 1 of them the only copy in sync?"
    assert outcome.err.startswith(f"penstock: {question}")
    assert not any(isinstance(request, UnregisterBrokerRequest) for request in cluster.asked)


def test_a_refusal_to_forget_a_broker_is_told_in_the_brokers_words(penstock: Penstock) -> None:
    refusal = UnregisterBrokerResponse(
        error_code=ErrorCode.INVALID_REQUEST, error_message="Broker 3 is running; stop it first."
    )
    with FakeBroker(CLUSTER, refusal, api_3=metadata) as cluster:
        outcome = penstock("brokers", "unregister", "3", "--yes", "--bootstrap", cluster.bootstrap)
    assert outcome.code == 1
    assert outcome.err == "penstock: could not unregister broker 3: Broker 3 is running; stop it first\n"


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        ("reassign orders", 2, "pass --to"),
        ("reassign orders --to 1 --cancel", 2, "pass --to"),
        ("reassign orders --to one", 2, "different broker ids"),
        ("reassign orders --to 1,1", 2, "different broker ids"),
        ("reassign orders --to 1,01", 2, "different broker ids"),
        ("reassign orders --to 99999999999", 2, "'99999999999' is not a number"),
        (f"reassign orders:{'9' * 5000} --to 1", 2, "is not a number"),
        ("reassign :0 --to 1", 2, "name must not be empty"),
        ("reassign orders:x --to 1", 2, "write TOPIC or TOPIC:PARTITION"),
        ("reassign orders:3 --to 1", 1, "topic orders has no partition 3; it has 3"),
        ("reassign nowhere --to 1", 1, "there is no topic nowhere"),
        ("elect --unclean", 2, "--unclean can lose records"),
        ("unregister 1 --yes", 1, "broker 1 is running; stop it first"),
        ("unregister 9 --yes", 1, "there is no broker 9; see `penstock brokers`"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_changed(
    penstock: Penstock, cluster: FakeBroker, words: str, code: int, complaint: str
) -> None:
    outcome = penstock("brokers", *words.split(), "--bootstrap", cluster.bootstrap)
    assert outcome.code == code
    assert complaint in outcome.err
    assert outcome.err.count("\n") == 1
    assert all(isinstance(request, MetadataRequest | DescribeClusterRequest) for request in cluster.asked)


@pytest.mark.parametrize("option", ["--json", "--bootstrap=elsewhere:1"])
def test_an_option_before_the_command_is_refused_and_not_passed_over(
    penstock: Penstock, cluster: FakeBroker, option: str
) -> None:
    outcome = penstock("brokers", option, "elect", "orders", "--bootstrap", cluster.bootstrap)
    assert outcome.code == 2 and "after `elect`" in outcome.err
    assert not cluster.asked
