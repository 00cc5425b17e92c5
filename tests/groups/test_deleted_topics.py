"""An offset belongs to a topic, and a topic is its id: one that is made again starts without offsets."""

from __future__ import annotations

from dataclasses import replace

from penstock.groups.changes import NO_TOPIC_ID, OffsetCommitted, OffsetRemoved
from penstock.protocol.errors import ErrorCode
from tests.groups.conversation import GROUP, Conversation, topic_id

P0 = ("orders", 0)
P1 = ("orders", 1)


def written_without_ids(talk: Conversation) -> list[OffsetCommitted]:
    """The offsets of a log as brokers wrote them that knew no topic ids."""
    return [
        replace(change, topic_id=NO_TOPIC_ID) for change in talk.log if isinstance(change, OffsetCommitted)
    ]


def test_the_offset_of_a_topic_that_was_made_again_is_seen_by_nobody() -> None:
    talk = Conversation()
    talk.commit({P0: 5, ("payments", 0): 3})
    talk.topics["orders"] = topic_id("orders", 2)
    assert talk.fetch(P0)[P0].committed_offset == -1
    assert talk.offsets() == {("payments", 0): 3}
    assert talk.restarted().offsets() == {("payments", 0): 3}


def test_the_offset_of_a_deleted_topic_is_removed_by_the_next_coordinator() -> None:
    talk = Conversation()
    talk.commit({P0: 5, ("payments", 0): 3})
    talk.topics["orders"] = None
    after = talk.restarted()
    after.reconcile()
    assert after.log[-1] == OffsetRemoved(GROUP, "orders", 0)
    after.topics["orders"] = topic_id("orders", 2)
    assert after.restarted().offsets() == {("payments", 0): 3}


def test_a_removal_that_comes_late_spares_what_was_committed_to_the_new_topic() -> None:
    talk = Conversation()
    talk.commit({P0: 5, P1: 6})
    talk.topics["orders"] = topic_id("orders", 2)
    talk.commit({P0: 1})
    talk.hold = True
    talk.commit({P1: 2})
    talk.reconcile()
    talk.commit_all()
    assert talk.offsets() == {P0: 1, P1: 2}
    assert talk.restarted().offsets() == {P0: 1, P1: 2}


def test_a_commit_under_way_to_a_topic_that_is_deleted_is_removed_behind_it() -> None:
    talk = Conversation()
    talk.hold = True
    talk.commit({P0: 5})
    talk.delete_topics("orders")
    talk.commit_all()
    talk.topics["orders"] = topic_id("orders", 1)
    assert talk.offsets() == {}, "it is in the log no longer, and not only hidden"


def test_a_removal_that_fails_is_made_again() -> None:
    talk = Conversation()
    talk.commit({P0: 5})
    talk.hold = True
    talk.delete_topics("orders")
    talk.fail_all()
    assert talk.offsets() == {}
    talk.hold = False
    talk.reconcile()
    assert talk.log[-1] == OffsetRemoved(GROUP, "orders", 0)
    assert talk.groups() == []


def test_nothing_is_written_when_nothing_is_gone() -> None:
    talk = Conversation()
    talk.commit({P0: 5, P1: 6})
    length = len(talk.log)
    talk.reconcile()
    assert len(talk.log) == length


def test_much_is_removed_in_portions() -> None:
    talk = Conversation()
    for group in ("a", "b", "c"):
        talk.commit({("orders", index): 1 for index in range(25)}, group=group)
    talk.topics["orders"] = None
    assert talk.reconcile(changes_max=10) >= 8
    assert talk.groups() == []
    assert sum(isinstance(change, OffsetRemoved) for change in talk.log) == 75


def test_a_commit_to_a_topic_that_does_not_exist_is_refused() -> None:
    talk = Conversation(topics={"orders": None})
    assert talk.commit({P0: 1}) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert talk.groups() == []


def test_offsets_without_an_id_belong_to_the_topic_that_has_the_name_and_are_written_with_its_id() -> None:
    talk = Conversation()
    talk.commit({P0: 5}, metadata="note")
    after = Conversation(log=written_without_ids(talk))
    assert after.offsets() == {P0: 5}
    after.reconcile()
    assert after.log[-1] == talk.log[-1]
    length = len(after.log)
    after.reconcile()
    assert len(after.log) == length
    after.topics["orders"] = topic_id("orders", 2)
    assert after.offsets() == {}


def test_offsets_without_an_id_are_written_with_one_even_if_that_fails_at_first() -> None:
    talk = Conversation()
    talk.commit({P0: 5})
    after = Conversation(log=written_without_ids(talk))
    after.hold = True
    after.reconcile()
    after.fail_all()
    after.hold = False
    after.reconcile()
    assert after.log[-1] == talk.log[-1]


def test_offsets_without_an_id_whose_topic_is_gone_do_not_come_back_with_a_topic_of_that_name() -> None:
    talk = Conversation()
    talk.commit({P0: 5})
    after = Conversation(log=written_without_ids(talk), topics={"orders": None})
    # The removal could not be written yet.
    after.topics["orders"] = topic_id("orders", 2)
    assert after.offsets() == {}
    after.reconcile()
    assert after.log[-1] == OffsetRemoved(GROUP, "orders", 0)


def test_a_moment_of_expiry_outlives_a_restart_beside_a_topic_id() -> None:
    talk = Conversation()
    talk.commit({P0: 5}, version=3, retention_ms=60_000)
    after = talk.restarted()
    assert after.offsets() == {P0: 5}
    after.sleep(after.settings.offsets_retention_check_interval_ms)
    assert after.offsets() == {}
