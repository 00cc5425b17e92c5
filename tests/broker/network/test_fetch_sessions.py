"""Fetch sessions by themselves: under which name a partition is remembered."""

from __future__ import annotations

import random

from penstock.broker.network.fetch_sessions import FetchPartition, FetchSession, FetchSessions, session_key
from penstock.model import NO_TOPIC_ID
from penstock.protocol.errors import ErrorCode
from tests.support_files import FakeClock

ID = b"i" * 16


def asked(topic: str, topic_id: bytes, offset: int) -> FetchPartition:
    return FetchPartition(topic, topic_id, 0, None, ErrorCode.UNKNOWN_TOPIC_ID, offset, 1 << 20, -1, -1)


def session_of(*partitions: FetchPartition) -> FetchSession:
    session = FetchSessions(10, FakeClock(), random.Random(1)).create(list(partitions))
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
