"""What the controller moves by itself, and when it leaves things alone."""

from __future__ import annotations

from collections import Counter

from penstock.metadata.broker_settings import (
    REBALANCE,
    REBALANCE_DELAY_MS,
    REBALANCE_PARTITIONS_MAX,
    REBUILD_DELAY_MS,
)
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import UnregisterBrokerRequest
from penstock.protocol.messages.placement import ListPartitionReassignmentsRequest
from tests.metadata.ensemble import Ensemble

CHECK_MS = 30_000
DELAY_MS = 10_000


def run(on: Ensemble, ms: int, alive: list[int]) -> None:
    """Let time pass in which followers catch up."""
    for _ in range(0, ms, 1000):
        on.advance(1000, alive)
        on.catch_up()


def held(on: Ensemble) -> Counter[int]:
    return Counter(
        broker
        for topic in on.on.image.topics.values()
        for partition in topic.partitions
        for broker in partition.replicas
    )


def led(on: Ensemble) -> Counter[int]:
    return Counter(
        partition.leader for topic in on.on.image.topics.values() for partition in topic.partitions
    )


# Preferred leaders.


def test_leadership_goes_back_to_the_first_replica_when_it_is_in_sync() -> None:
    on = Ensemble(static={})
    on.create("a", (1, 2, 3))
    on.lost(1)
    on.restart(1)
    on.advance(CHECK_MS + 1000, alive=[1, 2, 3])
    assert on.state("a")[0] == 2, "it is not in sync yet"
    on.propose("a", [2, 3, 1])
    on.advance(CHECK_MS + 1000, alive=[1, 2, 3])
    assert on.state("a")[0] == 1


def test_leadership_stays_where_it_is_when_that_is_switched_off() -> None:
    on = Ensemble(static={"auto.leader.rebalance.enable": "false"})
    on.create("a", (1, 2, 3))
    on.lost(1)
    on.restart(1)
    on.propose("a", [2, 3, 1])
    on.advance(2 * CHECK_MS, alive=[1, 2, 3])
    assert on.state("a")[0] == 2


# New brokers.


def test_broker_that_joins_gets_its_share_of_replicas_and_leaderships() -> None:
    on = Ensemble(brokers=2, static={})
    on.create("a", *[(1, 2), (2, 1)] * 6)
    on.join(3)
    assert on.on.image.newcomers == (3,)
    run(on, DELAY_MS - 1000, [1, 2, 3])
    assert held(on)[3] == 0, "it may be one of several that are being started"
    run(on, 90_000, [1, 2, 3])
    assert held(on) == {1: 8, 2: 8, 3: 8}
    assert led(on) == {1: 4, 2: 4, 3: 4}
    assert not on.on.image.newcomers
    before = on.on.image
    run(on, 90_000, [1, 2, 3])
    assert on.on.image is before, "there is nothing left to do"


def test_another_controller_goes_on_with_the_sharing() -> None:
    on = Ensemble(brokers=2, static={REBALANCE_PARTITIONS_MAX: "2"})
    on.create("a", *[(1, 2), (2, 1)] * 6)
    on.join(3)
    run(on, DELAY_MS + 2000, [1, 2, 3])
    assert 0 < held(on)[3] < 8
    on.fail_over()
    run(on, 90_000, [1, 2, 3])
    assert held(on) == {1: 8, 2: 8, 3: 8} and on.on.image.newcomers == ()


def test_no_more_than_a_bounded_number_is_moved_at_a_time() -> None:
    on = Ensemble(brokers=2, static={REBALANCE_PARTITIONS_MAX: "3"})
    on.create("a", *[(1, 2), (2, 1)] * 6)
    on.join(3)
    on.advance(DELAY_MS + 60_000, alive=[1, 2, 3])
    response = on.handle(ListPartitionReassignmentsRequest(topics=None))
    assert sum(len(topic.partitions) for topic in response.topics) == 3


