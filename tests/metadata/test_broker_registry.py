"""Brokers come, send heartbeats, fall silent, stop and come back; what becomes of their partitions."""

from __future__ import annotations

from itertools import permutations

import pytest

from penstock.metadata.broker_registry import OVERLAP_MS
from penstock.metadata.broker_settings import REBUILD_DELAY_MS
from penstock.metadata.image import Image
from penstock.metadata.values import LOST_DIRECTORY, RECOVERED, RECOVERING, UNASSIGNED_DIRECTORY
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.listeners import CLIENTS
from penstock.protocol.messages import TIME_UNKNOWN
from penstock.protocol.messages.brokers import (
    AllocateProducerIdsRequest,
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsRequestDirectory,
    AssignReplicasToDirsRequestPartition,
    AssignReplicasToDirsRequestTopic,
    UnregisterBrokerRequest,
)
from penstock.protocol.messages.configs import (
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest
from tests.metadata.ensemble import CLUSTER, SESSION_MS, STILL, WALL_MS, Ensemble, directory


def set_config(on: Ensemble, type: int, resource: str, name: str, value: str | None) -> int:
    config = IncrementalAlterableConfig(name=name, value=value, config_operation=0 if value else 1)
    asked = IncrementalAlterConfigsResource(resource_type=type, resource_name=resource, configs=[config])
    response = on.handle(IncrementalAlterConfigsRequest(resources=[asked]), 1)
    error: int = response.responses[0].error_code
    return error


# Registration.


def test_broker_registers_fenced_and_becomes_active_when_it_has_seen_its_registration() -> None:
    on = Ensemble(brokers=0)
    epoch = on.register(1).broker_epoch
    assert on.broker(1).fenced and on.broker(1).epoch == epoch == on.on.image.offset
    behind = on.beat(1, offset=epoch - 1)
    assert (behind.is_fenced, behind.is_caught_up) == (True, False)
    there = on.beat(1, offset=epoch)
    assert (there.is_fenced, there.is_caught_up, there.should_shut_down) == (False, True, False)
    assert on.broker(1).is_active


def test_broker_says_where_clients_and_where_other_nodes_reach_it() -> None:
    on = Ensemble(brokers=1)
    broker = on.broker(1)
    endpoint = broker.endpoint_for(CLIENTS)
    assert endpoint is not None and endpoint[1:3] == ("host-1", 9092)
    assert broker.internal is not None and broker.internal.port == 9192


def test_registration_repeated_by_the_same_incarnation_gets_the_same_epoch() -> None:
    on = Ensemble(brokers=0)
    first = on.register(1, incarnation=b"i" * 16)
    before = on.on.image
    again = on.register(1, incarnation=b"i" * 16)
    assert again == first and on.on.image is before


def test_broker_of_another_cluster_is_refused() -> None:
    on = Ensemble(brokers=0)
    assert on.register(1, cluster="another").error_code == ErrorCode.INCONSISTENT_CLUSTER_ID
    assert on.on.image.brokers == {} and on.on.image.cluster_id == CLUSTER


def test_cluster_id_is_no_setting_that_anybody_sees() -> None:
    on = Ensemble(brokers=0)
    assert on.on.image.configs == {}
    assert on.on.found_cluster("other").changes == []


def test_second_broker_of_the_same_id_is_refused_while_the_first_is_alive() -> None:
    on = Ensemble(brokers=1)
    other = on.register(1, directories=[b"x" * 16])
    assert other.error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
    on.advance(SESSION_MS)
    assert on.register(1, directories=[b"x" * 16]).error_code == ErrorCode.NONE


def test_broker_that_was_killed_may_come_back_before_its_session_is_over() -> None:
    on = Ensemble(brokers=2)
    epoch = on.broker(1).epoch
    assert on.register(1, previous=epoch, directories=[b"x" * 16]).error_code == ErrorCode.NONE
    assert on.register(2, previous=-1, directories=[directory(2)]).error_code == ErrorCode.NONE


def test_directory_of_another_broker_is_refused() -> None:
    on = Ensemble(brokers=2)
    assert on.register(3, directories=[directory(2)]).error_code == ErrorCode.INVALID_REGISTRATION


def test_controller_that_took_over_lets_a_new_incarnation_in() -> None:
    on = Ensemble(brokers=1)
    on.fail_over()
    assert on.register(1, directories=[b"x" * 16]).error_code == ErrorCode.NONE


def test_heartbeats_are_for_registered_brokers_of_this_epoch() -> None:
    on = Ensemble(brokers=1)
    assert on.beat(7).error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
    assert on.beat(1, epoch=on.broker(1).epoch - 1).error_code == ErrorCode.STALE_BROKER_EPOCH


# Sessions.


def test_clocks_are_compared_also_after_the_controllers_own_was_set() -> None:
    """The others go on meanwhile: by its monotonic clock the controller knows how far."""
    on = Ensemble(2)
    on.beat(2, time_ms=WALL_MS + 5, steady_ms=77)
    on.now_ms += 1_000  # and its wall clock stands still
    on.beat(1, time_ms=WALL_MS)
    told = {each.node_id: (each.ahead_ms, each.steady_ms) for each in on.beat(1, time_ms=WALL_MS).clocks}
    assert told[2] == (1_005, 77)
    assert told[1] == (0, TIME_UNKNOWN), "one of an older version does not say for how long"


def test_silent_broker_is_fenced_when_its_session_is_over_and_not_before() -> None:
    on = Ensemble(brokers=2)
    on.advance(SESSION_MS - 1000, alive=[2])
    assert on.is_active(1)
    on.advance(1000, alive=[2])
    assert not on.is_active(1) and on.is_active(2)


def test_new_controller_waits_for_as_long_as_the_leases_of_the_one_before_may_last() -> None:
    on = Ensemble(brokers=2)
    on.advance(SESSION_MS - 1000)
    on.fail_over()
    on.advance(SESSION_MS * 2 // 3 + OVERLAP_MS - 1000)
    assert on.is_active(1) and on.is_active(2)
    on.advance(1000)
    assert not on.is_active(1) and not on.is_active(2)


def test_broker_whose_connection_was_refused_is_fenced_at_once() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    on.lost(1, epoch=on.broker(1).epoch)
    assert on.state("a") == (2, (2, 3), ())


def test_news_of_an_older_process_fences_nobody() -> None:
    on = Ensemble(brokers=1)
    epoch = on.broker(1).epoch
    on.restart(1)
    on.lost(1, epoch=epoch)
    assert on.is_active(1)


def test_fenced_broker_that_is_heard_again_becomes_active() -> None:
    on = Ensemble(brokers=2)
    on.advance(SESSION_MS, alive=[2])
    assert not on.beat(1).is_fenced
    assert on.is_active(1)


def test_broker_may_ask_to_be_fenced() -> None:
    on = Ensemble(brokers=2)
    on.create("a", (1, 2))
    assert on.beat(1, want_fence=True).is_fenced
    assert on.state("a") == (2, (2,), ())
    assert on.beat(1, want_fence=True).is_fenced
    assert not on.beat(1).is_fenced


# Fencing and elections.


def test_leadership_goes_to_the_next_in_sync_replica_and_the_epochs_grow() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    before = on.partition("a")
    on.lost(1)
    after = on.partition("a")
    assert (after.leader, after.isr) == (2, (2, 3))
    assert after.leader_epoch == before.leader_epoch + 1
    assert after.partition_epoch == before.partition_epoch + 1


def test_follower_that_is_fenced_leaves_the_isr_and_the_leader_stays_in_its_epoch() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    on.lost(3)
    partition = on.partition("a")
    assert (partition.leader, partition.isr, partition.leader_epoch) == (1, (1, 2), 0)


def test_replica_out_of_sync_is_not_elected() -> None:
    on = Ensemble(brokers=3, static={**STILL, "min.insync.replicas": "1"})
    on.create("a", (1, 2, 3))
    on.propose("a", [1, 3])
    on.lost(1)
    assert on.state("a")[0] == 3
    on.lost(3)
    assert on.state("a") == (-1, (), (3,))
    on.restart(1)
    assert on.state("a") == (-1, (), (3,))
    on.restart(3)
    assert on.state("a") == (3, (3,), ())


def test_trap_7_the_last_replica_standing_and_those_before_it_may_lead_when_they_are_back() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    on.lost(3)
    assert on.state("a") == (1, (1, 2), ())
    # Below min.insync.replicas nothing is committed, so the one that leaves here lacks nothing.
    on.lost(2)
    assert on.state("a") == (1, (1,), (2,))
    on.lost(1)
    assert on.state("a") == (-1, (), (1, 2))
    assert on.partition("a").last_known_elr == (1,)
    # The third may lack what the first two committed.
    on.restart(3)
    assert on.state("a")[0] == -1
    on.restart(2)
    assert on.state("a") == (2, (2,), (1,))
    on.propose("a", [2, 3])
    assert on.state("a") == (2, (2, 3), ())


def test_trap_7_who_lost_its_page_cache_leaves_isr_and_eligible_leaders_at_registration() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    on.lost(3)
    on.lost(2)
    on.lost(1)
    assert on.state("a") == (-1, (), (1, 2))
    on.register(2, previous=-1)
    assert on.state("a") == (-1, (), (1,))
    on.beat(2)
    assert on.state("a") == (-1, (), (1,))
    on.restart(1)
    assert on.state("a") == (1, (1,), ())


def test_trap_7_who_lost_its_page_cache_keeps_what_it_says_is_flushed_and_nothing_else() -> None:
    on = Ensemble()
    on.create("t", (1, 2, 3), (1, 2, 3))
    for id in (3, 2, 1):
        on.lost(id)
    on.register(2, previous=-1, flushed=[("t", 0)])
    on.beat(2)
    on.settle()
    assert on.state("t", 0) == (2, (2,), (1,))
    assert on.state("t", 1) == (-1, (), (1,))


@pytest.mark.parametrize("where", ["controller", "topic"])
def test_trap_7_settings_do_not_say_what_a_broker_that_lost_its_page_cache_has_flushed(where: str) -> None:
    """The broker may run with others, or the topic was switched after the records were acknowledged."""
    static = {"penstock.durability": "flushed"} if where == "controller" else {}
    on = Ensemble(static={**STILL, **static})
    on.create("t", (1, 2))
    if where == "topic":
        setting = IncrementalAlterableConfig(name="flush.messages", config_operation=0, value="1")
        asked = IncrementalAlterConfigsResource(resource_type=2, resource_name="t", configs=[setting])
        on.handle(IncrementalAlterConfigsRequest(resources=[asked]), 1)
    on.lost(2)
    assert on.state("t") == (1, (1,), (2,))
    on.join(2, previous=-1)
    assert on.state("t") == (1, (1,), ())
    on.lost(1)
    on.settle()
    assert on.partition("t").leader == -1, "nobody who lacks records is elected"


def test_trap_7_what_was_flushed_in_a_directory_that_is_gone_is_lost() -> None:
    on = Ensemble()
    on.create("t", (1, 2, 3))
    for id in (3, 2, 1):
        on.lost(id)
    on.register(2, previous=-1, flushed=[("t", 0)], directories=[directory(2, 1)])
    on.beat(2)
    on.settle()
    assert on.state("t") == (-1, (), (1,))


@pytest.mark.parametrize("is_disk_gone", [False, True])
def test_trap_7_a_flushed_replica_that_has_no_directory_yet_has_lost_nothing(is_disk_gone: bool) -> None:
    """Where it lies is told before its first record. If a disk is gone, it is not taken at its word."""
    on = Ensemble()
    both = [directory(2, 0), directory(2, 1)]
    on.register(2, previous=on.broker(2).epoch, directories=both)
    on.beat(2)
    on.create("t", (1, 2, 3))
    assert on.partition("t").directory(BrokerId(2)) == UNASSIGNED_DIRECTORY
    for id in (3, 2, 1):
        on.lost(id)
    found = [both[0], directory(2, 2)] if is_disk_gone else both
    on.register(2, previous=-1, flushed=[("t", 0)], directories=found)
    on.beat(2)
    on.settle()
    assert on.state("t") == ((-1, (), (1,)) if is_disk_gone else (2, (2,), (1,)))


def test_trap_7_who_dies_before_it_wrote_its_new_epoch_down_has_lost_nothing() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    on.lost(3)
    on.lost(2)
    assert on.state("a") == (1, (1,), (2,))
    written_down = on.broker(2).epoch
    # Twice it dies before the answer to its registration has come.
    for _ in range(2):
        on.register(2, previous=written_down)
        assert on.state("a") == (1, (1,), (2,))
    assert on.broker(2).epoch > written_down
    on.lost(1)
    on.register(1, previous=-1)
    on.join(2, previous=written_down)
    assert on.state("a") == (2, (2,), ())


def test_trap_7_who_was_heard_of_since_and_knows_only_an_older_epoch_may_have_lost_something() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    on.lost(3)
    on.lost(2)
    older = on.broker(2).epoch
    on.register(2, previous=older)
    on.beat(2, want_fence=True)
    on.register(2, previous=older)
    assert on.state("a") == (1, (1,), ())


def test_trap_7_last_leader_comes_back_when_everybody_lost_the_page_cache() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    for id in (3, 2, 1):
        on.lost(id)
    for id in (3, 2, 1):
        on.register(id, previous=-1)
        assert on.state("a")[0] == -1
    assert on.state("a") == (-1, (), ()) and on.partition("a").last_known_elr == (1,)
    on.beat(2)
    on.beat(3)
    assert on.state("a")[0] == -1
    on.beat(1)
    partition = on.partition("a")
    assert (partition.leader, partition.isr, partition.last_known_elr) == (1, (1,), ())
    assert partition.leader_recovery_state == 1
    on.propose("a", [1, 2])
    assert on.partition("a").leader_recovery_state == 0


def test_live_broker_that_restarts_without_its_page_cache_hands_over_to_those_who_have_everything() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    on.register(1, previous=-1)
    assert on.state("a") == (2, (2, 3), ())
    on.beat(1)
    assert on.state("a") == (2, (2, 3), ())


def test_only_replica_keeps_its_leadership_over_a_restart() -> None:
    on = Ensemble(brokers=1)
    on.create("a", (1,))
    on.restart(1)
    assert on.state("a") == (1, (1,), ()) and on.partition("a").leader_epoch == 0


def test_only_replica_that_lost_its_page_cache_leads_in_a_new_epoch() -> None:
    on = Ensemble(brokers=1)
    on.create("a", (1,))
    on.join(1, previous=-1)
    assert on.state("a") == (1, (1,), ()) and on.partition("a").leader_epoch == 1


def test_only_replica_whose_session_is_over_leads_again_when_it_is_back() -> None:
    on = Ensemble(brokers=2)
    on.create("a", (1,))
    on.advance(SESSION_MS, alive=[2])
    assert on.state("a") == (-1, (), (1,))
    on.beat(1)
    assert on.state("a") == (1, (1,), ()) and on.partition("a").leader_epoch == 2


def test_only_replica_that_lost_its_page_cache_while_fenced_leads_again() -> None:
    on = Ensemble(brokers=2)
    on.create("a", (1,))
    on.lost(1)
    on.join(1, previous=-1)
    assert on.state("a") == (1, (1,), ()) and on.partition("a").leader_epoch == 2


def test_trap_18_a_clean_marker_of_an_older_life_is_no_proof() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    old = on.broker(1).epoch
    on.restart(1)
    on.propose("a", [2, 3, 1])
    on.lost(2)
    on.lost(3)
    assert on.state("a") == (1, (1,), (3,))
    # Restored from a copy of its disk, say: what it knows is a registration before the last one.
    on.register(1, previous=old)
    assert on.state("a") == (-1, (), (3,))


def test_trap_12_an_unclean_election_happens_only_where_it_is_allowed() -> None:
    on = Ensemble(brokers=3)
    for name in ("safe", "available"):
        on.create(name, (1, 2))
        on.propose(name, [1])
    assert set_config(on, 2, "available", "unclean.leader.election.enable", "true") == 0
    set_config(on, 2, "available", "min.insync.replicas", "1")
    set_config(on, 2, "safe", "min.insync.replicas", "1")
    on.lost(1)
    assert on.state("safe") == (-1, (), (1,))
    partition = on.partition("available")
    assert (partition.leader, partition.isr, partition.leader_recovery_state) == (2, (2,), 1)
    assert partition.eligible_leader_replicas == ()


def test_trap_12_unclean_election_that_is_allowed_later_happens_then() -> None:
    on = Ensemble(brokers=3, static={**STILL, "min.insync.replicas": "1"})
    on.create("a", (1, 2))
    on.propose("a", [1])
    on.lost(1)
    assert on.state("a")[0] == -1
    set_config(on, 2, "a", "unclean.leader.election.enable", "true")
    on.settle()
    assert on.state("a") == (2, (2,), ())


def test_lower_min_isr_takes_the_eligible_leaders_away_in_the_same_batch() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2))
    on.propose("a", [1])
    assert on.state("a") == (1, (1,), (2,))
    set_config(on, 2, "a", "min.insync.replicas", "1")
    assert on.state("a") == (1, (1,), ())


