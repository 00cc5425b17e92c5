"""JoinGroup: who gets in, who has to ask again, and what starts a rebalance."""

from __future__ import annotations

import pytest

from penstock.groups.settings import GroupSettings
from penstock.protocol.errors import ErrorCode
from tests.groups.conversation import (
    DELAY_MS,
    GROUP,
    ORDERS,
    REBALANCE_MS,
    SESSION_MS,
    Conversation,
    assignment_of,
    subscription,
)


def test_a_new_client_is_given_an_id_and_joins_with_it() -> None:
    talk = Conversation()
    first = talk.join(client="app")
    assert first.error is ErrorCode.MEMBER_ID_REQUIRED
    assert first.answer.member_id.startswith("app-")
    second = talk.join(first.answer.member_id)
    assert second.waits
    talk.sleep(DELAY_MS)
    assert second.error is ErrorCode.NONE
    assert second.answer.member_id == first.answer.member_id


def test_handed_out_ids_differ() -> None:
    talk = Conversation()
    assert len({talk.join().answer.member_id for _ in range(10)}) == 10


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_before_version_4_a_client_joins_without_asking_for_an_id(version: int) -> None:
    talk = Conversation()
    joining = talk.join(version=version)
    assert joining.waits
    talk.sleep(DELAY_MS)
    assert joining.error is ErrorCode.NONE
    assert joining.answer.generation_id == 1
    assert joining.answer.leader == joining.answer.member_id


def test_a_first_generation_names_leader_protocol_and_members() -> None:
    talk = Conversation()
    a, b = talk.join_new(), talk.join_new()
    talk.sleep(2 * DELAY_MS)
    leader, follower = a.answer, b.answer
    assert leader.leader == follower.leader == leader.member_id
    assert leader.generation_id == follower.generation_id == 1
    assert leader.protocol_type == follower.protocol_type == "consumer"
    assert leader.protocol_name == follower.protocol_name == "range"
    assert {m.member_id: m.metadata for m in leader.members} == {
        leader.member_id: ORDERS,
        follower.member_id: ORDERS,
    }
    assert follower.members == []
    assert not leader.skip_assignment


@pytest.mark.parametrize("version", range(10))
def test_a_refused_join_can_be_sent_in_every_version(version: int) -> None:
    asked = Conversation().join("nobody", version=version)
    assert asked.error is ErrorCode.UNKNOWN_MEMBER_ID
    assert asked.answer.protocol_name == (None if version >= 7 else "")
    assert asked.answer.generation_id == -1


def test_an_empty_group_id_is_invalid() -> None:
    talk = Conversation()
    assert talk.join(group="").error is ErrorCode.INVALID_GROUP_ID
    assert talk.groups() == []


@pytest.mark.parametrize("session_ms", [-(2**31), -1, 0, 5_999, 1_800_001, 2**31 - 1])
def test_session_timeouts_out_of_bounds_are_refused(session_ms: int) -> None:
    talk = Conversation()
    assert talk.join(session_ms=session_ms).error is ErrorCode.INVALID_SESSION_TIMEOUT
    assert talk.coordinator.next_deadline_ms is not None


@pytest.mark.parametrize("session_ms", [6_000, 1_800_000])
def test_session_timeouts_at_the_bounds_are_taken(session_ms: int) -> None:
    assert Conversation().join(session_ms=session_ms).error is ErrorCode.MEMBER_ID_REQUIRED


def test_an_unknown_member_id_is_refused_in_a_missing_and_in_a_living_group() -> None:
    talk = Conversation()
    assert talk.join("ghost").error is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.groups() == []
    talk.stable(1)
    assert talk.join("ghost").error is ErrorCode.UNKNOWN_MEMBER_ID


def test_an_id_of_another_group_is_unknown_here() -> None:
    talk = Conversation()
    elsewhere = talk.join(group="others").answer.member_id
    talk.stable(1)
    assert talk.join(elsewhere).error is ErrorCode.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize(("protocol_type", "protocols"), [("", {"range": b""}), ("consumer", {})])
def test_a_first_member_needs_a_protocol_type_and_a_protocol(
    protocol_type: str, protocols: dict[str, bytes]
) -> None:
    talk = Conversation()
    asked = talk.join(protocol_type=protocol_type, protocols=protocols)
    assert asked.error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert talk.groups() == []


def test_a_member_must_share_the_protocol_type_and_one_protocol_with_all() -> None:
    talk = Conversation()
    talk.stable(2, protocols={"range": ORDERS, "sticky": ORDERS})
    assert talk.join(protocol_type="connect").error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert talk.join(protocols={"other": b""}).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert talk.join(protocols={}).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert talk.join(protocols={"other": b"", "sticky": b""}).error is ErrorCode.MEMBER_ID_REQUIRED


