"""What one client can do to the others: nothing, and not much to our memory."""

from __future__ import annotations

import time

import pytest

from penstock.groups import commits
from penstock.groups.classic import membership
from penstock.groups.settings import CLIENT_ID_LENGTH_MAX, NAME_BYTES_MAX, PENDING_MEMBERS_MAX
from penstock.protocol.errors import ErrorCode
from tests.groups.conversation import DELAY_MS, GROUP, SESSION_MS, Conversation

P0 = ("orders", 0)


@pytest.mark.parametrize("group", ["x" * (NAME_BYTES_MAX + 1), "\u65e5" * 342, "x" * 100_000])
def test_group_ids_have_a_longest(group: str) -> None:
    talk = Conversation()
    assert talk.join(group=group).error is ErrorCode.INVALID_GROUP_ID
    assert talk.commit({P0: 1}, group=group) == [ErrorCode.INVALID_GROUP_ID]
    assert talk.heartbeat("m", 1, group=group) is ErrorCode.INVALID_GROUP_ID
    assert talk.groups() == []


@pytest.mark.parametrize("group", ["x" * NAME_BYTES_MAX, "..", "a/b", "\x00", "a\r\nb", "\u202e", "%2e%2e"])
def test_strange_group_ids_are_only_names(group: str) -> None:
    talk = Conversation()
    talk.stable(1, group=group)
    talk.commit({P0: 1}, group=group + "?" if len(group) < 100 else "other")
    assert talk.restarted().state(group) == "Stable"


def test_protocol_names_have_a_longest() -> None:
    talk = Conversation()
    long = "x" * (NAME_BYTES_MAX + 1)
    assert talk.join(protocol_type=long).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert talk.join(protocols={long: b""}).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_a_long_client_id_makes_no_longer_member_id() -> None:
    talk = Conversation()
    talk.stable(1, client="x" * 32_767)
    (member,) = talk.describe().members
    assert len(member.member_id) == CLIENT_ID_LENGTH_MAX + 37
    assert talk.restarted().describe().members == [member]


def test_a_flood_of_first_joins_leaves_a_bounded_number_of_pending_ids() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    ids = [talk.join().answer.member_id for _ in range(PENDING_MEMBERS_MAX + 5)]
    group = talk.coordinator._groups[GROUP]
    assert len(group.pending) == PENDING_MEMBERS_MAX
    assert talk.heartbeat(member, generation) is ErrorCode.NONE
    assert talk.join(ids[0]).error is ErrorCode.UNKNOWN_MEMBER_ID, "the oldest has gone"
    assert talk.join(ids[-1]).waits
    talk.sleep(SESSION_MS)
    assert group.pending == {}


def test_a_group_has_a_largest_size_even_when_the_setting_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MEMBERS_MAX", 5)
    talk = Conversation()
    joins = [talk.join(version=3) for _ in range(8)]
    talk.sleep(2 * DELAY_MS)
    errors = [asked.error for asked in joins]
    assert errors == [ErrorCode.NONE] * 5 + [ErrorCode.GROUP_MAX_SIZE_REACHED] * 3


def test_a_coordinator_has_a_largest_number_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "GROUPS_MAX", 3)
    monkeypatch.setattr(commits, "GROUPS_MAX", 3)
    talk = Conversation()
    for number in range(3):
        talk.commit({P0: 1}, group=f"g{number}")
    assert talk.join(group="one-more").error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert talk.commit({P0: 1}, group="one-more") == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    assert talk.commit({P0: 2}, group="g0") == [ErrorCode.NONE]
    assert talk.join(group="g0").error is ErrorCode.MEMBER_ID_REQUIRED


def test_a_leader_that_assigns_to_strangers_assigns_nothing() -> None:
    talk = Conversation()
    joining = talk.join_new()
    talk.sleep(DELAY_MS)
    member = joining.answer.member_id
    strangers = {f"stranger-{number}": b"x" * 1000 for number in range(1000)}
    talk.sync(member, 1, strangers)
    assert talk.describe().members[0].member_assignment == b""
    assert len(talk.log[-1].members) == 1  # type: ignore[union-attr]


def test_one_members_commit_does_not_count_for_another_group() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.stable(1, group="others")
    refused = talk.commit({P0: 1}, group="others", member_id=member, generation=generation)
    assert refused == [ErrorCode.UNKNOWN_MEMBER_ID]


@pytest.mark.parametrize("metadata", [b"", b"\x00", b"\x00\x00", b"\x00\x00\x7f\xff\xff\xff", b"\xff" * 50])
def test_broken_subscriptions_are_just_not_understood(metadata: bytes) -> None:
    talk = Conversation()
    talk.stable(1, protocols={"range": metadata})
    assert talk.restarted().state() == "Stable"


def test_heartbeats_and_commits_cost_the_same_in_large_and_small_groups() -> None:
    def cost(count: int) -> float:
        talk = Conversation()
        members, generation = talk.stable(count)
        member = members[-1]
        talk.coordinator.check = lambda: None  # type: ignore[method-assign]
        best = float("inf")
        for _ in range(5):
            started = time.process_time()
            for offset in range(50):
                talk.heartbeat(member, generation)
                talk.commit({P0: offset}, member_id=member, generation=generation)
            best = min(best, time.process_time() - started)
        return best

    assert cost(100) < 5 * cost(2)