def test_lower_min_isr_of_all_brokers_does_the_same() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2))
    on.propose("a", [1])
    set_config(on, 4, "", "min.insync.replicas", "1")
    assert on.state("a") == (1, (1,), ())


def test_min_isr_cannot_differ_between_brokers() -> None:
    on = Ensemble(brokers=3)
    assert set_config(on, 4, "1", "min.insync.replicas", "1") == ErrorCode.INVALID_CONFIG


def test_two_of_three_in_sync_are_asked_for_in_a_cluster_and_one_on_a_single_node() -> None:
    on = Ensemble(brokers=1)
    assert on.on.image.broker_config(None) == {}
    on.join(2)
    assert on.on.image.broker_config(None) == {}
    on.join(3)
    assert on.on.image.broker_config(None) == {"min.insync.replicas": "2"}
    set_config(on, 4, "", "min.insync.replicas", "1")
    on.join(4)
    assert on.on.image.broker_config(None) == {"min.insync.replicas": "1"}


def test_min_isr_that_was_given_becomes_that_of_the_cluster() -> None:
    on = Ensemble(brokers=2, static={"min.insync.replicas": "3"})
    assert on.on.image.broker_config(None) == {"min.insync.replicas": "3"}


@pytest.mark.parametrize(("brokers", "factor"), [(1, 1), (2, 2), (3, 3), (5, 3)])
def test_replication_follows_the_number_of_brokers_when_nobody_says(brokers: int, factor: int) -> None:
    on = Ensemble(brokers=brokers)
    asked = CreatableTopic(name="a", num_partitions=-1, replication_factor=-1)
    response = on.handle(CreateTopicsRequest(topics=[asked]), 7)
    assert response.topics[0].replication_factor == factor
    internal = CreatableTopic(name="__consumer_offsets", num_partitions=50, replication_factor=-1)
    response = on.handle(CreateTopicsRequest(topics=[internal]), 7, from_broker=True)
    assert (response.topics[0].error_code, response.topics[0].replication_factor) == (0, factor)


