"""`penstock quorum` against answers made up here; the quorum itself is tested elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.model import format_id
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.quorum import (
    AddRaftVoterResponse,
    DescribeQuorumResponse,
    DescribeQuorumResponsePartition,
    DescribeQuorumResponseTopic,
    Endpoint,
    Node,
    RemoveRaftVoterResponse,
    ReplicaState,
)
from tests.cli.conftest import Penstock
from tests.cli.fake_broker import FakeBroker

DIRECTORIES = {node: bytes([node]) * 16 for node in (1, 2, 3, 4, 5)}


def replica(node: int, end: int) -> ReplicaState:
    return ReplicaState(replica_id=node, replica_directory_id=DIRECTORIES[node], log_end_offset=end)


def described(*, voters: int = 3, leader: int = 2, error_code: int = 0) -> DescribeQuorumResponse:
    ends = {1: 95, 2: 100, 3: -1}
    partition = DescribeQuorumResponsePartition(
        error_code=error_code,
        error_message=None,
        leader_id=leader,
        leader_epoch=7,
        high_watermark=95,
        current_voters=[replica(node, ends[node]) for node in range(1, voters + 1)],
        observers=[replica(4, 40)],
    )
    topic = DescribeQuorumResponseTopic(topic_name="__cluster_metadata", partitions=[partition])
    nodes = [
        Node(node_id=node, listeners=[Endpoint(name="INTERNAL", host="::1", port=9090 + node)])
        for node in range(1, voters + 1)
    ]
    return DescribeQuorumResponse(error_message=None, topics=[topic], nodes=nodes)


@pytest.fixture
def cluster() -> Iterator[FakeBroker]:
    with FakeBroker(
        described(), AddRaftVoterResponse(error_message=None), RemoveRaftVoterResponse(error_message=None)
    ) as fake:
        yield fake


def test_showing_names_the_leader_and_how_far_each_node_is_behind(
    penstock: Penstock, cluster: FakeBroker
) -> None:
    outcome = penstock("quorum", "show", "--bootstrap", cluster.bootstrap)
    assert outcome.code == 0
    title, *rows = outcome.rows
    assert title == ["quorum", "leader", "2", "epoch", "7", "high", "watermark", "95"]
    ids = {node: format_id(raw) for node, raw in DIRECTORIES.items()}
    assert rows == [
        ["NODE", "ROLE", "ADDRESS", "END", "LAG", "BEHIND", "DIRECTORY"],
        ["1", "voter", "[::1]:9091", "95", "5", "-", ids[1]],
        ["2", "leader", "[::1]:9092", "100", "0", "-", ids[2]],
        ["3", "voter", "[::1]:9093", "-", "-", "-", ids[3]],
        ["4", "observer", "-", "40", "60", "-", ids[4]],
    ]


def test_showing_as_json(penstock: Penstock, cluster: FakeBroker) -> None:
    document = penstock("quorum", "show", "--json", "--bootstrap", cluster.bootstrap).json
    assert (document["leader"], document["epoch"], document["high_watermark"]) == (2, 7, 95)
    assert [node["lag"] for node in document["nodes"]] == [5, 0, None, 60]


def test_a_quorum_without_a_leader_says_so(penstock: Penstock) -> None:
    with FakeBroker(described(leader=-1)) as cluster:
        outcome = penstock("quorum", "show", "--bootstrap", cluster.bootstrap)
        assert outcome.rows[0][:3] == ["quorum", "no", "leader"]


def test_an_older_broker_that_tells_no_directories_is_shown_without(penstock: Penstock) -> None:
    with FakeBroker(described(), newest={55: 0}) as cluster:
        document = penstock("quorum", "show", "--json", "--bootstrap", cluster.bootstrap).json
        assert {(node["directory"], node["address"]) for node in document["nodes"]} == {(None, None)}


def test_adding_names_the_directory_that_the_observer_reported(
    penstock: Penstock, cluster: FakeBroker
) -> None:
    outcome = penstock("quorum", "add", "4@127.0.0.1:9094", "--bootstrap", cluster.bootstrap)
    assert (outcome.code, outcome.out) == (0, "added voter 4\n")
    asked = cluster.asked[-1]
    assert (asked.voter_id, asked.voter_directory_id) == (4, DIRECTORIES[4])
    assert asked.listeners == [Endpoint(name="INTERNAL", host="127.0.0.1", port=9094)]


def test_adding_a_node_that_had_another_disk_names_the_one_it_fetches_with(penstock: Penstock) -> None:
    answer = described()
    former, now = replica(4, 40), replica(4, 95)
    now.replica_directory_id = DIRECTORIES[5]
    former.last_fetch_timestamp, now.last_fetch_timestamp = 1_000, 2_000
    for observers in ([former, now], [now, former]):
        answer.topics[0].partitions[0].observers = observers
        with FakeBroker(answer, AddRaftVoterResponse(error_message=None)) as cluster:
            outcome = penstock("quorum", "add", "4@127.0.0.1:9094", "--bootstrap", cluster.bootstrap)
            assert outcome.code == 0
            assert cluster.asked[-1].voter_directory_id == DIRECTORIES[5]


def test_adding_takes_a_directory_that_the_quorum_does_not_know(
    penstock: Penstock, cluster: FakeBroker
) -> None:
    words = ("5@127.0.0.1:9094", "--directory", format_id(DIRECTORIES[5]), "--bootstrap", cluster.bootstrap)
    assert penstock("quorum", "add", *words, "--json").json == {"added": 5}
    assert cluster.asked[-1].voter_directory_id == DIRECTORIES[5]


def test_removing_names_the_voters_directory(penstock: Penstock, cluster: FakeBroker) -> None:
    outcome = penstock("quorum", "remove", "3", "--yes", "--bootstrap", cluster.bootstrap)
    assert (outcome.code, outcome.out) == (0, "removed voter 3\n")
    assert (cluster.asked[-1].voter_id, cluster.asked[-1].voter_directory_id) == (3, DIRECTORIES[3])


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        ("add 4", 2, "write ID@HOST:PORT"),
        ("add four@127.0.0.1:9094", 2, "write ID@HOST:PORT"),
        ("add 4@127.0.0.1", 2, "has no port"),
        ("add 4@127.0.0.1:0", 2, "got port 0"),
        ("add 99999999999@127.0.0.1:9094", 2, "'99999999999' is not a number"),
        (f"add {'9' * 5000}@127.0.0.1:9094", 2, "is not a number"),
        ("add 4@127.0.0.1:9094 --directory nonsense", 2, "'nonsense' is not a directory id"),
        ("add 1@127.0.0.1:9094", 1, "node 1 is already a voter"),
        ("add 5@127.0.0.1:9094", 1, "node 5 is not running as an observer"),
        ("remove 4 --yes", 1, "node 4 is not a voter"),
        ("remove 3", 1, "pass --yes to confirm"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_is_asked_for(
    penstock: Penstock, cluster: FakeBroker, words: str, code: int, complaint: str
) -> None:
    outcome = penstock("quorum", *words.split(), "--bootstrap", cluster.bootstrap)
    assert outcome.code == code
    assert complaint in outcome.err
    assert outcome.err.count("\n") == 1
    assert all(request.KEY == 55 for request in cluster.asked)


def test_the_last_voter_is_not_removed(penstock: Penstock) -> None:
    with FakeBroker(described(voters=1, leader=1)) as cluster:
        outcome = penstock("quorum", "remove", "1", "--yes", "--bootstrap", cluster.bootstrap)
    assert outcome.code == 1
    assert "the only voter" in outcome.err


def test_a_refusal_is_told_in_the_brokers_words(penstock: Penstock) -> None:
    refusal = AddRaftVoterResponse(error_code=ErrorCode.REQUEST_TIMED_OUT, error_message="It is behind.")
    with FakeBroker(described(), refusal) as cluster:
        outcome = penstock("quorum", "add", "4@127.0.0.1:9094", "--bootstrap", cluster.bootstrap)
    assert outcome.err == "penstock: could not make node 4 a voter: It is behind\n"


def test_an_error_without_words_is_told_by_its_name(penstock: Penstock) -> None:
    with FakeBroker(described(error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)) as cluster:
        outcome = penstock("quorum", "show", "--bootstrap", cluster.bootstrap)
    assert outcome.err == "penstock: could not describe the quorum: not leader or follower\n"
