"""OffsetCommit, OffsetFetch, OffsetDelete."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.groups.changes import OffsetCommitted, OffsetRemoved
from penstock.groups.offset_answers import offset_fetch_groups, offset_fetch_response
from penstock.protocol import schema
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import OffsetFetchRequest, OffsetFetchRequestTopic
from tests.groups.conversation import (
    DELAY_MS,
    GROUP,
    SESSION_MS,
    WALL_MS,
    Conversation,
    subscription,
    topic_id,
)

P0 = ("orders", 0)
P1 = ("orders", 1)
NONE = [ErrorCode.NONE]


def test_a_members_commit_is_stored_and_fetched() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.commit({P0: 7}, member_id=member, generation=generation, metadata="note", leader_epoch=3)
    found = talk.fetch(P0)[P0]
    assert (found.committed_offset, found.committed_leader_epoch, found.metadata) == (7, 3, "note")
    assert talk.log[-1] == OffsetCommitted(
        GROUP, "orders", 0, 7, 3, "note", WALL_MS + DELAY_MS, topic_id=topic_id("orders")
    )


def test_the_last_commit_wins_even_when_it_goes_back() -> None:
    talk = Conversation()
    for offset in (5, 9, 2):
        assert talk.commit({P0: offset}) == NONE
    assert talk.offsets() == {P0: 2}


def test_several_partitions_in_one_commit_are_one_batch() -> None:
    talk = Conversation()
    talk.hold = True
    talk.commit({P0: 1, P1: 2, ("payments", 0): 3})
    ((decision, _, _),) = talk.held
    assert len(decision.changes) == 3
    talk.commit_all()
    assert talk.offsets() == {P0: 1, P1: 2, ("payments", 0): 3}


def test_without_a_group_anybody_may_commit_with_generation_minus_one() -> None:
    talk = Conversation()
    assert talk.commit({P0: 1}) == NONE
    (listed,) = talk.groups()
    assert (listed.group_id, listed.group_state, listed.protocol_type) == (GROUP, "Empty", "")


def test_the_empty_group_id_may_store_offsets() -> None:
    talk = Conversation()
    assert talk.commit({P0: 1}, group="") == NONE
    assert talk.offsets(group="") == {P0: 1}


@pytest.mark.parametrize(
    ("version", "error"), [(8, ErrorCode.ILLEGAL_GENERATION), (9, ErrorCode.GROUP_ID_NOT_FOUND)]
)
def test_a_member_of_a_group_that_does_not_exist_cannot_commit(version: int, error: ErrorCode) -> None:
    talk = Conversation()
    assert talk.commit({P0: 1}, member_id="ghost", generation=3, version=version) == [error]
    assert talk.groups() == []


def test_an_empty_group_takes_commits_without_a_member_only() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.leave(member)
    late = talk.commit({P0: 1}, member_id=member, generation=generation)
    assert late == [ErrorCode.UNKNOWN_MEMBER_ID]
    assert talk.commit({P0: 1}) == NONE


def test_a_group_with_members_takes_no_commits_of_outsiders() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    assert talk.commit({P0: 1}) == [ErrorCode.UNKNOWN_MEMBER_ID]
    assert talk.commit({P0: 1}, member_id="ghost", generation=generation) == [ErrorCode.UNKNOWN_MEMBER_ID]
    assert talk.commit({P0: 1}, member_id=member) == [ErrorCode.ILLEGAL_GENERATION]
    assert talk.offsets() == {}


def test_commits_of_another_generation_are_refused() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    stale = [ErrorCode.ILLEGAL_GENERATION]
    assert talk.commit({P0: 1}, member_id=member, generation=generation - 1) == stale
    assert talk.commit({P0: 1}, member_id=member, generation=generation + 1) == stale


def test_a_member_may_commit_before_it_rejoins() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.join_new()
    assert talk.state() == "PreparingRebalance"
    assert talk.commit({P0: 5}, member_id=member, generation=generation) == NONE


def test_nobody_commits_while_the_assignment_is_awaited() -> None:
    talk = Conversation()
    joining = talk.join_new()
    talk.sleep(DELAY_MS)
    refused = talk.commit({P0: 5}, member_id=joining.answer.member_id, generation=1)
    assert refused == [ErrorCode.REBALANCE_IN_PROGRESS]


def test_a_commit_keeps_the_session() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    for offset in range(3):
        talk.sleep(SESSION_MS - 1)
        assert talk.commit({P0: offset}, member_id=member, generation=generation) == NONE
    assert talk.heartbeat(member, generation) is ErrorCode.NONE


def test_metadata_that_is_too_large_fails_its_partition_only() -> None:
    talk = Conversation()
    too_large = [ErrorCode.OFFSET_METADATA_TOO_LARGE]
    assert talk.commit({P0: 1}, metadata="x" * 4097) == too_large
    assert talk.groups() == [], "a refused commit makes no group"
    assert talk.commit({P0: 1}, metadata="x" * 4096) == NONE
    assert talk.commit({P0: 1}, metadata="\u65e5" * 4096) == NONE


def test_null_metadata_is_read_back_as_empty() -> None:
    talk = Conversation()
    talk.commit({P0: 1}, metadata=None)
    assert talk.fetch(P0)[P0].metadata == ""


@pytest.mark.parametrize("retention_ms", [0, 1000, 2**63 - 1, -2, -(2**63)])
def test_retention_times_of_old_versions_become_a_moment_that_can_be_stored(retention_ms: int) -> None:
    talk = Conversation()
    talk.commit({P0: 1}, version=4, retention_ms=retention_ms)
    (stored,) = talk.log
    assert isinstance(stored, OffsetCommitted)
    assert stored.expire_timestamp == max(0, min(WALL_MS + retention_ms, 2**63 - 1))
    assert talk.restarted().offsets() == {P0: 1}


def test_without_a_commit_there_is_no_offset_and_no_error() -> None:
    talk = Conversation()
    for _ in range(2):
        found = talk.fetch(P0, P1)
        assert [(p.committed_offset, p.committed_leader_epoch, p.metadata) for p in found.values()] == [
            (-1, -1, "")
        ] * 2
        assert {p.error_code for p in found.values()} == {ErrorCode.NONE}
        talk.commit({("payments", 0): 1})


def test_all_offsets_of_a_missing_group_are_none() -> None:
    assert Conversation().fetch() == {}


def test_fetch_sees_committed_offsets_only() -> None:
    talk = Conversation()
    talk.commit({P0: 1})
    talk.hold = True
    talk.commit({P0: 2, P1: 3})
    assert talk.offsets() == {P0: 1}
    assert talk.fetch(P0, P1)[P1].committed_offset == -1
    unstable = talk.fetch(P0, P1, ("payments", 0), stable=True)
    assert [ErrorCode(p.error_code) for p in unstable.values()] == [
        ErrorCode.UNSTABLE_OFFSET_COMMIT,
        ErrorCode.UNSTABLE_OFFSET_COMMIT,
        ErrorCode.NONE,
    ]
    assert talk.fetch(stable=True)[P0].error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
    talk.commit_all()
    assert talk.offsets() == {P0: 2, P1: 3}
    assert talk.fetch(P0, stable=True)[P0].committed_offset == 2


def test_a_commit_that_fails_to_be_written_leaves_the_old_offset() -> None:
    talk = Conversation()
    talk.commit({P0: 1})
    talk.hold = True
    talk.commit({P0: 2})
    talk.commit({P0: 3})
    talk.fail_all()
    assert talk.fetch(P0, stable=True)[P0].committed_offset == 1
    talk.commit({("payments", 0): 1}, group="others")
    talk.fail_all()
    assert [group.group_id for group in talk.groups()] == [GROUP]


@pytest.mark.parametrize("version", range(1, 8))
def test_an_old_offset_fetch_is_one_group_and_fits_its_version(version: int) -> None:
    talk = Conversation()
    talk.commit({P0: 4}, leader_epoch=2)
    topics = [OffsetFetchRequestTopic(name="orders", partition_indexes=[0, 1])]
    request = OffsetFetchRequest(group_id=GROUP, topics=topics)
    (group,) = offset_fetch_groups(request, version)
    response = offset_fetch_response(request, version, [talk.coordinator.fetch_offsets(group)])
    encoded = schema.encode(response, version)
    decoded = schema.decode(type(response), version, encoded)
    assert [(p.committed_offset, p.metadata) for p in decoded.topics[0].partitions] == [(4, ""), (-1, "")]
    assert decoded.topics[0].partitions[0].committed_leader_epoch == (2 if version >= 5 else -1)


@pytest.mark.parametrize("version", range(1, 8))
def test_a_refused_offset_fetch_says_so_where_its_version_can(version: int) -> None:
    topics = [OffsetFetchRequestTopic(name="orders", partition_indexes=[0])]
    request = OffsetFetchRequest(group_id=GROUP, topics=topics)
    response: Any = error_response(request, version, ErrorCode.NOT_COORDINATOR)
    decoded = schema.decode(type(response), version, schema.encode(response, version))
    if version == 1:
        assert decoded.topics[0].partitions[0].error_code == ErrorCode.NOT_COORDINATOR
    else:
        assert decoded.error_code == ErrorCode.NOT_COORDINATOR


def test_null_topics_before_version_8_ask_for_everything() -> None:
    talk = Conversation()
    talk.commit({P0: 4, P1: 5})
    request = OffsetFetchRequest(group_id=GROUP, topics=None)
    (group,) = offset_fetch_groups(request, 7)
    response = offset_fetch_response(request, 7, [talk.coordinator.fetch_offsets(group)])
    assert [p.committed_offset for p in response.topics[0].partitions] == [4, 5]


def test_offsets_of_topics_that_nobody_reads_can_be_deleted() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1, protocols={"range": subscription("orders")})
    talk.commit({P0: 1, ("payments", 0): 2}, member_id=member, generation=generation)
    deleted = talk.delete_offsets(P0, ("payments", 0), ("payments", 1)).answer
    errors = {(t.name, p.partition_index): p.error_code for t in deleted.topics for p in t.partitions}
    assert errors == {
        P0: ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC,
        ("payments", 0): ErrorCode.NONE,
        ("payments", 1): ErrorCode.NONE,
    }
    assert talk.offsets() == {P0: 1}
    assert talk.log[-1] == OffsetRemoved(GROUP, "payments", 0)


def test_offsets_of_a_group_whose_subscriptions_cannot_be_read_stay() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1, protocols={"range": b"\x00"})
    talk.commit({P0: 1}, member_id=member, generation=generation)
    deleted = talk.delete_offsets(P0).answer
    assert deleted.topics[0].partitions[0].error_code == ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC


def test_offsets_of_a_group_that_is_no_consumer_are_deleted_only_when_it_is_empty() -> None:
    talk = Conversation()
    (member,), _ = talk.stable(1, protocol_type="connect", protocols={"eager": b""})
    assert talk.delete_offsets(P0).error is ErrorCode.NON_EMPTY_GROUP
    talk.leave(member)
    talk.commit({P0: 1})
    assert talk.delete_offsets(P0).error is ErrorCode.NONE
    assert talk.offsets() == {}


def test_deleting_offsets_of_a_missing_group_says_so() -> None:
    assert Conversation().delete_offsets(P0).error is ErrorCode.GROUP_ID_NOT_FOUND


def test_an_emptied_group_reads_no_topics() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.commit({P0: 1}, member_id=member, generation=generation)
    talk.leave(member)
    assert talk.delete_offsets(P0).answer.topics[0].partitions[0].error_code == ErrorCode.NONE
    assert talk.offsets() == {}


def test_the_last_deleted_offset_of_a_group_without_members_takes_it_along() -> None:
    talk = Conversation()
    talk.commit({P0: 1})
    talk.delete_offsets(P0)
    assert talk.groups() == []
    assert talk.restarted().groups() == []


def test_offsets_of_deleted_topics_go() -> None:
    talk = Conversation()
    talk.commit({P0: 1, P1: 2, ("payments", 0): 3})
    talk.commit({P0: 1}, group="others")
    talk.delete_topics("orders")
    assert talk.offsets() == {("payments", 0): 3}
    assert talk.offsets(group="others") == {}
    assert talk.restarted().offsets() == {("payments", 0): 3}
