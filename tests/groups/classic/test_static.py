"""Static members (KIP-345): they keep their place while they are away."""

from __future__ import annotations

import pytest

from penstock.groups.changes import GroupStored
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import MemberIdentity
from tests.groups.conversation import (
    DELAY_MS,
    ORDERS,
    REBALANCE_MS,
    SESSION_MS,
    Conversation,
    assignment_of,
    subscription,
)


def static_pair(talk: Conversation, session_ms: int = SESSION_MS) -> tuple[str, str]:
    """A stable group of the static members "i-1" (the leader) and "i-2", in generation 1."""
    a = talk.join(instance="i-1", session_ms=session_ms)
    b = talk.join(instance="i-2", session_ms=session_ms)
    talk.sleep(2 * DELAY_MS)
    leader, follower = a.answer.member_id, b.answer.member_id
    assert a.answer.leader == leader
    talk.sync(leader, 1, assignment_of([leader, follower]), instance="i-1")
    talk.sync(follower, 1, instance="i-2")
    return leader, follower


def test_a_static_member_needs_no_id_and_is_named_after_its_instance() -> None:
    talk = Conversation()
    leader, follower = static_pair(talk)
    assert leader.startswith("i-1-") and follower.startswith("i-2-")
    assert {m.group_instance_id for m in talk.describe().members} == {"i-1", "i-2"}


def test_the_leader_learns_the_instance_ids() -> None:
    talk = Conversation()
    asked = talk.join(instance="i-1")
    talk.sleep(DELAY_MS)
    assert [member.group_instance_id for member in asked.answer.members] == ["i-1"]


def test_a_restarted_static_member_keeps_its_assignment_without_a_rebalance() -> None:
    talk = Conversation()
    leader, follower = static_pair(talk)
    again = talk.join(instance="i-2").answer
    assert again.error_code == ErrorCode.NONE
    assert again.member_id not in (leader, follower)
    assert (again.generation_id, again.leader, again.members) == (1, leader, [])
    assert not again.skip_assignment
    synced = talk.sync(again.member_id, 1, instance="i-2")
    assert synced.answer.assignment == b"for " + follower.encode()
    assert talk.heartbeat(leader, 1, instance="i-1") is ErrorCode.NONE
    assert talk.state() == "Stable"


def test_the_new_id_is_stored_before_it_is_told() -> None:
    talk = Conversation()
    leader, _ = static_pair(talk)
    talk.hold = True
    again = talk.join(instance="i-2")
    assert again.waits
    talk.commit_all()
    stored = talk.log[-1]
    assert isinstance(stored, GroupStored)
    assert {m.instance_id: m.member_id for m in stored.members} == {
        "i-1": leader,
        "i-2": again.answer.member_id,
    }


def test_the_session_of_the_old_id_ends_without_a_trace() -> None:
    talk = Conversation()
    leader, _ = static_pair(talk)
    talk.sleep(SESSION_MS - 1)
    new = talk.join(instance="i-2").answer.member_id
    assert talk.heartbeat(leader, 1, instance="i-1") is ErrorCode.NONE
    talk.sleep(SESSION_MS - 1)
    assert talk.heartbeat(new, 1, instance="i-2") is ErrorCode.NONE
    assert talk.state() == "Stable"


def test_the_old_id_is_fenced_everywhere() -> None:
    talk = Conversation()
    _, old = static_pair(talk)
    new = talk.join(instance="i-2").answer.member_id
    fenced = ErrorCode.FENCED_INSTANCE_ID
    assert talk.heartbeat(old, 1, instance="i-2") is fenced
    assert talk.sync(old, 1, instance="i-2").error is fenced
    assert talk.join(old, instance="i-2").error is fenced
    assert talk.commit({("orders", 0): 1}, member_id=old, generation=1, instance="i-2") == [fenced]
    left = talk.leave(MemberIdentity(member_id=old, group_instance_id="i-2"))
    assert [member.error_code for member in left.answer.members] == [fenced]
    assert talk.heartbeat(old, 1) is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.heartbeat(new, 1, instance="i-2") is ErrorCode.NONE