def test_new_topic_has_the_active_brokers_in_sync_and_the_fenced_ones_as_replicas() -> None:
    on = Ensemble(brokers=3)
    on.lost(2)
    asked = CreatableTopic(name="a", num_partitions=6, replication_factor=3)
    assert on.handle(CreateTopicsRequest(topics=[asked]), 7).topics[0].error_code == 0
    for partition in on.on.image.topics["a"].partitions:
        assert set(partition.replicas) == {1, 2, 3} and set(partition.isr) == {1, 3}


def test_controllers_that_follow_each_other_finish_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.metadata import broker_registry

    monkeypatch.setattr(broker_registry, "PORTION", 3)
    on = Ensemble(brokers=3)
    on.create("a", *[(1, 2, 3)] * 10)
    on.lost(1)
    assert sum(partition.leader == 1 for partition in on.on.image.topics["a"].partitions) == 7
    on.fail_over()
    assert all(partition.leader == 2 for partition in on.on.image.topics["a"].partitions)
    assert all(partition.isr == (2, 3) for partition in on.on.image.topics["a"].partitions)


def test_large_decisions_come_in_portions_and_a_broker_waits_for_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from penstock.metadata import broker_registry

    monkeypatch.setattr(broker_registry, "PORTION", 3)
    on = Ensemble(brokers=2)
    on.create("a", *[(1, 2)] * 10)
    decision = on.decided(on.on.broker_lost(1, -1, on.now_ms))
    assert len(decision.changes) == 1 + 3
    assert on.on.next_deadline_ms(on.now_ms) == on.now_ms
    assert on.beat(1).is_fenced, "it is still in some ISRs"
    on.settle()
    assert all(partition.isr == (2,) for partition in on.on.image.topics["a"].partitions)
    assert not on.beat(1).is_fenced