def test_a_protocol_that_only_some_members_support_is_not_enough() -> None:
    talk = Conversation()
    talk.join_new(protocols={"range": ORDERS, "sticky": ORDERS})
    talk.join_new(protocols={"range": ORDERS})
    assert talk.join(protocols={"sticky": ORDERS}).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_an_emptied_group_may_change_its_protocol_type() -> None:
    talk = Conversation()
    (member,), _ = talk.stable(1)
    talk.leave(member)
    assert talk.state() == "Empty"
    joining = talk.join_new(protocol_type="connect", protocols={"eager": b"x"})
    talk.sleep(DELAY_MS)
    assert (joining.answer.protocol_type, joining.answer.protocol_name) == ("connect", "eager")
    assert joining.answer.generation_id == 3


def test_the_protocol_with_the_most_votes_wins() -> None:
    talk = Conversation()
    range_first = {"range": b"r", "sticky": b"s"}
    sticky_first = {"sticky": b"s", "range": b"r"}
    joins = [talk.join_new(protocols=votes) for votes in (range_first, sticky_first, sticky_first)]
    talk.sleep(2 * DELAY_MS)
    assert {asked.answer.protocol_name for asked in joins} == {"sticky"}
    assert [member.metadata for member in joins[0].answer.members] == [b"s", b"s", b"s"]


def test_a_preferred_protocol_that_not_all_support_gets_no_votes() -> None:
    talk = Conversation()
    talk.join_new(protocols={"mine": b"", "range": b""})
    other = talk.join_new(protocols={"range": b""})
    talk.sleep(2 * DELAY_MS)
    assert other.answer.protocol_name == "range"


def test_of_two_protocols_with_one_name_the_first_counts() -> None:
    talk = Conversation()
    joining = talk.join_new(protocols=[("range", b"first"), ("range", b"second")])
    talk.sleep(DELAY_MS)
    assert [member.metadata for member in joining.answer.members] == [b"first"]


def test_a_new_member_of_a_stable_group_starts_a_rebalance() -> None:
    talk = Conversation()
    (a, b), generation = talk.stable(2)
    newcomer = talk.join_new()
    assert newcomer.waits
    assert talk.heartbeat(a, generation) is ErrorCode.REBALANCE_IN_PROGRESS
    rejoined = [talk.join(a), talk.join(b)]
    assert {asked.answer.generation_id for asked in [newcomer, *rejoined]} == {generation + 1}
    assert len(rejoined[0].answer.members) == 3


def test_the_last_to_join_gets_its_answer_as_the_response_itself() -> None:
    talk = Conversation()
    (a,), generation = talk.stable(1)
    again = talk.join(a)
    assert not again.waits
    assert again.answer.generation_id == generation + 1


def test_a_follower_that_rejoins_a_stable_group_unchanged_gets_the_current_generation() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2)
    again = talk.join(follower).answer
    assert (again.generation_id, again.leader, again.members) == (generation, leader, [])
    assert talk.state() == "Stable"
    assert talk.sync(follower, generation).answer.assignment == assignment_of([follower])[follower]


def test_a_leader_that_rejoins_a_stable_group_starts_a_rebalance() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2)
    again = talk.join(leader)
    assert again.waits
    assert talk.heartbeat(follower, generation) is ErrorCode.REBALANCE_IN_PROGRESS
    talk.join(follower)
    assert again.answer.generation_id == generation + 1


def test_changed_metadata_starts_a_rebalance_in_a_stable_group() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2)
    changed = subscription("orders", "payments")
    again = talk.join(follower, protocols={"range": changed})
    assert again.waits
    members = talk.join(leader).answer.members
    assert {m.member_id: m.metadata for m in members} == {leader: ORDERS, follower: changed}
    assert again.answer.generation_id == generation + 1


def test_a_repeated_join_while_the_assignment_is_awaited_gets_the_same_generation() -> None:
    talk = Conversation()
    a, b = talk.join_new(), talk.join_new()
    talk.sleep(2 * DELAY_MS)
    leader, follower = a.answer, b.answer
    assert talk.join(leader.member_id).answer == leader
    assert talk.join(follower.member_id).answer == follower
    assert talk.state() == "CompletingRebalance"


def test_changed_metadata_while_the_assignment_is_awaited_starts_over() -> None:
    talk = Conversation()
    a, b = talk.join_new(), talk.join_new()
    talk.sleep(2 * DELAY_MS)
    leader, follower = a.answer.member_id, b.answer.member_id
    waiting = talk.sync(follower, 1)
    again = talk.join(leader, protocols={"range": subscription("payments")})
    assert waiting.error is ErrorCode.REBALANCE_IN_PROGRESS
    assert again.waits
    assert talk.join(follower).answer.generation_id == again.answer.generation_id == 2