def test_a_restarted_static_leader_is_told_to_skip_the_assignment() -> None:
    talk = Conversation()
    leader, follower = static_pair(talk)
    again = talk.join(instance="i-1", version=9).answer
    assert again.leader == again.member_id != leader
    assert again.skip_assignment
    assert {member.member_id for member in again.members} == {again.member_id, follower}


@pytest.mark.parametrize("version", [5, 6, 7, 8])
def test_before_version_9_a_restarted_static_leader_is_not_told_that_it_leads(version: int) -> None:
    talk = Conversation()
    leader, _ = static_pair(talk)
    again = talk.join(instance="i-1", version=version).answer
    assert again.leader == leader != again.member_id
    assert again.members == []
    assert not again.skip_assignment
    # It leads nevertheless: when it joins again, everybody has to.
    assert talk.join(again.member_id, instance="i-1", version=version).waits


def test_metadata_that_changes_at_every_start_does_not_matter() -> None:
    talk = Conversation()
    static_pair(talk)
    restarted = talk.join(instance="i-2", protocols={"range": subscription("orders", user_data=b"owned")})
    assert restarted.answer.generation_id == 1
    assert talk.state() == "Stable"


def test_other_topics_start_a_rebalance() -> None:
    talk = Conversation()
    leader, _ = static_pair(talk)
    restarted = talk.join(instance="i-2", protocols={"range": subscription("payments")})
    assert restarted.waits
    assert talk.join(leader, instance="i-1").answer.generation_id == 2
    assert restarted.answer.generation_id == 2


def test_another_protocol_starts_a_rebalance() -> None:
    talk = Conversation()
    both = {"range": ORDERS, "sticky": ORDERS}
    first = talk.join(instance="i-1", protocols=both)
    talk.sleep(DELAY_MS)
    talk.sync(first.answer.member_id, 1, {}, instance="i-1")
    again = talk.join(instance="i-1", protocols={"sticky": ORDERS})
    assert (again.answer.generation_id, again.answer.protocol_name) == (2, "sticky")


def test_metadata_that_is_no_subscription_is_not_compared() -> None:
    talk = Conversation()
    first = talk.join(instance="i-1", protocols={"range": b"?"})
    talk.sleep(DELAY_MS)
    talk.sync(first.answer.member_id, 1, {}, instance="i-1")
    assert talk.join(instance="i-1", protocols={"range": b"!"}).answer.generation_id == 1


def test_a_static_member_that_returns_during_the_join_phase_takes_its_old_place() -> None:
    talk = Conversation()
    leader, follower = static_pair(talk)
    waiting = talk.join(leader, instance="i-1")
    assert waiting.waits
    again = talk.join(instance="i-1")
    assert waiting.error is ErrorCode.FENCED_INSTANCE_ID
    assert again.waits
    other = talk.join(follower, instance="i-2")
    assert other.answer.generation_id == again.answer.generation_id == 2
    assert other.answer.leader == again.answer.member_id


def test_a_static_member_that_returns_while_the_assignment_is_awaited_starts_over() -> None:
    talk = Conversation()
    a, b = talk.join(instance="i-1"), talk.join(instance="i-2")
    talk.sleep(2 * DELAY_MS)
    leader, follower = a.answer.member_id, b.answer.member_id
    waiting = talk.sync(follower, 1, instance="i-2")
    again = talk.join(instance="i-2")
    assert waiting.error is ErrorCode.FENCED_INSTANCE_ID
    assert again.waits
    late = talk.sync(leader, 1, assignment_of([leader, follower]), instance="i-1")
    assert late.error is ErrorCode.REBALANCE_IN_PROGRESS
    assert talk.join(leader, instance="i-1").answer.generation_id == again.answer.generation_id == 2


