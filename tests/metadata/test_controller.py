"""The controller's decisions about topics, partitions, brokers and producer ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.metadata import creation
from penstock.metadata.changes import METADATA_VERSION, decode, encode
from penstock.metadata.controller import Controller, ProducerIds
from penstock.metadata.image import BrokerImage, Endpoint, Image
from penstock.metadata.topic_settings import TOPIC
from penstock.metadata.topics import CLUSTER_METADATA, CLUSTER_METADATA_ID, CONSUMER_OFFSETS
from penstock.metadata.values import registration_record
from penstock.model import BrokerId, format_id
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.metadata_records import (
    ConfigRecord,
    FeatureLevelRecord,
    FenceBrokerRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
    UnfenceBrokerRecord,
)
from penstock.protocol.messages.topics import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfig,
    CreatableTopicResult,
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
    CreateTopicsRequest,
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from penstock.protocol.schema import Message

WALL_MS = 1_700_000_000_000
DIRECTORY = b"D" * 16


def controller(
    brokers: int = 1, static: Mapping[str, str] | None = None, racks: Sequence[str] = (), seed: int = 1
) -> Controller:
    made = Controller(Image(), random=Random(seed), broker=1, static=static or {})
    made.found_cluster()
    for id in range(1, brokers + 1):
        register(made, id, rack=racks[id - 1] if racks else None)
    return made


def register(on: Controller, id: int, *, rack: str | None = None) -> None:
    """A broker that is there and serves, without the way of its heartbeats."""
    broker = BrokerImage(
        BrokerId(id),
        on.image.offset + 1,
        id.to_bytes(16, "big"),
        (Endpoint("PLAINTEXT", "localhost", 9092 + id, 0),),
        rack,
        fenced=False,
        in_controlled_shutdown=False,
        directories=(DIRECTORY,),
    )
    on._decide([registration_record(broker)])


def topic(
    name: str, partitions: int = 1, factor: int = 1, configs: Mapping[str, str | None] | None = None
) -> CreatableTopic:
    return CreatableTopic(
        name=name,
        num_partitions=partitions,
        replication_factor=factor,
        configs=[CreatableTopicConfig(name=key, value=value) for key, value in (configs or {}).items()],
    )


def assigned(name: str, *replicas: Sequence[int], indexes: Sequence[int] | None = None) -> CreatableTopic:
    return CreatableTopic(
        name=name,
        num_partitions=-1,
        replication_factor=-1,
        assignments=[
            CreatableReplicaAssignment(partition_index=index, broker_ids=list(brokers))
            for index, brokers in zip(indexes or range(len(replicas)), replicas)
        ],
    )


def create(
    on: Controller, *topics: CreatableTopic, version: int = 7, validate_only: bool = False
) -> list[CreatableTopicResult]:
    request = CreateTopicsRequest(topics=list(topics), validate_only=validate_only)
    decision = on.handle(request, version, WALL_MS)
    on.image.check()
    results: list[CreatableTopicResult] = decision.response.topics
    return results


def error_of(on: Controller, asked: CreatableTopic) -> ErrorCode:
    before = on.image
    (result,) = create(on, asked)
    if result.error_code:
        assert on.image == before
        assert result.error_message
        assert result.num_partitions == -1
    return ErrorCode(result.error_code)


# Creating topics.


def test_topic_is_created_with_what_was_asked() -> None:
    on = controller()
    decision = on.handle(CreateTopicsRequest(topics=[topic("a", 3, 1, {"retention.ms": "5"})]), 7, WALL_MS)
    (result,) = decision.response.topics
    made = on.image.topics["a"]
    assert (result.error_code, result.error_message) == (ErrorCode.NONE, None)
    assert (result.topic_id, result.num_partitions, result.replication_factor) == (made.id, 3, 1)
    assert [part.leader for part in made.partitions] == [1, 1, 1]
    assert made.partitions[0].directories == (DIRECTORY,)
    assert made.created_ms == WALL_MS
    assert on.image.topic_config("a") == {"retention.ms": "5"}
    # The order in which Kafka writes them: the topic, its settings, its partitions.
    assert [type(change) for change in decision.changes] == [
        TopicRecord,
        ConfigRecord,
        ConfigRecord,
        *[PartitionRecord] * 3,
    ]


def test_changes_replay_to_the_image_that_was_decided() -> None:
    on = controller(brokers=3)
    start = on.image
    decision = on.handle(CreateTopicsRequest(topics=[topic("a", 3, 2), topic("b", -1, -1)]), 7, WALL_MS)
    replayed, _ = start.apply([decode(encode(change)) for change in decision.changes])
    assert replayed == on.image


def test_second_request_sees_the_first_before_it_is_committed() -> None:
    on = controller()
    create(on, topic("a"))
    assert error_of(on, topic("a")) is ErrorCode.TOPIC_ALREADY_EXISTS


def test_validation_alone_changes_nothing_but_answers_the_same() -> None:
    on = controller()
    before = on.image
    request = CreateTopicsRequest(topics=[topic("a", 4), topic("a/b")], validate_only=True)
    decision = on.handle(request, 7, WALL_MS)
    assert decision.changes == [] and on.image is before
    assert [result.error_code for result in decision.response.topics] == [
        0,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
    ]
    assert decision.response.topics[0].num_partitions == 4


def test_defaults_come_from_the_settings_of_the_broker() -> None:
    on = controller(brokers=3, static={"num.partitions": "5", "default.replication.factor": "2"})
    (result,) = create(on, topic("a", -1, -1))
    assert (result.num_partitions, result.replication_factor) == (5, 2)
    (result,) = create(on, topic("b", 2, -1))
    assert (result.num_partitions, result.replication_factor) == (2, 2)


def test_answer_tells_all_settings_and_their_origins_since_version_5() -> None:
    on = controller(static={"log.segment.bytes": "2097152"})
    (result,) = create(on, topic("a", configs={"retention.ms": "77"}), version=5)
    told = {config.name: (config.value, config.config_source) for config in result.configs or []}
    assert told.keys() == TOPIC.keys()
    assert told["retention.ms"] == ("77", 1)
    assert told["segment.bytes"] == ("2097152", 4)
    assert told["cleanup.policy"] == ("delete", 5)
    (result,) = create(on, topic("b"), version=4)
    assert result.configs == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ä", "x" * 250])
def test_illegal_name_is_refused(name: str) -> None:
    assert error_of(controller(), topic(name)) is ErrorCode.INVALID_TOPIC_EXCEPTION


@pytest.mark.parametrize("name", [CONSUMER_OFFSETS, CLUSTER_METADATA, "__transaction_state"])
def test_names_of_internal_topics_are_refused_to_clients(name: str) -> None:
    assert error_of(controller(), topic(name)) is ErrorCode.INVALID_TOPIC_EXCEPTION


def test_name_that_differs_only_in_dots_and_underscores_is_refused() -> None:
    on = controller()
    create(on, topic("a.b_c"))
    assert error_of(on, topic("a_b.c")) is ErrorCode.INVALID_TOPIC_EXCEPTION
    assert error_of(on, topic("a-b-c")) is ErrorCode.NONE


def test_colliding_names_of_one_request_are_told_apart() -> None:
    on = controller()
    results = create(on, topic("a.b"), topic("a_b"))
    assert [result.error_code for result in results] == [0, ErrorCode.INVALID_TOPIC_EXCEPTION]
    assert set(on.image.topics) == {"a.b"}


def test_collision_ends_with_the_deletion_of_the_topic() -> None:
    on = controller()
    create(on, topic("a.b"))
    on.handle(DeleteTopicsRequest(topic_names=["a.b"]), 5, WALL_MS)
    assert error_of(on, topic("a_b")) is ErrorCode.NONE


def test_collisions_are_known_after_a_restart() -> None:
    on = controller()
    create(on, topic("a.b"))
    again = Controller(on.image, random=Random(2), broker=1, static={})
    assert error_of(again, topic("a_b")) is ErrorCode.INVALID_TOPIC_EXCEPTION


def test_name_given_twice_is_refused_once_and_not_created() -> None:
    on = controller()
    results = create(on, topic("a", 1), topic("b"), topic("a", 2))
    assert [(result.name, result.error_code) for result in results] == [
        ("a", ErrorCode.INVALID_REQUEST),
        ("b", ErrorCode.NONE),
    ]
    assert set(on.image.topics) == {"b"}


@pytest.mark.parametrize("count", [0, -2, -(2**31)])
def test_number_of_partitions_must_be_positive(count: int) -> None:
    assert error_of(controller(), topic("a", count)) is ErrorCode.INVALID_PARTITIONS


@pytest.mark.parametrize("factor", [0, -2, 2, 32767])
def test_replication_factor_must_be_possible(factor: int) -> None:
    assert error_of(controller(), topic("a", 1, factor)) is ErrorCode.INVALID_REPLICATION_FACTOR


@pytest.mark.parametrize("count", [creation.PARTITIONS_PER_REQUEST_MAX + 1, 2**31 - 1])
def test_request_for_very_many_partitions_is_refused_before_anything_is_built(count: int) -> None:
    assert error_of(controller(), topic("a", count)) is ErrorCode.POLICY_VIOLATION


def test_many_topics_of_one_request_share_its_limit() -> None:
    on = controller()
    half = creation.PARTITIONS_PER_REQUEST_MAX // 2
    results = create(on, topic("a", half), topic("b", half), topic("c"), version=4)
    assert [result.error_code for result in results] == [0, 0, ErrorCode.POLICY_VIOLATION]


def test_cluster_has_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "PARTITIONS_MAX", 10)
    on = controller()
    create(on, topic("a", 8))
    assert error_of(on, topic("b", 3)) is ErrorCode.POLICY_VIOLATION
    assert error_of(on, topic("b", 2)) is ErrorCode.NONE


@pytest.mark.parametrize(
    "configs",
    [
        {"retention.ms": "soon"},
        {"retention.ms": None},
        {"retention": "1"},
        {"message.format.version": "2.8"},
        {"cleanup.policy": "compress"},
        {"compression.type": "zstd"},
        {"remote.storage.enable": "true"},
        {"penstock.created.ms": "1"},
        {"min.compaction.lag.ms": "5", "max.compaction.lag.ms": "4"},
        {"log.retention.ms": "1"},
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(configs: dict[str, str | None]) -> None:
    assert error_of(controller(), topic("a", configs=configs)) is ErrorCode.INVALID_CONFIG


def test_setting_given_twice_is_refused() -> None:
    asked = topic("a", configs={"retention.ms": "1"})
    asked.configs *= 2
    assert error_of(controller(), asked) is ErrorCode.INVALID_CONFIG


def test_assigned_replicas_are_taken_as_they_are() -> None:
    on = controller(brokers=3)
    (result,) = create(on, assigned("a", (3, 1), (2, 3), indexes=(1, 0)))
    assert (result.num_partitions, result.replication_factor) == (2, 2)
    assert [part.replicas for part in on.image.topics["a"].partitions] == [(2, 3), (3, 1)]


@pytest.mark.parametrize(
    "asked",
    [
        assigned("a", ()),
        assigned("a", (1, 1)),
        assigned("a", (1, 2), (1,)),
        assigned("a", (9,)),
        assigned("a", (1,), (1,), indexes=(0, 2)),
        assigned("a", (1,), (1,), indexes=(1, 2)),
        assigned("a", (1,), (1,), indexes=(0, 0)),
    ],
    ids=["empty", "twice", "uneven", "unknown", "gap", "not from 0", "repeated"],
)
def test_assignments_that_cannot_be_are_refused(asked: CreatableTopic) -> None:
    assert error_of(controller(brokers=2), asked) is ErrorCode.INVALID_REPLICA_ASSIGNMENT


def test_a_refused_assignment_names_the_broker_that_nobody_knows() -> None:
    (result,) = create(controller(brokers=2), assigned("a", (1, 9)))
    assert result.error_message == "Partition 0 is assigned broker 9, which is not registered."


@pytest.mark.parametrize(("partitions", "factor"), [(1, -1), (-1, 1)])
def test_assignments_and_numbers_together_are_refused(partitions: int, factor: int) -> None:
    asked = assigned("a", (1,))
    asked.num_partitions, asked.replication_factor = partitions, factor
    assert error_of(controller(), asked) is ErrorCode.INVALID_REQUEST


def test_leader_is_the_first_replica_that_is_active() -> None:
    on = controller(brokers=3)
    on.apply([FenceBrokerRecord(id=1, epoch=on.image.brokers[BrokerId(1)].epoch)])
    create(on, assigned("a", (1, 2, 3)))
    (part,) = on.image.topics["a"].partitions
    assert (part.leader, part.isr) == (2, (2, 3))
    assert error_of(on, assigned("b", (1,))) is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    on.apply([UnfenceBrokerRecord(id=1, epoch=on.image.brokers[BrokerId(1)].epoch)])
    assert error_of(on, assigned("b", (1,))) is ErrorCode.NONE


def test_leaders_are_spread_over_the_brokers_and_replicas_over_the_racks() -> None:
    on = controller(brokers=4, racks=["x", "x", "y", "y"])
    create(on, topic("a", 8, 2))
    parts = on.image.topics["a"].partitions
    assert sorted(part.leader for part in parts) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert all({broker <= 2 for broker in part.replicas} == {True, False} for part in parts)


def test_ids_are_random_uuids_that_no_command_takes_for_an_option() -> None:
    on = controller()
    create(on, *(topic(f"t{number}") for number in range(300)), version=4)
    ids = set(on.image.topics_by_id)
    assert len(ids) == 300 and CLUSTER_METADATA_ID not in ids
    assert all(id[6] >> 4 == 4 and id[8] >> 6 == 2 for id in ids)
    assert not any(format_id(id).startswith("-") for id in ids)


def test_the_same_seed_decides_the_same() -> None:
    images = []
    for _ in range(2):
        on = controller(brokers=5, seed=7)
        create(on, topic("a", 7, 3), topic("b", 2, 2))
        images.append(on.image)
    assert images[0] == images[1]


def test_internal_topic_may_be_compacted() -> None:
    on = controller()
    decision = on.create_internal_topic(CONSUMER_OFFSETS, 50, 1, {"cleanup.policy": "compact"}, WALL_MS)
    assert decision.response.error_code == ErrorCode.NONE
    assert len(on.image.topics[CONSUMER_OFFSETS].partitions) == 50
    assert on.image.topic_config(CONSUMER_OFFSETS) == {"cleanup.policy": "compact"}
    again = on.create_internal_topic(CONSUMER_OFFSETS, 50, 1, {}, WALL_MS)
    assert again.response.error_code == ErrorCode.TOPIC_ALREADY_EXISTS and again.changes == []
    assert error_of(on, topic(CONSUMER_OFFSETS)) is ErrorCode.TOPIC_ALREADY_EXISTS


def test_internal_topic_waits_for_enough_brokers() -> None:
    on = controller()
    decision = on.create_internal_topic(CONSUMER_OFFSETS, 50, 3, {}, WALL_MS)
    assert decision.response.error_code == ErrorCode.INVALID_REPLICATION_FACTOR
    assert decision.changes == []


# Deleting topics.


def delete(on: Controller, *names: str, version: int = 5) -> list[DeletableTopicResult]:
    response: DeleteTopicsResponse = on.handle(
        DeleteTopicsRequest(topic_names=list(names)), version, WALL_MS
    ).response
    on.image.check()
    return response.responses


def delete_states(on: Controller, *states: tuple[str | None, bytes]) -> list[DeletableTopicResult]:
    asked = [DeleteTopicState(name=name, topic_id=id) for name, id in states]
    response: DeleteTopicsResponse = on.handle(DeleteTopicsRequest(topics=asked), 6, WALL_MS).response
    on.image.check()
    return response.responses


def test_topic_is_deleted_by_name() -> None:
    on = controller()
    create(on, topic("a"), topic("b"))
    id = on.image.topics["a"].id
    decision = on.handle(DeleteTopicsRequest(topic_names=["a"]), 5, WALL_MS)
    assert decision.changes == [RemoveTopicRecord(topic_id=id)]
    assert set(on.image.topics) == {"b"}


def test_topic_is_deleted_by_id() -> None:
    on = controller()
    create(on, topic("a"))
    id = on.image.topics["a"].id
    (result,) = delete_states(on, (None, id))
    assert (result.name, result.topic_id, result.error_code) == ("a", id, ErrorCode.NONE)
    assert on.image.topics == {}


def test_missing_topics_are_reported_by_what_they_were_asked_by() -> None:
    on = controller()
    by_name, by_id = delete_states(on, ("a", bytes(16)), (None, b"x" * 16))
    assert (by_name.name, by_name.error_code) == ("a", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert (by_id.name, by_id.topic_id, by_id.error_code) == (None, b"x" * 16, ErrorCode.UNKNOWN_TOPIC_ID)


def test_topic_named_twice_is_not_deleted() -> None:
    on = controller()
    create(on, topic("a"))
    assert [result.error_code for result in delete(on, "a", "a")] == [ErrorCode.INVALID_REQUEST]
    id = on.image.topics["a"].id
    results = delete_states(on, ("a", bytes(16)), (None, id))
    assert [result.error_code for result in results] == [ErrorCode.INVALID_REQUEST] * 2
    assert "a" in on.image.topics


def test_topic_is_named_by_name_or_by_id_but_not_both_or_neither() -> None:
    on = controller()
    create(on, topic("a"))
    results = delete_states(on, ("a", on.image.topics["a"].id), (None, bytes(16)))
    assert [result.error_code for result in results] == [ErrorCode.INVALID_REQUEST] * 2
    assert "a" in on.image.topics


def test_internal_topics_are_not_deleted() -> None:
    on = controller()
    on.create_internal_topic(CONSUMER_OFFSETS, 1, 1, {}, WALL_MS)
    (result,) = delete(on, CONSUMER_OFFSETS)
    assert result.error_code == ErrorCode.INVALID_REQUEST
    assert CONSUMER_OFFSETS in on.image.topics


@pytest.mark.parametrize(
    ("version", "error"), [(1, ErrorCode.INVALID_REQUEST), (3, ErrorCode.TOPIC_DELETION_DISABLED)]
)
def test_deletion_can_be_switched_off(version: int, error: ErrorCode) -> None:
    on = controller(static={"delete.topic.enable": "false"})
    create(on, topic("a"))
    assert [result.error_code for result in delete(on, "a", version=version)] == [error]
    assert "a" in on.image.topics


# Adding partitions.


def add(
    on: Controller,
    name: str,
    count: int,
    assignments: Sequence[Sequence[int]] | None = None,
    validate_only: bool = False,
) -> CreatePartitionsTopicResult:
    asked = CreatePartitionsTopic(
        name=name,
        count=count,
        assignments=None
        if assignments is None
        else [CreatePartitionsAssignment(broker_ids=list(brokers)) for brokers in assignments],
    )
    request = CreatePartitionsRequest(topics=[asked], validate_only=validate_only)
    before = on.image
    decision = on.handle(request, 3, WALL_MS)
    on.image.check()
    (result,) = decision.response.results
    if result.error_code or validate_only:
        assert on.image is before
    typed: CreatePartitionsTopicResult = result
    return typed


def test_partitions_are_added_and_the_old_ones_stay() -> None:
    on = controller(brokers=3)
    create(on, topic("a", 2, 2))
    before = on.image.topics["a"].partitions
    assert add(on, "a", 5).error_code == ErrorCode.NONE
    after = on.image.topics["a"].partitions
    assert after[:2] == before
    assert [part.index for part in after] == [0, 1, 2, 3, 4]
    assert all(len(part.replicas) == 2 for part in after)


def test_new_leaders_go_on_where_the_old_ones_ended() -> None:
    on = controller(brokers=3)
    create(on, topic("a", 2))
    add(on, "a", 6)
    leaders = [part.leader for part in on.image.topics["a"].partitions]
    assert sorted(leaders[:3]) == sorted(leaders[3:]) == [1, 2, 3]


@pytest.mark.parametrize("racks", [(), ("x", "x", "y", "y")])
@pytest.mark.parametrize("step", [1, 3])
def test_a_topic_that_grows_little_by_little_is_spread_as_one_made_at_once(
    racks: tuple[str, ...], step: int
) -> None:
    on = controller(brokers=4, racks=racks)
    create(on, topic("a", 1, 2))
    for count in range(1 + step, 26, step):
        assert add(on, "a", count).error_code == ErrorCode.NONE
    parts = on.image.topics["a"].partitions
    leaders = Counter(part.leader for part in parts)
    replicas = Counter(broker for part in parts for broker in part.replicas)
    assert max(leaders.values()) - min(leaders[broker] for broker in on.image.brokers) <= 1
    assert max(replicas.values()) - min(replicas[broker] for broker in on.image.brokers) <= 1


@pytest.mark.parametrize("count", [2, 1, 0, -1])
def test_partitions_never_become_fewer_or_stay_as_many(count: int) -> None:
    on = controller()
    create(on, topic("a", 2))
    assert add(on, "a", count).error_code == ErrorCode.INVALID_PARTITIONS


@pytest.mark.parametrize("count", [2**31 - 1, creation.PARTITIONS_PER_REQUEST_MAX + 2])
def test_very_many_new_partitions_are_refused(count: int) -> None:
    on = controller()
    create(on, topic("a"))
    assert add(on, "a", count).error_code == ErrorCode.POLICY_VIOLATION


def test_partitions_of_missing_and_internal_topics_are_refused() -> None:
    on = controller()
    on.create_internal_topic(CONSUMER_OFFSETS, 1, 1, {}, WALL_MS)
    assert add(on, "a", 2).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert add(on, CONSUMER_OFFSETS, 2).error_code == ErrorCode.INVALID_REQUEST


def test_new_partitions_may_be_assigned() -> None:
    on = controller(brokers=3)
    create(on, topic("a", 1, 2))
    assert add(on, "a", 3, [(2, 3), (3, 1)]).error_code == ErrorCode.NONE
    assert [part.replicas for part in on.image.topics["a"].partitions[1:]] == [(2, 3), (3, 1)]


@pytest.mark.parametrize("assignments", [[], [(1, 2), (2, 1)], [(1,)], [(1, 1)], [(1, 9)], [()]], ids=str)
def test_new_partitions_that_cannot_be_assigned_so_are_refused(assignments: list[tuple[int, ...]]) -> None:
    on = controller(brokers=3)
    create(on, topic("a", 1, 2))
    assert add(on, "a", 2, assignments).error_code == ErrorCode.INVALID_REPLICA_ASSIGNMENT


def test_new_partitions_can_be_validated_only() -> None:
    on = controller()
    create(on, topic("a"))
    assert add(on, "a", 4, validate_only=True).error_code == ErrorCode.NONE


def test_topic_to_grow_may_be_named_once() -> None:
    on = controller()
    create(on, topic("a"))
    asked = [CreatePartitionsTopic(name="a", count=count, assignments=None) for count in (2, 3)]
    decision = on.handle(CreatePartitionsRequest(topics=asked), 3, WALL_MS)
    assert [result.error_code for result in decision.response.results] == [ErrorCode.INVALID_REQUEST]
    assert decision.changes == []


# Brokers, producer ids and the beginning.


def test_metadata_log_begins_with_its_version() -> None:
    on = Controller(Image(), random=Random(1), broker=1, static={})
    decision = on.found_cluster()
    assert [type(change) for change in decision.changes] == [FeatureLevelRecord]
    assert METADATA_VERSION in on.image.features
    assert on.found_cluster().changes == []


def test_producer_ids_come_in_blocks_that_never_overlap() -> None:
    on = controller(brokers=2)
    epochs = {id: known.epoch for id, known in on.image.brokers.items()}
    blocks = [
        on.allocate_producer_ids(id, epoch).response for id, epoch in [*epochs.items(), *epochs.items()]
    ]
    assert blocks == [ProducerIds(first, 1000) for first in (0, 1000, 2000, 3000)]
    assert on.image.next_producer_id == 4000


def test_producer_ids_are_for_registered_brokers_of_this_epoch() -> None:
    on = controller()
    assert on.allocate_producer_ids(9, 0).response is ErrorCode.BROKER_ID_NOT_REGISTERED
    assert on.allocate_producer_ids(1, 99).response is ErrorCode.STALE_BROKER_EPOCH


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_sequence_of_requests_leaves_a_consistent_image(data: st.DataObject) -> None:
    brokers = data.draw(st.integers(1, 4))
    on = controller(brokers=brokers, seed=data.draw(st.integers(0, 99)))
    log: list[Message] = list(on.image.snapshot())
    names = st.sampled_from(["a", "b", "a.b", "a_b", "c d"])
    numbers = st.integers(-2, 5)
    for _ in range(data.draw(st.integers(1, 12))):
        request: Message
        match data.draw(st.sampled_from(["create", "delete", "add"])):
            case "create":
                asked = [topic(data.draw(names), data.draw(numbers), data.draw(numbers)) for _ in range(2)]
                request = CreateTopicsRequest(topics=asked)
            case "delete":
                request = DeleteTopicsRequest(topic_names=[data.draw(names), data.draw(names)])
            case _:
                grown = CreatePartitionsTopic(
                    name=data.draw(names), count=data.draw(numbers), assignments=None
                )
                request = CreatePartitionsRequest(topics=[grown])
        log += on.handle(request, 3, WALL_MS).changes
        on.image.check()
        assert not {"a.b", "a_b"} <= on.image.topics.keys()
    replayed, _ = Image().apply([decode(encode(change)) for change in log])
    assert replayed == on.image
