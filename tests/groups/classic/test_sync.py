"""SyncGroup and Heartbeat: the second half of a rebalance, and life in a generation."""

from __future__ import annotations

import pytest

from penstock.groups.changes import GroupStored
from penstock.protocol.errors import ErrorCode
from tests.groups.conversation import (
    DELAY_MS,
    GROUP,
    ORDERS,
    REBALANCE_MS,
    SESSION_MS,
    WALL_MS,
    Conversation,
    assignment_of,
)


def completing(talk: Conversation, count: int = 2, session_ms: int = SESSION_MS) -> list[str]:
    """A group that awaits its leader's assignment in generation 1; the leader first."""
    joins = [talk.join_new(session_ms=session_ms) for _ in range(count)]
    talk.sleep(2 * DELAY_MS)
    assert talk.state() == "CompletingRebalance"
    leader = joins[0].answer.leader
    return sorted((asked.answer.member_id for asked in joins), key=lambda name: name != leader)


def test_followers_wait_for_the_leaders_assignment() -> None:
    talk = Conversation()
    leader, follower = completing(talk)
    waiting = talk.sync(follower, 1)
    assert waiting.waits
    assert (
        talk.sync(leader, 1, assignment_of([leader, follower])).answer.assignment == b"for " + leader.encode()
    )
    assert waiting.answer.assignment == b"for " + follower.encode()
    assert (waiting.answer.protocol_type, waiting.answer.protocol_name) == ("consumer", "range")
    assert talk.state() == "Stable"


def test_a_follower_that_comes_after_the_leader_is_answered_at_once() -> None:
    talk = Conversation()
    leader, follower = completing(talk)
    talk.sync(leader, 1, assignment_of([leader, follower]))
    assert talk.sync(follower, 1).answer.assignment == b"for " + follower.encode()


@pytest.mark.parametrize("version", range(6))
def test_an_assignment_can_be_sent_in_every_version(version: int) -> None:
    talk = Conversation()
    leader, follower = completing(talk)
    waiting = talk.sync(follower, 1, version=version)
    talk.sync(leader, 1, assignment_of([leader, follower]), version=version)
    assert waiting.answer.assignment == b"for " + follower.encode()


def test_a_member_that_the_leader_forgot_gets_an_empty_assignment() -> None:
    talk = Conversation()
    leader, follower = completing(talk)
    waiting = talk.sync(follower, 1)
    talk.sync(leader, 1, {leader: b"everything", "stranger": b"nothing"})
    assert waiting.error is ErrorCode.NONE
    assert waiting.answer.assignment == b""


def test_the_generation_is_stored_with_its_assignment_and_answered_after_that() -> None:
    talk = Conversation()
    leader, follower = completing(talk)
    talk.hold = True
    waiting = talk.sync(follower, 1)
    leading = talk.sync(leader, 1, assignment_of([leader, follower]))
    late = talk.sync(follower, 1)
    assert talk.log == []
    assert waiting.waits and leading.waits and late.waits
    talk.commit_all()
    assert waiting.error is leading.error is late.error is ErrorCode.NONE
    (stored,) = talk.log
    assert isinstance(stored, GroupStored)
    assert (stored.group_id, stored.generation, stored.leader) == (GROUP, 1, leader)
    assert (stored.protocol_type, stored.protocol) == ("consumer", "range")
    assert stored.state_timestamp == WALL_MS + 2 * DELAY_MS
    assert {m.member_id: (m.subscription, m.assignment) for m in stored.members} == {
        name: (ORDERS, assignment) for name, assignment in assignment_of([leader, follower]).items()
    }
    assert {(m.session_timeout_ms, m.rebalance_timeout_ms) for m in stored.members} == {
        (SESSION_MS, REBALANCE_MS)
    }


def test_readers_see_a_generation_only_once_it_is_stored() -> None:
    talk = Conversation()
    leader, follower = completing(talk)
    talk.hold = True
    talk.sync(leader, 1, assignment_of([leader, follower]))
    described = talk.describe()
    assert described.group_state == "CompletingRebalance"
    assert {member.member_assignment for member in described.members} == {b""}
    assert talk.groups(states=["Stable"]) == []
    talk.commit_all()
    assert talk.describe().group_state == "Stable"


def test_a_generation_that_cannot_be_stored_is_given_up() -> None:
    talk = Conversation()
    leader, follower = completing(talk)
    talk.hold = True
    talk.sync(leader, 1, assignment_of([leader, follower]))
    talk.fail_all()
    talk.hold = False
    assert talk.state() == "PreparingRebalance"
    assert {member.member_assignment for member in talk.describe().members} == {b""}
    assert talk.sync(follower, 1).error is ErrorCode.REBALANCE_IN_PROGRESS
    rejoined = [talk.join(leader), talk.join(follower)]
    assert {asked.answer.generation_id for asked in rejoined} == {2}


