"""Waiting until a broker has heard of what the cluster had committed, and no longer than makes sense."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from penstock.broker.membership import freshness
from penstock.broker.membership.freshness import Freshness
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.quorum import (
    DescribeQuorumResponse,
    DescribeQuorumResponsePartition,
    DescribeQuorumResponseTopic,
)


class Stage:
    """A broker that is no leader of the quorum, whose image is at offset 10; node 2 leads."""

    def __init__(self) -> None:
        self.timers: list[tuple[int, Callable[[], None]]] = []
        self.asked: list[tuple[int, Callable[[Any], None]]] = []
        environment: Any = SimpleNamespace(spawn=SimpleNamespace(later=self._later))
        peers: Any = SimpleNamespace(call=self._call)
        consensus: Any = SimpleNamespace(is_active=False, leader_id=2, image=SimpleNamespace(offset=10))
        self.consensus = consensus
        self.freshness = Freshness(environment, consensus, peers, node_id=1)
        self.went_on: list[str] = []

    def wait(self, name: str) -> None:
        self.freshness.when_fresh(lambda: self.went_on.append(name))

    def answer(self, high_watermark: int, error: ErrorCode = ErrorCode.NONE) -> None:
        partition = DescribeQuorumResponsePartition(high_watermark=high_watermark, error_code=error)
        topic = DescribeQuorumResponseTopic(topic_name="__cluster_metadata", partitions=[partition])
        self.asked.pop(0)[1](DescribeQuorumResponse(topics=[topic]))

    def move_to(self, offset: int) -> None:
        self.consensus.image.offset = offset
        self.freshness.image_moved()

    def pass_time(self, delay_ms: int) -> None:
        due = [act for at_ms, act in self.timers if at_ms <= delay_ms]
        self.timers = [timer for timer in self.timers if timer[0] > delay_ms]
        for act in due:
            act()

    def _call(
        self, node: int, channel: str, request: Any, version: int, done: Any, *, timeout_ms: int
    ) -> None:
        self.asked.append((node, done))

    def _later(self, delay_ms: int, act: Callable[[], None]) -> None:
        self.timers.append((delay_ms, act))


def test_the_node_that_commits_asks_nobody() -> None:
    stage = Stage()
    stage.consensus.is_active = True
    stage.wait("a")
    assert stage.went_on == ["a"]
    assert stage.asked == []


def test_a_broker_that_has_everything_goes_on_with_the_answer() -> None:
    stage = Stage()
    stage.wait("a")
    assert stage.went_on == []
    stage.answer(11)
    assert stage.went_on == ["a"]


def test_one_that_is_behind_goes_on_when_it_has_caught_up() -> None:
    stage = Stage()
    stage.wait("a")
    stage.answer(21)
    stage.move_to(19)
    assert stage.went_on == []
    stage.move_to(20)
    assert stage.went_on == ["a"]


def test_those_who_come_during_a_question_wait_for_the_next_one_together() -> None:
    stage = Stage()
    stage.wait("a")
    stage.wait("b")
    stage.wait("c")
    assert len(stage.asked) == 1
    stage.answer(11)
    assert stage.went_on == ["a"]
    assert len(stage.asked) == 1
    stage.answer(13)
    stage.move_to(12)
    assert stage.went_on == ["a", "b", "c"]


def test_a_node_that_leads_no_longer_is_not_believed() -> None:
    stage = Stage()
    stage.wait("a")
    stage.answer(5, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert stage.went_on == []
    stage.consensus.leader_id = 3
    stage.pass_time(freshness.RETRY_MS)
    assert stage.asked[0][0] == 3
    stage.answer(11)
    assert stage.went_on == ["a"]


def test_nobody_waits_for_ever_and_a_late_answer_is_for_nobody() -> None:
    stage = Stage()
    stage.consensus.leader_id = None
    stage.wait("a")
    stage.pass_time(freshness.RETRY_MS)
    stage.consensus.leader_id = 2
    stage.pass_time(freshness.RETRY_MS)
    stage.pass_time(freshness.TIMEOUT_MS)
    assert stage.went_on == ["a"]
    stage.wait("b")
    stage.answer(11)
    assert stage.went_on == ["a"], "that answer was to the question before"
    stage.answer(11)
    assert stage.went_on == ["a", "b"]
