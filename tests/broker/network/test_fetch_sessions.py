"""Fetch sessions by themselves: under which name a partition is remembered, and what its asker knows of it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.broker.network.fetch_sessions import FetchPartition, FetchSession, FetchSessions, session_key
from penstock.model import NO_TOPIC_ID
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import EpochEndOffset, PartitionData
from tests.support_files import FakeClock

ID = b"i" * 16


def asked(topic: str, topic_id: bytes, offset: int, start: int = -1) -> FetchPartition:
    return FetchPartition(
        topic, topic_id, 0, None, ErrorCode.UNKNOWN_TOPIC_ID, offset, 1 << 20, -1, -1, start
    )


def session_of(*partitions: FetchPartition, is_replica: bool = False) -> FetchSession:
    session = FetchSessions(10, FakeClock(), random.Random(1)).create(list(partitions), is_replica=is_replica)
    assert session is not None
    return session


def test_a_topic_whose_name_becomes_known_later_is_not_remembered_twice() -> None:
    """A follower may ask for a topic before its leader has heard of it: then only the id is known."""
    session = session_of(asked("", ID, 0))
    session.update([asked("events", ID, 188)], ())
    assert [partition.fetch_offset for partition in session.candidates()] == [188]
    session.check()


def test_a_topic_asked_for_by_id_is_forgotten_by_id() -> None:
    session = session_of(asked("", ID, 0))
    session.update((), [session_key("events", ID, 0)])
    assert session.candidates() == []


def test_topics_asked_for_by_name_are_told_apart_by_name() -> None:
    session = session_of(asked("a", NO_TOPIC_ID, 1), asked("b", NO_TOPIC_ID, 2))
    assert [partition.fetch_offset for partition in session.candidates()] == [1, 2]


@pytest.mark.parametrize("other", [(0, 5), (1, 6)], ids=["isolation level", "ACLs"])
def test_another_isolation_level_or_other_acls_look_at_every_partition_again(other: tuple[int, int]) -> None:
    session = session_of(asked("a", ID, 9))
    session.look_again_if_changed((1, 5))
    (partition,) = session.candidates()
    session.answered([(partition, told())])
    session.look_again_if_changed((1, 5))
    assert session.candidates() == []
    session.look_again_if_changed(other)
    assert session.candidates() == [partition]


def test_a_client_does_not_find_the_session_of_a_follower() -> None:
    sessions = FetchSessions(10, FakeClock(), random.Random(1))
    session = sessions.create([], is_replica=True)
    assert session is not None
    assert sessions.resume(session.id, 1) == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert sessions.resume(session.id, 1, is_replica=True) is session


def told(**what: Any) -> PartitionData:
    return PartitionData(partition_index=0, high_watermark=9, log_start_offset=8, records=b"", **what)


def test_what_came_with_an_order_to_truncate_is_said_again() -> None:
    """A follower that cuts its log takes nothing else from that answer."""
    follower = asked("a", ID, 12, start=0)
    session = session_of(follower, is_replica=True)
    session.answered([(follower, told(diverging_epoch=EpochEndOffset(epoch=3, end_offset=10)))])
    again = asked("a", ID, 10, start=0)
    session.update([again], ())
    assert session.has_news(again, told())
    session.answered([(again, told())])
    done = asked("a", ID, 10, start=8)
    session.update([done], ())
    assert not session.has_news(done, told())


def test_a_follower_that_begins_elsewhere_is_told_again_where_its_leader_begins() -> None:
    follower = asked("a", ID, 9, start=0)
    session = session_of(follower, is_replica=True)
    session.answered([(follower, told())])
    # It had to drop that answer, and says so by where it begins.
    again = asked("a", ID, 9, start=0)
    session.update([again], ())
    assert session.has_news(again, told())
    session.answered([(again, told())])
    done = asked("a", ID, 9, start=8)
    session.update([done], ())
    assert not session.has_news(done, told())


def test_a_consumer_is_told_once() -> None:
    consumer = asked("a", ID, 9)
    session = session_of(consumer)
    session.answered([(consumer, told())])
    again = asked("a", ID, 9)
    session.update([again], ())
    assert not session.has_news(again, told())
