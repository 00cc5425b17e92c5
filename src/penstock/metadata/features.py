"""Feature levels (KIP-584): what the whole cluster may use, because every broker in it understands it.

A broker registers the levels it supports. The level of a feature is finalized by a record in the metadata log, and
then holds for all nodes: ``image.features`` has it, and ApiVersions shows it to clients. From then on a broker that
does not support this level is not registered.

The rolling upgrade needs no step by hand: a feature without a level gets the highest one of this release as soon as
every registered broker supports it, also if it is fenced. A broker of an older release that is gone for good holds
that back until it is unregistered. UpdateFeatures can set another level; it is not raised again by itself.

Controllers do not register, so a node that is only a controller is not asked. It needs no feature to lead the
quorum: it may be upgraded last, but until then it registers brokers without their features, which they report
again in their heartbeats when a newer controller has taken over. Once penstock.security has a level, it cannot
handle the requests of clients either, which come in envelopes that it does not know; so upgrade controllers first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.metadata.changes import METADATA_VERSION, METADATA_VERSION_LEVEL
from penstock.metadata.decided_state import DecidedState
from penstock.metadata.image import Image
from penstock.metadata.refusal import Refusal
from penstock.metadata.values import FeatureRange
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import Feature
from penstock.protocol.messages.cluster import (
    FeatureUpdateKey,
    UpdatableFeatureResult,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from penstock.protocol.messages.metadata_records import FeatureLevelRecord

# 1: transactions as clients have had them since Kafka 0.11. 2: also those of KIP-890, which clients choose when
# they see this level. Without a level, transactional ids are refused.
TRANSACTION_VERSION = "transaction.version"

# 1: brokers compact logs, which then have offsets without a record and batches without any. Older brokers would
# take such a log for a damaged one. Without a level, nothing is compacted, and users cannot ask for it.
COMPACTION = "penstock.compaction"

# 1: brokers read records of credentials, ACLs and quotas, and forward clients' requests in envelopes. Without a
# level, no such record is written, and requests that would write one are refused.
SECURITY = "penstock.security"
SECURITY_LEVEL = 1

# What brokers of this release register. The metadata records have one format, so one level.
SUPPORTED_FEATURES = (
    FeatureRange(METADATA_VERSION, METADATA_VERSION_LEVEL, METADATA_VERSION_LEVEL),
    FeatureRange(TRANSACTION_VERSION, 0, 2),
    FeatureRange(COMPACTION, 0, 1),
    FeatureRange(SECURITY, 0, SECURITY_LEVEL),
)

# Upgrade types of UpdateFeatures. No feature here loses anything by a lower level, so the last two are the same.
UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3
# The results per feature were removed in this version: all updates of a request succeed, or none.
_NO_RESULTS_VERSION = 2

# Features in one registration.
FEATURES_MAX = 100
NAME_MAX = 1000


def may_compact(image: Image) -> bool:
    """Whether every broker understands a log that was compacted."""
    return image.features.get(COMPACTION, 0) >= 1


def may_secure(image: Image) -> bool:
    """Whether every broker reads records of credentials, ACLs and quotas."""
    return image.features.get(SECURITY, 0) >= 1


def ranges_of(features: Iterable[Feature]) -> tuple[FeatureRange, ...]:
    """The levels that a broker says it supports."""
    return tuple(
        FeatureRange(feature.name, feature.min_supported_version, feature.max_supported_version)
        for feature in features
    )


def are_valid(ranges: tuple[FeatureRange, ...]) -> bool:
    return (
        len(ranges) <= FEATURES_MAX
        and len({each.name for each in ranges}) == len(ranges)
        and all(0 <= each.level_min <= each.level_max and len(each.name) <= NAME_MAX for each in ranges)
    )


def unsupported_level(levels: Mapping[str, int], ranges: Iterable[FeatureRange]) -> tuple[str, int] | None:
    """The first finalized feature, with its level, that a broker with these ranges does not support."""
    supported = {each.name: each for each in ranges}
    for name, level in sorted(levels.items()):
        known = supported.get(name)
        # Older releases do not say which metadata they read. It has had one level so far.
        if known is None and name == METADATA_VERSION:
            continue
        if known is None or not known.level_min <= level <= known.level_max:
            return name, level
    return None


def raise_levels(decided: DecidedState) -> None:
    """Finalize each feature that has no level yet and that every registered broker supports."""
    image = decided.image
    if not image.brokers or METADATA_VERSION not in image.features:
        return
    for name, _, level in SUPPORTED_FEATURES:
        if name not in image.features and all(
            [broker.supports(name, level) for broker in image.brokers.values()]
        ):
            decided.take([FeatureLevelRecord(name=name, feature_level=level)])


def update_features(
    decided: DecidedState, request: UpdateFeaturesRequest, version: int
) -> UpdateFeaturesResponse:
    """Set levels, all or none."""
    updates = request.feature_updates
    try:
        if len({update.feature for update in updates}) < len(updates):
            raise Refusal(ErrorCode.INVALID_REQUEST, "A feature is named twice.")
        for update in updates:
            _check_update(decided, update)
    except Refusal as refusal:
        return UpdateFeaturesResponse(error_code=refusal.error, error_message=refusal.message)
    if not request.validate_only:
        decided.take(
            [
                FeatureLevelRecord(name=update.feature, feature_level=update.max_version_level)
                for update in updates
                if update.max_version_level != decided.image.features.get(update.feature, 0)
            ]
        )
    return UpdateFeaturesResponse(
        error_message=None,
        results=[
            UpdatableFeatureResult(feature=update.feature, error_message=None)
            for update in updates
            if version < _NO_RESULTS_VERSION
        ],
    )


def _check_update(decided: DecidedState, update: FeatureUpdateKey) -> None:
    """Raises Refusal."""
    name, level = update.feature, update.max_version_level
    supported = next((each for each in SUPPORTED_FEATURES if each.name == name), None)
    if supported is None:
        names = ", ".join(each.name for each in SUPPORTED_FEATURES)
        raise _invalid(f"There is no feature {name!r} whose level can be set. Features: {names}.")
    low, high = max(1, supported.level_min), supported.level_max
    if level == 0:
        raise _invalid(f"{name} cannot be turned off again. Its lowest level is {low}.")
    if not low <= level <= high:
        levels = f"level {low}" if low == high else f"levels {low} to {high}"
        raise _invalid(f"{name} has no level {level} in this release, only {levels}.")
    for id, broker in sorted(decided.image.brokers.items()):
        # Its level does not change, and older releases do not say which one they support.
        if name != METADATA_VERSION and not broker.supports(name, level):
            raise _invalid(
                f"Broker {id} does not support level {level} of {name}: upgrade it, or unregister it if it is "
                "gone for good."
            )
    # Version 0 has only this flag.
    kind = SAFE_DOWNGRADE if update.allow_downgrade else update.upgrade_type
    if kind not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        raise _invalid(f"There is no upgrade type {kind}. Types: 1 upgrade, 2 and 3 downgrade.")
    now = decided.image.features.get(name, 0)
    if level < now and kind == UPGRADE:
        raise _invalid(f"{name} is at level {now}. To lower it to {level}, ask for a downgrade.")
    if level > now and kind != UPGRADE:
        raise _invalid(f"{name} is at level {now}. To raise it to {level}, ask for an upgrade.")


def _invalid(message: str) -> Refusal:
    return Refusal(ErrorCode.INVALID_UPDATE_VERSION, message)
