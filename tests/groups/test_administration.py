"""ListGroups, DescribeGroups, DeleteGroups."""

from __future__ import annotations

import pytest

from penstock.groups.changes import GroupRemoved, OffsetRemoved
from penstock.protocol.errors import ErrorCode
from tests.groups.conversation import DELAY_MS, GROUP, ORDERS, Conversation

P0 = ("orders", 0)


def test_groups_are_listed_with_state_and_type() -> None:
    talk = Conversation()
    talk.stable(1)
    talk.commit({P0: 1}, group="simple")
    talk.join(group="waiting")
    assert {(g.group_id, g.group_state, g.group_type, g.protocol_type) for g in talk.groups()} == {
        (GROUP, "Stable", "classic", "consumer"),
        ("simple", "Empty", "classic", ""),
        ("waiting", "Empty", "classic", ""),
    }


def test_lists_are_filtered_by_state_and_type_whatever_the_case() -> None:
    talk = Conversation()
    talk.stable(1)
    talk.commit({P0: 1}, group="simple")
    assert [g.group_id for g in talk.groups(states=["sTABLE"])] == [GROUP]
    assert [g.group_id for g in talk.groups(states=["Empty", "Dead"])] == ["simple"]
    assert talk.groups(states=["NoSuchState"]) == []
    assert len(talk.groups(types=["Classic"])) == 2
    assert len(talk.groups(types=["consumer", "CLASSIC"])) == 2
    assert talk.groups(types=["consumer"]) == []
    assert [g.group_id for g in talk.groups(states=["Empty"], types=["classic"])] == ["simple"]


def test_a_stable_group_is_described_with_metadata_and_assignments() -> None:
    talk = Conversation()
    (leader, follower), _ = talk.stable(2, client="app")
    described = talk.describe()
    assert (described.error_code, described.group_state) == (ErrorCode.NONE, "Stable")
    assert (described.protocol_type, described.protocol_data) == ("consumer", "range")
    assert {member.member_id for member in described.members} == {leader, follower}
    for member in described.members:
        assert (member.client_id, member.client_host) == ("app", "/127.0.0.1")
        assert member.member_metadata == ORDERS
        assert member.member_assignment == b"for " + member.member_id.encode()


def test_a_group_is_described_in_every_state() -> None:
    talk = Conversation()
    joining = talk.join_new()
    assert talk.describe().group_state == "PreparingRebalance"
    assert talk.describe().protocol_data == ""
    assert talk.describe().members[0].member_metadata == b""
    talk.sleep(DELAY_MS)
    assert talk.describe().group_state == "CompletingRebalance"
    talk.sync(joining.answer.member_id, 1, {})
    assert talk.describe().group_state == "Stable"
    talk.leave(joining.answer.member_id)
    described = talk.describe()
    assert (described.group_state, described.protocol_type, described.members) == ("Empty", "consumer", [])


@pytest.mark.parametrize("version", range(7))
def test_a_missing_group_is_dead_or_not_found(version: int) -> None:
    described = Conversation().describe("missing", version)
    assert described.group_state == "Dead"
    if version >= 6:
        assert described.error_code == ErrorCode.GROUP_ID_NOT_FOUND
        assert described.error_message == "Group missing not found."
    else:
        assert described.error_code == ErrorCode.NONE


def test_an_empty_group_is_deleted_with_its_offsets() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.commit({P0: 1, ("orders", 1): 2}, member_id=member, generation=generation)
    assert talk.delete_group() is ErrorCode.NON_EMPTY_GROUP
    talk.leave(member)
    assert talk.delete_group() is ErrorCode.NONE
    assert talk.log[-3:] == [
        OffsetRemoved(GROUP, "orders", 0),
        OffsetRemoved(GROUP, "orders", 1),
        GroupRemoved(GROUP),
    ]
    assert talk.groups() == talk.restarted().groups() == []
    assert talk.fetch() == {}
    assert talk.delete_group() is ErrorCode.GROUP_ID_NOT_FOUND


def test_a_deleted_group_can_be_joined_again_from_the_beginning() -> None:
    talk = Conversation()
    (member,), _ = talk.stable(1)
    talk.leave(member)
    talk.delete_group()
    _, generation = talk.stable(1)
    assert generation == 1


def test_a_group_is_dead_until_its_deletion_is_committed() -> None:
    talk = Conversation()
    talk.commit({P0: 1})
    talk.hold = True
    assert talk.delete_group() is ErrorCode.NONE
    assert talk.state() == "Dead"
    assert talk.offsets() == {P0: 1}, "readers see what is committed"
    talk.hold = False
    assert talk.delete_group() is ErrorCode.GROUP_ID_NOT_FOUND
    assert talk.join().error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert talk.commit({P0: 2}) == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    assert talk.delete_offsets(P0).error is ErrorCode.GROUP_ID_NOT_FOUND
    talk.delete_topics("orders")
    talk.commit_all()
    assert talk.groups() == []


def test_a_deletion_that_fails_gives_the_group_back() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.commit({P0: 1}, member_id=member, generation=generation)
    talk.leave(member)
    talk.hold = True
    talk.delete_group()
    talk.fail_all()
    talk.hold = False
    assert talk.state() == "Empty"
    assert talk.offsets() == {P0: 1}
    assert talk.delete_group() is ErrorCode.NONE
    assert talk.log[-1] == GroupRemoved(GROUP)


def test_commits_in_flight_are_deleted_too() -> None:
    talk = Conversation()
    talk.hold = True
    talk.commit({P0: 1})
    talk.delete_group()
    talk.commit_all()
    assert talk.groups() == talk.restarted().groups() == []


def test_deleting_a_group_that_somebody_is_about_to_join_forgets_the_promise() -> None:
    talk = Conversation()
    handed_out = talk.join().answer.member_id
    assert talk.delete_group() is ErrorCode.NONE
    assert talk.log == []
    assert talk.join(handed_out).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_who_waits_is_sent_away_when_the_coordinator_resigns() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2)
    joining = talk.join(leader)
    other = [talk.join_new(group="others") for _ in range(2)]
    talk.sleep(2 * DELAY_MS)
    leading = other[0].answer.leader
    (second,) = {asked.answer.member_id for asked in other} - {leading}
    syncing = talk.sync(second, 1, group="others")
    for token, response in talk.coordinator.resign().replies:
        token.take(response)
    assert joining.error is syncing.error is ErrorCode.NOT_COORDINATOR
    assert talk.heartbeat(follower, generation) is ErrorCode.REBALANCE_IN_PROGRESS


def test_a_group_lives_on_when_its_deletion_could_not_be_written_after_a_change_in_flight() -> None:
    talk = Conversation()
    talk.commit({P0: 1})
    talk.hold = True
    talk.commit({P0: 2})
    assert talk.delete_group() is ErrorCode.NONE
    talk.fail_last()
    talk.hold = False
    assert talk.state() == "Empty"
    assert talk.commit({P0: 3}) == [ErrorCode.NONE]
    talk.commit_all()
    assert talk.delete_group() is ErrorCode.NONE
    assert talk.groups() == []


def test_a_group_with_a_generation_in_flight_lives_on_when_its_deletion_could_not_be_written() -> None:
    talk = Conversation()
    (member,), _ = talk.stable(1)
    talk.hold = True
    talk.leave(member)
    assert talk.delete_group() is ErrorCode.NONE
    talk.fail_last()
    talk.commit_all()
    talk.hold = False
    assert talk.state() == "Empty"
    talk.stable(1)
