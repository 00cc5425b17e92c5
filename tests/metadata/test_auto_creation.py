"""What asking for a topic does not create: names that were just refused, or deleted."""

from __future__ import annotations

import pytest

from penstock.metadata.auto_creation import HOLD_MS, NAMES_MAX, OLD_CLIENTS_HOLD_MS, AutoCreation
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest, DeleteTopicsRequest
from tests.metadata.ensemble import Ensemble

UNKNOWN = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
LONG_AGO_MS = 3_600_000


def created(ensemble: Ensemble, name: str, *, replicas: int = -1, validate_only: bool = False) -> int:
    """The error of an explicit creation."""
    topic = CreatableTopic(name=name, num_partitions=-1, replication_factor=replicas)
    request = CreateTopicsRequest(topics=[topic], validate_only=validate_only)
    return int(ensemble.handle(request, 7).topics[0].error_code)


def asked_for(ensemble: Ensemble, name: str, *, connected_for_ms: int = 0) -> int:
    """The error of a creation because a client asked for the topic."""
    topic = CreatableTopic(name=name, num_partitions=-1, replication_factor=-1)
    request = CreateTopicsRequest(topics=[topic], connected_for_ms=connected_for_ms)
    return int(ensemble.handle(request, 7, from_broker=True).topics[0].error_code)


def delete(ensemble: Ensemble, name: str) -> None:
    (result,) = ensemble.handle(DeleteTopicsRequest(topic_names=[name]), 5).responses
    assert result.error_code == 0


@pytest.fixture
def ensemble() -> Ensemble:
    return Ensemble()


def test_a_name_that_was_just_refused_is_not_created_by_asking_for_it(ensemble: Ensemble) -> None:
    assert created(ensemble, "a", replicas=9) == ErrorCode.INVALID_REPLICATION_FACTOR
    assert asked_for(ensemble, "a", connected_for_ms=LONG_AGO_MS) == UNKNOWN
    assert "a" not in ensemble.on.image.topics
    assert asked_for(ensemble, "b") == 0
    ensemble.now_ms += HOLD_MS
    assert asked_for(ensemble, "a") == 0


def test_a_refusal_of_what_was_only_to_be_validated_holds_nothing(ensemble: Ensemble) -> None:
    assert created(ensemble, "a", replicas=9, validate_only=True)
    assert asked_for(ensemble, "a") == 0


def test_a_topic_that_is_there_already_is_no_refusal(ensemble: Ensemble) -> None:
    assert created(ensemble, "a") == 0
    assert created(ensemble, "a") == ErrorCode.TOPIC_ALREADY_EXISTS
    assert asked_for(ensemble, "a") == ErrorCode.TOPIC_ALREADY_EXISTS


def test_a_deleted_topic_is_not_made_again_by_a_client_that_was_connected_before(ensemble: Ensemble) -> None:
    created(ensemble, "a")
    delete(ensemble, "a")
    for _ in range(10):
        assert asked_for(ensemble, "a", connected_for_ms=LONG_AGO_MS) == UNKNOWN
        ensemble.now_ms += OLD_CLIENTS_HOLD_MS // 10
    assert asked_for(ensemble, "a", connected_for_ms=LONG_AGO_MS) == 0


def test_a_client_that_connects_later_makes_it_again_after_a_moment(ensemble: Ensemble) -> None:
    created(ensemble, "a")
    delete(ensemble, "a")
    assert asked_for(ensemble, "a") == UNKNOWN
    ensemble.now_ms += HOLD_MS
    assert asked_for(ensemble, "a", connected_for_ms=HOLD_MS - 1) == 0


def test_creating_it_explicitly_works_at_once_and_ends_the_hold(ensemble: Ensemble) -> None:
    created(ensemble, "a")
    delete(ensemble, "a")
    assert created(ensemble, "a") == 0
    assert asked_for(ensemble, "a") == ErrorCode.TOPIC_ALREADY_EXISTS


def test_only_so_many_names_are_remembered() -> None:
    names = AutoCreation()
    for number in range(NAMES_MAX + 5):
        names.deleted(f"{number}", number)
        names.refused(f"{number}", number)
    names.check()
    assert not names.is_held("4", 0, NAMES_MAX + 5)
    assert names.is_held("5", LONG_AGO_MS, NAMES_MAX + 5)
