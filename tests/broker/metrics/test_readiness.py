"""When a node says that it is ready, and what it says when it is not."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.broker.membership.membership import State
from penstock.broker.metrics import readiness
from penstock.broker.metrics.readiness import Readiness
from penstock.metadata.values import PartitionImage
from penstock.model import BrokerId
from tests.broker.metrics.scraping import ADDRESS, Http, scrape
from tests.broker.test_virtual_time import create
from tests.virtual import World


@pytest.fixture
def world() -> World:
    world = World(metrics=ADDRESS)
    create(world.client(), "events")
    return world


def reason(world: World) -> str | None:
    """None if it is ready."""
    answer = Http(world).get("/readyz")
    assert answer.body.count(b"\n") == 1
    if answer.status == 200:
        assert answer.body == b"ready\n"
        assert scrape(world)["penstock_ready"] == 1
        return None
    assert answer.status == 503
    assert scrape(world)["penstock_ready"] == 0
    return answer.body.decode().rstrip()


def replace_image(world: World, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the partition be in another state, in the metadata that this broker knows."""
    hosted = world.broker.partitions.get("events", 0)
    assert hosted is not None
    image: PartitionImage = hosted.image._replace(**changes)
    monkeypatch.setattr(type(hosted), "image", property(lambda self: image))


def test_a_broker_that_serves_is_ready(world: World) -> None:
    assert reason(world) is None


@pytest.mark.parametrize("state", [State.REGISTERING, State.CATCHING_UP, State.STOPPING, State.STOPPED])
def test_one_that_comes_or_goes_says_so(world: World, state: State) -> None:
    world.broker.membership.state = state
    assert reason(world) == state.value
    assert Http(world).get("/healthz").status == 200


def test_one_that_is_fenced_is_not_ready(world: World) -> None:
    world.broker.membership.state = State.FENCED
    assert reason(world) == "fenced: the controller has not admitted this broker yet, or not again"


def test_one_whose_lease_is_over_is_not_ready(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.broker.membership, "is_serving", lambda: False)
    assert reason(world) == "the controller has not answered a heartbeat for too long"


def test_one_whose_metadata_is_behind_is_not_ready(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    consensus = world.broker.consensus
    behind = consensus.image.offset + 4
    monkeypatch.setattr(type(consensus), "high_watermark", property(lambda self: behind))
    assert reason(world) == "the metadata is 3 records behind"


def test_without_a_leader_of_the_quorum_it_is_not_ready(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(world.broker.consensus), "leader_id", property(lambda self: None))
    assert reason(world) == "the metadata quorum has no leader"


def test_a_replica_that_is_not_in_sync_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    others = (BrokerId(2), BrokerId(3))
    replace_image(world, monkeypatch, leader=BrokerId(2), replicas=(BrokerId(1), *others), isr=others)
    assert reason(world) == "the replica of partition events-0 is not in sync"


def test_a_replica_that_a_reassignment_adds_may_take_its_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a broker that joins would not be ready for hours, and nobody is served worse meanwhile."""
    others = (BrokerId(2), BrokerId(3))
    replace_image(
        world,
        monkeypatch,
        leader=BrokerId(2),
        replicas=(BrokerId(1), *others),
        isr=others,
        adding_replicas=(BrokerId(1),),
    )
    assert reason(world) is None


def test_a_replica_on_a_failed_disk_is_named(world: World) -> None:
    hosted = world.broker.partitions.get("events", 0)
    assert hosted is not None
    hosted.take_offline()
    assert reason(world) == "partition events-0 is offline: its disk has failed, or it is damaged"
    assert scrape(world)["penstock_offline_replicas"] == 1


def test_a_controller_without_partitions_only_needs_the_metadata(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.broker.is_broker = False
    world.broker.membership.state = State.REGISTERING  # as it always is there
    assert reason(world) is None
    assert not any("topic=" in name or "isr" in name for name in scrape(world))


def test_many_partitions_are_looked_at_in_slices(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client = world.client()
    for number in range(5):
        create(client, f"more-{number}")
    monkeypatch.setattr(readiness, "PARTITIONS_PER_SLICE", 2)
    found: list[str | None] = []
    Readiness(world.broker).check(found.append)
    assert found == []
    world.run_for(1)
    assert found == [None]