def test_leaderships_move_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.metadata import broker_registry

    monkeypatch.setattr(broker_registry, "PORTION", 3)
    on = Ensemble(brokers=2)
    on.create("a", *[(2, 1), (1, 2)] * 3)
    on.lost(1)
    assert [partition.leader for partition in on.on.image.topics["a"].partitions] == [2] * 6


def test_registration_after_a_loss_waits_until_nothing_rests_on_the_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from penstock.metadata import broker_registry

    monkeypatch.setattr(broker_registry, "PORTION", 4)
    on = Ensemble(brokers=2)
    on.create("a", *[(1, 2)] * 10)
    epoch = on.broker(1).epoch
    errors = [on.register(1, previous=-1).error_code for _ in range(3)]
    assert errors == [ErrorCode.REQUEST_TIMED_OUT, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NONE]
    assert on.broker(1).epoch > epoch
    assert all(1 not in partition.isr for partition in on.on.image.topics["a"].partitions)


# Stopping.


def test_controlled_shutdown_hands_leaderships_over_before_the_broker_stops() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3), (2, 1, 3))
    on.create("single", (1,))
    first = on.beat(1, want_shut_down=True)
    assert (first.should_shut_down, first.is_fenced) == (False, False)
    assert on.broker(1).in_controlled_shutdown
    assert [on.state("a", index) for index in range(2)] == [(2, (2, 3), ())] * 2
    assert on.state("single") == (1, (1,), ())
    second = on.beat(1, want_shut_down=True)
    assert (second.should_shut_down, second.is_fenced) == (True, True)
    on.restart(1)
    assert on.state("single") == (1, (1,), ())


