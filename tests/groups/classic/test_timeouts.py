"""What the clock does: sessions, the length of rebalances, the delay before a first one."""

from __future__ import annotations

import pytest

from penstock.groups.settings import NEW_MEMBER_TIMEOUT_MS, RETRY_MS_MIN, GroupSettings
from penstock.protocol.errors import ErrorCode
from tests.groups.conversation import DELAY_MS, REBALANCE_MS, SESSION_MS, Conversation, assignment_of


def test_a_first_rebalance_waits_for_more_members() -> None:
    talk = Conversation()
    first = talk.join_new()
    talk.sleep(DELAY_MS - 1)
    assert first.waits
    second = talk.join_new()
    talk.sleep(1)
    assert first.waits, "somebody came, so somebody else may"
    talk.sleep(DELAY_MS - 1)
    assert first.waits
    talk.sleep(1)
    assert len(first.answer.members) == 2
    assert second.answer.generation_id == 1


def test_a_first_rebalance_is_not_put_off_beyond_the_rebalance_timeout() -> None:
    talk = Conversation()
    first = talk.join_new(rebalance_ms=10_000)
    for _ in range(4):
        assert first.waits
        talk.sleep(2_499)
        talk.join_new(rebalance_ms=10_000)
    talk.sleep(10_000 - 4 * 2_499 - 1)
    assert first.waits
    talk.sleep(1)
    assert len(first.answer.members) == 5


def test_a_first_rebalance_does_not_wait_when_the_delay_is_zero() -> None:
    talk = Conversation(GroupSettings(initial_rebalance_delay_ms=0))
    first = talk.join_new()
    talk.sleep(0)
    assert first.answer.generation_id == 1


def test_a_first_rebalance_goes_on_when_somebody_leaves() -> None:
    talk = Conversation()
    first, second = talk.join_new(), talk.join_new()
    talk.leave(talk.describe().members[0].member_id)
    assert first.error is ErrorCode.UNKNOWN_MEMBER_ID
    assert second.waits
    talk.sleep(2 * DELAY_MS)
    assert len(second.answer.members) == 1


def test_a_first_rebalance_that_everybody_left_ends_empty() -> None:
    talk = Conversation()
    talk.join_new()
    talk.leave(talk.describe().members[0].member_id)
    talk.sleep(DELAY_MS)
    assert talk.state() == "Empty"
    assert talk.log[-1].generation == 1  # type: ignore[union-attr]


def test_a_silent_member_is_removed_and_the_others_rebalance() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2)
    talk.sleep(SESSION_MS - 1)
    assert talk.heartbeat(follower, generation) is ErrorCode.NONE
    talk.sleep(1)
    assert talk.heartbeat(leader, generation) is ErrorCode.UNKNOWN_MEMBER_ID
    again = talk.join(follower).answer
    assert (again.leader, again.generation_id) == (follower, generation + 1)
    assert [member.member_id for member in again.members] == [follower]


def test_a_group_whose_last_member_falls_silent_becomes_empty_and_is_stored() -> None:
    talk = Conversation()
    _, generation = talk.stable(1)
    talk.sleep(SESSION_MS)
    assert talk.state() == "Empty"
    stored = talk.log[-1]
    assert (stored.generation, stored.members, stored.leader) == (generation + 1, (), None)  # type: ignore[union-attr]
    assert stored.state_timestamp == talk.wall_ms  # type: ignore[union-attr]


def test_members_that_do_not_rejoin_are_left_behind_after_the_rebalance_timeout() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2, session_ms=2 * REBALANCE_MS)
    again = talk.join(leader)
    talk.sleep(REBALANCE_MS - 1)
    assert again.waits
    talk.sleep(1)
    assert [member.member_id for member in again.answer.members] == [leader]
    assert talk.heartbeat(follower, generation) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_leader_that_does_not_rejoin_is_replaced() -> None:
    talk = Conversation()
    (_leader, b, c), generation = talk.stable(3, session_ms=2 * REBALANCE_MS)
    talk.join_new(session_ms=2 * REBALANCE_MS)
    again = [talk.join(b), talk.join(c)]
    talk.sleep(REBALANCE_MS)
    assert {asked.answer.leader for asked in again} == {b}
    assert {asked.answer.generation_id for asked in again} == {generation + 1}


