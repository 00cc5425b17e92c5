"""A broker says with its heartbeats which of its disks are full: others lead and are in sync, as long as there are
others.
"""

from __future__ import annotations

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import BrokerHeartbeatRequest
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest
from penstock.protocol.schema import decode, encode
from tests.metadata.ensemble import Ensemble, directory
from tests.metadata.test_broker_registry import assign


def fill(on: Ensemble, *ids: int) -> None:
    for id in ids:
        on.beat(id, full_log_dirs=[directory(id)])
    on.settle()


def test_a_leader_without_room_is_replaced_at_once_and_leaves_the_isr() -> None:
    on = Ensemble()
    on.create("a", (1, 2, 3))
    fill(on, 1)
    assert on.state("a") == (2, (2, 3), ())


def test_a_follower_without_room_leaves_the_isr_at_once() -> None:
    on = Ensemble()
    on.create("a", (1, 2, 3))
    fill(on, 3)
    assert on.state("a") == (1, (1, 2), ())
    # The same news again changes nothing.
    before = on.on.image
    fill(on, 3)
    assert on.on.image is before


def test_a_replica_without_room_is_not_taken_in_until_there_is_some() -> None:
    on = Ensemble()
    on.create("a", (1, 2, 3))
    fill(on, 3)
    assert on.propose("a", [1, 2, 3]).error_code == ErrorCode.INELIGIBLE_REPLICA
    on.beat(3)
    assert on.propose("a", [1, 2, 3]).error_code == ErrorCode.NONE
    assert on.state("a") == (1, (1, 2, 3), ())


def test_below_the_minimum_whoever_leaves_for_want_of_room_may_still_be_elected() -> None:
    on = Ensemble()
    on.create("a", (1, 2, 3))
    fill(on, 1, 2)
    assert on.state("a") == (3, (3,), (2,))
    on.lost(3)
    # Nobody with room is left who has everything: reads go on.
    assert on.state("a") == (2, (2,), (3,))


def test_where_everybody_is_full_all_stays_as_it_is() -> None:
    on = Ensemble()
    on.create("a", (1, 2, 3))
    on.create("single", (1,))
    fill(on, 1, 2, 3)
    leader, isr, elr = on.state("a")
    assert leader in isr and set(isr) | set(elr) >= {3}
    assert on.state("single") == (1, (1,), ())


def test_whoever_has_room_first_takes_over_from_one_that_has_none() -> None:
    on = Ensemble()
    on.create("a", (1, 2, 3))
    fill(on, 1, 2, 3)
    assert on.state("a") == (3, (3,), (2,))
    on.beat(2)
    on.settle()
    # It was eligible, so it has all that was committed.
    assert on.state("a") == (2, (2,), (3,))


def test_the_only_copy_stays_and_is_elected_again_after_a_restart_on_a_full_disk() -> None:
    on = Ensemble()
    on.create("single", (1,))
    fill(on, 1)
    assert on.state("single") == (1, (1,), ())
    on.lost(1)
    assert on.state("single")[0] == -1
    on.register(1, previous=on.broker(1).epoch)
    fill(on, 1)
    assert on.state("single") == (1, (1,), ())


def test_only_what_lies_on_the_full_disk_of_several_moves_away() -> None:
    on = Ensemble(brokers=3)
    on.register(1, previous=on.broker(1).epoch, directories=[directory(1, 0), directory(1, 1)])
    on.beat(1)
    on.create("a", (1, 2, 3), (1, 2, 3), (1, 2, 3))
    assert assign(on, 1, {directory(1, 0): [0], directory(1, 1): [1]}) == [0, 0]
    on.beat(1, full_log_dirs=[directory(1, 1)])
    assert [on.state("a", index)[0] for index in range(3)] == [1, 2, 1]
    on.beat(1, full_log_dirs=[directory(1, 0), directory(1, 1)])
    assert [on.state("a", index)[0] for index in range(3)] == [2, 2, 2]


def test_a_new_topic_is_led_by_brokers_with_room() -> None:
    on = Ensemble()
    fill(on, 2)
    topic = CreatableTopic(name="a", num_partitions=6, replication_factor=3)
    on.handle(CreateTopicsRequest(topics=[topic]), 7)
    for index in range(6):
        leader, isr, _ = on.state("a", index)
        assert leader != 2 and sorted(isr) == [1, 3]


def test_a_new_controller_forgets_and_hears_of_it_with_the_next_heartbeat() -> None:
    on = Ensemble()
    on.create("a", (1, 2, 3))
    fill(on, 3)
    on.fail_over()
    assert on.propose("a", [1, 2, 3]).error_code == ErrorCode.NONE
    fill(on, 3)
    assert on.state("a") == (1, (1, 2), ())


def test_a_preferred_leader_without_room_is_not_elected() -> None:
    on = Ensemble(static={"auto.leader.rebalance.enable": "true", "penstock.rebalance.enable": "false"})
    on.create("a", (1, 2, 3))
    fill(on, 1)
    for _ in range(400):
        on.now_ms += 1000
        fill(on, 1)
        on.beat(2)
        on.beat(3)
    assert on.state("a") == (2, (2, 3), ())


def test_a_stopping_broker_does_not_hand_over_to_one_without_room_while_there_is_another() -> None:
    on = Ensemble()
    on.create("a", (1, 2, 3))
    fill(on, 2)
    on.beat(1, want_shut_down=True)
    on.settle()
    assert on.state("a")[0] == 3


def test_a_heartbeat_says_it_in_a_field_that_others_pass_over() -> None:
    said = BrokerHeartbeatRequest(broker_id=1, full_log_dirs=[directory(1)])
    assert decode(BrokerHeartbeatRequest, 1, encode(said, 1)).full_log_dirs == [directory(1)]
    unsaid = BrokerHeartbeatRequest(broker_id=1)
    assert not decode(BrokerHeartbeatRequest, 1, encode(unsaid, 1)).full_log_dirs
    assert len(encode(unsaid, 1)) < len(encode(said, 1))
