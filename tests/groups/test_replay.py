"""What survives a restart: the log is all that another coordinator knows."""

from __future__ import annotations

from penstock.groups.changes import GroupRemoved, GroupStored, OffsetCommitted, OffsetRemoved, StoredMember
from penstock.protocol.errors import ErrorCode
from tests.groups.conversation import (
    DELAY_MS,
    GROUP,
    ORDERS,
    SESSION_MS,
    Conversation,
    assignment_of,
    subscription,
)

P0 = ("orders", 0)


def test_a_stable_group_goes_on_after_a_restart() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2)
    talk.commit({P0: 5}, member_id=follower, generation=generation)
    after = talk.restarted()
    assert after.state() == "Stable"
    assert after.offsets() == {P0: 5}
    assert after.heartbeat(leader, generation) is ErrorCode.NONE
    assert after.sync(follower, generation).answer.assignment == assignment_of([follower])[follower]
    assert after.commit({P0: 6}, member_id=follower, generation=generation) == [ErrorCode.NONE]
    assert after.describe().members == talk.describe().members


def test_members_have_a_whole_session_after_a_restart() -> None:
    talk = Conversation()
    (leader, follower), generation = talk.stable(2)
    talk.sleep(SESSION_MS - 1)
    after = talk.restarted()
    after.sleep(SESSION_MS - 1)
    assert after.heartbeat(leader, generation) is ErrorCode.NONE
    after.sleep(1)
    assert after.heartbeat(follower, generation) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_rebalance_that_was_under_way_is_forgotten_but_not_the_generation_before() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    newcomer = talk.join_new()
    again = talk.join(member)
    assert again.answer.generation_id == generation + 1
    after = talk.restarted()
    assert after.heartbeat(member, generation) is ErrorCode.NONE
    assert after.sync(member, generation + 1).error is ErrorCode.ILLEGAL_GENERATION
    assert after.sync(newcomer.answer.member_id, generation + 1).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_the_generation_goes_on_after_a_restart() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.leave(member)
    after = talk.restarted()
    assert after.state() == "Empty"
    _, later = after.stable(1)
    assert later == generation + 2


def test_subscriptions_are_known_after_a_restart() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1, protocols={"range": subscription("orders")})
    talk.commit({P0: 1, ("payments", 0): 1}, member_id=member, generation=generation)
    after = talk.restarted()
    deleted = after.delete_offsets(P0, ("payments", 0)).answer
    errors = [topic.partitions[0].error_code for topic in deleted.topics]
    assert errors == [ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC, ErrorCode.NONE]


def test_tombstones_of_unknown_things_are_ignored() -> None:
    talk = Conversation(log=[OffsetRemoved("a", "orders", 0), GroupRemoved("b")])
    assert talk.groups() == []


def test_a_removed_group_whose_offsets_are_still_there_is_only_a_store_of_offsets() -> None:
    member = StoredMember("m", None, "c", "/h", 1000, SESSION_MS, ORDERS, b"")
    stored = GroupStored(GROUP, "consumer", 7, "range", "m", 1, (member,))
    talk = Conversation(log=[stored, OffsetCommitted(GROUP, "orders", 0, 1), GroupRemoved(GROUP)])
    assert talk.heartbeat("m", 7) is ErrorCode.UNKNOWN_MEMBER_ID
    assert talk.offsets() == {P0: 1}
    (listed,) = talk.groups()
    assert (listed.group_state, listed.protocol_type) == ("Empty", "")


def test_the_leader_is_known_after_a_restart() -> None:
    members = tuple(StoredMember(name, None, "c", "/h", 1000, SESSION_MS, ORDERS, b"") for name in "mn")
    talk = Conversation(log=[GroupStored(GROUP, "consumer", 7, "range", "n", 1, members)])
    follower = talk.join("m").answer
    assert (follower.leader, follower.generation_id) == ("n", 7)
    assert talk.join("n").waits


def test_a_leader_that_is_no_member_is_replaced() -> None:
    member = StoredMember("m", None, "c", "/h", 1000, SESSION_MS, ORDERS, b"")
    talk = Conversation(log=[GroupStored(GROUP, "consumer", 7, "range", "gone", 1, (member,))])
    assert talk.join("m").answer.leader == "m"


def test_a_decision_without_changes_may_be_confirmed_or_failed() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.hold = True
    talk.join()
    talk.fail_all()
    talk.hold = False
    assert talk.heartbeat(member, generation) is ErrorCode.NONE


def test_an_emptied_group_whose_record_failed_stays_usable() -> None:
    talk = Conversation()
    (member,), _ = talk.stable(1)
    talk.hold = True
    talk.leave(member)
    talk.fail_all()
    talk.hold = False
    assert talk.state() == "Empty"
    joining = talk.join_new()
    talk.sleep(DELAY_MS)
    assert joining.error is ErrorCode.NONE
