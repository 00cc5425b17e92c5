"""A replica that lacks acknowledged records is never elected as if it had them.

Four brokers, of which three vote. Node 4 leads a topic of two replicas and is killed in the end; the follower is
back by then, and what it does not hold must not have been acknowledged, or it must not lead. In the first two ways
``min.insync.replicas`` is raised while the follower is lost, in the others the follower loses its power together
with all that it has not flushed. ``make chaos`` tries each 25 times, the test suite once, without the one that
takes long and comes to the point only now and then.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.metadata.topic_settings import DURABILITY, FLUSHED
from penstock.metadata.values import TOPIC_RESOURCE
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from tests.chaos import lossy
from tests.chaos.conftest import SECONDS
from tests.chaos.errands import read_everything, settings
from tests.chaos.ledger import Ledger, Place, encode_value, identity_of, offset_in
from tests.chaos.power import Disk, PowerLoss
from tests.cluster.cluster import Cluster
from tests.cluster.wire import Wire
from tests.support import wait_until

pytestmark = pytest.mark.chaos

LEADER = 4
FOLLOWER = 3
RECORDS = 20
LAG = "replica.lag.time.max.ms"
LAG_MS = 500
# Twenty-five with the ten minutes of ``make chaos``.
TRIES = max(1, int(float(os.environ.get(SECONDS) or 0) / 24))
PATIENCE_S = 60.0
# For acknowledgements that should not come.
GRACE_S = 0.3


class WitnessedCluster(Cluster):
    """Of which every node may lose its power. The nodes that may lead the metadata are started as flushed."""

    def __init__(self) -> None:
        super().__init__(3)
        self.power: dict[int, PowerLoss] = {}

    def _make(self, node_id: int) -> None:
        super()._make(node_id)
        node = self.nodes[node_id]
        power = PowerLoss(node.data_dirs[0], self.scratch / f"witness-{node_id}")
        node.entry = ["-P", lossy.__file__, str(power.journal), str(power.attic)]
        if node_id not in (LEADER, FOLLOWER):
            node.settings[DURABILITY] = FLUSHED
        self.power[node_id] = power


class Scene:
    """A topic with two replicas, and a producer that writes to it with acks=all."""

    def __init__(self, cluster: WitnessedCluster, topic: str, **config: str) -> None:
        self.cluster = cluster
        self.place = Place(topic, 0)
        self.ledger = Ledger()
        self._sent = 0
        self._failures: list[KafkaError] = []
        while (controller := cluster.controller()) == FOLLOWER:
            cluster.restart(FOLLOWER)
        self.controller = controller
        named = {name.replace("_", "."): value for name, value in config.items()}
        new = NewTopic(topic, 1, replica_assignment=[[LEADER, FOLLOWER]], config=named)
        admin = AdminClient(settings(cluster.bootstrap))
        admin.create_topics([new])[topic].result(PATIENCE_S)
        cluster.wait_in_sync(topic)
        self._producer = Producer(
            settings(cluster.bootstrap, enable_idempotence=True, message_timeout_ms=int(PATIENCE_S * 1000))
        )

    def send(self) -> None:
        """Some records, and wait until the leader has them."""
        before = self._log_size()
        for _ in range(RECORDS):
            identity = identity_of(0, self._sent)
            self._sent += 1
            self._producer.produce(
                self.place.topic,
                encode_value(identity, 100),
                partition=self.place.partition,
                on_delivery=partial(self._delivered, identity),
            )
        wait_until(lambda: self._log_size() > before, PATIENCE_S, "the leader has written records")

    def finish_sending(self, timeout_s: float = PATIENCE_S) -> bool:
        """Whether all that was sent has been acknowledged by then."""
        return self._producer.flush(timeout_s) == 0

    def wire(self) -> Wire:
        """To the controller's node, which needs nobody else to change a setting."""
        return Wire(self.cluster.nodes[self.controller].address)

    def set(self, wire: Wire, **config: str) -> None:
        resource = IncrementalAlterConfigsResource(
            resource_type=TOPIC_RESOURCE,
            resource_name=self.place.topic,
            configs=[
                IncrementalAlterableConfig(name=name.replace("_", "."), config_operation=0, value=value)
                for name, value in config.items()
            ],
        )
        answer = wire.call(IncrementalAlterConfigsRequest(resources=[resource]), 1)
        assert answer.responses[0].error_code == ErrorCode.NONE, answer

    def wait_alone(self, node_id: int) -> None:
        """Until a node has heard that only the leader is in sync."""
        self.cluster.wait_for(
            self.place.topic,
            lambda view: view.in_sync_replicas == (LEADER,),
            "only the leader is in sync",
            asking=[node_id],
        )

    def lost_by_election(self, *, is_expected: bool) -> int:
        """The leader dies, the follower comes back first: how many acknowledged records are gone then."""
        self.cluster.kill(LEADER)
        self.cluster.start(FOLLOWER)
        if is_expected:
            self.cluster.wait_for(
                self.place.topic,
                lambda view: view.leader == FOLLOWER,
                "the follower leads",
                asking=[self.controller],
            )
        self.cluster.start(LEADER)
        self.cluster.wait_in_sync(self.place.topic)
        assert self.finish_sending(), "not everything was acknowledged"
        assert not self._failures, self._failures[0]
        readings = read_everything(self.cluster.bootstrap, [self.place])
        lost = self.ledger.lost(readings)
        if not lost:
            self.ledger.check(readings)
        return lost

    def _delivered(self, identity: int, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.ledger.acknowledged(self.place, offset_in(message), identity)
        else:
            self._failures.append(error)

    def _log_size(self) -> int:
        directory: Path = self.cluster.nodes[LEADER].data_dirs[0] / f"{self.place.topic}-0"
        return sum(path.stat().st_size for path in directory.glob("*.log"))


def raised_and_lost_in_one_image(cluster: WitnessedCluster, topic: str, choose: random.Random) -> int:
    """The leader, which is paused, hears at one time that more must be in sync and that the follower is lost."""
    scene = Scene(cluster, topic, min_insync_replicas="1")
    scene.send()
    assert scene.finish_sending()
    cluster.pause(FOLLOWER)
    scene.send()
    cluster.pause(LEADER)
    with scene.wire() as wire:
        # The leader is told of this in the answer that it waits for, and of all that comes later in the next one.
        scene.set(wire, retention_ms="1000000000")
        scene.set(wire, min_insync_replicas="2")
    cluster.kill(FOLLOWER)
    scene.wait_alone(scene.controller)
    cluster.resume(LEADER)
    scene.wait_alone(LEADER)
    scene.finish_sending(GRACE_S)
    return scene.lost_by_election(is_expected=True)


def raised_while_the_leader_asks(cluster: WitnessedCluster, topic: str, choose: random.Random) -> int:
    """The leader asks to drop the follower, and may be answered before it hears that more must be in sync."""
    cluster.nodes[LEADER].settings[LAG] = str(LAG_MS)
    cluster.restart(LEADER)
    scene = Scene(cluster, topic, min_insync_replicas="1")
    scene.send()
    assert scene.finish_sending()
    with scene.wire() as wire, ThreadPoolExecutor(1) as executor:
        cluster.pause(FOLLOWER)
        scene.send()
        time.sleep(0.9 * LAG_MS / 1000)
        # The controller finds both questions when it goes on.
        cluster.pause(scene.controller)
        raised = executor.submit(scene.set, wire, min_insync_replicas="2")
        time.sleep(0.7 * LAG_MS / 1000)
        cluster.resume(scene.controller)
        raised.result(PATIENCE_S)
    scene.wait_alone(LEADER)
    scene.finish_sending(GRACE_S)
    del cluster.nodes[LEADER].settings[LAG]
    cluster.kill(FOLLOWER)
    return scene.lost_by_election(is_expected=False)


def controller_alone_is_flushed(cluster: WitnessedCluster, topic: str, choose: random.Random) -> int:
    """The nodes that may lead the metadata are started as flushed, those with the records are not."""
    scene = Scene(cluster, topic, min_insync_replicas="2")
    scene.send()
    assert scene.finish_sending()
    return lost_by_power(scene, choose, is_damaged=True)


def switched_to_flushed(cluster: WitnessedCluster, topic: str, choose: random.Random) -> int:
    """After records were acknowledged that nobody has flushed."""
    scene = Scene(cluster, topic, min_insync_replicas="2", flush_messages=str(2**63 - 1))
    scene.send()
    assert scene.finish_sending()
    with scene.wire() as wire:
        scene.set(wire, flush_messages="1")
    time.sleep(choose.choice((0, 0, 0.01, 0.05, 0.2)))
    # It may have flushed everything by now, and then may lead.
    return lost_by_power(scene, choose, is_damaged=False)


def lost_by_power(scene: Scene, choose: random.Random, *, is_damaged: bool) -> int:
    cluster = scene.cluster
    cluster.kill(FOLLOWER)
    damage = cluster.power[FOLLOWER].strike(Disk.STRICT, choose)
    assert damage.lost_bytes > 0 or not is_damaged, "everything was flushed"
    scene.wait_alone(scene.controller)
    return scene.lost_by_election(is_expected=False)


def test_a_replica_without_acknowledged_records_is_not_elected_cleanly(seed: int) -> None:
    choose = random.Random(seed)
    ways = WAYS if TRIES > 1 else [way for way in WAYS if way is not raised_while_the_leader_asks]
    lost = {way.__name__: 0 for way in ways}
    with WitnessedCluster() as cluster:
        assert cluster.add() == LEADER
        for number in range(TRIES):
            for way in ways:
                lost[way.__name__] += way(cluster, f"{way.__name__}-{number}", choose) > 0
            if TRIES > 1:
                print(f"{number + 1} tries of each, of which lost acknowledged records: {lost}", flush=True)
    assert not any(lost.values()), f"of {TRIES} tries each, acknowledged records were lost in {lost}"


WAYS: list[Callable[[WitnessedCluster, str, random.Random], int]] = [
    raised_and_lost_in_one_image,
    raised_while_the_leader_asks,
    controller_alone_is_flushed,
    switched_to_flushed,
]
