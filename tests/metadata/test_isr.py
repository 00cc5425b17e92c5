"""AlterPartition: which proposals of a leader are accepted, and in what order they are refused."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import (
    AlterPartitionRequest,
    AlterPartitionRequestPartition,
    AlterPartitionRequestTopic,
)
from tests.metadata.ensemble import STILL, Ensemble


def ensemble() -> Ensemble:
    on = Ensemble(brokers=4)
    on.create("a", (1, 2, 3))
    return on


def test_proposal_is_accepted_and_answered_with_the_new_state() -> None:
    on = ensemble()
    answer = on.propose("a", [1, 3])
    assert (answer.error_code, answer.leader_id, answer.isr) == (ErrorCode.NONE, 1, [1, 3])
    assert (answer.leader_epoch, answer.partition_epoch) == (0, 1)
    assert on.state("a") == (1, (1, 3), ())
    assert on.propose("a", [3, 2, 1]).isr == [1, 2, 3]


def test_trap_9_a_proposal_of_what_is_already_so_makes_older_ones_void() -> None:
    on = ensemble()
    before = on.partition("a")
    assert on.propose("a", [3, 1, 2]).partition_epoch == before.partition_epoch + 1
    assert on.state("a") == (1, (1, 2, 3), ())
    # Sent before and late: the leader no longer counts on it.
    late = on.propose("a", [1], partition_epoch=before.partition_epoch)
    assert late.error_code == ErrorCode.INVALID_UPDATE_VERSION


def test_version_2_has_no_broker_epochs() -> None:
    on = ensemble()
    assert on.propose("a", [1, 3], version=2).isr == [1, 3]


def test_trap_8_a_replica_with_a_stale_broker_epoch_does_not_join() -> None:
    on = ensemble()
    old = on.broker(2).epoch
    on.restart(2)
    assert on.state("a") == (1, (1, 3), ())
    assert on.propose("a", [1, 3, 2], epochs={2: old}).error_code == ErrorCode.INELIGIBLE_REPLICA
    assert on.propose("a", [1, 3, 2]).error_code == ErrorCode.NONE
    # A leader that does not know the epoch is believed.
    on.propose("a", [1, 3])
    assert on.propose("a", [1, 3, 2], epochs={2: -1}).error_code == ErrorCode.NONE


def test_trap_8_fenced_and_stopping_replicas_do_not_join() -> None:
    on = ensemble()
    on.lost(2)
    on.beat(3, want_shut_down=True)
    assert on.state("a") == (1, (1,), (3,))
    assert on.propose("a", [1, 2]).error_code == ErrorCode.INELIGIBLE_REPLICA
    assert on.propose("a", [1, 3]).error_code == ErrorCode.INELIGIBLE_REPLICA


def test_trap_8_the_sender_is_known_by_its_broker_epoch() -> None:
    on = ensemble()
    request = AlterPartitionRequest(broker_id=1, broker_epoch=on.broker(1).epoch - 1)
    assert on.handle(request, 3).error_code == ErrorCode.STALE_BROKER_EPOCH
    unknown = AlterPartitionRequest(broker_id=9, broker_epoch=0)
    assert on.handle(unknown, 3).error_code == ErrorCode.STALE_BROKER_EPOCH


def test_trap_9_and_11_a_proposal_from_an_older_state_is_refused() -> None:
    on = ensemble()
    stale = on.partition("a").partition_epoch
    on.lost(3)
    answer = on.propose("a", [1, 2, 3], partition_epoch=stale)
    assert answer.error_code == ErrorCode.INVALID_UPDATE_VERSION
    assert on.state("a") == (1, (1, 2), ())


def test_trap_10_an_empty_isr_is_refused() -> None:
    on = ensemble()
    assert on.propose("a", []).error_code == ErrorCode.INVALID_REQUEST
    assert on.state("a") == (1, (1, 2, 3), ())


def test_trap_11_an_epoch_that_is_ahead_means_that_this_controller_is_not_the_one() -> None:
    on = ensemble()
    assert on.propose("a", [1], leader_epoch=5).error_code == ErrorCode.NOT_CONTROLLER
    assert on.propose("a", [1], partition_epoch=5).error_code == ErrorCode.NOT_CONTROLLER


def test_trap_11_a_leader_that_was_replaced_is_fenced() -> None:
    on = ensemble()
    on.lost(1)
    on.restart(1)
    assert on.propose("a", [1], sender=1, leader_epoch=0).error_code == ErrorCode.FENCED_LEADER_EPOCH
    assert on.propose("a", [1], sender=1).error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "isr", [[2, 3], [1, 1, 2], [1, 4], [1, 99]], ids=["without leader", "twice", "no replica", "unknown"]
)
def test_isr_that_cannot_be_is_refused(isr: list[int]) -> None:
    on = ensemble()
    assert on.propose("a", isr).error_code == ErrorCode.INVALID_REQUEST


def test_recovered_leader_does_not_recover_again() -> None:
    on = ensemble()
    assert on.propose("a", [1], leader_recovery_state=1).error_code == ErrorCode.INVALID_REQUEST
    assert on.propose("a", [1], leader_recovery_state=7).error_code == ErrorCode.INVALID_REQUEST


def test_missing_topics_and_partitions_are_reported_one_by_one() -> None:
    on = ensemble()
    id = on.on.image.topics["a"].id
    request = AlterPartitionRequest(
        broker_id=1,
        broker_epoch=on.broker(1).epoch,
        topics=[
            AlterPartitionRequestTopic(
                topic_id=b"x" * 16, partitions=[AlterPartitionRequestPartition(partition_index=0)]
            ),
            AlterPartitionRequestTopic(
                topic_id=id, partitions=[AlterPartitionRequestPartition(partition_index=i) for i in (3, -1)]
            ),
        ],
    )
    errors = [part.error_code for topic in on.handle(request, 3).topics for part in topic.partitions]
    assert errors == [ErrorCode.UNKNOWN_TOPIC_ID, *[ErrorCode.UNKNOWN_TOPIC_OR_PARTITION] * 2]


def test_partition_named_twice_in_one_request_is_changed_once() -> None:
    on = ensemble()
    partition = on.partition("a")
    asked = [
        AlterPartitionRequestPartition(partition_index=0, new_isr=isr, partition_epoch=0)
        for isr in ([1, 2], [1, 3])
    ]
    request = AlterPartitionRequest(
        broker_id=1,
        broker_epoch=on.broker(1).epoch,
        topics=[AlterPartitionRequestTopic(topic_id=on.on.image.topics["a"].id, partitions=asked)],
    )
    answers = on.handle(request, 2).topics[0].partitions
    assert [answer.error_code for answer in answers] == [ErrorCode.NONE, ErrorCode.INVALID_REQUEST]
    assert on.partition("a").partition_epoch == partition.partition_epoch + 1


def test_isr_below_the_minimum_leaves_eligible_leaders_and_above_it_none() -> None:
    on = ensemble()
    on.propose("a", [1])
    assert on.state("a") == (1, (1,), (2, 3))
    on.propose("a", [1, 3])
    assert on.state("a") == (1, (1, 3), ())


@pytest.mark.parametrize("minimum", ["1", "2"])
def test_a_controller_started_with_another_minimum_reviews_who_is_eligible(minimum: str) -> None:
    """With two brokers the minimum may be each controller's own. The leader waits while anybody is eligible."""
    ensemble = Ensemble(brokers=2)
    ensemble.static = {**STILL, "min.insync.replicas": "2"}
    ensemble.fail_over()
    ensemble.create("t", (1, 2))
    ensemble.lost(2)
    assert ensemble.state("t") == (1, (1,), (2,))
    ensemble.static = {**STILL, "min.insync.replicas": minimum}
    ensemble.fail_over()
    assert ensemble.state("t") == (1, (1,), () if minimum == "1" else (2,))


def test_an_answer_says_who_is_eligible() -> None:
    ensemble = Ensemble()
    ensemble.create("t", (1, 2, 3))
    assert ensemble.propose("t", [1, 2]).eligible_leader_replicas == []
    assert ensemble.propose("t", [1]).eligible_leader_replicas == [2]
