"""The group APIs on the wire: what the shell adds to the coordinator (``tests/groups`` has the rules)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    FindCoordinatorRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    LeaveGroupRequest,
    ListGroupsRequest,
    MemberIdentity,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from penstock.protocol.schema import encoder
from tests.broker.conftest import Node
from tests.broker.phrases import create_topic, delete_topic, find_coordinator, only
from tests.broker.wire import Wire, frame
from tests.support import BrokerProcess

Unique = Callable[[str], str]

SESSION_MS = 30_000


@pytest.fixture
def group(wire: Wire, unique: Unique) -> str:
    name = unique("g")
    find_coordinator(wire, name)
    return name


@pytest.fixture
def topic(wire: Wire, unique: Unique) -> str:
    name = unique("t")
    create_topic(wire, name, 3)
    return name


def join_request(group: str, member_id: str = "", metadata: bytes = b"subscription") -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=group,
        session_timeout_ms=SESSION_MS,
        rebalance_timeout_ms=SESSION_MS,
        member_id=member_id,
        protocol_type="test",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=metadata)],
    )


def join(wire: Wire, group: str, version: int = 9) -> Any:
    """Become the only member of a group; the answer to the last JoinGroup."""
    response = wire.call(join_request(group), version)
    if response.error_code == ErrorCode.MEMBER_ID_REQUIRED:
        response = wire.call(join_request(group, response.member_id), version)
    assert response.error_code == 0, response
    return response


def sync(wire: Wire, group: str, joined: Any, version: int = 5, assignment: bytes = b"assigned") -> Any:
    assigned = [SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment)]
    request = SyncGroupRequest(
        group_id=group,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        assignments=assigned,
    )
    return wire.call(request, version)


def commit(
    wire: Wire,
    group: str,
    topic: str,
    offsets: dict[int, int],
    *,
    version: int = 9,
    topic_id: bytes = bytes(16),
) -> dict[int, int]:
    """Commit without being a member; the errors by partition."""
    partitions = [
        OffsetCommitRequestPartition(
            partition_index=index,
            committed_offset=offset,
            committed_leader_epoch=0,
            committed_metadata="note",
        )
        for index, offset in offsets.items()
    ]
    asked = OffsetCommitRequestTopic(name=topic, topic_id=topic_id, partitions=partitions)
    response = wire.call(OffsetCommitRequest(group_id=group, topics=[asked]), version)
    return {
        partition.partition_index: partition.error_code
        for answer in response.topics
        for partition in answer.partitions
    }


def committed(wire: Wire, group: str, topic: str, indexes: list[int]) -> list[int]:
    asked = OffsetFetchRequestTopic(name=topic, partition_indexes=indexes)
    response = wire.call(OffsetFetchRequest(group_id=group, topics=[asked]), 5)
    assert response.error_code == 0
    return [partition.committed_offset for partition in only(response.topics).partitions]


# FindCoordinator


@pytest.mark.parametrize("version", range(7))
def test_every_version_finds_the_coordinator(node: Node, wire: Wire, unique: Unique, version: int) -> None:
    groups = [unique("g"), unique("g")]
    response = wire.call(FindCoordinatorRequest(key=groups[0], coordinator_keys=groups), version)
    if version < 4:
        assert (response.error_code, response.node_id) == (0, 1)
        assert (response.host, response.port) == node.address
        return
    assert [found.key for found in response.coordinators] == groups
    for found in response.coordinators:
        assert (found.error_code, found.node_id) == (0, 1)
        assert (found.host, found.port) == node.address


def test_coordinators_of_other_kinds_are_refused(wire: Wire) -> None:
    for kind, error in (
        (2, ErrorCode.INVALID_REQUEST),
        (-1, ErrorCode.INVALID_REQUEST),
        (127, ErrorCode.INVALID_REQUEST),
    ):
        assert wire.call(FindCoordinatorRequest(key="x", key_type=kind), 2).error_code == error
        request = FindCoordinatorRequest(coordinator_keys=["x", "y"], key_type=kind)
        found = wire.call(request, 6).coordinators
        assert [one.error_code for one in found] == [error] * 2
    assert wire.call(FindCoordinatorRequest(coordinator_keys=[]), 6).coordinators == []


def test_before_the_first_find_coordinator_nobody_coordinates() -> None:
    with BrokerProcess() as process, Wire((process.host, process.port)) as wire:
        assert wire.call(join_request("g"), 5).error_code == ErrorCode.NOT_COORDINATOR
        heartbeat = wire.call(HeartbeatRequest(group_id="g", generation_id=1, member_id="m"), 4)
        assert heartbeat.error_code == ErrorCode.NOT_COORDINATOR
        create_topic(wire, "t")
        assert commit(wire, "g", "t", {0: 1}) == {0: ErrorCode.NOT_COORDINATOR}
        request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="g", topics=None)])
        assert only(wire.call(request, 9).groups).error_code == ErrorCode.NOT_COORDINATOR
        assert wire.call(ListGroupsRequest(), 5).groups == []
        described = only(wire.call(DescribeGroupsRequest(groups=["g"]), 5).groups)
        assert described.error_code == ErrorCode.NOT_COORDINATOR
        deleted = only(wire.call(DeleteGroupsRequest(groups_names=["g"]), 2).results)
        assert deleted.error_code == ErrorCode.NOT_COORDINATOR
        # Two at the same moment: one of them creates the offsets topic, both are answered.
        with Wire((process.host, process.port)) as other:
            wire.send(FindCoordinatorRequest(key="g"), 2)
            other.send(FindCoordinatorRequest(key="h"), 2)
            assert (wire.receive().error_code, other.receive().error_code) == (0, 0)
        assert wire.call(join_request("g"), 3).error_code == 0


# Membership


@pytest.mark.parametrize("version", range(10))
def test_every_version_of_join_leads_to_an_assignment(wire: Wire, group: str, version: int) -> None:
    joined = join(wire, group, version)
    assert (joined.generation_id, joined.leader) == (1, joined.member_id)
    assert joined.protocol_name == "range"
    assert [(one.member_id, one.metadata) for one in joined.members] == [(joined.member_id, b"subscription")]
    synced = sync(wire, group, joined, min(version, 5))
    assert (synced.error_code, synced.assignment) == (0, b"assigned")
    request = HeartbeatRequest(group_id=group, generation_id=1, member_id=joined.member_id)
    assert wire.call(request, min(version, 4)).error_code == 0
    leaving = LeaveGroupRequest(
        group_id=group, member_id=joined.member_id, members=[MemberIdentity(member_id=joined.member_id)]
    )
    assert wire.call(leaving, min(version, 5)).error_code == 0
    assert wire.call(request, min(version, 4)).error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_peer_that_left_while_joining_does_no_harm(node: Node, wire: Wire, group: str) -> None:
    join(wire, group, 3)
    for _ in range(10):
        with node.connect() as leaving:
            leaving.send(join_request(group), 3)
    described = only(wire.call(DescribeGroupsRequest(groups=[group]), 5).groups)
    assert described.error_code == 0


def test_the_longest_client_id_there_is_does_no_harm(wire: Wire, group: str) -> None:
    # Each byte is invalid UTF-8, and becomes three as it is replaced.
    client_id = b"\xff" * 32767
    correlation_id = wire.expect(11, 3)
    body = b"".join(bytes(part) for part in encoder(JoinGroupRequest, 3)(join_request(group)))  # type: ignore[arg-type]
    wire.send_bytes(frame(struct.pack(">hhih", 11, 3, correlation_id, len(client_id)) + client_id + body))
    joined = wire.receive()
    assert joined.error_code == 0
    assert sync(wire, group, joined).error_code == 0
    described = only(wire.call(DescribeGroupsRequest(groups=[group]), 0).groups)
    assert len(only(described.members).client_id) == 255


def test_a_subscription_of_megabytes_is_refused(wire: Wire, group: str) -> None:
    response = wire.call(join_request(group, metadata=bytes(1024 * 1024 + 1)), 3)
    assert response.error_code == ErrorCode.MESSAGE_TOO_LARGE
    # As large as is allowed.
    response = wire.call(join_request(group, metadata=bytes(1024 * 1024)), 3)
    assert response.error_code == 0


def test_assignments_for_nobody_are_not_kept(wire: Wire, group: str) -> None:
    joined = join(wire, group, 3)
    members = [joined.member_id, *(f"nobody-{number}" for number in range(3))]
    assignments = [
        SyncGroupRequestAssignment(member_id=name, assignment=bytes(3_500_000)) for name in members
    ]
    request = SyncGroupRequest(
        group_id=group,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        assignments=assignments,
    )
    assert wire.call(request, 3).error_code == 0
    described = only(wire.call(DescribeGroupsRequest(groups=[group]), 5).groups)
    assert [len(member.member_assignment) for member in described.members] == [3_500_000]


def test_a_generation_too_large_to_be_stored_is_given_up_and_does_not_stop_a_restart() -> None:
    with BrokerProcess({"group.initial.rebalance.delay.ms": "1500"}) as process:
        address = process.host, process.port
        with Wire(address) as wire, ExitStack() as stack:
            find_coordinator(wire, "g")
            members = [stack.enter_context(Wire(address)) for _ in range(34)]
            for member in members:
                member.send(join_request("g", metadata=bytes(1024 * 1024)), 3)
            answers = [member.receive() for member in members]
            leader = only([answer for answer in answers if answer.leader == answer.member_id])
            assert {answer.generation_id for answer in answers} == {1}
            assert sync(wire, "g", leader).error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
            assert only(wire.call(DescribeGroupsRequest(groups=["g"]), 5).groups).error_code == 0
        process.restart()
        with Wire(address) as wire:
            assert sync(wire, "g", leader).error_code == ErrorCode.UNKNOWN_MEMBER_ID


# Offsets


@pytest.mark.parametrize("version", range(2, 11))
def test_every_version_commits_what_exists_and_refuses_the_rest(
    wire: Wire, group: str, unique: Unique, version: int
) -> None:
    name = unique("t")
    topic_id = create_topic(wire, name, 2)
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    answered = commit(wire, group, name, {0: 10, 1: 11, 2: 12, -1: 13}, version=version, topic_id=topic_id)
    assert answered == {0: 0, 1: 0, 2: unknown, -1: unknown}
    assert committed(wire, group, name, [0, 1, 2]) == [10, 11, -1]
    nowhere = commit(wire, group, "no-such-topic", {0: 1}, version=version, topic_id=b"\7" * 16)
    assert nowhere == {0: unknown if version < 10 else ErrorCode.UNKNOWN_TOPIC_ID}


@pytest.mark.parametrize("version", range(1, 8))
def test_every_old_version_fetches_offsets(wire: Wire, group: str, topic: str, version: int) -> None:
    commit(wire, group, topic, {0: 5, 2: 7})
    asked = OffsetFetchRequestTopic(name=topic, partition_indexes=[0, 1, 2, 99])
    response = wire.call(OffsetFetchRequest(group_id=group, topics=[asked]), version)
    partitions = only(response.topics).partitions
    assert [partition.committed_offset for partition in partitions] == [5, -1, 7, -1]
    # No commit is no error, and its note is empty, not null.
    assert [partition.error_code for partition in partitions] == [0] * 4
    assert [partition.metadata for partition in partitions] == ["note", "", "note", ""]
    if version >= 2:
        response = wire.call(OffsetFetchRequest(group_id=group, topics=None), version)
        assert [partition.partition_index for partition in only(response.topics).partitions] == [0, 2]


@pytest.mark.parametrize("version", [8, 9, 10])
def test_every_new_version_fetches_offsets_of_several_groups(
    wire: Wire, unique: Unique, version: int
) -> None:
    name = unique("t")
    topic_id = create_topic(wire, name, 2)
    groups = [unique("g"), unique("g")]
    for number, group in enumerate(groups):
        find_coordinator(wire, group)
        commit(wire, group, name, {0: number})
    asked = [
        OffsetFetchRequestGroup(
            group_id=group,
            topics=[OffsetFetchRequestTopics(name=name, topic_id=topic_id, partition_indexes=[0, 1])],
        )
        for group in groups
    ]
    response = wire.call(OffsetFetchRequest(groups=asked), version)
    assert [answer.group_id for answer in response.groups] == groups
    for number, answer in enumerate(response.groups):
        topic = only(answer.topics)
        assert (topic.name, topic.topic_id) == ((name, bytes(16)) if version < 10 else ("", topic_id))
        assert [partition.committed_offset for partition in topic.partitions] == [number, -1]
    everything = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=groups[1], topics=None)])
    topic = only(only(wire.call(everything, version).groups).topics)
    assert [partition.committed_offset for partition in topic.partitions] == [1]


def test_offsets_by_topic_id_survive_strangers(wire: Wire, group: str, unique: Unique) -> None:
    name = unique("t")
    topic_id = create_topic(wire, name)
    commit(wire, group, "", {0: 4}, version=10, topic_id=topic_id)
    asked = [
        OffsetFetchRequestTopics(topic_id=one, partition_indexes=[0, 5])
        for one in (topic_id, bytes(16), b"\7" * 16)
    ]
    request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=group, topics=asked)])
    topics = {topic.topic_id: topic.partitions for topic in only(wire.call(request, 10).groups).topics}
    assert [(one.committed_offset, one.error_code) for one in topics[topic_id]] == [(4, 0), (-1, 0)]
    for stranger in (bytes(16), b"\7" * 16):
        errors = [(one.committed_offset, one.error_code) for one in topics[stranger]]
        assert errors == [(-1, ErrorCode.UNKNOWN_TOPIC_ID)] * 2


def test_a_group_asked_for_twice_is_answered_once(wire: Wire, group: str, topic: str) -> None:
    commit(wire, group, topic, {0: 1, 1: 1})
    asked = [OffsetFetchRequestGroup(group_id=group, topics=None)] * 100
    response = wire.call(OffsetFetchRequest(groups=asked), 9)
    assert [len(answer.topics) for answer in response.groups] == [1] + [0] * 99
    assert {answer.error_code for answer in response.groups[1:]} == {ErrorCode.INVALID_REQUEST}
    join(wire, group, 3)
    assert len(wire.call(DescribeGroupsRequest(groups=[group] * 100), 5).groups) == 1


def test_committed_offsets_go_with_their_topic(wire: Wire, group: str, topic: str) -> None:
    commit(wire, group, topic, {0: 5})
    delete_topic(wire, topic)
    create_topic(wire, topic)
    assert committed(wire, group, topic, [0]) == [-1]


def test_offsets_are_deleted(wire: Wire, group: str, topic: str) -> None:
    commit(wire, group, topic, {0: 5, 1: 6})
    asked = OffsetDeleteRequestTopic(
        name=topic, partitions=[OffsetDeleteRequestPartition(partition_index=index) for index in (0, 9)]
    )
    response = wire.call(OffsetDeleteRequest(group_id=group, topics=[asked]), 0)
    assert response.error_code == 0
    assert committed(wire, group, topic, [0, 1]) == [-1, 6]


@pytest.mark.parametrize(
    "name", ["", "\0", "a\r\nb\x1b[31m", "x" * 1024, "x" * 1025, "../../x", "\u202ex"], ids=repr
)
def test_strange_names_of_groups_are_answered(wire: Wire, topic: str, name: str) -> None:
    find_coordinator(wire, name)
    response = wire.call(join_request(name), 3)
    too_long = len(name) > 1024
    refused = not name or too_long
    assert response.error_code == (ErrorCode.INVALID_GROUP_ID if refused else 0)
    assert commit(wire, f"{name}-offsets" if not refused else name, topic, {0: 1})[0] in (
        0,
        ErrorCode.INVALID_GROUP_ID,
    )
    described = only(wire.call(DescribeGroupsRequest(groups=[name]), 5).groups)
    assert described.group_id == name
    listed = [one.group_id for one in wire.call(ListGroupsRequest(), 4).groups]
    assert (name in listed) == (not too_long)


@pytest.mark.parametrize("timeout_ms", [0, -1, 5999, 1_800_001, 2**31 - 1, -(2**31)])
def test_session_timeouts_that_cannot_be_are_refused(wire: Wire, group: str, timeout_ms: int) -> None:
    request = join_request(group)
    request.session_timeout_ms = timeout_ms
    assert wire.call(request, 5).error_code == ErrorCode.INVALID_SESSION_TIMEOUT


@pytest.mark.parametrize("timeout_ms", [0, -1, 2**31 - 1, -(2**31)])
def test_any_rebalance_timeout_is_survived(wire: Wire, group: str, timeout_ms: int) -> None:
    request = join_request(group)
    request.rebalance_timeout_ms = timeout_ms
    assert wire.call(request, 3).error_code == 0


def test_groups_are_listed_described_and_deleted(wire: Wire, group: str, topic: str) -> None:
    joined = join(wire, group)
    sync(wire, group, joined)
    for version in range(6):
        listed = {one.group_id: one for one in wire.call(ListGroupsRequest(), version).groups}
        assert listed[group].protocol_type == "test"
    for version in range(7):
        described = only(wire.call(DescribeGroupsRequest(groups=[group]), version).groups)
        assert (described.error_code, described.group_state) == (0, "Stable")
        assert only(described.members).member_assignment == b"assigned"
    for version in range(3):
        results = wire.call(DeleteGroupsRequest(groups_names=[group, "no-such-group"]), version).results
        assert {one.group_id: one.error_code for one in results} == {
            group: ErrorCode.NON_EMPTY_GROUP,
            "no-such-group": ErrorCode.GROUP_ID_NOT_FOUND,
        }
    wire.call(LeaveGroupRequest(group_id=group, members=[MemberIdentity(member_id=joined.member_id)]), 5)
    assert only(wire.call(DeleteGroupsRequest(groups_names=[group, group]), 2).results).error_code == 0
    assert wire.call(DeleteGroupsRequest(groups_names=[]), 2).results == []


def test_requests_for_nothing_are_answered(wire: Wire, group: str) -> None:
    assert wire.call(OffsetCommitRequest(group_id=group, topics=[]), 9).topics == []
    assert wire.call(OffsetFetchRequest(groups=[]), 9).groups == []
    assert wire.call(DescribeGroupsRequest(groups=[]), 5).groups == []
    assert wire.call(LeaveGroupRequest(group_id=group, members=[]), 5).members == []
    refused = wire.call(join_request(group), 3)
    assert refused.error_code == 0
    nothing = join_request(group)
    nothing.protocols = []
    assert wire.call(nothing, 3).error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
