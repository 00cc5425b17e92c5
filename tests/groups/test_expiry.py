"""How long offsets and groups are kept (KIP-211)."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.groups.changes import NO_TIMESTAMP, GroupRemoved, GroupStored, OffsetRemoved
from penstock.groups.settings import GroupSettings
from penstock.protocol.errors import ErrorCode
from tests.groups.conversation import DAY_MS, GROUP, SESSION_MS, Conversation, subscription

P0 = ("orders", 0)
CHECK_MS = GroupSettings().offsets_retention_check_interval_ms
WEEK_MS = 7 * DAY_MS


def live(talk: Conversation, member: str, generation: int, milliseconds: int) -> None:
    """Let time pass in small steps, with heartbeats."""
    step_ms = 29 * 60 * 1000
    for _ in range(milliseconds // step_ms):
        talk.sleep(step_ms)
        assert talk.heartbeat(member, generation) is ErrorCode.NONE


def test_offsets_of_a_group_without_members_expire_a_week_after_their_commit() -> None:
    talk = Conversation()
    talk.commit({P0: 1})
    talk.sleep(3 * DAY_MS)
    talk.commit({("payments", 0): 1})
    talk.sleep(4 * DAY_MS - CHECK_MS)
    assert len(talk.offsets()) == 2
    talk.sleep(2 * CHECK_MS)
    assert talk.offsets() == {("payments", 0): 1}
    talk.sleep(3 * DAY_MS)
    assert talk.groups() == []
    assert not any(isinstance(change, GroupRemoved) for change in talk.log), "there was no record to remove"


def test_the_clock_starts_when_the_group_becomes_empty() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1, session_ms=1_800_000)
    talk.commit({P0: 1}, member_id=member, generation=generation)
    live(talk, member, generation, 10 * DAY_MS)
    assert talk.offsets() == {P0: 1}, "it is read, however old the commit"
    talk.leave(member)
    talk.sleep(WEEK_MS - CHECK_MS)
    assert talk.offsets() == {P0: 1}
    talk.sleep(2 * CHECK_MS)
    assert talk.groups() == []
    assert talk.log[-2:] == [OffsetRemoved(GROUP, "orders", 0), GroupRemoved(GROUP)]
    assert talk.restarted().groups() == []


def test_an_offset_committed_to_an_empty_group_counts_from_its_commit() -> None:
    talk = Conversation()
    (member,), _ = talk.stable(1)
    talk.leave(member)
    talk.commit({P0: 1})
    talk.sleep(6 * DAY_MS)
    talk.commit({P0: 2})
    talk.sleep(6 * DAY_MS)
    assert talk.offsets() == {P0: 2}
    talk.sleep(DAY_MS + CHECK_MS)
    assert talk.groups() == []


def test_the_clock_goes_on_over_a_restart() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.commit({P0: 1}, member_id=member, generation=generation)
    talk.leave(member)
    talk.sleep(6 * DAY_MS)
    after = talk.restarted()
    assert after.offsets() == {P0: 1}
    after.sleep(DAY_MS + CHECK_MS)
    assert after.groups() == []


def test_in_a_stable_group_only_topics_that_are_no_longer_read_expire() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1, session_ms=1_800_000)
    talk.commit({P0: 1, ("payments", 0): 2}, member_id=member, generation=generation)
    live(talk, member, generation, WEEK_MS + DAY_MS)
    assert talk.offsets() == {P0: 1}


def test_a_group_that_is_no_consumer_loses_nothing_while_it_has_members() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(
        1, session_ms=1_800_000, protocol_type="connect", protocols={"eager": b""}
    )
    talk.commit({P0: 1}, member_id=member, generation=generation)
    live(talk, member, generation, WEEK_MS + DAY_MS)
    assert talk.offsets() == {P0: 1}


def test_subscriptions_that_cannot_be_read_protect_everything() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1, session_ms=1_800_000, protocols={"range": b""})
    talk.commit({P0: 1}, member_id=member, generation=generation)
    live(talk, member, generation, WEEK_MS + DAY_MS)
    assert talk.offsets() == {P0: 1}


def test_nothing_expires_during_a_rebalance() -> None:
    talk = Conversation()
    patient: dict[str, Any] = {"session_ms": 1_800_000, "rebalance_ms": 2**31 - 1}
    (member,), generation = talk.stable(1, **patient)
    talk.commit({("payments", 0): 2}, member_id=member, generation=generation)
    changed = talk.join(member, protocols={"range": subscription("other")}, **patient)
    assert changed.answer.generation_id == generation + 1
    for _ in range(500):
        talk.sleep(1_700_000)
        assert talk.heartbeat(member, generation + 1) is ErrorCode.NONE
    assert talk.state() == "CompletingRebalance"
    assert talk.offsets() == {("payments", 0): 2}


def test_a_retention_time_of_its_own_counts_instead() -> None:
    talk = Conversation()
    talk.commit({P0: 1}, version=4, retention_ms=DAY_MS)
    talk.sleep(DAY_MS - CHECK_MS)
    assert talk.offsets() == {P0: 1}
    talk.sleep(2 * CHECK_MS)
    assert talk.groups() == []


def test_a_longer_retention_time_of_its_own_counts_too() -> None:
    talk = Conversation()
    talk.commit({P0: 1}, version=4, retention_ms=2 * WEEK_MS)
    talk.sleep(WEEK_MS + CHECK_MS)
    assert talk.offsets() == {P0: 1}


def test_the_retention_is_a_setting() -> None:
    talk = Conversation(GroupSettings(offsets_retention_ms=DAY_MS))
    talk.commit({P0: 1})
    talk.sleep(DAY_MS + CHECK_MS)
    assert talk.groups() == []


def test_an_empty_group_without_offsets_is_removed_at_the_next_look() -> None:
    talk = Conversation()
    talk.stable(1)
    talk.sleep(SESSION_MS)
    assert talk.state() == "Empty"
    talk.sleep(CHECK_MS)
    assert talk.groups() == []
    assert talk.log[-1] == GroupRemoved(GROUP)


def test_an_empty_group_that_is_about_to_be_joined_is_not_removed() -> None:
    talk = Conversation()
    (member,), _ = talk.stable(1)
    talk.leave(member)
    talk.join(session_ms=1_800_000)
    talk.sleep(CHECK_MS)
    assert [group.group_id for group in talk.groups()] == [GROUP]


def test_an_offset_that_is_just_being_committed_does_not_expire() -> None:
    talk = Conversation()
    talk.commit({P0: 1})
    talk.sleep(WEEK_MS - CHECK_MS)
    talk.hold = True
    talk.commit({P0: 2})
    talk.sleep(2 * CHECK_MS)
    talk.commit_all()
    assert talk.offsets() == {P0: 2}


def test_a_group_of_an_old_record_without_a_time_expires_by_its_commits() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.commit({P0: 1}, member_id=member, generation=generation)
    talk.leave(member)
    old = [
        dataclasses.replace(change, state_timestamp=NO_TIMESTAMP)
        if isinstance(change, GroupStored)
        else change
        for change in talk.log
    ]
    after = Conversation(log=old)
    after.sleep(WEEK_MS - CHECK_MS)
    assert after.offsets() == {P0: 1}
    after.sleep(2 * CHECK_MS)
    assert after.groups() == []
