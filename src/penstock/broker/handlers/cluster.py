"""ApiVersions (0-4) and DescribeCluster (0-2): the APIs this broker serves, and the brokers of the cluster.

ApiVersions is answered in every version: a client with a newer one gets a version 0 response with our range and
tries again. Produce is advertised from version 0 although 3 is the oldest served, because librdkafka before 2.11
takes a higher minimum to mean "cannot compress" (KAFKA-18659).

The APIs of transactions are listed once transaction.version has a level: until then a broker of an older release,
which does not serve them, may be in the cluster.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.network.authorization import ResourceType, authorized_operations
from penstock.broker.network.connection import Call, Encoded
from penstock.metadata.features import SUPPORTED_FEATURES, TRANSACTION_VERSION
from penstock.metadata.image import Image
from penstock.metadata.values import FeatureRange
from penstock.protocol.apis import advertised
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import OPERATIONS_OMITTED, TIME_UNKNOWN
from penstock.protocol.messages.cluster import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)
from penstock.raft.events import KRAFT_VERSION

API_VERSIONS_KEY = 18
SOFTWARE_SINCE_VERSION = 3
LEVEL_0_SINCE_VERSION = 4
KRAFT_FEATURE = "kraft.version"
# AddPartitionsToTxn, AddOffsetsToTxn, EndTxn, WriteTxnMarkers, TxnOffsetCommit, DescribeProducers,
# DescribeTransactions and ListTransactions.
TRANSACTION_APIS = frozenset((24, 25, 26, 27, 28, 61, 65, 66))
ENDPOINT_BROKERS = 1
ENDPOINT_CONTROLLERS = 2

# KIP-511: valid names and versions of client software.
_software = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?").fullmatch


def api_versions(broker: Broker, request: ApiVersionsRequest, call: Call) -> Any:
    if call.version >= SOFTWARE_SINCE_VERSION and not (
        _software(request.client_software_name) and _software(request.client_software_version)
    ):
        return ApiVersionsResponse(error_code=ErrorCode.INVALID_REQUEST)
    key = (call.listener.serves, call.version)
    offset, encoded = broker.encoded_api_versions.get(key, (-1, None))
    if encoded is None or offset != broker.image.offset:
        has_transactions = broker.image.features.get(TRANSACTION_VERSION, 0) > 0
        response = ApiVersionsResponse(
            api_keys=[
                api
                for api in _served(call.listener.serves)
                if has_transactions or api.api_key not in TRANSACTION_APIS
            ]
        )
        _add_features(response, broker.image, call.version)
        encoded = Encoded(call.route.encode(response))
        broker.encoded_api_versions[key] = broker.image.offset, encoded
    return encoded


def unsupported_api_versions(broker: Broker, request: object, call: Call) -> ApiVersionsResponse:
    """The version 0 response to a version we do not serve; the only entry is our own range."""
    return ApiVersionsResponse(
        error_code=ErrorCode.UNSUPPORTED_VERSION,
        api_keys=[api for api in _served(call.listener.serves) if api.api_key == API_VERSIONS_KEY],
    )


def _served(listener: str) -> list[ApiVersion]:
    return [
        ApiVersion(api_key=api.key, min_version=api.advertised_min, max_version=api.version_max_on(listener))
        for api in advertised(listener)
    ]


def _add_features(response: ApiVersionsResponse, image: Image, version: int) -> None:
    """Add the feature levels (KIP-584). Only features that work are listed: no group.version (KIP-848), no
    share.version.
    """
    finalized = {**image.features, KRAFT_FEATURE: KRAFT_VERSION}
    response.supported_features = [
        SupportedFeatureKey(name=name, min_version=low, max_version=high)
        for name, low, high in (FeatureRange(KRAFT_FEATURE, 0, KRAFT_VERSION), *SUPPORTED_FEATURES)
        # Older clients cannot read a range that begins at 0 (KAFKA-17492).
        if low or version >= LEVEL_0_SINCE_VERSION
    ]
    if not image.features:
        return  # the cluster is not founded yet
    response.finalized_features_epoch = image.offset
    response.finalized_features = [
        FinalizedFeatureKey(name=name, min_version_level=level, max_version_level=level)
        for name, level in sorted(finalized.items())
    ]


def describe_cluster(broker: Broker, request: DescribeClusterRequest, call: Call) -> DescribeClusterResponse:
    if request.endpoint_type != ENDPOINT_BROKERS:
        controllers = request.endpoint_type == ENDPOINT_CONTROLLERS
        return DescribeClusterResponse(
            error_code=(
                ErrorCode.MISMATCHED_ENDPOINT_TYPE if controllers else ErrorCode.UNSUPPORTED_ENDPOINT_TYPE
            ),
            error_message="this listener serves brokers only; ask for endpoint type 1",
            endpoint_type=request.endpoint_type,
        )
    clocks = broker.clocks.ahead_ms() if request.include_clocks else {}
    return DescribeClusterResponse(
        cluster_id=broker.cluster_id or "",
        controller_id=broker.controller_id_for(call.listener),
        brokers=[
            DescribeClusterBroker(
                broker_id=member.id,
                host=endpoint.host,
                port=endpoint.port,
                rack=member.rack,
                is_fenced=member.fenced,
                clock_ahead_ms=_told(clocks.get(member.id)),
            )
            for member in broker.image.brokers.values()
            if request.include_fenced_brokers or not member.fenced
            if (endpoint := member.endpoint_for(call.listener)) is not None
        ],
        cluster_authorized_operations=(
            authorized_operations(call, ResourceType.CLUSTER)
            if request.include_cluster_authorized_operations
            else OPERATIONS_OMITTED
        ),
    )


def _told(ahead_ms: int | None) -> int:
    return TIME_UNKNOWN if ahead_ms is None else ahead_ms