def test_a_member_that_waits_for_us_does_not_have_to_send_heartbeats() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2)
    waiting = talk.join(leader)
    for _ in range(3):
        talk.sleep(SESSION_MS - 1)
        assert talk.heartbeat(follower, generation) is ErrorCode.REBALANCE_IN_PROGRESS
    assert waiting.waits
    talk.join(follower)
    assert waiting.answer.generation_id == generation + 1
    syncing = talk.sync(follower, generation + 1)
    for _ in range(3):
        talk.sleep(SESSION_MS - 1)
        assert talk.heartbeat(leader, generation + 1) is ErrorCode.NONE
    assert syncing.waits
    talk.sync(leader, generation + 1, assignment_of([leader, follower]))
    assert syncing.error is ErrorCode.NONE


def test_its_session_starts_again_with_our_answer() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2)
    talk.join(leader)
    talk.sleep(SESSION_MS - 1)
    talk.heartbeat(follower, generation)
    talk.sleep(SESSION_MS - 1)
    talk.join(follower)
    talk.sleep(SESSION_MS - 1)
    assert talk.heartbeat(leader, generation + 1) is ErrorCode.NONE
    talk.sleep(SESSION_MS)
    assert talk.heartbeat(leader, generation + 1) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_new_member_does_not_wait_longer_than_five_minutes() -> None:
    talk = Conversation()
    long_ms = 2 * NEW_MEMBER_TIMEOUT_MS
    (member,), generation = talk.stable(1, session_ms=long_ms, rebalance_ms=long_ms)
    newcomer = talk.join_new(rebalance_ms=long_ms)
    talk.sleep(NEW_MEMBER_TIMEOUT_MS - 1)
    assert newcomer.waits
    talk.sleep(1)
    assert newcomer.error is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.join(member).answer.generation_id == generation + 1


def test_late_ticks_do_everything_that_came_due() -> None:
    talk = Conversation()
    talk.stable(3)
    talk.stall(5 * REBALANCE_MS)
    talk.sleep(0)
    assert talk.state() == "Empty"


def test_a_timer_never_fires_early() -> None:
    talk = Conversation()
    talk.stable(1)
    deadline = talk.coordinator.next_deadline_ms
    assert deadline == talk.now_ms + SESSION_MS
    decision = talk.coordinator.tick(deadline - 1, talk.wall_ms)
    assert not decision.changes and not decision.replies
    assert talk.coordinator.next_deadline_ms == deadline


@pytest.mark.parametrize("rebalance_ms", [-(2**31), -1, 0])
def test_a_rebalance_timeout_of_nothing_means_not_waiting(rebalance_ms: int) -> None:
    talk = Conversation()
    hasty = talk.join_new(rebalance_ms=rebalance_ms)
    talk.sleep(DELAY_MS)
    assert hasty.answer.generation_id == 1
    assert talk.sync(hasty.answer.member_id, 1, {}).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.state() == "Empty"


def test_one_hasty_member_does_not_hurry_the_others() -> None:
    talk = Conversation()
    hasty = talk.join_new(rebalance_ms=0)
    patient = talk.join_new()
    talk.sleep(DELAY_MS)
    assert len(hasty.answer.members) == 2
    talk.sleep(SESSION_MS - 1)
    assert talk.sync(patient.answer.member_id, 1).waits
    assert talk.sync(hasty.answer.member_id, 1, {}).error is ErrorCode.NONE


def test_the_longest_rebalance_timeout_does_no_harm() -> None:
    talk = Conversation()
    (leader,), generation = talk.stable(1, rebalance_ms=2**31 - 1)
    newcomer = talk.join_new(rebalance_ms=2**31 - 1)
    talk.sleep(SESSION_MS)
    assert newcomer.answer.generation_id == generation + 1
    assert talk.heartbeat(leader, generation) is ErrorCode.UNKNOWN_MEMBER_ID


def test_silent_static_members_do_not_make_the_coordinator_spin() -> None:
    talk = Conversation()
    static = talk.join(instance="i-1")
    talk.sleep(DELAY_MS)
    member = static.answer.member_id
    talk.sync(member, 1, {}, instance="i-1")
    talk.join(member, instance="i-1", rebalance_ms=0)
    talk.sync(member, 2, {}, instance="i-1")
    newcomer = talk.join_new(rebalance_ms=0)
    talk.leave(talk.describe().members[1].member_id)
    assert newcomer.error is ErrorCode.UNKNOWN_MEMBER_ID
    ticks = 0
    while talk.state() == "PreparingRebalance":
        deadline = talk.coordinator.next_deadline_ms
        assert deadline is not None
        talk.sleep(deadline - talk.now_ms)
        ticks += 1
    assert talk.state() == "Empty"
    assert ticks <= SESSION_MS // RETRY_MS_MIN + 2
