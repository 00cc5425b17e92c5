"""`penstock features` against answers made up here; the levels themselves are tested elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.protocol.apis import API_VERSIONS, APIS
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.cluster import (
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
    UpdatableFeatureResult,
    UpdateFeaturesResponse,
)
from tests.cli.conftest import Penstock
from tests.cli.fake_broker import FakeBroker

UPGRADE, SAFE_DOWNGRADE = 1, 2


class Featured(FakeBroker):
    """A broker that supports levels 0 to 2, in a cluster at some level; None for no level yet."""

    level: int | None = 2

    def _versions(self) -> ApiVersionsResponse:
        versions = super()._versions()
        versions.api_keys.append(self._version(APIS[API_VERSIONS]))
        versions.supported_features = [
            SupportedFeatureKey(name="transaction.version", min_version=0, max_version=2),
            SupportedFeatureKey(name="metadata.version", min_version=25, max_version=25),
        ]
        levels = {"metadata.version": 25, "later.version": 1}
        if self.level is not None:
            levels["transaction.version"] = self.level
        versions.finalized_features = [
            FinalizedFeatureKey(name=name, min_version_level=level, max_version_level=level)
            for name, level in levels.items()
        ]
        return versions


@pytest.fixture
def cluster() -> Iterator[Featured]:
    fake = Featured(UpdateFeaturesResponse(error_message=None))
    with fake:
        yield fake


def test_listing_shows_what_is_supported_and_what_is_used(penstock: Penstock, cluster: Featured) -> None:
    expected = [
        ["FEATURE", "SUPPORTED", "LEVEL"],
        ["later.version", "-", "1"],
        ["metadata.version", "25", "25"],
        ["transaction.version", "0-2", "2"],
    ]
    for words in (("features",), ("features", "list")):
        outcome = penstock(*words, "--bootstrap", cluster.bootstrap)
        assert (outcome.code, outcome.rows) == (0, expected)


def test_a_feature_that_is_not_used_yet_has_no_level(penstock: Penstock, cluster: Featured) -> None:
    cluster.level = None
    document = penstock("features", "list", "--json", "--bootstrap", cluster.bootstrap).json
    assert document["features"][-1] == {"name": "transaction.version", "min": 0, "max": 2, "level": None}
    assert document["features"][0] == {"name": "later.version", "min": None, "max": None, "level": 1}


@pytest.mark.parametrize(
    ("now", "to", "kind", "said"),
    [
        (2, 1, SAFE_DOWNGRADE, "set transaction.version to 1, before 2\n"),
        (1, 2, UPGRADE, "set transaction.version to 2, before 1\n"),
        (2, 2, UPGRADE, "set transaction.version to 2\n"),
        (None, 1, UPGRADE, "set transaction.version to 1\n"),
    ],
)
def test_setting_asks_for_an_upgrade_or_a_downgrade_by_itself(
    penstock: Penstock, cluster: Featured, now: int | None, to: int, kind: int, said: str
) -> None:
    cluster.level = now
    outcome = penstock("features", "set", "transaction.version", str(to), "--bootstrap", cluster.bootstrap)
    assert (outcome.code, outcome.out) == (0, said)
    (asked,) = cluster.asked
    (update,) = asked.feature_updates
    assert (update.feature, update.max_version_level, update.upgrade_type) == (
        "transaction.version",
        to,
        kind,
    )
    assert not asked.validate_only


def test_a_dry_run_only_validates(penstock: Penstock, cluster: Featured) -> None:
    words = ("features", "set", "transaction.version", "1", "--dry-run", "--bootstrap", cluster.bootstrap)
    assert penstock(*words).out == "could set transaction.version to 1, now 2\n"
    assert penstock(*words, "--json").json == {
        "feature": "transaction.version",
        "from": 2,
        "to": 1,
        "dry_run": True,
    }
    assert all(asked.validate_only for asked in cluster.asked)


def test_a_refusal_gives_the_reason(penstock: Penstock) -> None:
    refused = UpdateFeaturesResponse(
        error_code=ErrorCode.INVALID_UPDATE_VERSION, error_message="Broker 3 does not support it."
    )
    with Featured(refused) as cluster:
        outcome = penstock("features", "set", "transaction.version", "2", "--bootstrap", cluster.bootstrap)
    assert outcome.code == 1
    assert outcome.err == ("penstock: could not set transaction.version to 2: Broker 3 does not support it\n")


def test_a_refusal_of_the_one_feature_gives_the_reason_too(penstock: Penstock) -> None:
    result = UpdatableFeatureResult(
        feature="transaction.version", error_code=ErrorCode.INVALID_UPDATE_VERSION, error_message=None
    )
    answer = UpdateFeaturesResponse(error_message=None, results=[result])
    with Featured(answer, newest={57: 1}) as cluster:
        outcome = penstock("features", "set", "transaction.version", "2", "--bootstrap", cluster.bootstrap)
    assert outcome.code == 1 and "invalid update version" in outcome.err


def test_a_broker_that_cannot_set_levels_says_so(penstock: Penstock) -> None:
    with Featured() as cluster:
        outcome = penstock("features", "set", "transaction.version", "1", "--bootstrap", cluster.bootstrap)
    assert outcome.code == 1 and "does not support UpdateFeatures" in outcome.err


@pytest.mark.parametrize("level", ["-1", "32768", "two"])
def test_a_level_that_is_none_is_wrong_usage(penstock: Penstock, level: str) -> None:
    assert penstock("features", "set", "transaction.version", "--", level).code == 2