def test_syncs_of_strangers_and_of_old_generations_are_refused() -> None:
    talk = Conversation()
    assert talk.sync("ghost", 1).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.sync("ghost", 1, group="").error is ErrorCode.INVALID_GROUP_ID
    leader, _ = completing(talk)
    assert talk.sync("ghost", 1).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.sync(leader, 0).error is ErrorCode.ILLEGAL_GENERATION
    assert talk.sync(leader, 2).error is ErrorCode.ILLEGAL_GENERATION
    assert talk.sync(leader, 1, instance="i-1").error is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_sync_during_the_join_phase_is_told_to_rejoin() -> None:
    talk = Conversation()
    (leader, _follower), generation = talk.stable(2)
    talk.join_new()
    assert talk.sync(leader, generation).error is ErrorCode.REBALANCE_IN_PROGRESS


def test_a_sync_of_an_emptied_group_is_of_an_unknown_member() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.leave(member)
    assert talk.sync(member, generation).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_from_version_5_on_the_protocol_must_be_the_chosen_one() -> None:
    talk = Conversation()
    leader, _ = completing(talk)
    wrong = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert talk.sync(leader, 1, protocol_type="connect").error is wrong
    assert talk.sync(leader, 1, protocol_name="sticky").error is wrong
    assert talk.sync(leader, 1, {}, protocol_type="consumer", protocol_name="range").error is ErrorCode.NONE


def test_an_overtaken_sync_is_answered() -> None:
    talk = Conversation()
    leader, follower = completing(talk)
    first = talk.sync(follower, 1)
    second = talk.sync(follower, 1)
    assert first.error is ErrorCode.REBALANCE_IN_PROGRESS
    talk.sync(leader, 1, assignment_of([leader, follower]))
    assert second.error is ErrorCode.NONE


def test_members_that_do_not_sync_are_removed_after_the_rebalance_timeout() -> None:
    talk = Conversation()
    leader, lazy = completing(talk, session_ms=2 * REBALANCE_MS)
    talk.sync(leader, 1, {})
    assert talk.state() == "Stable"
    talk.sleep(REBALANCE_MS - 1)
    assert talk.heartbeat(lazy, 1) is ErrorCode.NONE
    talk.sleep(1)
    assert talk.heartbeat(lazy, 1) is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.heartbeat(leader, 1) is ErrorCode.REBALANCE_IN_PROGRESS
    assert [member.member_id for member in talk.join(leader).answer.members] == [leader]


def test_a_leader_that_does_not_sync_is_removed_and_the_others_start_over() -> None:
    talk = Conversation()
    leader, follower = completing(talk, session_ms=2 * REBALANCE_MS)
    waiting = talk.sync(follower, 1)
    talk.sleep(REBALANCE_MS)
    assert waiting.error is ErrorCode.REBALANCE_IN_PROGRESS
    again = talk.join(follower)
    assert again.answer.leader == follower
    assert talk.heartbeat(leader, 2) is ErrorCode.UNKNOWN_MEMBER_ID


def test_heartbeats_keep_a_member() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    for _ in range(5):
        talk.sleep(SESSION_MS - 1)
        assert talk.heartbeat(member, generation) is ErrorCode.NONE
    talk.sleep(SESSION_MS)
    assert talk.heartbeat(member, generation) is ErrorCode.UNKNOWN_MEMBER_ID


def test_heartbeats_while_the_assignment_is_awaited_are_fine() -> None:
    talk = Conversation()
    leader, follower = completing(talk)
    assert talk.heartbeat(leader, 1) is ErrorCode.NONE
    talk.sync(follower, 1)
    assert talk.heartbeat(follower, 1) is ErrorCode.NONE


def test_heartbeats_of_strangers_and_of_old_generations_are_refused() -> None:
    talk = Conversation()
    assert talk.heartbeat("ghost", 1) is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.heartbeat("ghost", 1, group="") is ErrorCode.INVALID_GROUP_ID
    (member,), generation = talk.stable(1)
    assert talk.heartbeat("ghost", generation) is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.heartbeat(member, generation - 1) is ErrorCode.ILLEGAL_GENERATION
    assert talk.heartbeat(member, generation + 1) is ErrorCode.ILLEGAL_GENERATION
    pending = talk.join().answer.member_id
    assert talk.heartbeat(pending, generation) is ErrorCode.UNKNOWN_MEMBER_ID


def test_heartbeats_do_not_grow_anything() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    for _ in range(1000):
        talk.stall(1)
        talk.heartbeat(member, generation)
    assert talk.coordinator.next_deadline_ms == talk.now_ms + SESSION_MS
