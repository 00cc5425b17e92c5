"""The shell that all kinds of coordinators share, around a core of a few lines that counts."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker.coordination.coordinator_kind import CoordinatorKind
from penstock.broker.coordination.coordinator_partition import CoordinatorPartition
from penstock.broker.coordination.coordinators import Coordinators
from penstock.broker.partition.produced_batch import Appended
from penstock.decision import Decision
from penstock.environment import Buffer
from penstock.metadata.image import Image
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import HeartbeatResponse
from penstock.protocol.messages.topics import CreatableTopic
from tests.virtual import World

TOPIC = "__share_group_state"
Counted = tuple[str, int]


class Waiter:
    """A request that a core answers later."""

    def __init__(self) -> None:
        self.responses: list[Any] = []

    def answer(self, response: Any) -> None:
        self.responses.append(response)


class Counters:
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.committed_counts: dict[str, int] = {}
        self.is_loaded = False
        self.waiting: list[Waiter] = []
        self.next_deadline_ms: int | None = None

    def count(self, key: str) -> Decision[Counted]:
        self.counts[key] = self.counts.get(key, 0) + 1
        return Decision([(key, self.counts[key])], response=self.counts[key])

    def wait(self, waiter: Waiter, until_ms: int) -> Decision[Counted]:
        self.waiting.append(waiter)
        self.next_deadline_ms = until_ms
        return Decision()

    def apply(self, change: Counted) -> None:
        key, count = change
        self.counts[key] = self.committed_counts[key] = count

    def loaded(self, now_ms: int, wall_ms: int) -> None:
        self.is_loaded = True

    def committed(self, decision: Decision[Counted]) -> None:
        self.committed_counts.update(decision.changes)

    def failed(self, decision: Decision[Counted], now_ms: int, wall_ms: int) -> None:
        for key, _ in decision.changes:
            self.counts[key] -= 1

    def reconcile(self, keys: list[str], changes_max: int, *, now_ms: int, wall_ms: int) -> Decision[Counted]:
        keys.clear()
        return Decision()

    def tick(self, now_ms: int, wall_ms: int, *, may_expire: bool) -> Decision[Counted]:
        self.next_deadline_ms = None
        return self._answer_all(ErrorCode.NONE)

    def all_keys(self) -> list[str]:
        return list(self.counts)

    def resign(self) -> Decision[Counted]:
        return self._answer_all(ErrorCode.NOT_COORDINATOR)

    def _answer_all(self, error: ErrorCode) -> Decision[Counted]:
        waiting, self.waiting = self.waiting, []
        return Decision(replies=[(waiter, HeartbeatResponse(error_code=error)) for waiter in waiting])


def kind() -> CoordinatorKind[Counters]:
    def make_core(image: Callable[[], Image]) -> Counters:
        return Counters()

    def encode(change: Counted) -> tuple[bytes, bytes | None]:
        return change[0].encode(), b"%d" % change[1]

    def decode(key: Buffer, value: Buffer | None) -> Counted | None:
        return None if value is None else (bytes(key).decode(), int(bytes(value)))

    def new_topic() -> CreatableTopic:
        return CreatableTopic(name=TOPIC, num_partitions=4, replication_factor=1)

    return CoordinatorKind(
        topic=TOPIC, new_topic=new_topic, make_core=make_core, encode=encode, decode=decode
    )


def counters(world: World) -> Coordinators[Counters]:
    """Beside the group coordinators, in a broker that has their topic."""
    coordinators = world.broker.coordinators.register(kind())
    errors: list[int] = []
    coordinators.when_topic_exists(errors.append)
    world.run_until(lambda: bool(errors), 10_000)
    assert errors == [ErrorCode.NONE]
    return coordinators


def loaded(world: World, coordinators: Coordinators[Counters], key: str) -> CoordinatorPartition[Counters]:
    world.run_until(lambda: not isinstance(coordinators.of(key), ErrorCode), 10_000)
    partition = coordinators.of(key)
    assert not isinstance(partition, ErrorCode)
    return partition


def count(world: World, partition: CoordinatorPartition[Counters], key: str) -> Any:
    answers: list[Any] = []
    partition.handle(lambda core, now_ms, wall_ms: core.count(key), answers.append, "unavailable")
    world.run_until(lambda: bool(answers), 10_000)
    return answers[0]


def wait(partition: CoordinatorPartition[Counters], waiter: Waiter) -> None:
    """For five seconds."""
    partition.handle(
        lambda core, now_ms, wall_ms: core.wait(waiter, now_ms + 5_000), waiter.answer, "unavailable"
    )


def test_a_key_has_no_coordinator_before_its_topic_exists() -> None:
    world = World()
    world.run_for(1_000)
    coordinators = world.broker.coordinators.register(kind())
    assert coordinators.of("a") is ErrorCode.NOT_COORDINATOR
    assert coordinators.broker_of("a") is None


def test_a_registered_topic_gets_coordinators_that_replay_what_was_counted() -> None:
    world = World()
    coordinators = counters(world)
    assert coordinators.broker_of("a") == world.broker.node_id
    partition = loaded(world, coordinators, "a")
    assert [count(world, partition, "a") for _ in range(3)] == [1, 2, 3]
    assert partition.core.committed_counts == {"a": 3}
    world = world.restarted(clean=False)
    partition = loaded(world, counters(world), "a")
    assert partition.core.is_loaded
    assert partition.core.counts == {"a": 3}
    assert count(world, partition, "a") == 4


def test_each_partition_of_the_topic_has_a_core_of_its_own() -> None:
    world = World()
    coordinators = counters(world)
    one, other = loaded(world, coordinators, "a"), loaded(world, coordinators, "b")
    assert one is not other
    assert count(world, one, "a") == 1
    assert other.core.counts == {}


def test_a_decision_that_cannot_be_written_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    partition = loaded(world, counters(world), "a")
    assert count(world, partition, "a") == 1

    def refuse(self: CoordinatorPartition[Any], *_: Any) -> Appended:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(CoordinatorPartition, "_append", refuse)
        assert count(world, partition, "a") == "unavailable"
    assert count(world, partition, "a") == 2


def test_the_core_is_woken_at_its_deadline() -> None:
    world = World()
    partition = loaded(world, counters(world), "a")
    waiter = Waiter()
    wait(partition, waiter)
    world.run_for(4_000)
    assert waiter.responses == []
    world.run_for(2_000)
    assert [response.error_code for response in waiter.responses] == [ErrorCode.NONE]


def test_requests_that_wait_are_sent_to_the_next_coordinator_when_this_one_resigns() -> None:
    world = World()
    partition = loaded(world, counters(world), "a")
    waiter = Waiter()
    wait(partition, waiter)
    partition.resign()
    world.run_for(6_000)
    assert [response.error_code for response in waiter.responses] == [ErrorCode.NOT_COORDINATOR]


def test_a_coordinator_that_resigned_decides_nothing_more() -> None:
    world = World()
    coordinators = counters(world)
    partition = loaded(world, coordinators, "a")
    assert count(world, partition, "a") == 1
    end_offset = partition.hosted.log.log_end_offset
    partition.resign()
    assert count(world, partition, "a") == "unavailable"
    assert partition.hosted.log.log_end_offset == end_offset
