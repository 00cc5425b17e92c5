"""min.insync.replicas changes while the ISR does: the leader commits nothing that an eligible leader may lack.

A real controller decides, a hosted partition leads and hears of it in all the ways there are: several changes in
one image, an answer that comes before its image, settings of a topic and of all brokers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.broker.config import BrokerConfig
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.partition.partition_lifecycle import PartitionLifecycle
from penstock.broker.replication.isr_proposals import _assignment
from penstock.metadata.image import Delta
from penstock.metadata.topic_settings import MIN_ISR
from penstock.metadata.values import BROKER_RESOURCE, TOPIC_RESOURCE
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import AlterPartitionResponsePartition
from penstock.protocol.messages.configs import (
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.topics import DeleteTopicsRequest, DeleteTopicState
from tests.broker.disks import NODE, Node
from tests.broker.phrases import batch
from tests.metadata.ensemble import Ensemble

OTHER = 8
THIRD = 9
LAG_MS = 10_000


class Around:
    """What a hosted partition needs to know of its broker."""

    me = BrokerId(NODE)
    lag_max_ms = LAG_MS

    def __init__(self, ensemble: Ensemble) -> None:
        self._ensemble = ensemble

    def live(self, broker: int) -> int | None:
        known = self._ensemble.on.image.brokers.get(BrokerId(broker))
        return known.epoch if known is not None and known.is_active else None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Stage:
    """NODE leads ``t`` with OTHER in sync; a producer with acks=all waits for a record that OTHER lacks."""

    def __init__(self, path: Path, brokers: tuple[int, ...] = (NODE, OTHER, THIRD)) -> None:
        self.ensemble = Ensemble(brokers=0)
        for broker in brokers:
            self.ensemble.join(broker)
        self.ensemble.create("t", (NODE, OTHER))
        config, _ = BrokerConfig.load({})
        storage = Node(path, "a").start()
        self.partitions = Partitions(storage.environment.clock)
        self.lifecycle = PartitionLifecycle(
            self.partitions,
            storage,
            Around(self.ensemble),
            lambda image, name: config.topic_config(image, NODE, name),
        )
        self.acks: list[ErrorCode] = []
        self.seen = 0
        self.image = self.ensemble.replayed
        self.seen = len(self.ensemble.log)
        self.lifecycle.apply(self.image, Delta(created=("t",)))

    def write(self) -> None:
        hosted = self.hosted
        assert hosted.fetched_by(OTHER, self.ensemble.broker(OTHER).epoch, 0, 0) == ErrorCode.NONE
        appended = hosted.append(memoryview(bytearray(batch(b"x"))), by_all=True)
        assert appended.error == ErrorCode.NONE
        hosted.when_acknowledged(appended, self.acks.append, by_all=True)
        assert self.acks == []

    @property
    def hosted(self) -> Any:
        hosted = self.partitions.get("t", 0)
        assert hosted is not None
        return hosted

    def set_min_isr(self, value: int, *, of_all: bool = False) -> None:
        resource = IncrementalAlterConfigsResource(
            resource_type=BROKER_RESOURCE if of_all else TOPIC_RESOURCE,
            resource_name="" if of_all else "t",
            configs=[IncrementalAlterableConfig(name=MIN_ISR, config_operation=0, value=str(value))],
        )
        response = self.ensemble.handle(IncrementalAlterConfigsRequest(resources=[resource]), 1)
        assert response.responses[0].error_code == 0, response

    def hear(self) -> None:
        """All that was decided since the last time, as one image."""
        changes = self.ensemble.log[self.seen :]
        self.seen = len(self.ensemble.log)
        self.image, delta = self.image.apply(changes)
        self.lifecycle.apply(self.image, delta)

    def drop_by_proposal(self, *, is_old_controller: bool = False) -> None:
        """The leader drops OTHER, and is answered before any image comes."""
        core = self.hosted.replication
        now_ms = self.hosted._now_ms()
        # It fell behind with the append; the second look is too late for it.
        assert core.proposal(now_ms) is None
        now_ms += 10 * LAG_MS
        proposal = core.proposal(now_ms)
        assert proposal is not None and [broker for broker, _ in proposal.isr] == [NODE]
        answer = self.ensemble.propose("t", [NODE])
        assert answer.error_code == 0
        if is_old_controller:
            answer = AlterPartitionResponsePartition(
                leader_id=answer.leader_id,
                leader_epoch=answer.leader_epoch,
                isr=answer.isr,
                partition_epoch=answer.partition_epoch,
            )
        core.answered(proposal, 0, _assignment(core, answer), now_ms)
        self.hosted.proposal_answered()

    def assert_nothing_is_lost(self) -> None:
        """The leader dies. OTHER, which has nothing, is elected cleanly, so nothing was acknowledged."""
        assert self.ensemble.state("t") == (NODE, (NODE,), (OTHER,))
        self.ensemble.lost(NODE)
        if not self.ensemble.is_active(OTHER):
            self.ensemble.restart(OTHER)
        self.ensemble.settle()
        partition = self.ensemble.partition("t")
        assert (partition.leader, partition.leader_recovery_state) == (OTHER, 0)
        assert self.acks == [], "acknowledged, and the leader that was elected cleanly does not have it"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    stage.set_min_isr(1)
    stage.hear()
    stage.write()
    return stage


@pytest.mark.parametrize("of_all", [False, True], ids=["topic", "all brokers"])
@pytest.mark.parametrize("images", [1, 2])
def test_the_minimum_is_raised_and_a_follower_lost(tmp_path: Path, images: int, of_all: bool) -> None:
    stage = Stage(tmp_path)
    stage.set_min_isr(1, of_all=of_all)
    stage.hear()
    stage.write()
    stage.set_min_isr(2, of_all=of_all)
    if images == 2:
        stage.hear()
    stage.ensemble.lost(OTHER)
    stage.hear()
    stage.assert_nothing_is_lost()


@pytest.mark.parametrize("is_old_controller", [False, True], ids=["", "of an old controller"])
def test_an_answer_comes_before_the_image_that_raised_the_minimum(
    stage: Stage, is_old_controller: bool
) -> None:
    stage.set_min_isr(2)
    stage.drop_by_proposal(is_old_controller=is_old_controller)
    assert stage.acks == []
    stage.hear()
    stage.assert_nothing_is_lost()


def test_an_answer_comes_before_two_images(stage: Stage) -> None:
    """Raised, lowered and raised again; none of it is known to the leader when the answer comes."""
    for value in (2, 1, 2):
        stage.set_min_isr(value)
    stage.drop_by_proposal()
    assert stage.acks == []
    stage.hear()
    stage.assert_nothing_is_lost()


def test_a_third_broker_joins_and_with_it_the_default_changes(tmp_path: Path) -> None:
    stage = Stage(tmp_path, brokers=(NODE, OTHER))
    assert stage.hosted.config.min_insync_replicas == 1
    stage.write()
    stage.ensemble.join(THIRD)
    stage.ensemble.lost(OTHER)
    stage.hear()
    assert stage.hosted.config.min_insync_replicas == 2
    stage.assert_nothing_is_lost()


def test_a_third_broker_joins_and_the_answer_comes_before_the_image(tmp_path: Path) -> None:
    stage = Stage(tmp_path, brokers=(NODE, OTHER))
    stage.write()
    stage.ensemble.join(THIRD)
    stage.drop_by_proposal()
    stage.assert_nothing_is_lost()


def test_a_lowered_minimum_lets_the_leader_commit(stage: Stage) -> None:
    stage.set_min_isr(2)
    stage.ensemble.lost(OTHER)
    stage.hear()
    assert stage.acks == []
    stage.set_min_isr(1)
    stage.hear()
    assert stage.acks == [ErrorCode.NONE]
    assert stage.ensemble.state("t") == (NODE, (NODE,), ())


def test_the_minimum_is_lowered_and_raised_in_one_image(stage: Stage) -> None:
    """The follower lost under the higher minimum was given up meanwhile, so its lack does not matter."""
    stage.set_min_isr(2)
    stage.ensemble.lost(OTHER)
    stage.set_min_isr(1)
    stage.set_min_isr(2)
    stage.hear()
    assert stage.ensemble.state("t") == (NODE, (NODE,), ())
    assert stage.acks == [], "two must be in sync, as far as anybody knows"


def test_a_topic_made_again_in_the_same_image_begins_with_its_own_minimum(stage: Stage) -> None:
    stage.set_min_isr(2)
    response = stage.ensemble.handle(DeleteTopicsRequest(topics=[DeleteTopicState(name="t")]), 6)
    assert response.responses[0].error_code == 0
    stage.ensemble.create("t", (NODE, OTHER))
    stage.ensemble.lost(OTHER)
    stage.hear()
    assert stage.acks == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    # Of three brokers, so two must be in sync.
    assert stage.hosted.config.min_insync_replicas == 2
    assert stage.ensemble.state("t") == (NODE, (NODE,), (OTHER,))
    assert not stage.hosted.has_enough_replicas
