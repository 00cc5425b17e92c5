"""Reassignments and elections that an administrator asks for."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    ElectLeadersRequest,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsTopics,
    ReassignablePartition,
    ReassignableTopic,
)
from penstock.protocol.messages.topics import CreatePartitionsRequest, CreatePartitionsTopic
from tests.metadata.ensemble import Ensemble, directory

PREFERRED, UNCLEAN = 0, 1


def ensemble() -> Ensemble:
    on = Ensemble(brokers=5)
    on.create("a", (1, 2, 3))
    return on


def moving(on: Ensemble) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    partition = on.partition("a")
    return partition.replicas, partition.adding_replicas, partition.removing_replicas


def test_new_replicas_are_added_first_and_the_old_ones_go_when_those_are_in_sync() -> None:
    on = ensemble()
    assert on.reassign("a", [1, 4, 5]) == ErrorCode.NONE
    assert moving(on) == ((1, 4, 5, 2, 3), (4, 5), (2, 3))
    assert on.partition("a").directories == tuple(map(directory, (1, 4, 5, 2, 3)))
    assert on.state("a") == (1, (1, 2, 3), ())
    on.propose("a", [1, 2, 3, 4])
    assert moving(on)[1:] == ((4, 5), (2, 3))
    answer = on.propose("a", [1, 2, 3, 4, 5])
    assert answer.error_code == ErrorCode.NONE and answer.isr == [1, 4, 5]
    assert moving(on) == ((1, 4, 5), (), ())
    assert on.partition("a").directories == tuple(map(directory, (1, 4, 5)))
    # Those who were removed must not go on as if they were followers.
    assert on.partition("a").leader_epoch == 1


def test_leader_that_is_removed_hands_over_to_the_first_of_the_new_replicas() -> None:
    on = ensemble()
    on.reassign("a", [4, 5, 2])
    assert on.state("a")[0] == 1
    on.propose("a", [1, 2, 3, 4])
    assert on.propose("a", [1, 2, 3, 4, 5]).error_code == ErrorCode.NEW_LEADER_ELECTED
    assert on.state("a")[0] == 4
    assert set(on.state("a")[1]) == {4, 5, 2}


def test_a_topic_that_grows_while_it_is_moved_keeps_its_replication_factor() -> None:
    on = ensemble()
    on.reassign("a", [1, 4, 5])
    grown = CreatePartitionsTopic(name="a", count=2, assignments=None)
    assert on.handle(CreatePartitionsRequest(topics=[grown]), 3).results[0].error_code == ErrorCode.NONE
    assert len(on.partition("a", 1).replicas) == 3


def test_replicas_are_not_removed_before_enough_are_in_sync_without_them() -> None:
    on = ensemble()
    on.propose("a", [1, 3])
    on.reassign("a", [4, 2, 5])
    on.propose("a", [1, 3, 4])
    on.lost(5)
    assert moving(on)[1:] == ((4, 5), (1, 3))
    on.reassign("a", [4, 2])
    # One would be left of those that hold what was confirmed by two.
    assert moving(on)[1:] == ((4,), (1, 3))
    on.propose("a", [1, 3, 4, 2])
    assert moving(on) == ((4, 2), (), ())


def test_replication_factor_may_grow_and_shrink_unless_that_is_forbidden() -> None:
    on = ensemble()
    fixed = {"allow_replication_factor_change": False}
    assert on.reassign("a", [1, 2], **fixed) == ErrorCode.INVALID_REPLICATION_FACTOR
    assert on.reassign("a", [1, 2, 4], **fixed) == ErrorCode.NONE
    assert on.reassign("a", [1, 2, 5], **fixed) == ErrorCode.NONE
    assert on.reassign("a", None) == ErrorCode.NONE
    assert on.reassign("a", [2]) == ErrorCode.NONE
    assert moving(on) == ((2,), (), ()) and on.state("a") == (2, (2,), ())
    on.reassign("a", [2, 1, 3, 4])
    on.propose("a", [2, 1, 3, 4])
    assert moving(on) == ((2, 1, 3, 4), (), ())


def test_new_order_of_the_same_replicas_takes_effect_at_once() -> None:
    on = ensemble()
    on.reassign("a", [3, 1, 2])
    assert moving(on) == ((3, 1, 2), (), ())
    assert on.partition("a").directories == tuple(map(directory, (3, 1, 2)))
    assert (on.partition("a").leader, on.partition("a").leader_epoch) == (1, 0)


def test_reassignment_is_cancelled_and_the_old_replicas_stay() -> None:
    on = ensemble()
    assert on.reassign("a", None) == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
    on.reassign("a", [4, 5, 1])
    on.propose("a", [1, 2, 3, 4])
    assert on.reassign("a", None) == ErrorCode.NONE
    assert set(on.partition("a").replicas) == {1, 2, 3} and moving(on)[1:] == ((), ())
    assert set(on.partition("a").isr) == {1, 2, 3} and on.partition("a").leader == 1


def test_cancelling_moves_the_leadership_back() -> None:
    on = ensemble()
    on.reassign("a", [4, 5, 1])
    on.propose("a", [1, 2, 3, 4])
    on.elect("a", PREFERRED)
    assert on.partition("a").leader == 4
    assert on.reassign("a", None) == ErrorCode.NONE
    assert on.partition("a").leader == 1 and set(on.partition("a").isr) == {1, 2, 3}


def test_cancelling_is_refused_when_only_new_replicas_have_everything() -> None:
    on = Ensemble(brokers=5, static={"min.insync.replicas": "1", "penstock.rebalance.enable": "false"})
    on.create("a", (1, 2, 3))
    on.reassign("a", [4, 5, 1])
    on.propose("a", [1, 4])
    on.elect("a", PREFERRED)
    on.propose("a", [4])
    assert on.state("a") == (4, (4,), ())
    assert on.reassign("a", None) == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert moving(on)[1] == (4, 5)


def test_cancelling_is_refused_while_it_would_leave_what_was_confirmed_on_too_few() -> None:
    on = ensemble()
    on.reassign("a", [4, 5, 1])
    on.propose("a", [1, 4])
    assert on.reassign("a", None) == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    on.propose("a", [1, 4, 2])
    assert on.reassign("a", None) == ErrorCode.NONE
    assert set(on.partition("a").isr) == {1, 2}


def test_reassignment_may_be_replaced_by_another() -> None:
    on = ensemble()
    on.reassign("a", [1, 2, 4])
    on.reassign("a", [1, 2, 5])
    # 4 never came to be in sync, so there is nothing to keep it for.
    assert moving(on) == ((1, 2, 5, 3), (5,), (3,))
    on.reassign("a", [1, 2, 5, 4])
    assert moving(on) == ((1, 2, 5, 4, 3), (5, 4), (3,))
    on.propose("a", [1, 2, 3, 4, 5])
    assert moving(on) == ((1, 2, 5, 4), (), ())


@pytest.mark.parametrize("replicas", [[], [1, 1], [1, 9], [-1]], ids=str)
def test_replicas_that_cannot_be_are_refused(replicas: list[int]) -> None:
    on = ensemble()
    before = on.on.image
    assert on.reassign("a", replicas) == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert on.on.image is before


def test_missing_and_repeated_partitions_are_refused_one_by_one() -> None:
    on = ensemble()
    assert on.reassign("a", [1], index=7) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert on.reassign("b", [1]) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    asked = [ReassignablePartition(partition_index=0, replicas=replicas) for replicas in ([1, 2], [2, 3])]
    request = AlterPartitionReassignmentsRequest(topics=[ReassignableTopic(name="a", partitions=asked)])
    answers = on.handle(request, 1).responses[0].partitions
    assert [answer.error_code for answer in answers] == [ErrorCode.NONE, ErrorCode.INVALID_REQUEST]
    assert on.partition("a").replicas == (1, 2)


def test_reassignments_under_way_are_listed() -> None:
    on = ensemble()
    on.create("b", (1, 2))
    on.reassign("a", [1, 2, 4])
    response = on.handle(ListPartitionReassignmentsRequest(topics=None))
    (topic,) = response.topics
    (partition,) = topic.partitions
    assert (topic.name, partition.partition_index) == ("a", 0)
    assert (partition.replicas, partition.adding_replicas, partition.removing_replicas) == (
        [1, 2, 4, 3],
        [4],
        [3],
    )
    asked = [
        ListPartitionReassignmentsTopics(name=name, partition_indexes=[0, 5]) for name in ("a", "b", "c")
    ]
    assert on.handle(ListPartitionReassignmentsRequest(topics=asked)).topics == response.topics


def test_fenced_leader_in_the_middle_of_a_reassignment_hands_over_to_any_replica_in_sync() -> None:
    on = ensemble()
    on.reassign("a", [4, 5, 3])
    on.propose("a", [1, 2, 3, 4])
    on.lost(1)
    # In order of preference the new ones come first.
    assert on.state("a") == (4, (4, 3, 2), ())
    assert moving(on)[1:] == ((4, 5), (1, 2))


# Elections.


def test_preferred_leader_is_elected_when_it_is_in_sync() -> None:
    on = ensemble()
    assert on.elect("a", PREFERRED) == ErrorCode.ELECTION_NOT_NEEDED
    on.lost(1)
    assert on.elect("a", PREFERRED) == ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    on.restart(1)
    assert on.elect("a", PREFERRED) == ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    on.propose("a", [2, 3, 1])
    assert on.elect("a", PREFERRED) == ErrorCode.NONE
    assert on.state("a")[0] == 1


def test_trap_12_an_unclean_election_that_is_forced_is_a_new_epoch_and_recovers() -> None:
    on = ensemble()
    on.propose("a", [1, 2])
    assert on.elect("a", UNCLEAN) == ErrorCode.ELECTION_NOT_NEEDED
    on.lost(2)
    on.lost(1)
    before = on.partition("a")
    assert before.leader == -1 and before.eligible_leader_replicas == (1, 2)
    assert on.elect("a", UNCLEAN) == ErrorCode.NONE
    after = on.partition("a")
    assert (after.leader, after.isr, after.eligible_leader_replicas) == (3, (3,), ())
    assert after.leader_epoch == before.leader_epoch + 1 and after.leader_recovery_state == 1


def test_nobody_alive_is_nobody_to_elect() -> None:
    on = ensemble()
    for id in (1, 2, 3):
        on.lost(id)
    assert on.elect("a", UNCLEAN) == ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE


def test_election_everywhere_reports_only_what_was_to_do() -> None:
    on = ensemble()
    on.create("b", (2, 1))
    on.lost(1)
    on.restart(1)
    on.propose("a", [2, 3, 1])
    response = on.handle(ElectLeadersRequest(election_type=PREFERRED, topic_partitions=None), 2)
    assert [
        (found.topic, found.partition_result[0].error_code) for found in response.replica_election_results
    ] == [("a", 0)]
    assert on.handle(ElectLeadersRequest(election_type=5, topic_partitions=[]), 2).error_code == (
        ErrorCode.INVALID_REQUEST
    )