def test_broker_with_much_to_hand_over_need_not_ask_for_each_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.metadata import broker_registry

    monkeypatch.setattr(broker_registry, "PORTION", 3)
    on = Ensemble(brokers=3)
    on.create("a", *[(1, 2, 3)] * 10)
    assert not on.beat(1, want_shut_down=True).should_shut_down
    assert sum(partition.leader == 1 for partition in on.on.image.topics["a"].partitions) == 7
    on.settle()
    assert all(partition.isr == (2, 3) for partition in on.on.image.topics["a"].partitions)
    assert not on.broker(1).fenced, "it says itself when it stops"
    assert on.beat(1, want_shut_down=True).should_shut_down


def test_broker_that_stops_hands_its_leaderships_over_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.metadata import broker_registry

    monkeypatch.setattr(broker_registry, "PORTION", 3)
    on = Ensemble(brokers=3)
    on.create("a", *[(2, 1, 3), (1, 2, 3)] * 3)
    on.beat(1, want_shut_down=True)
    assert [partition.leader for partition in on.on.image.topics["a"].partitions] == [2] * 6
    assert [1 in partition.isr for partition in on.on.image.topics["a"].partitions] == [True, False] * 3


def test_the_next_process_of_a_broker_does_not_go_on_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.metadata import broker_registry

    monkeypatch.setattr(broker_registry, "PORTION", 3)
    on = Ensemble(brokers=3)
    on.create("a", *[(1, 2, 3)] * 10)
    on.beat(1, want_shut_down=True)
    on.restart(1)
    on.settle()
    assert on.broker(1).is_active