def test_a_static_member_that_returns_before_its_first_generation_is_not_doubled() -> None:
    talk = Conversation()
    first = talk.join(instance="i-1")
    again = talk.join(instance="i-1")
    assert first.error is ErrorCode.FENCED_INSTANCE_ID
    talk.sleep(2 * DELAY_MS)
    assert len(again.answer.members) == 1


def test_a_static_member_stays_while_others_rebalance_without_it() -> None:
    talk = Conversation()
    leader, absent = static_pair(talk, session_ms=4 * REBALANCE_MS)
    again = talk.join(leader, instance="i-1", session_ms=4 * REBALANCE_MS)
    talk.sleep(REBALANCE_MS)
    assert {member.member_id for member in again.answer.members} == {leader, absent}


def test_an_absent_static_leader_is_replaced_by_one_who_is_there() -> None:
    talk = Conversation()
    leader, follower = static_pair(talk, session_ms=4 * REBALANCE_MS)
    changed = talk.join(follower, instance="i-2", protocols={"range": subscription("payments")})
    talk.sleep(REBALANCE_MS)
    assert changed.answer.leader == follower
    assert {member.member_id for member in changed.answer.members} == {leader, follower}


def test_a_static_member_is_removed_when_its_session_ends() -> None:
    talk = Conversation()
    leader, _ = static_pair(talk)
    talk.sleep(SESSION_MS - 1)
    talk.heartbeat(leader, 1, instance="i-1")
    talk.sleep(1)
    assert talk.heartbeat(leader, 1, instance="i-1") is ErrorCode.REBALANCE_IN_PROGRESS
    assert [m.group_instance_id for m in talk.describe().members] == ["i-1"]


def test_a_static_member_that_restarts_before_its_sync_still_has_to_sync() -> None:
    talk = Conversation()
    patient = 4 * REBALANCE_MS
    a, _ = talk.join(instance="i-1", session_ms=patient), talk.join(instance="i-2", session_ms=patient)
    talk.sleep(2 * DELAY_MS)
    leader = a.answer.member_id
    talk.sync(leader, 1, {}, instance="i-1")
    again = talk.join(instance="i-2", session_ms=patient).answer.member_id
    talk.sleep(REBALANCE_MS)
    assert talk.heartbeat(again, 1, instance="i-2") is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.heartbeat(leader, 1, instance="i-1") is ErrorCode.REBALANCE_IN_PROGRESS


def test_an_administrator_removes_a_static_member_by_its_instance() -> None:
    talk = Conversation()
    leader, follower = static_pair(talk)
    left = talk.leave(
        MemberIdentity(group_instance_id="i-2"),
        MemberIdentity(group_instance_id="i-3"),
        MemberIdentity(),
        version=3,
    )
    unknown = ErrorCode.UNKNOWN_MEMBER_ID
    assert [member.error_code for member in left.answer.members] == [ErrorCode.NONE, unknown, unknown]
    assert [member.group_instance_id for member in left.answer.members] == ["i-2", "i-3", None]
    assert talk.heartbeat(follower, 1, instance="i-2") is unknown
    assert talk.heartbeat(leader, 1, instance="i-1") is ErrorCode.REBALANCE_IN_PROGRESS


def test_static_members_survive_a_restart_of_the_coordinator() -> None:
    talk = Conversation()
    leader, _ = static_pair(talk)
    after = talk.restarted()
    assert after.heartbeat(leader, 1, instance="i-1") is ErrorCode.NONE
    again = after.join(instance="i-2").answer
    assert (again.generation_id, again.leader) == (1, leader)
    assert after.state() == "Stable"


@pytest.mark.parametrize("instance", ["", "x" * 1025])
def test_impossible_instance_ids_are_refused(instance: str) -> None:
    assert Conversation().join(instance=instance).error is ErrorCode.INVALID_REQUEST
