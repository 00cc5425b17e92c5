"""ApiVersions, which is the handshake, UpdateFeatures and DescribeCluster.

An unknown version of ApiVersions is answered in version 0 with UNSUPPORTED_VERSION and our own range, so that the
client can try again (KIP-511).
"""

from __future__ import annotations

from penstock.protocol.messages import OPERATIONS_OMITTED, TIME_UNKNOWN
from penstock.protocol.schema import (
    OWN_TAGS,
    Message,
    Response,
    array,
    boolean,
    int8,
    int16,
    int32,
    int64,
    string,
)


class ApiVersionsRequest(Message, key=18, versions="0-4", flexible="3+"):
    client_software_name: str = string("3+")
    client_software_version: str = string("3+")


class ApiVersion(Message):
    api_key: int = int16()
    min_version: int = int16()
    max_version: int = int16()


class SupportedFeatureKey(Message):
    name: str = string()
    min_version: int = int16()
    max_version: int = int16()


class FinalizedFeatureKey(Message):
    name: str = string()
    max_version_level: int = int16()
    min_version_level: int = int16()


class ApiVersionsResponse(Response, key=18, versions="0-4", flexible="3+"):
    error_code: int = int16()
    api_keys: list[ApiVersion] = array(ApiVersion)
    throttle_time_ms: int = int32("1+")
    supported_features: list[SupportedFeatureKey] = array(SupportedFeatureKey, "3+", tag=0)
    finalized_features_epoch: int = int64("3+", default=-1, tag=1)
    finalized_features: list[FinalizedFeatureKey] = array(FinalizedFeatureKey, "3+", tag=2)
    zk_migration_ready: bool = boolean("3+", tag=3)


class FeatureUpdateKey(Message):
    feature: str = string()
    max_version_level: int = int16()
    allow_downgrade: bool = boolean("0")
    # 1 upgrade, 2 safe downgrade, 3 unsafe downgrade.
    upgrade_type: int = int8("1+", default=1)


class UpdateFeaturesRequest(Message, key=57, versions="0-2", flexible="0+"):
    timeout_ms: int = int32(default=60_000)
    feature_updates: list[FeatureUpdateKey] = array(FeatureUpdateKey)
    validate_only: bool = boolean("1+")


class UpdatableFeatureResult(Message):
    feature: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


class UpdateFeaturesResponse(Response, key=57, versions="0-2", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    results: list[UpdatableFeatureResult] = array(UpdatableFeatureResult, "0-1")


class DescribeClusterRequest(Message, key=60, versions="0-2", flexible="0+"):
    include_cluster_authorized_operations: bool = boolean()
    endpoint_type: int = int8("1+", default=1)
    include_fenced_brokers: bool = boolean("2+")
    # Ours: whether to include the clock differences.
    include_clocks: bool = boolean(tag=OWN_TAGS)


class DescribeClusterBroker(Message):
    broker_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable=True, default=None)
    is_fenced: bool = boolean("2+")
    # Ours: ahead of the median of all brokers' clocks. Only if ``include_clocks``.
    clock_ahead_ms: int = int64(default=TIME_UNKNOWN, tag=OWN_TAGS)


class DescribeClusterResponse(Response, key=60, versions="0-2", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    endpoint_type: int = int8("1+", default=1)
    cluster_id: str = string()
    controller_id: int = int32(default=-1)
    brokers: list[DescribeClusterBroker] = array(DescribeClusterBroker)
    cluster_authorized_operations: int = int32(default=OPERATIONS_OMITTED)
