"""Feature levels: finalized when every broker supports them, and then required of every broker."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.metadata.changes import METADATA_VERSION, METADATA_VERSION_LEVEL
from penstock.metadata.controller import Controller
from penstock.metadata.features import (
    COMPACTION,
    FEATURES_MAX,
    SAFE_DOWNGRADE,
    SECURITY,
    SUPPORTED_FEATURES,
    TRANSACTION_VERSION,
    UNSAFE_DOWNGRADE,
    UPGRADE,
    may_compact,
    unsupported_level,
)
from penstock.metadata.image import Image
from penstock.metadata.values import FeatureRange
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import Feature, UnregisterBrokerRequest
from penstock.protocol.messages.cluster import FeatureUpdateKey, UpdateFeaturesRequest, UpdateFeaturesResponse
from penstock.protocol.messages.metadata_records import FeatureLevelRecord, RegisterBrokerRecord
from penstock.protocol.messages.topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from tests.metadata.ensemble import Ensemble

NEW = SUPPORTED_FEATURES
OLD: tuple[FeatureRange, ...] = ()
# Understands everything, but transactions only up to this level.
FIRST_ONLY = (FeatureRange(TRANSACTION_VERSION, 0, 1), *NEW[2:])
# A release with transactions and without compaction.
WITHOUT_COMPACTION = NEW[:2]


def told(ranges: Sequence[FeatureRange]) -> list[Feature]:
    return [
        Feature(name=name, min_supported_version=low, max_supported_version=high)
        for name, low, high in ranges
    ]


def level(on: Ensemble) -> int:
    return on.on.image.features.get(TRANSACTION_VERSION, 0)


def register(on: Ensemble, id: int, ranges: Sequence[FeatureRange], previous: int = -1) -> int:
    return on.register(id, previous=previous, features=told(ranges)).error_code


def cluster(*releases: Sequence[FeatureRange]) -> Ensemble:
    """Brokers from 1 on, each with the features of its release."""
    on = Ensemble(0)
    for id, ranges in enumerate(releases, 1):
        assert register(on, id, ranges) == ErrorCode.NONE
        on.settle()
        on.beat(id)
    return on


def update(
    on: Ensemble,
    to: int,
    kind: int = UPGRADE,
    *,
    name: str = TRANSACTION_VERSION,
    version: int = 2,
    validate_only: bool = False,
    allow_downgrade: bool = False,
) -> UpdateFeaturesResponse:
    asked = FeatureUpdateKey(
        feature=name, max_version_level=to, upgrade_type=kind, allow_downgrade=allow_downgrade
    )
    response: UpdateFeaturesResponse = on.handle(
        UpdateFeaturesRequest(feature_updates=[asked], validate_only=validate_only), version
    )
    return response


# Raised by the controller.


def test_a_cluster_of_this_release_has_the_highest_level_at_once() -> None:
    on = cluster(NEW)
    assert level(on) == 2
    assert register(on, 2, NEW) == ErrorCode.NONE
    assert [change.name for change in on.log if isinstance(change, FeatureLevelRecord)] == [
        METADATA_VERSION,
        TRANSACTION_VERSION,
        COMPACTION,
        SECURITY,
    ]


def test_a_cluster_without_brokers_has_no_level() -> None:
    on = Ensemble(0)
    on.settle()
    assert level(on) == 0


def test_one_broker_of_an_older_release_holds_the_level_back() -> None:
    on = cluster(OLD, NEW, NEW)
    on.advance(60_000, alive=(1, 2, 3))
    on.fail_over()
    assert level(on) == 0


def test_the_level_is_raised_with_the_registration_of_the_last_broker_that_is_upgraded() -> None:
    on = cluster(OLD, OLD, OLD)
    for id in (1, 2, 3):
        assert level(on) == 0
        assert register(on, id, NEW, on.broker(id).epoch) == ErrorCode.NONE
    assert level(on) == 2
    assert on.broker(3).features == NEW


def test_topics_may_be_compacted_once_every_broker_understands_compacted_logs() -> None:
    on = cluster(WITHOUT_COMPACTION, NEW, WITHOUT_COMPACTION)
    assert level(on) == 2 and not may_compact(on.on.image)
    compacted = CreatableTopic(
        name="a",
        num_partitions=1,
        replication_factor=1,
        configs=[CreatableTopicConfig(name="cleanup.policy", value="compact")],
    )
    request = CreateTopicsRequest(topics=[compacted])
    (refused,) = on.handle(request, 7).topics
    assert refused.error_code == ErrorCode.INVALID_CONFIG
    assert refused.error_message == (
        "cleanup.policy=compact: topics can be compacted once all brokers have been upgraded (`penstock features` "
        "shows penstock.compaction)."
    )
    for id in (1, 3):
        assert not may_compact(on.on.image)
        assert register(on, id, NEW, on.broker(id).epoch) == ErrorCode.NONE
        on.beat(id)
    assert may_compact(on.on.image)
    (created,) = on.handle(request, 7).topics
    assert created.error_code == ErrorCode.NONE
    # And there is no way back.
    assert register(on, 2, WITHOUT_COMPACTION, on.broker(2).epoch) == ErrorCode.UNSUPPORTED_VERSION


def test_a_fenced_broker_of_an_older_release_holds_it_back_until_it_is_unregistered() -> None:
    on = cluster(OLD, NEW, NEW)
    on.lost(1)
    assert not on.is_active(1) and level(on) == 0
    on.handle(UnregisterBrokerRequest(broker_id=1))
    assert level(on) == 2


def test_a_broker_that_supports_a_lower_level_only_holds_it_back() -> None:
    on = cluster(FIRST_ONLY, NEW)
    assert level(on) == 0
    register(on, 1, NEW, on.broker(1).epoch)
    assert level(on) == 2


def test_a_new_controller_raises_what_the_last_one_could_not_commit() -> None:
    on = cluster(OLD, OLD)
    for id in (1, 2):
        register(on, id, NEW, on.broker(id).epoch)
    without, _ = Image().apply([change for change in on.log if not _is_level(change)])
    controller = Controller(without, random=Random(1), broker=99, static={})
    controller.took_over(0)
    assert controller.next_deadline_ms(0) == 0
    decision = controller.tick(0, 0)
    assert FeatureLevelRecord(name=TRANSACTION_VERSION, feature_level=2) in decision.changes


def _is_level(change: object) -> bool:
    return isinstance(change, FeatureLevelRecord) and change.name == TRANSACTION_VERSION


def test_a_level_that_was_lowered_by_hand_is_not_raised_again() -> None:
    on = cluster(NEW, NEW)
    assert update(on, 1, SAFE_DOWNGRADE).error_code == ErrorCode.NONE
    register(on, 1, NEW, on.broker(1).epoch)
    on.fail_over()
    on.advance(30_000, alive=(1, 2))
    assert level(on) == 1


# Required of brokers.


def test_a_broker_that_does_not_support_the_level_is_not_registered() -> None:
    on = cluster(NEW)
    before = on.on.image
    for ranges in (OLD, FIRST_ONLY, NEW[:1], (FeatureRange(TRANSACTION_VERSION, 3, 4),)):
        assert register(on, 2, ranges) == ErrorCode.UNSUPPORTED_VERSION
    assert on.on.image is before
    update(on, 1, SAFE_DOWNGRADE)
    assert register(on, 2, FIRST_ONLY) == ErrorCode.NONE


def test_a_known_broker_that_went_back_to_an_older_release_is_not_registered_either() -> None:
    on = cluster(NEW, NEW)
    assert register(on, 2, OLD, on.broker(2).epoch) == ErrorCode.UNSUPPORTED_VERSION
    assert on.broker(2).features == NEW


def test_a_broker_with_other_metadata_is_not_registered() -> None:
    on = Ensemble(0)
    other = FeatureRange(METADATA_VERSION, METADATA_VERSION_LEVEL + 1, METADATA_VERSION_LEVEL + 1)
    assert register(on, 1, (other,)) == ErrorCode.UNSUPPORTED_VERSION


def test_features_that_nobody_here_knows_are_recorded_and_do_no_harm() -> None:
    later = (*NEW, FeatureRange("group.version", 0, 1))
    on = cluster(later)
    assert on.broker(1).features == later
    assert "group.version" not in on.on.image.features


@pytest.mark.parametrize(
    "ranges",
    [
        (FeatureRange("a", 2, 1),),
        (FeatureRange("a", -1, 1),),
        (FeatureRange("a", 0, 1), FeatureRange("a", 0, 1)),
        (FeatureRange("a" * 1001, 0, 1),),
        tuple(FeatureRange(f"f{number}", 0, 1) for number in range(FEATURES_MAX + 1)),
    ],
)
def test_ranges_that_make_no_sense_are_refused(ranges: tuple[FeatureRange, ...]) -> None:
    assert register(Ensemble(0), 1, ranges) == ErrorCode.INVALID_REGISTRATION


# Brokers that a controller of an older release has registered.


def test_a_heartbeat_adds_the_features_that_an_older_controller_did_not_record() -> None:
    on = cluster(OLD, OLD)
    epochs = [on.broker(id).epoch for id in (1, 2)]
    on.beat(1, features=told(NEW))
    assert (on.broker(1).features, level(on)) == (NEW, 0)
    on.beat(2, features=told(NEW))
    assert level(on) == 2
    assert [on.broker(id).epoch for id in (1, 2)] == epochs
    assert on.is_active(1) and on.is_active(2)
    length = len(on.log)
    on.beat(2, features=told(NEW))
    assert len(on.log) == length


def test_a_fenced_broker_that_reports_its_features_becomes_active_with_the_same_heartbeat() -> None:
    on = Ensemble(0)
    register(on, 1, OLD)
    on.settle()
    assert not on.beat(1, features=told(NEW)).is_fenced
    assert on.is_active(1) and on.broker(1).features == NEW and level(on) == 2


def test_a_registration_that_is_repeated_by_another_release_has_its_features() -> None:
    on = Ensemble(0)
    incarnation = b"i" * 16
    first = on.register(1, incarnation=incarnation, features=told(OLD))
    again = on.register(1, incarnation=incarnation, features=told(NEW))
    assert again.broker_epoch == first.broker_epoch
    assert on.broker(1).features == NEW and level(on) == 2


def test_a_heartbeat_with_features_that_make_no_sense_or_do_not_suffice_changes_nothing() -> None:
    on = cluster(NEW, NEW)
    for ranges in (FIRST_ONLY, (FeatureRange("a", 2, 1),)):
        assert on.beat(1, features=told(ranges)).error_code == ErrorCode.NONE
        assert on.broker(1).features == NEW


# UpdateFeatures.


def test_a_level_can_be_lowered_and_raised_in_every_version() -> None:
    on = cluster(NEW)
    for version in (1, 2):
        for kind in (SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
            assert update(on, 1, kind, version=version).error_code == ErrorCode.NONE
            assert level(on) == 1
            assert update(on, 2, version=version).error_code == ErrorCode.NONE
            assert level(on) == 2
    assert update(on, 1, version=0, allow_downgrade=True).error_code == ErrorCode.NONE
    assert level(on) == 1


def test_results_per_feature_are_there_in_versions_that_have_them() -> None:
    on = cluster(NEW)
    for version, results in ((0, 1), (1, 1), (2, 0)):
        response = update(on, 2, version=version)
        assert (response.error_code, response.error_message) == (ErrorCode.NONE, None)
        assert [each.error_code for each in response.results] == [ErrorCode.NONE] * results


def test_the_present_level_can_be_set_and_writes_nothing() -> None:
    on = cluster(NEW)
    length = len(on.log)
    for kind in (UPGRADE, SAFE_DOWNGRADE):
        assert update(on, 2, kind).error_code == ErrorCode.NONE
    assert update(on, METADATA_VERSION_LEVEL, name=METADATA_VERSION).error_code == ErrorCode.NONE
    assert len(on.log) == length


def test_validating_changes_nothing() -> None:
    on = cluster(NEW)
    assert update(on, 1, SAFE_DOWNGRADE, validate_only=True).error_code == ErrorCode.NONE
    refused = update(on, 3, validate_only=True)
    assert (refused.error_code, level(on)) == (ErrorCode.INVALID_UPDATE_VERSION, 2)


@pytest.mark.parametrize(
    ("name", "to", "kind", "message"),
    [
        (TRANSACTION_VERSION, 3, UPGRADE, "no level 3 in this release, only levels 1 to 2"),
        (TRANSACTION_VERSION, -1, SAFE_DOWNGRADE, "no level -1 in this release"),
        (TRANSACTION_VERSION, 0, SAFE_DOWNGRADE, "cannot be turned off again. Its lowest level is 1"),
        (TRANSACTION_VERSION, 0, UNSAFE_DOWNGRADE, "cannot be turned off"),
        (TRANSACTION_VERSION, 1, UPGRADE, "is at level 2. To lower it to 1, ask for a downgrade"),
        (TRANSACTION_VERSION, 1, 0, "no upgrade type 0"),
        (TRANSACTION_VERSION, 1, 4, "no upgrade type 4"),
        (METADATA_VERSION, 24, SAFE_DOWNGRADE, "no level 24 in this release, only level 25"),
        ("kraft.version", 1, UPGRADE, "no feature 'kraft.version' whose level can be set"),
        ("", 1, UPGRADE, "no feature ''"),
    ],
)
def test_what_cannot_be_set_is_refused_with_the_reason(name: str, to: int, kind: int, message: str) -> None:
    on = cluster(NEW)
    response = update(on, to, kind, name=name)
    assert response.error_code == ErrorCode.INVALID_UPDATE_VERSION
    assert message in (response.error_message or "")
    assert level(on) == 2


def test_an_upgrade_that_was_asked_for_as_a_downgrade_is_refused() -> None:
    on = cluster(NEW)
    update(on, 1, SAFE_DOWNGRADE)
    response = update(on, 2, SAFE_DOWNGRADE)
    assert response.error_message == (
        "transaction.version is at level 1. To raise it to 2, ask for an upgrade."
    )


def test_a_level_that_a_broker_does_not_support_cannot_be_set() -> None:
    on = cluster(FIRST_ONLY[:1], NEW, OLD)
    assert update(on, 1).error_message == (
        "Broker 3 does not support level 1 of transaction.version: upgrade it, or unregister it if it is gone for "
        "good."
    )
    on.handle(UnregisterBrokerRequest(broker_id=3))
    assert update(on, 2).error_code == ErrorCode.INVALID_UPDATE_VERSION
    assert update(on, 1).error_code == ErrorCode.NONE
    assert level(on) == 1


def test_several_updates_are_made_together_or_not_at_all() -> None:
    on = cluster(NEW)
    one = FeatureUpdateKey(feature=TRANSACTION_VERSION, max_version_level=1, upgrade_type=SAFE_DOWNGRADE)
    other = FeatureUpdateKey(feature="other", max_version_level=1)
    assert on.handle(UpdateFeaturesRequest(feature_updates=[one, other]), 2).error_code
    assert level(on) == 2
    twice = on.handle(UpdateFeaturesRequest(feature_updates=[one, one]), 2)
    assert (twice.error_code, level(on)) == (ErrorCode.INVALID_REQUEST, 2)
    assert on.handle(UpdateFeaturesRequest(feature_updates=[]), 1).error_code == ErrorCode.NONE


# In the log.


def test_a_snapshot_keeps_what_brokers_support() -> None:
    image = cluster(NEW, NEW).on.image
    again, _ = Image().apply(image.snapshot())
    assert again == image
    assert again.brokers[BrokerId(1)].supports(TRANSACTION_VERSION, 2)


def test_the_log_of_an_older_release_has_no_level_and_is_raised_when_its_brokers_are_upgraded() -> None:
    on = cluster(OLD, OLD)
    assert all(not change.features for change in on.log if isinstance(change, RegisterBrokerRecord))
    on.fail_over()
    assert level(on) == 0
    for id in (1, 2):
        on.beat(id, features=told(NEW))
    assert level(on) == 2


# Brokers register, go, come back with another release, report late; updates at any time.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("register"), st.integers(1, 3), st.sampled_from((NEW, OLD, FIRST_ONLY))),
        st.tuples(st.just("beat"), st.integers(1, 3), st.sampled_from((NEW, FIRST_ONLY))),
        st.tuples(st.just("unregister"), st.integers(1, 3), st.just(OLD)),
        st.tuples(st.just("update"), st.integers(-1, 3), st.just(OLD)),
        st.tuples(st.just("fail over"), st.just(0), st.just(OLD)),
    ),
    max_size=30,
)


@given(STEPS)
def test_every_registered_broker_supports_the_level_whatever_happens(
    steps: list[tuple[str, int, tuple[FeatureRange, ...]]],
) -> None:
    on = Ensemble(0)
    for what, number, ranges in steps:
        before = level(on)
        known = on.on.image.brokers.get(BrokerId(number))
        if what == "register":
            register(on, number, ranges, -1 if known is None else known.epoch)
        elif what == "beat":
            on.beat(number, features=told(ranges))
        elif what == "unregister":
            on.handle(UnregisterBrokerRequest(broker_id=number))
        elif what == "update":
            update(on, number, UPGRADE if number > before else SAFE_DOWNGRADE)
        else:
            on.fail_over()
        image = on.on.image
        assert not before or level(on), "it was turned off"
        assert all(
            unsupported_level(image.features, each.features) is None for each in image.brokers.values()
        )
        supported = bool(image.brokers) and all(
            broker.supports(TRANSACTION_VERSION, 2) for broker in image.brokers.values()
        )
        assert level(on) or not supported
