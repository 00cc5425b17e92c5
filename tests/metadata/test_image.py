"""The image: what changes make of it, and that it never matters how they are cut into batches."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.metadata.changes import decode, encode
from penstock.metadata.image import (
    BROKER_RESOURCE,
    NO_LEADER,
    TOPIC_RESOURCE,
    ConfigResource,
    Delta,
    Image,
    config_record,
)
from penstock.metadata.topic_settings import CREATED
from penstock.model import BrokerId
from penstock.protocol.listeners import CLIENTS
from penstock.protocol.messages.metadata_records import (
    BrokerEndpoint,
    BrokerRegistrationChangeRecord,
    FeatureLevelRecord,
    FenceBrokerRecord,
    NoOpRecord,
    PartitionChangeRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    RemoveTopicRecord,
    TopicRecord,
    UnfenceBrokerRecord,
    UnregisterBrokerRecord,
)
from penstock.protocol.schema import Message

DIRECTORY = b"D" * 16


def topic_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def topic(name: str, id: int, partitions: int = 1, replicas: Iterable[int] = (1,)) -> list[Message]:
    changes: list[Message] = [TopicRecord(name=name, topic_id=topic_id(id))]
    return changes + [partition(id, index, replicas) for index in range(partitions)]


def partition(id: int, index: int, replicas: Iterable[int] = (1,)) -> PartitionRecord:
    brokers = list(replicas)
    return PartitionRecord(
        partition_id=index,
        topic_id=topic_id(id),
        replicas=brokers,
        isr=brokers,
        leader=brokers[0],
        leader_epoch=0,
        partition_epoch=0,
        directories=[DIRECTORY] * len(brokers),
    )


def broker(id: int, epoch: int = 0) -> RegisterBrokerRecord:
    return RegisterBrokerRecord(
        broker_id=id,
        broker_epoch=epoch,
        incarnation_id=b"I" * 16,
        end_points=[BrokerEndpoint(name="PLAINTEXT", host="h", port=9092)],
        fenced=False,
    )


def test_topic_is_found_by_name_and_by_id() -> None:
    image, delta = Image().apply(topic("a", 1, partitions=3))
    image.check()
    assert image.topics["a"] is image.topics_by_id[image.topics["a"].id]
    assert [part.index for part in image.topics["a"].partitions] == [0, 1, 2]
    assert image.partition_count == 3
    assert delta == Delta(created=("a",))


def test_old_image_stays_as_it_was() -> None:
    first, _ = Image().apply(
        [broker(1), *topic("a", 1), config_record(ConfigResource(2, "a"), "retention.ms", "1")]
    )
    before = (first.topics["a"], dict(first.topics), dict(first.brokers), dict(first.topic_config("a")))
    first.apply(
        [
            partition(1, 1),
            config_record(ConfigResource(2, "a"), "retention.ms", "2"),
            FenceBrokerRecord(id=1, epoch=0),
            *topic("b", 2),
        ]
    )
    assert before == (
        first.topics["a"],
        dict(first.topics),
        dict(first.brokers),
        dict(first.topic_config("a")),
    )


def test_untouched_topics_are_shared_between_images() -> None:
    first, _ = Image().apply([*topic("a", 1), *topic("b", 2)])
    second, delta = first.apply([partition(1, 1)])
    assert second.topics["b"] is first.topics["b"]
    assert second.brokers is first.brokers and second.configs is first.configs
    assert delta == Delta(changed=("a",), partitions_changed=(("a", 1),))


def test_equal_replicas_of_a_batch_are_one_object() -> None:
    image, _ = Image().apply([decode(encode(change)) for change in topic("a", 1, 50, replicas=(300, 400))])
    parts = image.topics["a"].partitions
    assert len({id(part.replicas) for part in parts} | {id(part.isr) for part in parts}) == 1
    assert len({id(part.directories) for part in parts}) == 1


def test_deletion_takes_the_settings_along_and_names_the_id() -> None:
    resource = ConfigResource(TOPIC_RESOURCE, "a")
    image, _ = Image().apply([*topic("a", 1, 2), config_record(resource, "retention.ms", "1")])
    after, delta = image.apply([RemoveTopicRecord(topic_id=topic_id(1))])
    after.check()
    assert after == Image()
    assert delta == Delta(deleted=(image.topics["a"],))


def test_topic_created_again_is_another_topic() -> None:
    image, _ = Image().apply(topic("a", 1))
    after, delta = image.apply([RemoveTopicRecord(topic_id=topic_id(1)), *topic("a", 2, 2)])
    after.check()
    assert after.topics["a"].id == topic_id(2)
    assert delta.created == ("a",)
    assert [gone.id for gone in delta.deleted] == [topic_id(1)]


def test_topic_that_came_and_went_in_one_batch_is_reported_deleted() -> None:
    image, delta = Image().apply([*topic("a", 1), RemoveTopicRecord(topic_id=topic_id(1))])
    assert image == Image()
    assert [(gone.name, gone.id) for gone in delta.deleted] == [("a", topic_id(1))]
    assert delta.created == delta.changed == ()


def test_election_raises_the_leader_epoch_also_of_the_same_leader() -> None:
    image, _ = Image().apply(topic("a", 1, replicas=(1, 2)))
    image, delta = image.apply([PartitionChangeRecord(partition_id=0, topic_id=topic_id(1), leader=1)])
    assert image.topics["a"].partitions[0][:4] == (0, 1, 1, 1)
    image, _ = image.apply([PartitionChangeRecord(partition_id=0, topic_id=topic_id(1), isr=[2], leader=2)])
    elected = image.topics["a"].partitions[0]
    assert (elected.leader, elected.isr, elected.leader_epoch, elected.partition_epoch) == (2, (2,), 2, 2)
    assert delta.changed == ("a",)


def test_change_of_the_isr_alone_keeps_the_leader_epoch() -> None:
    image, _ = Image().apply(topic("a", 1, replicas=(1, 2)))
    image, _ = image.apply(
        [
            PartitionChangeRecord(partition_id=0, topic_id=topic_id(1), isr=[1]),
            PartitionChangeRecord(
                partition_id=0,
                topic_id=topic_id(1),
                replicas=[1, 2, 3],
                adding_replicas=[3],
                directories=[DIRECTORY] * 3,
                eligible_leader_replicas=[2],
                last_known_elr=[2],
                leader_recovery_state=1,
            ),
        ]
    )
    changed = image.topics["a"].partitions[0]
    assert (changed.leader_epoch, changed.partition_epoch) == (0, 2)
    assert (changed.isr, changed.replicas, changed.adding_replicas) == ((1,), (1, 2, 3), (3,))
    assert (changed.eligible_leader_replicas, changed.last_known_elr, changed.leader_recovery_state) == (
        (2,),
        (2,),
        1,
    )


def test_partition_may_have_no_leader() -> None:
    image, _ = Image().apply(topic("a", 1))
    image, _ = image.apply([PartitionChangeRecord(partition_id=0, topic_id=topic_id(1), leader=NO_LEADER)])
    image.check()
    assert image.topics["a"].partitions[0].leader == NO_LEADER


@pytest.mark.parametrize(
    "change",
    [
        TopicRecord(name="a", topic_id=topic_id(9)),
        TopicRecord(name="b", topic_id=topic_id(1)),
        partition(1, 2),
        PartitionChangeRecord(partition_id=0, topic_id=topic_id(1), isr=[7]),
        PartitionChangeRecord(partition_id=0, topic_id=topic_id(1), leader=7),
        FenceBrokerRecord(id=1, epoch=5),
        ProducerIdsRecord(next_producer_id=500),
        BrokerEndpoint(),
    ],
    ids=lambda change: type(change).__name__,
)
def test_change_that_contradicts_the_image_stops_the_broker(change: Message) -> None:
    image, _ = Image().apply([broker(1), *topic("a", 1), ProducerIdsRecord(next_producer_id=1000)])
    with pytest.raises(AssertionError):
        image.apply([change])


def test_settings_are_added_replaced_and_removed() -> None:
    everyone = ConfigResource(BROKER_RESOURCE, "")
    one = ConfigResource(BROKER_RESOURCE, "1")
    image, delta = Image().apply(
        [config_record(everyone, "log.retention.ms", "1"), config_record(one, "log.retention.ms", "2")]
    )
    assert delta.configs_changed == (everyone, one)
    assert image.broker_config(None) == {"log.retention.ms": "1"}
    assert image.broker_config(1) == {"log.retention.ms": "2"}
    assert image.broker_config(2) == {}
    image, _ = image.apply([config_record(one, "log.retention.ms", None), config_record(one, "gone", None)])
    assert one not in image.configs
    image.check()


def test_settings_of_a_new_topic_are_part_of_its_creation() -> None:
    resource = ConfigResource(TOPIC_RESOURCE, "a")
    image, delta = Image().apply([*topic("a", 1), config_record(resource, "retention.ms", "1")])
    assert delta == Delta(created=("a",))
    _, delta = image.apply([config_record(resource, "retention.ms", "2")])
    assert delta == Delta(configs_changed=(resource,))


def test_creation_time_is_kept_with_the_topic_and_not_with_its_settings() -> None:
    created = config_record(ConfigResource(TOPIC_RESOURCE, "a"), CREATED, "1700000000000")
    image, delta = Image().apply([*topic("a", 1), created])
    assert image.topics["a"].created_ms == 1700000000000
    assert image.topic_config("a") == {}
    assert delta == Delta(created=("a",))


def test_brokers_come_change_and_go() -> None:
    image, delta = Image().apply([broker(1), broker(2, epoch=3)])
    image.check()
    assert delta.brokers_changed == (1, 2)
    endpoint = image.brokers[BrokerId(1)].endpoint_for(CLIENTS)
    assert endpoint is not None and endpoint[1:3] == ("h", 9092)
    image, _ = image.apply([FenceBrokerRecord(id=2, epoch=3)])
    assert not image.brokers[BrokerId(2)].is_active
    image, _ = image.apply([UnfenceBrokerRecord(id=2, epoch=3)])
    assert image.brokers[BrokerId(2)].is_active
    image, _ = image.apply(
        [
            BrokerRegistrationChangeRecord(
                broker_id=2, broker_epoch=3, fenced=1, in_controlled_shutdown=1, log_dirs=[DIRECTORY]
            )
        ]
    )
    assert image.brokers[BrokerId(2)][5:8] == (True, True, (DIRECTORY,))
    image, delta = image.apply([UnregisterBrokerRecord(broker_id=2, broker_epoch=3)])
    assert set(image.brokers) == {1} and delta.brokers_changed == (2,)


def test_features_and_producer_ids_are_remembered() -> None:
    image, delta = Image().apply(
        [
            FeatureLevelRecord(name="metadata.version", feature_level=25),
            FeatureLevelRecord(name="other", feature_level=1),
            FeatureLevelRecord(name="other", feature_level=0),
            ProducerIdsRecord(next_producer_id=1000),
            NoOpRecord(),
        ]
    )
    assert image.features == {"metadata.version": 25}
    assert image.next_producer_id == 1000
    assert delta == Delta()


def test_offset_follows_the_changes_unless_it_is_told() -> None:
    image, _ = Image().apply(topic("a", 1))
    assert image.offset == 1
    image, _ = image.apply([NoOpRecord()], offset=10, epoch=3)
    assert (image.offset, image.epoch) == (10, 3)


def test_partitions_take_so_little_memory_that_there_can_be_a_hundred_thousand() -> None:
    import tracemalloc

    changes = [decode(encode(change)) for id in range(1, 101) for change in topic(f"t{id}", id, 100)]
    tracemalloc.start()
    image, _ = Image().apply(changes)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert image.partition_count == 10_000
    assert used / image.partition_count < 250


class Model:
    """A plain account of the same state, kept in the dumbest way, that also makes the changes up."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.ids = 0
        self.epoch = 0
        self.topics: dict[str, tuple[int, list[tuple[int, ...]]]] = {}
        self.configs: dict[tuple[int, str], dict[str, str]] = {}
        self.brokers: dict[int, int] = {}
        self.deleted: list[int] = []

    def changes(self) -> list[Message]:
        """One step, as the changes of one decision."""
        random = self.random
        match random.choice(["topic", "partition", "delete", "config", "config", "broker", "fence"]):
            case "topic":
                name = random.choice("abcdef")
                if name in self.topics:
                    return []
                self.ids += 1
                count = random.randint(1, 3)
                self.topics[name] = (self.ids, [(1, 2)] * count)
                return topic(name, self.ids, count, (1, 2))
            case "partition" if self.topics:
                id, parts = random.choice(list(self.topics.values()))
                if random.random() < 0.5:
                    parts.append((1,))
                    return [partition(id, len(parts) - 1)]
                index = random.randrange(len(parts))
                parts[index] = (*parts[index], len(parts[index]) + 1)
                return [
                    PartitionChangeRecord(
                        partition_id=index,
                        topic_id=topic_id(id),
                        replicas=list(parts[index]),
                        directories=[DIRECTORY] * len(parts[index]),
                    )
                ]
            case "delete" if self.topics:
                name = random.choice(list(self.topics))
                id, _ = self.topics.pop(name)
                self.configs.pop((TOPIC_RESOURCE, name), None)
                self.deleted.append(id)
                return [RemoveTopicRecord(topic_id=topic_id(id))]
            case "config":
                resources = [(TOPIC_RESOURCE, name) for name in self.topics] + [(BROKER_RESOURCE, "")]
                resource = random.choice(resources)
                key, value = random.choice("xy"), random.choice([None, "1", "2"])
                known = self.configs.setdefault(resource, {})
                known.pop(key, None)
                if value is not None:
                    known[key] = value
                if not known:
                    del self.configs[resource]
                return [config_record(ConfigResource(*resource), key, value)]
            case "broker":
                self.epoch += 1
                id = random.randint(1, 3)
                self.brokers[id] = self.epoch
                return [broker(id, self.epoch)]
            case "fence" if self.brokers:
                id = random.choice(list(self.brokers))
                return [FenceBrokerRecord(id=id, epoch=self.brokers[id])]
        return []


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60), data=st.data())
@settings(max_examples=60, deadline=None)
def test_one_at_a_time_equals_in_batches_equals_a_naive_model(
    seed: int, steps: int, data: st.DataObject
) -> None:
    model = Model(seed)
    decisions = [model.changes() for _ in range(steps)]
    changes = [decode(encode(change)) for decision in decisions for change in decision]

    single = Image()
    for change in changes:
        single, _ = single.apply([change])
    single.check()

    batched = Image()
    deleted = []
    position = 0
    while position < len(changes):
        size = data.draw(st.integers(1, len(changes) - position))
        batched, delta = batched.apply(changes[position : position + size])
        deleted += [int.from_bytes(gone.id, "big") for gone in delta.deleted]
        position += size
    batched.check()

    assert batched == single
    assert batched.offset == single.offset
    assert {
        name: (int.from_bytes(known.id, "big"), [part.replicas for part in known.partitions])
        for name, known in batched.topics.items()
    } == model.topics
    assert batched.configs == model.configs
    assert {id: known.epoch for id, known in batched.brokers.items()} == model.brokers
    assert deleted == model.deleted


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_snapshot_replays_to_an_equal_image(seed: int) -> None:
    model = Model(seed)
    changes = [change for _ in range(40) for change in model.changes()]
    created = [config_record(ConfigResource(TOPIC_RESOURCE, name), CREATED, "5") for name in model.topics]
    level = FeatureLevelRecord(name="metadata.version", feature_level=25)
    image, _ = Image().apply([*changes, *created, ProducerIdsRecord(next_producer_id=3000), level])
    snapshot = [decode(encode(change)) for change in image.snapshot()]
    replayed, delta = Image().apply(snapshot)
    assert replayed == image
    assert set(delta.created) == set(image.topics)
    assert isinstance(snapshot[0], FeatureLevelRecord)