def test_broker_that_leads_nothing_may_stop_at_once() -> None:
    on = Ensemble(brokers=1)
    on.create("a", (1,))
    answer = on.beat(1, want_shut_down=True)
    assert answer.should_shut_down and answer.is_fenced
    on.restart(1)
    assert on.state("a") == (1, (1,), ()) and on.partition("a").leader_epoch == 0


def test_last_in_sync_replica_leads_to_the_end() -> None:
    on = Ensemble(brokers=2)
    on.create("a", (1, 2))
    on.propose("a", [1])
    assert on.beat(1, want_shut_down=True).should_shut_down
    assert on.state("a") == (-1, (), (1,))
    on.restart(1)
    assert on.state("a") == (1, (1,), ())


def test_controlled_shutdown_is_no_reason_for_an_unclean_election() -> None:
    on = Ensemble(brokers=2)
    on.create("a", (1, 2))
    on.propose("a", [1])
    set_config(on, 2, "a", "unclean.leader.election.enable", "true")
    on.beat(1, want_shut_down=True)
    # When it is gone, that is what was allowed.
    assert on.partition("a").leader == 2 and on.partition("a").leader_recovery_state == 1
    assert on.broker(1).fenced


def test_broker_that_is_stopping_is_given_no_new_leaderships() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    on.create("b", (2, 3))
    on.beat(2, want_shut_down=True)
    on.lost(1)
    assert on.state("a") == (3, (3,), (1,))


def test_broker_is_unregistered_with_everything_that_rested_on_it() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    on.create("single", (1,))
    assert on.handle(UnregisterBrokerRequest(broker_id=9)).error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
    assert on.handle(UnregisterBrokerRequest(broker_id=1)).error_code == ErrorCode.NONE
    assert BrokerId(1) not in on.on.image.brokers
    assert on.state("a") == (2, (2, 3), ())
    assert on.state("single") == (-1, (), ())
    assert on.beat(1).error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
    on.join(1)
    assert on.state("single")[0] == 1


