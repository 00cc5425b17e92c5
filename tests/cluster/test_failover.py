"""Something happens to one of three nodes: the work goes on within a time, and nothing that was promised is lost.

The deadlines are three times what is asked for, because the machine may be busy; ``benchmarks/failover.py``
says what it really is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from penstock.protocol.errors import ErrorCode
from tests.chaos.errands import read_everything
from tests.chaos.ledger import Ledger, Place
from tests.cluster import wire
from tests.cluster.cluster import Cluster
from tests.cluster.failover import (
    controller_killed_s,
    create,
    leader_cut_off_s,
    leader_killed_s,
    leader_stopped_s,
    load,
    write,
)
from tests.cluster.network import Network
from tests.cluster.wire import NoAnswer, Wire
from tests.support import wait_until

SLACK = 3.0
KILLED_S = 2.0
CUT_OFF_S = 10.0
CONTROLLER_S = 2.0
PARTITIONS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster


@pytest.mark.parametrize("measure", [leader_killed_s, leader_stopped_s], ids=["killed", "stopped"])
def test_writes_go_on_after_the_leader_is_gone(
    cluster: Cluster, unique: Callable[[str], str], measure: Callable[[Cluster, str], float]
) -> None:
    topic, ledger = unique("topic"), Ledger()
    create(cluster, topic, PARTITIONS)
    with load(cluster, topic, PARTITIONS, ledger) as writer:
        # The probe's records are not the ledger's, so it has a topic of its own.
        probed = unique("probed")
        create(cluster, probed, 1)
        seconds = measure(cluster, probed)
        cluster.wait_in_sync(topic)
    readings = read_everything(cluster.bootstrap, [Place(topic, number) for number in range(PARTITIONS)])
    ledger.check(readings)
    writer.check(readings)
    assert seconds < SLACK * KILLED_S


def test_metadata_changes_again_after_the_controller_was_killed(cluster: Cluster) -> None:
    before = cluster.controller()
    seconds = controller_killed_s(cluster)
    assert cluster.controller() != before or seconds > 0
    assert seconds < SLACK * CONTROLLER_S


def test_deleted_records_stay_deleted_under_the_next_leader(
    cluster: Cluster, unique: Callable[[str], str]
) -> None:
    """Nothing is written after them, so it is for the deletion alone that the followers must hear of it."""
    topic = unique("topic")
    create(cluster, topic, 1)
    write(cluster, topic, 100)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    deleted = admin.delete_records([TopicPartition(topic, 0, 60)])
    (result,) = [future.result(60) for future in deleted.values()]
    assert result.low_watermark == 60
    leader = cluster.leader(topic, 0)
    cluster.kill(leader)
    try:
        wait_until(lambda: cluster.leader(topic, 0) not in (leader, -1), 30, "another leader")
        asker = AdminClient({"bootstrap.servers": cluster.bootstrap})
        earliest = asker.list_offsets({TopicPartition(topic, 0): OffsetSpec.earliest()})  # type: ignore[no-untyped-call]
        (found,) = [future.result(60) for future in earliest.values()]
        assert found.offset == 60
    finally:
        cluster.start(leader)


def test_a_fresh_client_writes_after_the_leader_was_cut_off_silently(network: Network) -> None:
    ledger = Ledger()
    with Cluster(3, network=network) as cluster:
        create(cluster, "loaded", PARTITIONS)
        create(cluster, "probed", 1)
        with load(cluster, "loaded", PARTITIONS, ledger):
            seconds = leader_cut_off_s(cluster, "probed")
            cluster.wait_in_sync("loaded", deadline_s=120)
        ledger.check(
            read_everything(cluster.bootstrap, [Place("loaded", number) for number in range(PARTITIONS)])
        )
    assert seconds < SLACK * CUT_OFF_S


def test_a_leader_cut_off_from_the_others_serves_nobody_once_there_is_a_new_one(network: Network) -> None:
    """Clients still reach it. Neither a write that only it would have, nor a read, may be answered by then."""
    with Cluster(3, network=network) as cluster:
        create(cluster, "topic", 1)
        write(cluster, "topic", 100, partition=0)
        old = cluster.leader("topic", 0)
        others = [node for node in cluster.nodes if node != old]
        writes: list[float] = []
        reads: list[float] = []
        wait_until(lambda: is_written(cluster, old) and is_read(cluster, old), 30, "it serves before")
        network.cut_off(old, also_from_clients=False)
        deadline = time.monotonic() + SLACK * CUT_OFF_S
        taken_over = None
        while time.monotonic() < deadline and (taken_over is None or time.monotonic() < taken_over + 3):
            if is_written(cluster, old):
                writes.append(time.monotonic())
            if is_read(cluster, old):
                reads.append(time.monotonic())
            if taken_over is None:
                began = time.monotonic()
                leader = wire.partitions(cluster.nodes[others[0]].address, ["topic"])["topic", 0].leader
                if leader != old and leader >= 0 and is_written(cluster, leader, acks=-1):
                    taken_over = began
            time.sleep(0.05)
        assert taken_over is not None, "nobody took over"
        assert writes and reads, "it was never the leader"
        assert max(writes) < taken_over, "the old leader acknowledged a write after the new one had"
        assert max(reads) < taken_over, "the old leader served a read after the new one had taken a write"
        # It comes back, gives up what nobody else had, and all is one again.
        network.heal()
        cluster.wait_in_sync("topic", deadline_s=60)
        write(cluster, "topic", 10, partition=0)


def is_written(cluster: Cluster, node_id: int, acks: int = 1) -> bool:
    try:
        with Wire(cluster.nodes[node_id].address, timeout_s=1) as connection:
            answer = wire.produce(connection, "topic", 0, b"x", acks=acks, timeout_ms=500)
    except NoAnswer:
        return False
    return bool(answer.error_code == ErrorCode.NONE)


def is_read(cluster: Cluster, node_id: int) -> bool:
    try:
        with Wire(cluster.nodes[node_id].address, timeout_s=1) as connection:
            answer = wire.fetch(connection, "topic", 0, 0)
    except NoAnswer:
        return False
    return bool(answer.error_code == ErrorCode.NONE)


def test_a_cluster_that_was_killed_whole_comes_back_whole(unique: Callable[[str], str]) -> None:
    topic, ledger = unique("topic"), Ledger()
    with Cluster(3) as cluster:
        create(cluster, topic, PARTITIONS)
        with load(cluster, topic, PARTITIONS, ledger):
            cluster.kill(*cluster.nodes)
            cluster.start(*cluster.nodes)
            before = ledger.acknowledged_count
            wait_until(lambda: ledger.acknowledged_count > before + 100, 60, "writes go on")
        cluster.wait_in_sync(topic)
        places = [Place(topic, number) for number in range(PARTITIONS)]
        ledger.check(read_everything(cluster.bootstrap, places))


def test_a_cluster_that_was_stopped_whole_comes_back_whole(unique: Callable[[str], str]) -> None:
    topic = unique("topic")
    with Cluster(3) as cluster:
        create(cluster, topic, PARTITIONS)
        write(cluster, topic, 1000)
        cluster.stop(*cluster.nodes)
        cluster.start(*cluster.nodes)
        cluster.wait_in_sync(topic)
        write(cluster, topic, 1000)
        places = [Place(topic, number) for number in range(PARTITIONS)]
        ends = [end(cluster, place) for place in places]
        assert sum(ends) == 2000


def end(cluster: Cluster, place: Place) -> int:
    with Wire(cluster.nodes[cluster.leader(*place)].address) as connection:
        high_watermark: int = wire.fetch(connection, *place, 0).high_watermark
    return high_watermark