def test_a_new_member_while_the_assignment_is_awaited_starts_over() -> None:
    talk = Conversation()
    a = talk.join_new()
    talk.sleep(DELAY_MS)
    leader = a.answer.member_id
    newcomer = talk.join_new()
    assert newcomer.waits
    assert talk.sync(leader, 1, {leader: b"x"}).error is ErrorCode.REBALANCE_IN_PROGRESS
    assert talk.join(leader).answer.generation_id == newcomer.answer.generation_id == 2


def test_an_overtaken_join_is_answered() -> None:
    talk = Conversation()
    (a, _b), _ = talk.stable(2)
    first = talk.join(a)
    second = talk.join(a)
    assert first.error is ErrorCode.REBALANCE_IN_PROGRESS
    assert second.waits


def test_pending_ids_hold_up_a_rebalance_until_they_are_used_or_expire() -> None:
    talk = Conversation()
    (a,), generation = talk.stable(1)
    talk.join(session_ms=SESSION_MS)
    again = talk.join(a)
    assert again.waits, "somebody was promised a place"
    talk.sleep(SESSION_MS)
    assert again.answer.generation_id == generation + 1


def test_pending_ids_alone_do_not_start_a_rebalance() -> None:
    talk = Conversation()
    (a,), generation = talk.stable(1)
    talk.join()
    talk.sleep(SESSION_MS // 2)
    assert talk.heartbeat(a, generation) is ErrorCode.NONE
    talk.sleep(SESSION_MS // 2)
    assert talk.heartbeat(a, generation) is ErrorCode.NONE
    assert talk.state() == "Stable"


def test_an_expired_pending_id_is_unknown_and_its_group_is_forgotten() -> None:
    talk = Conversation()
    handed_out = talk.join().answer.member_id
    assert [group.group_id for group in talk.groups()] == [GROUP]
    talk.sleep(SESSION_MS)
    assert talk.groups() == []
    assert talk.join(handed_out).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.log == []


def test_a_pending_id_cannot_be_used_by_a_static_member() -> None:
    talk = Conversation()
    handed_out = talk.join().answer.member_id
    assert talk.join(handed_out, instance="i-1").error is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_full_stable_group_takes_nobody_new() -> None:
    talk = Conversation(GroupSettings(members_max=2))
    (leader, _follower), generation = talk.stable(2)
    assert talk.join().error is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert talk.heartbeat(leader, generation) is ErrorCode.NONE
    assert talk.join(leader).waits, "who is in stays in"


def test_a_full_group_turns_away_the_last_to_join() -> None:
    talk = Conversation(GroupSettings(members_max=2))
    ids = [talk.join().answer.member_id for _ in range(3)]
    a, b, c = (talk.join(member) for member in ids)
    assert c.error is ErrorCode.GROUP_MAX_SIZE_REACHED
    talk.sleep(2 * DELAY_MS)
    assert a.answer.generation_id == b.answer.generation_id == 1


def test_lowering_the_limit_rebalances_a_loaded_group_down_to_it() -> None:
    talk = Conversation()
    members, generation = talk.stable(3)
    smaller = Conversation(GroupSettings(members_max=2), talk.log)
    assert smaller.state() == "PreparingRebalance"
    answers = [smaller.join(member) for member in members]
    assert answers[2].error is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert {asked.answer.generation_id for asked in answers[:2]} == {generation + 1}


def test_the_rebalance_timeout_is_the_longest_of_all_members() -> None:
    talk = Conversation()
    talk.join_new(rebalance_ms=20_000, session_ms=60_000)
    slow = talk.join_new(rebalance_ms=REBALANCE_MS, session_ms=60_000)
    talk.sleep(2 * DELAY_MS)
    leader = slow.answer.leader
    talk.sync(leader, 1, {})
    talk.sync(slow.answer.member_id, 1)
    newcomer = talk.join_new(rebalance_ms=1_000, session_ms=60_000)
    talk.sleep(REBALANCE_MS - 1)
    assert newcomer.waits
    talk.sleep(1)
    assert newcomer.answer.generation_id == 2
    assert len(newcomer.answer.members) == 1


def test_version_0_waits_for_the_session_timeout() -> None:
    talk = Conversation()
    talk.join(version=0, rebalance_ms=-1, session_ms=20_000)
    talk.sleep(DELAY_MS)
    newcomer = talk.join(version=0, rebalance_ms=-1, session_ms=20_000)
    talk.sleep(19_999)
    assert newcomer.waits
    talk.sleep(1)
    assert newcomer.answer.generation_id == 2