def test_broker_with_more_than_a_portion_is_unregistered_by_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Portions are for what the controller does by itself. An operator would have to ask again for each."""
    from penstock.metadata import broker_registry

    monkeypatch.setattr(broker_registry, "PORTION", 3)
    on = Ensemble(brokers=2)
    on.create("a", *[(1, 2)] * 10)
    assert on.handle(UnregisterBrokerRequest(broker_id=1)).error_code == ErrorCode.NONE
    assert 1 not in on.on.image.brokers
    assert all(partition.isr == (2,) for partition in on.on.image.topics["a"].partitions)


# Directories.


def test_failed_directory_takes_its_replicas_out_of_sync_and_no_others() -> None:
    on = Ensemble(brokers=3)
    on.register(4, directories=[directory(4, 0), directory(4, 1)])
    on.beat(4)
    on.create("a", (4, 1, 2), (4, 1, 2))
    on.create("single", (4,))
    assert assign(on, 4, {directory(4, 0): [0], directory(4, 1): [1]}) == [0, 0]
    assert assign(on, 4, {directory(4, 1): [0]}, "single") == [0]
    on.beat(4, offline_log_dirs=[directory(4, 1)])
    assert on.broker(4).directories == (directory(4, 0),)
    assert on.state("a", 0)[0] == 4
    assert on.state("a", 1) == (1, (1, 2), ())
    assert on.state("single") == (-1, (), (4,))
    # The same news again changes nothing.
    before = on.on.image
    on.beat(4, offline_log_dirs=[directory(4, 1)])
    assert on.on.image is before
    # Repaired, it has what it had.
    on.register(4, previous=on.broker(4).epoch, directories=[directory(4, 0), directory(4, 1)])
    on.beat(4)
    assert on.state("single") == (4, (4,), ())


def test_replica_in_a_directory_that_vanished_cannot_lead_nor_be_in_sync() -> None:
    on = Ensemble(brokers=3)
    both = [directory(1, 0), directory(1, 1)]
    on.register(1, previous=on.broker(1).epoch, directories=both)
    on.beat(1)
    on.create("a", (1, 2, 3))
    on.create("single", (1,))
    for name in ("a", "single"):
        assert assign(on, 1, {both[1]: [0]}, name) == [0]
    on.register(1, previous=on.broker(1).epoch, directories=both[:1])
    on.beat(1)
    assert on.state("a") == (2, (2, 3), ())
    assert on.state("single") == (-1, (), (1,))
    assert on.propose("a", [2, 3, 1]).error_code == ErrorCode.INELIGIBLE_REPLICA
    # The broker says that it begins anew in the one that is left, where it has nothing.
    for name in ("a", "single"):
        assert assign(on, 1, {both[0]: [0]}, name) == [0]
    assert on.propose("a", [2, 3, 1]).error_code == ErrorCode.NONE
    assert on.state("single") == (-1, (), ())
    on.fail_over()
    assert on.state("single") == (-1, (), ()) and on.partition("single").last_known_elr == ()
    assert on.elect("single", 1) == ErrorCode.NONE


def test_broker_with_a_new_disk_begins_anew_there_and_nothing_rests_on_it() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    on.create("single", (1,))
    on.lost(1)
    on.register(1, directories=[b"new disk 1234567"])
    on.beat(1)
    assert on.partition("a").directories[0] == b"new disk 1234567"
    assert on.state("a") == (2, (2, 3), ())
    assert on.propose("a", [2, 3, 1]).error_code == ErrorCode.NONE
    # An empty log must not pass for the records that were there: somebody has to say that they are given up.
    assert on.state("single") == (-1, (), ())
    assert on.elect("single", 1) == ErrorCode.NONE


def assign(on: Ensemble, id: int, directories: dict[bytes, list[int]], topic: str = "a") -> list[int]:
    response = on.handle(
        AssignReplicasToDirsRequest(
            broker_id=id,
            broker_epoch=on.broker(id).epoch,
            directories=[
                AssignReplicasToDirsRequestDirectory(
                    id=name,
                    topics=[
                        AssignReplicasToDirsRequestTopic(
                            topic_id=on.on.image.topics[topic].id,
                            partitions=[
                                AssignReplicasToDirsRequestPartition(partition_index=i) for i in parts
                            ],
                        )
                    ],
                )
                for name, parts in directories.items()
            ],
        )
    )
    assert response.error_code == 0
    return [
        partition.error_code
        for found in response.directories
        for known in found.topics
        for partition in known.partitions
    ]


def test_directories_are_assigned_by_the_broker_that_has_the_replica() -> None:
    on = Ensemble(brokers=2)
    on.create("a", (1,), (2,))
    assert assign(on, 1, {directory(1): [0, 1, 5]}) == [
        ErrorCode.NONE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    stale = AssignReplicasToDirsRequest(broker_id=1, broker_epoch=0)
    assert on.handle(stale).error_code == ErrorCode.STALE_BROKER_EPOCH


def test_producer_ids_are_allocated_to_brokers_that_ask() -> None:
    on = Ensemble(brokers=2)
    first = on.handle(AllocateProducerIdsRequest(broker_id=1, broker_epoch=on.broker(1).epoch))
    second = on.handle(AllocateProducerIdsRequest(broker_id=2, broker_epoch=on.broker(2).epoch))
    assert (first.producer_id_start, first.producer_id_len) == (0, 1000)
    assert second.producer_id_start == 1000
    stale = on.handle(AllocateProducerIdsRequest(broker_id=2, broker_epoch=0))
    assert stale.error_code == ErrorCode.STALE_BROKER_EPOCH


def test_nothing_is_ever_deleted_because_a_broker_is_gone() -> None:
    """Trap 23: the one change that takes data away names a topic."""
    from penstock.protocol.messages.metadata_records import RemoveTopicRecord

    on = Ensemble(brokers=3, static={REBUILD_DELAY_MS: "1000"})
    on.create("a", (1, 2))
    on.create("b", (3,))
    for id in (1, 2, 3):
        on.lost(id)
    on.advance(60_000)
    on.handle(UnregisterBrokerRequest(broker_id=3))
    on.advance(60_000)
    assert not any(isinstance(change, RemoveTopicRecord) for change in on.log)
    assert (on.partition("a").replicas, on.partition("b").replicas) == ((1, 2), (3,))


@pytest.mark.parametrize("damaged", list(permutations((1, 2, 3))))
@pytest.mark.parametrize("mended", list(permutations((1, 2, 3))))
def test_trap_12_when_every_replica_is_damaged_the_last_to_say_so_leads_again_and_recovers(
    damaged: tuple[int, ...], mended: tuple[int, ...]
) -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    for id in damaged:
        assert assign(on, id, {LOST_DIRECTORY: [0]}) == [0]
    assert on.state("a") == (-1, (), ())
    last = damaged[-1]
    for id in mended:
        assign(on, id, {directory(id): [0]})
        on.settle()
        is_back = last in mended[: mended.index(id) + 1]
        assert on.state("a") == ((last, (last,), ()) if is_back else (-1, (), ()))
        # What the others had behind its damage is given up, and that is written down.
        assert on.partition("a").leader_recovery_state == (RECOVERING if is_back else RECOVERED)


def test_a_damaged_replica_is_in_sync_again_only_when_its_leader_says_so() -> None:
    on = Ensemble(brokers=3)
    on.create("a", (1, 2, 3))
    assign(on, 1, {LOST_DIRECTORY: [0]})
    assert on.state("a") == (2, (2, 3), ())
    assign(on, 3, {LOST_DIRECTORY: [0]})
    # It left an ISR that is too small now, but it does not hold what is committed.
    assert on.state("a") == (2, (2,), ())
    assert on.propose("a", [2, 3]).error_code == ErrorCode.INELIGIBLE_REPLICA
    assign(on, 3, {directory(3): [0]})
    assert on.state("a") == (2, (2,), ())
    assert on.propose("a", [2, 3]).error_code == ErrorCode.NONE
    assert on.partition("a").leader_recovery_state == RECOVERED


# Sessions that differ between nodes, as during a rolling restart


def session(ms: int) -> dict[str, str]:
    return {**STILL, "broker.session.timeout.ms": str(ms)}


def test_an_answer_names_the_session_that_the_controller_fences_by() -> None:
    on = Ensemble(brokers=1, static=session(3_000))
    assert on.beat(1).session_timeout_ms == 3_000
    on.advance(2_999)
    assert on.is_active(1)
    on.advance(1)
    assert not on.is_active(1)


def test_a_broker_whose_lease_goes_by_a_setting_of_its_own_keeps_the_default_session() -> None:
    """One of an older release does not listen to what the controller names."""
    on = Ensemble(brokers=1, static=session(3_000))
    on.beat(1, takes_session=False)
    on.advance(SESSION_MS - 1)
    assert on.is_active(1)
    on.advance(1)
    assert not on.is_active(1)


def test_a_new_controller_with_a_shorter_session_waits_for_the_leases_of_the_longer_one() -> None:
    on = Ensemble(static=session(30_000))
    on.create("t", (1, 2, 3))
    on.beat(1)
    granted_ms = on.now_ms
    on.static = session(3_000)
    on.fail_over()
    on.advance(5_000, alive=(2, 3))
    # Another one, before the leases of the first have ended.
    on.fail_over()
    while on.partition("t").leader == 1:
        on.advance(1_000, alive=(2, 3))
    assert on.now_ms >= granted_ms + 20_000
    # From now on nobody holds a lease of the long session.
    on.advance(30_000, alive=(1, 2, 3))
    on.fail_over()
    failed_over_ms, leader = on.now_ms, on.partition("t").leader
    others = [id for id in (1, 2, 3) if id != leader]
    while on.partition("t").leader == leader:
        on.advance(1_000, alive=others)
    assert on.now_ms <= failed_over_ms + 3_000


def test_a_heartbeat_whose_answer_is_lost_does_not_shorten_a_lease_of_the_controller_before() -> None:
    on = Ensemble(static=session(30_000))
    on.create("t", (1, 2, 3))
    on.beat(1)
    granted_ms = on.now_ms
    on.static = session(3_000)
    on.fail_over()
    # The new controller hears it; the answer, which names the shorter session, never arrives.
    on.beat(1)
    while on.partition("t").leader == 1:
        on.advance(500, alive=(2, 3))
    assert on.now_ms >= granted_ms + 20_000


def test_a_longer_session_is_written_down_before_anybody_is_given_it() -> None:
    on = Ensemble(static=session(30_000))
    assert on.replayed.session_ms == 30_000
    assert Image().apply(on.replayed.snapshot())[0] == on.replayed
    on.static = STILL
    on.fail_over()
    on.advance(5_000, alive=(1, 2, 3))
    assert on.replayed.session_ms == 30_000, "some may still hold what the other one gave"
    on.advance(30_000, alive=(1, 2, 3))
    assert on.replayed.session_ms == SESSION_MS


def test_the_default_session_is_not_written_down() -> None:
    on = Ensemble()
    on.advance(30_000, alive=(1, 2, 3))
    assert on.replayed.session_ms == 0
