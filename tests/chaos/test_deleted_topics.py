"""A topic is deleted and recreated while the coordinator of its groups is paused, or is killed.

The groups of the new topic must begin without offsets, whoever coordinates them by then: an offset of the old
topic would let them skip records without a word. Once each in the test suite; ``make chaos`` tries it 50 times.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from penstock.broker.coordination.coordinators import partition_for
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
)
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest, DeleteTopicsRequest
from tests.chaos.conftest import SECONDS
from tests.cluster.cluster import Cluster
from tests.cluster.wire import NoAnswer, Wire
from tests.support import wait_until

pytestmark = pytest.mark.chaos

OFFSETS_TOPIC = "__consumer_offsets"
OFFSETS_PARTITIONS = 6
TOPIC = "again"
OLD_OFFSET = 1_000
NO_OFFSET = -1
GROUPS = 10
# Fifty with the ten minutes of ``make chaos``.
TRIES = max(1, int(float(os.environ.get(SECONDS) or 0) / 12))
PATIENCE_S = 60.0


class Scene:
    """A cluster, a topic, and groups with one coordinator, which does not lead the metadata."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        cluster.wait_in_sync(OFFSETS_TOPIC)
        controller = cluster.controller()
        leaders = [cluster.leader(OFFSETS_TOPIC, index) for index in range(OFFSETS_PARTITIONS)]
        self.coordinator = next(leader for leader in leaders if leader != controller)
        names = (f"group-{number}-{each}" for each in range(10_000))
        coordinated = (
            name for name in names if leaders[partition_for(name, OFFSETS_PARTITIONS)] == self.coordinator
        )
        self.groups = [next(coordinated) for _ in range(GROUPS)]
        self.create()
        for group in self.groups:
            wait_until(lambda group=group: self._commit(group), PATIENCE_S, f"{group} commits")  # type: ignore[misc]

    def delete(self) -> None:
        wait_until(self._delete, PATIENCE_S, "the topic is deleted")

    def create(self) -> None:
        wait_until(self._create, PATIENCE_S, "the topic is created")

    def stale_offsets(self) -> list[int]:
        """The offsets that groups have in a topic to which nobody has committed."""
        found = [self._committed(group) for group in self.groups]
        return [offset for offset in found if offset != NO_OFFSET]

    def _delete(self) -> bool:
        answer = self._ask(DeleteTopicsRequest(topic_names=[TOPIC], timeout_ms=5_000), 5)
        gone = (ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return answer is not None and answer.responses[0].error_code in gone

    def _create(self) -> bool:
        topic = CreatableTopic(name=TOPIC, num_partitions=1, replication_factor=3)
        answer = self._ask(CreateTopicsRequest(topics=[topic], timeout_ms=5_000), 5)
        there = (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS)
        return answer is not None and answer.topics[0].error_code in there

    def _commit(self, group: str) -> bool:
        partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=OLD_OFFSET)
        topic = OffsetCommitRequestTopic(name=TOPIC, partitions=[partition])
        # A partition that changes its leader just now is somewhere else than expected.
        for node in self.cluster.running:
            with suppress(NoAnswer), Wire(self.cluster.nodes[node].address) as wire:
                answer = wire.call(OffsetCommitRequest(group_id=group, topics=[topic]), 7)
                if answer.topics[0].partitions[0].error_code == ErrorCode.NONE:
                    return True
        return False

    def _committed(self, group: str) -> int:
        """What a consumer would begin at, from whoever coordinates the group now."""
        topic = OffsetFetchRequestTopic(name=TOPIC, partition_indexes=[0])
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for node in self.cluster.running:
                with suppress(NoAnswer), Wire(self.cluster.nodes[node].address) as wire:
                    answer = wire.call(OffsetFetchRequest(group_id=group, topics=[topic]), 5)
                    if answer.error_code == ErrorCode.NONE:
                        offset: int = answer.topics[0].partitions[0].committed_offset
                        return offset
            time.sleep(0.02)
        raise AssertionError(f"nobody coordinates {group}")

    def _ask(self, request: CreateTopicsRequest | DeleteTopicsRequest, version: int) -> Any:
        """Of a broker that the test leaves alone."""
        other = next(node for node in self.cluster.running if node != self.coordinator)
        with suppress(NoAnswer), Wire(self.cluster.nodes[other].address) as wire:
            return wire.call(request, version)
        return None


def paused(scene: Scene, choose: random.Random) -> list[int]:
    """It goes on before anybody has missed it, or after another has taken over."""
    cluster, coordinator = scene.cluster, scene.coordinator
    is_missed = TRIES > 1 and choose.random() < 0.5
    cluster.pause(coordinator)
    scene.delete()
    scene.create()
    stale = []
    if is_missed:
        cluster.wait_for(OFFSETS_TOPIC, lambda view: view.leader not in (-1, coordinator), "it is replaced")
        stale = scene.stale_offsets()
    cluster.resume(coordinator)
    return stale or scene.stale_offsets()


def killed_before(scene: Scene, choose: random.Random) -> list[int]:
    scene.cluster.kill(scene.coordinator)
    time.sleep(choose.choice((0, 0, 0.1, 0.5)))
    scene.delete()
    scene.create()
    stale = scene.stale_offsets()
    scene.cluster.start(scene.coordinator)
    return stale or scene.stale_offsets()


def killed_after(scene: Scene, choose: random.Random) -> list[int]:
    scene.delete()
    scene.cluster.kill(scene.coordinator)
    time.sleep(choose.choice((0, 0, 0.1, 0.5)))
    scene.create()
    stale = scene.stale_offsets()
    scene.cluster.start(scene.coordinator)
    return stale or scene.stale_offsets()


def test_a_topic_made_again_has_no_offsets(seed: int) -> None:
    choose = random.Random(seed)
    settings = {"offsets.topic.num.partitions": str(OFFSETS_PARTITIONS)}
    stale = {way.__name__: 0 for way in WAYS}
    with Cluster(3, settings) as cluster:
        with Wire(cluster.nodes[1].address) as wire:
            wire.call(FindCoordinatorRequest(key="any"), 2)
        for number in range(TRIES):
            for way in WAYS:
                scene = Scene(cluster, number)
                stale[way.__name__] += bool(way(scene, choose))
                scene.delete()
            if TRIES > 1:
                print(f"{number + 1} tries of each, of which with stale offsets: {stale}", flush=True)
    assert not any(stale.values()), f"of {TRIES} deletions each, offsets outlived the topic in {stale}"


WAYS: list[Callable[[Scene, random.Random], list[int]]] = [paused, killed_before, killed_after]