def test_broker_that_an_administrator_emptied_stays_empty() -> None:
    on = Ensemble(static={})
    on.create("a", (1, 2), (2, 3), (3, 1))
    run(on, 30_000, [1, 2, 3])
    for index in (1, 2):
        assert on.reassign("a", [1, 2], index) == ErrorCode.NONE
    run(on, 90_000, [1, 2, 3])
    assert held(on) == {1: 3, 2: 3}
    on.restart(3)
    on.fail_over()
    run(on, 90_000, [1, 2, 3])
    assert held(on) == {1: 3, 2: 3}


def test_sharing_can_be_switched_off() -> None:
    on = Ensemble(brokers=2, static={REBALANCE: "false"})
    on.create("a", *[(1, 2), (2, 1)] * 6)
    on.join(3)
    run(on, 60_000, [1, 2, 3])
    assert held(on)[3] == 0


def test_partition_that_somebody_moves_is_left_alone() -> None:
    on = Ensemble(brokers=2, static={REBALANCE_DELAY_MS: "0"})
    on.create("a", (1, 2), (1, 2), (1, 2), (1, 2))
    on.join(3)
    on.join(4)
    on.reassign("a", [3, 4], index=0)
    run_without_catching_up = on.advance
    run_without_catching_up(20_000, alive=[1, 2, 3, 4])
    assert on.partition("a", 0).adding_replicas == (3, 4)
    run(on, 60_000, [1, 2, 3, 4])
    assert on.partition("a", 0).replicas == (3, 4) or on.partition("a", 0).replicas == (4, 3)
    assert held(on) == {1: 2, 2: 2, 3: 2, 4: 2}


# Dead brokers.


def test_replicas_of_a_broker_that_stays_away_are_built_elsewhere() -> None:
    on = Ensemble(brokers=4, static={REBUILD_DELAY_MS: "60000"})
    on.create("a", (1, 2, 3), (3, 1, 2), (2, 3, 4))
    on.lost(3)
    run(on, 59_000, [1, 2, 4])
    assert held(on)[3] == 3
    run(on, 60_000, [1, 2, 4])
    assert held(on) == {1: 3, 2: 3, 4: 3}
    assert all(len(partition.isr) == 3 for partition in on.on.image.topics["a"].partitions)


def test_broker_that_comes_back_too_late_is_a_newcomer() -> None:
    on = Ensemble(brokers=4, static={REBUILD_DELAY_MS: "20000"})
    on.create("a", *[(1, 2), (2, 3), (3, 4), (4, 1)] * 3)
    on.lost(3)
    run(on, 60_000, [1, 2, 4])
    assert held(on) == {1: 8, 2: 8, 4: 8}
    assert on.on.image.newcomers == (3,)
    on.restart(3)
    run(on, 90_000, [1, 2, 3, 4])
    assert held(on) == {1: 6, 2: 6, 3: 6, 4: 6}


def test_only_replica_is_never_given_up() -> None:
    on = Ensemble(brokers=3, static={REBUILD_DELAY_MS: "20000"})
    on.create("a", (3,))
    on.lost(3)
    run(on, 120_000, [1, 2])
    assert on.partition("a").replicas == (3,) and on.state("a") == (-1, (), (3,))


def test_rebuilding_can_be_switched_off() -> None:
    on = Ensemble(brokers=3, static={REBUILD_DELAY_MS: "-1"})
    on.create("a", (1, 2))
    on.lost(2)
    run(on, 1_000_000, [1, 3])
    assert on.partition("a").replicas == (1, 2)


def test_replicas_of_an_unregistered_broker_are_built_elsewhere_at_once() -> None:
    on = Ensemble(brokers=3, static={})
    on.create("a", (1, 2))
    on.handle(UnregisterBrokerRequest(broker_id=2))
    run(on, 10_000, [1, 3])
    assert on.partition("a").replicas == (1, 3)


def test_move_to_a_broker_that_died_is_given_up() -> None:
    on = Ensemble(brokers=3, static={REBUILD_DELAY_MS: "30000"})
    on.create("a", (1, 2))
    on.handle(UnregisterBrokerRequest(broker_id=2))
    on.advance(5000, alive=[1, 3])
    assert on.partition("a").adding_replicas == (3,)
    on.join(4)
    on.lost(3)
    run(on, 60_000, [1, 4])
    assert on.partition("a").replicas == (1, 4) and not on.partition("a").is_reassigned
