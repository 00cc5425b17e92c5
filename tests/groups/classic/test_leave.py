"""LeaveGroup: one member, many, or an id that was never used."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ErrorCode
from tests.groups.conversation import DELAY_MS, SESSION_MS, Conversation


@pytest.mark.parametrize("version", [0, 1, 2])
def test_before_version_3_one_member_leaves_with_its_error_at_the_top(version: int) -> None:
    talk = Conversation()
    (member,), _ = talk.stable(1)
    assert talk.leave("ghost", version=version).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.leave(member, version=version).error is ErrorCode.NONE
    assert talk.state() == "Empty"


@pytest.mark.parametrize("version", [3, 4, 5])
def test_from_version_3_on_each_member_has_its_own_result(version: int) -> None:
    talk = Conversation()
    (a, b, c), generation = talk.stable(3)
    left = talk.leave(b, "ghost", c, b, version=version).answer
    assert left.error_code == ErrorCode.NONE
    assert [(member.member_id, ErrorCode(member.error_code)) for member in left.members] == [
        (b, ErrorCode.NONE),
        ("ghost", ErrorCode.UNKNOWN_MEMBER_ID),
        (c, ErrorCode.NONE),
        (b, ErrorCode.UNKNOWN_MEMBER_ID),
    ]
    assert talk.heartbeat(a, generation) is ErrorCode.REBALANCE_IN_PROGRESS


@pytest.mark.parametrize("version", [2, 5])
def test_leaving_a_group_that_does_not_exist_is_of_an_unknown_member(version: int) -> None:
    talk = Conversation()
    left = talk.leave("ghost", version=version).answer
    codes = [left.error_code] if version < 3 else [member.error_code for member in left.members]
    assert codes == [ErrorCode.UNKNOWN_MEMBER_ID]
    assert talk.leave("ghost", group="", version=version).error is ErrorCode.INVALID_GROUP_ID


def test_leaving_with_an_empty_list_does_nothing() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    assert talk.leave(version=5).answer.members == []
    assert talk.heartbeat(member, generation) is ErrorCode.NONE


def test_a_leaving_leader_is_replaced() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2)
    talk.leave(leader)
    again = talk.join(follower).answer
    assert (again.leader, again.generation_id) == (follower, generation + 1)


def test_the_last_to_leave_leaves_an_empty_group_in_a_new_generation() -> None:
    talk = Conversation()
    (a, b), generation = talk.stable(2)
    talk.leave(a, b)
    stored = talk.log[-1]
    assert stored.generation == generation + 1  # type: ignore[union-attr]
    assert stored.members == ()  # type: ignore[union-attr]
    assert stored.protocol_type == "consumer"  # type: ignore[union-attr]
    assert talk.state() == "Empty"


def test_leaving_lets_those_who_have_rejoined_go_on() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2)
    waiting = talk.join(leader)
    assert waiting.waits
    talk.leave(follower)
    assert waiting.answer.generation_id == generation + 1


def test_leaving_while_the_assignment_is_awaited_starts_over() -> None:
    talk = Conversation()
    a, b = talk.join_new(), talk.join_new()
    talk.sleep(2 * DELAY_MS)
    waiting = talk.sync(b.answer.member_id, 1)
    talk.leave(a.answer.member_id)
    assert waiting.error is ErrorCode.REBALANCE_IN_PROGRESS
    assert talk.join(b.answer.member_id).answer.generation_id == 2


def test_a_member_that_leaves_while_it_waits_is_answered() -> None:
    talk = Conversation()
    (leader, follower), _ = talk.stable(2)
    joining = talk.join(leader)
    talk.leave(leader)
    assert joining.error is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.join(follower).answer.leader == follower


def test_a_pending_id_leaves_without_a_rebalance() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    pending = talk.join().answer.member_id
    left = talk.leave(pending).answer
    assert left.members[0].error_code == ErrorCode.NONE
    assert talk.heartbeat(member, generation) is ErrorCode.NONE
    assert talk.join(pending).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_pending_id_that_leaves_no_longer_holds_up_a_rebalance() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    pending = talk.join().answer.member_id
    again = talk.join(member)
    assert again.waits
    talk.leave(pending)
    assert again.answer.generation_id == generation + 1


def test_the_only_pending_id_takes_its_group_with_it() -> None:
    talk = Conversation()
    talk.leave(talk.join().answer.member_id)
    assert talk.groups() == []
    talk.sleep(SESSION_MS)
    assert talk.log == []
