"""The shell of the controller: when there is one, what it answers when there is none, and its clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.broker.controller.active_controller import (
    AHEAD_MAX,
    ASLEEP_MS,
    RETRY_MS,
    ActiveController,
)
from penstock.broker.logs import Logger
from penstock.decision import Decision
from penstock.environment import Environment
from penstock.metadata import broker_registry
from penstock.metadata.image import Image
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import brokers, topics
from penstock.protocol.schema import Message

SESSION_MS = 9000


class Timer:
    def __init__(self, due_ms: float, callback: Callable[[], None]) -> None:
        self.due_ms = due_ms
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class World:
    """Clock and timers in the hands of the test."""

    def __init__(self) -> None:
        self.ms = 1000
        self.timers: list[Timer] = []

    def now_ms(self) -> int:
        return self.ms

    def boot_id(self) -> str:
        return ""

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self.ms

    def later(self, delay_ms: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.ms + delay_ms, callback)
        self.timers.append(timer)
        return timer

    def advance(self, ms: int, *, asleep: bool = False) -> None:
        """Let time pass; ``asleep``: all at once, as for a process that was stopped."""
        end_ms = self.ms + ms
        while True:
            live = [timer for timer in self.timers if not timer.is_cancelled and timer.due_ms <= end_ms]
            if not live:
                break
            timer = min(live, key=lambda timer: timer.due_ms)
            self.timers.remove(timer)
            self.ms = end_ms if asleep else max(self.ms, int(timer.due_ms))
            timer.callback()
        self.ms = end_ms


class StandInQuorum:
    """Commits when told to."""

    def __init__(self) -> None:
        self.image = Image()
        self.waiting: list[tuple[Decision[Message], Callable[[Any], None], Callable[[], None]]] = []
        self.is_full = False
        self.commits_at_once = True

    def propose(
        self, decision: Decision[Message], answer: Callable[[Any], None], lost: Callable[[], None]
    ) -> bool:
        if decision.changes and self.is_full:
            return False
        self.waiting.append((decision, answer, lost))
        if self.commits_at_once:
            self.commit()
        return True

    def decided_image(self) -> Image:
        image = self.image
        for decision, _, _ in self.waiting:
            image, _ = image.apply(decision.changes)
        return image

    def commit(self) -> None:
        waiting, self.waiting = self.waiting, []
        for decision, answer, _ in waiting:
            self.image, _ = self.image.apply(decision.changes)
            answer(decision.response)

    def lose(self) -> None:
        waiting, self.waiting = self.waiting, []
        for _, _, lost in waiting:
            lost()


class Silent(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def info(self, event: str, **values: Any) -> None:
        self.lines.append(event)

    warning = error = info


class Stage:
    def __init__(self, static: Mapping[str, str] | None = None) -> None:
        self.world = World()
        self.quorum = StandInQuorum()
        self.logger = Silent()
        environment = cast(
            Environment, SimpleNamespace(clock=self.world, spawn=self.world, random=random.Random(1))
        )
        self.on = ActiveController(
            environment, self.quorum, SimpleNamespace(static=static or {}), self.logger, node_id=1
        )

    def ask(self, request: Message, version: int = 0) -> Any:
        answers: list[Any] = []
        self.on.handle(request, version, answers.append)
        assert len(answers) <= 1
        return answers[0] if answers else None

    def join(self, id: int) -> None:
        image = self.quorum.decided_image()
        response = self.ask(
            brokers.BrokerRegistrationRequest(
                broker_id=id,
                cluster_id=image.cluster_id,
                incarnation_id=id.to_bytes(16, "big"),
                listeners=[brokers.Listener(name="PLAINTEXT", host="h", port=9092)],
                log_dirs=[b"d" * 15 + bytes([id])],
            ),
            4,
        )
        assert response.error_code == 0
        assert not self.beat(id).is_fenced

    def beat(self, id: int, *, wants_to_stop: bool = False) -> Any:
        image = self.quorum.decided_image()
        return self.ask(
            brokers.BrokerHeartbeatRequest(
                broker_id=id,
                broker_epoch=image.brokers[BrokerId(id)].epoch,
                current_metadata_offset=image.offset,
                want_shut_down=wants_to_stop,
            ),
            1,
        )

    def is_active(self, id: int) -> bool:
        return self.quorum.decided_image().brokers[BrokerId(id)].is_active


def create(name: str, factor: int = 1) -> topics.CreateTopicsRequest:
    return topics.CreateTopicsRequest(
        topics=[topics.CreatableTopic(name=name, num_partitions=1, replication_factor=factor)]
    )


def test_nobody_is_answered_with_a_decision_before_this_node_leads() -> None:
    stage = Stage()
    assert stage.ask(create("a"), 7).topics[0].error_code == ErrorCode.NOT_CONTROLLER
    assert not stage.on.is_active and stage.on.image is None


def test_first_controller_founds_the_cluster_and_the_next_ones_do_not() -> None:
    stage = Stage()
    stage.on.on_active(True)
    cluster_id = stage.quorum.image.cluster_id
    assert len(cluster_id) == 22
    offset = stage.quorum.image.offset
    stage.on.on_active(False)
    stage.on.on_active(True)
    assert (stage.quorum.image.cluster_id, stage.quorum.image.offset) == (cluster_id, offset)


def test_answer_leaves_when_the_decision_is_committed() -> None:
    stage = Stage()
    stage.on.on_active(True)
    stage.join(1)
    stage.quorum.commits_at_once = False
    answers: list[Any] = []
    stage.on.handle(create("a"), 7, answers.append)
    assert answers == []
    stage.quorum.commit()
    assert answers[0].topics[0].error_code == ErrorCode.NONE


def test_trap_11_who_waits_when_leadership_is_lost_is_told_to_ask_another() -> None:
    stage = Stage()
    stage.on.on_active(True)
    stage.join(1)
    stage.quorum.commits_at_once = False
    answers: list[Any] = []
    stage.on.handle(create("a"), 7, answers.append)
    stage.on.on_active(False)
    stage.quorum.lose()
    assert answers[0].topics[0].error_code == ErrorCode.NOT_CONTROLLER
    assert not any(not timer.is_cancelled for timer in stage.world.timers)
    # What was decided and lost is not known to whoever decides next.
    stage.quorum.commits_at_once = True
    stage.on.on_active(True)
    assert stage.ask(create("a"), 7).topics[0].error_code == ErrorCode.NONE


def test_silent_brokers_are_fenced_by_the_clock_and_others_are_not() -> None:
    stage = Stage()
    stage.on.on_active(True)
    stage.join(1)
    stage.join(2)
    for _ in range(10):
        stage.world.advance(1000)
        stage.beat(2)
    assert not stage.is_active(1) and stage.is_active(2)
    assert "broker fenced" in stage.logger.lines


def test_a_broker_that_stopped_on_purpose_is_not_reported_like_one_that_was_lost() -> None:
    stage = Stage()
    stage.on.on_active(True)
    stage.join(1)
    stage.join(2)
    while not stage.beat(2, wants_to_stop=True).should_shut_down:
        stage.world.advance(100)
        stage.beat(1)
    stage.on.broker_lost(2)
    assert not stage.is_active(2)
    assert "broker stopped" in stage.logger.lines
    assert "broker fenced" not in stage.logger.lines


def test_broker_that_nobody_listens_for_is_fenced_at_once() -> None:
    stage = Stage()
    stage.on.broker_lost(1)
    stage.on.on_active(True)
    stage.join(1)
    stage.on.broker_lost(1)
    assert not stage.is_active(1)


def test_controller_that_was_asleep_fences_nobody_for_it() -> None:
    stage = Stage()
    stage.on.on_active(True)
    stage.join(1)
    stage.world.advance(SESSION_MS + ASLEEP_MS + 60_000, asleep=True)
    assert stage.is_active(1)
    stage.world.advance(SESSION_MS)
    assert not stage.is_active(1)


def test_heartbeats_do_not_leave_timers_behind() -> None:
    stage = Stage()
    stage.on.on_active(True)
    stage.join(1)
    for _ in range(100):
        stage.world.advance(100)
        stage.beat(1)
    assert sum(not timer.is_cancelled for timer in stage.world.timers) <= 1


def test_full_disk_refuses_the_change_and_the_controller_goes_on_from_the_log() -> None:
    stage = Stage()
    stage.on.on_active(True)
    stage.join(1)
    stage.quorum.is_full = True
    assert stage.ask(create("a"), 7).topics[0].error_code == ErrorCode.KAFKA_STORAGE_ERROR
    stage.quorum.is_full = False
    assert stage.ask(create("a"), 7).topics[0].error_code == ErrorCode.NONE


def test_fencing_that_found_no_room_is_tried_again() -> None:
    stage = Stage()
    stage.on.on_active(True)
    stage.join(1)
    stage.quorum.is_full = True
    stage.world.advance(SESSION_MS)
    assert stage.is_active(1)
    stage.quorum.is_full = False
    stage.world.advance(RETRY_MS + SESSION_MS)
    assert not stage.is_active(1)


def in_the_middle_of_a_large_decision(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A broker with twenty partitions is lost, each of them is a portion, and nothing is committed by itself."""
    monkeypatch.setattr(broker_registry, "PORTION", 1)
    stage = Stage()
    stage.on.on_active(True)
    stage.join(1)
    stage.join(2)
    asked = topics.CreatableTopic(name="a", num_partitions=20, replication_factor=2)
    assert not stage.ask(topics.CreateTopicsRequest(topics=[asked]), 7).topics[0].error_code
    stage.quorum.commits_at_once = False
    stage.on.broker_lost(1)
    return stage


def test_large_decision_goes_on_as_it_is_committed_so_that_nobody_waits_behind_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = in_the_middle_of_a_large_decision(monkeypatch)
    rounds = 0
    while any(1 in partition.isr for partition in stage.quorum.image.topics["a"].partitions):
        rounds += 1
        assert rounds < 20, "it never comes to an end"
        stage.world.advance(100)
        assert len(stage.quorum.waiting) <= AHEAD_MAX + 1
        stage.quorum.commit()
    assert rounds > 20 // (AHEAD_MAX + 1)


def test_next_controller_does_not_wait_for_what_the_last_one_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = in_the_middle_of_a_large_decision(monkeypatch)
    stage.world.advance(100)
    stage.quorum.commit()
    stage.world.advance(100)
    assert stage.quorum.waiting
    stage.on.on_active(False)
    stage.quorum.lose()
    stage.quorum.commits_at_once = True
    stage.on.on_active(True)
    stage.world.advance(100)
    assert all(partition.isr == (2,) for partition in stage.quorum.image.topics["a"].partitions)
