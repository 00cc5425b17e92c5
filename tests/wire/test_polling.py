"""Fetches that share requests, against a cluster in a dictionary: none waits for the long poll of another."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchResponse
from penstock.wire import OffsetOutOfRange, UnknownTopic, calls, polling
from penstock.wire.core import Task
from penstock.wire.operations import Fetched
from penstock.wire.polling import FetchSettings, Polling
from penstock.wire.record_batches import decode_fetched
from tests.wire.fake import SILENCE, FakeCluster, FakeShell

FETCH = 1
PLACES = [TopicPartition("orders", number) for number in range(4)]


class Reading:
    """A cluster whose fetches at the end of a log are answered when the log grows, or never."""

    def __init__(self, leaders: list[int] | None = None) -> None:
        self.cluster = FakeCluster(3)
        self.cluster.make_topic("orders", leaders or [1, 1, 1, 1])
        self.shell = FakeShell(self.cluster, deadline_ms=10**9)
        self.polling = Polling(self.shell.core)
        self.holds = True
        self.cluster.interfere = self._interfere

    def _interfere(self, broker: int, key: int, version: int, request: Any) -> Any:
        if key == FETCH and request.max_wait_ms and self.holds:
            wanted = [each for topic in request.topics for each in topic.partitions]
            partitions = self.cluster.topics["orders"][1]
            if all(partitions[each.partition].log_end_offset <= each.fetch_offset for each in wanted):
                return SILENCE
        return None

    def start(self, at: TopicPartition, offset: int, wait_ms: int = 60_000) -> Task[Fetched]:
        call = calls.fetch(at, offset, FetchSettings(1 << 20, wait_ms), None, self.polling)
        task: Task[Fetched] = self.shell.start(call.what, call.steps)
        return task

    def fetch(self, at: TopicPartition, offset: int, wait_ms: int = 60_000) -> list[int]:
        task = self.start(at, offset, wait_ms)
        return [record.offset for record in decode_fetched(self.shell.result(task), offset).records]

    def requests(self) -> list[Any]:
        return [request for _, key, _, request in self.cluster.asked if key == FETCH]


def test_fetches_of_one_moment_share_a_request() -> None:
    reading = Reading()
    for at in PLACES:
        reading.cluster.fill(at, 2)
    reading.fetch(PLACES[0], 0)
    reading.cluster.asked.clear()
    tasks = []
    for at in PLACES:
        call = calls.fetch(at, 3, FetchSettings(), None, reading.polling)
        tasks.append(reading.shell.core.begin(call.what, call.steps))
    reading.shell.wait(0)
    reading.shell.run(lambda: all(task.is_done for task in tasks))
    assert [task.outcome().next_offset for task in tasks] == [6, 6, 6, 6]
    assert len(reading.requests()) == 1


def test_a_fetch_is_answered_while_others_wait_at_the_end() -> None:
    reading = Reading()
    reading.cluster.fill(PLACES[3], 1)
    waiting = [reading.start(at, 0) for at in PLACES[:3]]
    reading.shell.run(lambda: len(reading.requests()) >= 4)
    assert reading.fetch(PLACES[3], 0) == [0, 1, 2]
    assert not any(task.is_done for task in waiting)


def test_readers_at_the_same_end_share_a_place_and_the_records() -> None:
    reading = Reading()
    waiting = [reading.start(PLACES[0], 0) for _ in range(50)]
    reading.shell.run(lambda: any(request.max_wait_ms for request in reading.requests()))
    # Each was alone when it came; now they wait together.
    reading.holds = False
    for number in list(reading.shell.links):
        reading.shell.lose(number)
    reading.cluster.asked.clear()
    reading.cluster.fill(PLACES[0], 1)
    reading.shell.run(lambda: all(task.is_done for task in waiting))
    assert {task.outcome().next_offset for task in waiting} == {3}
    assert len(reading.requests()) <= 3


def test_a_fetch_at_the_end_comes_back_empty_when_its_time_is_over() -> None:
    reading = Reading()
    reading.holds = False
    began_ms = reading.shell.now_ms
    assert reading.fetch(PLACES[0], 0, wait_ms=1_200) == []
    assert 1_200 <= reading.shell.now_ms - began_ms <= 1_300


def test_one_that_comes_when_every_lane_is_taken_is_not_late_by_more_than_a_recheck() -> None:
    reading = Reading()
    for at in PLACES[: polling.LANES]:
        reading.start(at, 0)
        count = len([request for request in reading.requests() if request.max_wait_ms])
        reading.shell.run(
            lambda count=count: len([each for each in reading.requests() if each.max_wait_ms]) > count  # type: ignore[misc]
        )
    late = reading.start(PLACES[3], 0)
    reading.shell.run(lambda: not reading.shell.can_act() and not reading.shell.can_deliver())
    reading.cluster.fill(PLACES[3], 1)
    began_ms = reading.shell.now_ms
    assert reading.shell.result(late).next_offset == 3
    assert reading.shell.now_ms - began_ms <= polling.RECHECK_MS


def test_a_partition_that_did_not_fit_is_asked_for_again() -> None:
    reading = Reading()
    for at in PLACES:
        reading.cluster.fill(at, 1)
    answer = reading.cluster._fetch

    def first_only(broker: int, version: int, request: Any) -> FetchResponse:
        response = answer(broker, version, request)
        for data in response.responses[0].partitions[1:]:
            data.records = b""
        return response

    reading.cluster._fetch = first_only  # type: ignore[method-assign]
    tasks = [reading.start(at, 0) for at in PLACES]
    reading.shell.run(lambda: all(task.is_done for task in tasks))
    assert [task.outcome().next_offset for task in tasks] == [3, 3, 3, 3]


def test_errors_reach_only_the_fetch_they_are_for() -> None:
    reading = Reading()
    reading.cluster.fill(PLACES[0], 1)
    good, far = reading.start(PLACES[0], 0), reading.start(PLACES[1], 99)
    missing = reading.start(TopicPartition("nothing", 0), 0)
    reading.shell.run(lambda: good.is_done and far.is_done and missing.is_done)
    assert good.outcome().next_offset == 3
    with pytest.raises(OffsetOutOfRange):
        far.outcome()
    with pytest.raises(UnknownTopic):
        missing.outcome()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_readers_get_every_record_once_whatever_moves_or_breaks(seed: int) -> None:
    chance = random.Random(seed)
    reading = Reading([1, 2, 3, 1])
    shell, cluster = reading.shell, reading.cluster
    positions = dict.fromkeys(PLACES, 0)
    tasks: dict[TopicPartition, Task[Fetched]] = {}
    seen: dict[TopicPartition, list[int]] = {at: [] for at in PLACES}
    filled = dict.fromkeys(PLACES, 0)
    for step in range(400):
        is_quiet = step > 250
        for at in PLACES:
            if at in tasks and tasks[at].is_done:
                fetched = decode_fetched(tasks.pop(at).outcome(), positions[at])
                seen[at] += [record.offset for record in fetched.records]
                positions[at] = fetched.next_offset
            if at not in tasks:
                tasks[at] = reading.start(at, positions[at], chance.choice([0, 40, 2_000]))
        moves = ["act"] * len(shell.can_act()) + ["deliver"] * len(shell.can_deliver()) + ["wait"]
        if not is_quiet:
            moves += ["fill", "move", "lose"]
        match chance.choice(moves):
            case "act":
                shell.act(chance.choice(shell.can_act()))
            case "deliver":
                shell.deliver(chance.choice(shell.can_deliver()))
            case "wait":
                due_ms = shell.core.due_ms() or shell.now_ms
                shell.wait(max(0, min(due_ms - shell.now_ms, 60)))
            case "fill":
                at = chance.choice(PLACES)
                cluster.fill(at, 1)
                filled[at] += 3
                reading.holds = chance.random() < 0.5
            case "move":
                cluster.move(chance.choice(PLACES), chance.choice([1, 2, 3]))
            case "lose" if shell.links:
                shell.lose(chance.choice(list(shell.links)))
    reading.holds = False
    for at in PLACES:
        while positions[at] < filled[at]:
            task = tasks.pop(at, None) or reading.start(at, positions[at], 0)
            fetched = decode_fetched(shell.result(task), positions[at])
            seen[at] += [record.offset for record in fetched.records]
            positions[at] = fetched.next_offset
        assert seen[at] == list(range(filled[at]))


def test_a_request_that_fails_is_repeated_at_the_new_leader() -> None:
    reading = Reading([1, 2, 3, 1])
    task = reading.start(PLACES[0], 0)
    reading.shell.run(lambda: any(request.max_wait_ms for request in reading.requests()))
    reading.cluster.move(PLACES[0], 2)
    reading.cluster.fill(PLACES[0], 1)
    reading.shell.stop_broker(1)
    assert reading.shell.result(task).next_offset == 3


def test_an_error_of_the_whole_response_is_everybodys() -> None:
    reading = Reading()
    reading.cluster.fill(PLACES[0], 1)
    refused = FetchResponse(error_code=ErrorCode.UNKNOWN_SERVER_ERROR, responses=[])
    answers = [refused]
    reading.cluster.interfere = lambda broker, key, version, request: (
        answers.pop() if key == FETCH and answers else None
    )
    assert reading.fetch(PLACES[0], 0) == [0, 1, 2]
