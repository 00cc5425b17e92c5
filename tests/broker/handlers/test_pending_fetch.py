"""Fetches of followers, whose answers change what they are asked about."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.counters import TopicTraffic, WaitingRequests
from penstock.broker.handlers.fetch import PendingFetch
from penstock.broker.network.fetch_sessions import FetchPartition, FetchSessions
from penstock.broker.partition.waiters import Waiters
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchRequest, ReplicaState
from tests.support_files import FakeClock
from tests.virtual import VirtualSpawn


class FakePartition:
    """What a fetch uses of a hosted partition. ``on_fetched``: what a follower's progress sets off."""

    index, leader_epoch = 0, 0
    is_leader, is_deleted, is_offline = True, False, False
    config = SimpleNamespace(is_compact=False)

    def __init__(self, topic: str, end_offset: int, on_fetched: Callable[[], None] = lambda: None) -> None:
        self.topic = topic
        self.topic_id = topic.encode().ljust(16, b"\0")
        self.log = SimpleNamespace(
            log_start_offset=0,
            log_end_offset=end_offset,
            last_stable_offset=lambda high_watermark: 0,
            end_offset_of=lambda found: end_offset,
        )
        self.traffic = TopicTraffic()
        self.high_watermark = end_offset
        hosted: Any = self
        self.waiters = Waiters(hosted)
        self._on_fetched = on_fetched

    def fetched_by(self, *_: int) -> ErrorCode:
        self._on_fetched()
        return ErrorCode.NONE

    def read(self, offset: int, limit: int, *, at_least_one: bool, ceiling: int) -> Any:
        return SimpleNamespace(size=1) if offset < ceiling else None

    def append(self, count: int) -> None:
        self.log.log_end_offset += count
        self.waiters.appended()


class Scene:
    """A follower has all of ``data`` and of ``state``. Its fetch commits ``state``, which appends to ``data``."""

    def __init__(self, *, has_more: bool) -> None:
        self.clock = FakeClock()
        self.spawn = VirtualSpawn(self.clock)
        self.data = FakePartition("data", 15)
        appends = [29]
        self.state = FakePartition(
            "state", 9 if has_more else 8, lambda: self.data.append(appends.pop()) if appends else None
        )
        sessions = FetchSessions(10, self.clock, random.Random(1))
        session = sessions.create([self.asked(self.data, 15), self.asked(self.state, 8)], is_replica=True)
        assert session is not None
        self.session = session
        self.answers: list[Any] = []
        broker: Any = SimpleNamespace(
            environment=SimpleNamespace(spawn=self.spawn),
            config=SimpleNamespace(fetch_max_bytes=1 << 20),
            membership=SimpleNamespace(is_serving=lambda: True),
            waiting_requests=WaitingRequests(),
        )
        call: Any = SimpleNamespace(answer=self.answers.append, on_abandoned=None, allows=lambda *_: True)
        request = FetchRequest(
            replica_state=ReplicaState(replica_id=3, replica_epoch=1),
            max_wait_ms=500,
            min_bytes=1,
            max_bytes=1 << 20,
        )
        self.fetch = PendingFetch(broker, call, request, session, [])

    @staticmethod
    def asked(hosted: Any, offset: int) -> FetchPartition:
        return FetchPartition(
            hosted.topic, hosted.topic_id, 0, hosted, ErrorCode.NONE, offset, 1 << 20, 0, -1, 0
        )


def names_of(response: Any) -> dict[str, bool]:
    return {
        topic.topic: bool(partition.records) for topic in response.responses for partition in topic.partitions
    }


def test_what_is_appended_while_the_answer_is_made_is_sent_with_the_next() -> None:
    scene = Scene(has_more=True)
    assert names_of(scene.fetch.try_now()) == {"data": False, "state": True}
    assert "data" in [partition.topic for partition in scene.session.candidates()]
    assert names_of(scene.fetch.try_now())["data"]


def test_what_the_fetch_itself_sets_off_in_the_partition_is_in_its_answer() -> None:
    # A coordinator's next decision, when the one before is committed.
    scene = Scene(has_more=True)
    scene.data._on_fetched = lambda: scene.data.append(1)
    assert names_of(scene.fetch.try_now())["data"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_fetch_that_begins_to_wait_does_not_miss_what_was_appended_meanwhile(is_first: bool) -> None:
    scene = Scene(has_more=False)
    if not is_first:
        # The session has named both before, so there is nothing to say of them.
        scene.session.answered(
            [
                (partition, told(partition.hosted))
                for partition in scene.session.candidates()
                if partition.hosted is not None
            ]
        )
        scene.session.mark_dirty(as_hosted(scene.data))
        scene.session.mark_dirty(as_hosted(scene.state))
    assert scene.fetch.try_now() is None
    scene.fetch.wait(500)
    scene.spawn.run_until(scene.clock.now_ms())
    assert len(scene.answers) == 1 and names_of(scene.answers[0])["data"]


def as_hosted(partition: FakePartition) -> Any:
    return partition


def told(hosted: Any) -> Any:
    return SimpleNamespace(
        error_code=0,
        diverging_epoch=None,
        preferred_read_replica=-1,
        records=None,
        high_watermark=hosted.high_watermark,
        log_start_offset=0,
    )
