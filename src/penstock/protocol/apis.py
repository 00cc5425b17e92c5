"""The APIs we serve: versions, headers, message classes, listeners and codecs.

ApiVersions advertises this table, so an API appears here only once it works: clients use the newest advertised
version at once. Message modules are imported when an API is first used.

A node has two listeners. Clients use one. The other nodes use the internal one, for requests that only nodes may
send and for requests that they forward for clients.

Careful: ``advertised_min`` is not ``version_min``. Produce is advertised from 0 although 3 is the first version we
read, because older librdkafka stops compressing when it sees a higher minimum (KAFKA-18659).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any

from penstock.protocol.schema import Message, Response, decoder, encoder

API_VERSIONS = 18

CLIENT = "client"
INTERNAL = "internal"


class Codecs(dict[int, Callable[..., Any]]):
    """version -> codec, compiled on first use. KeyError for a version that is not served."""

    def __init__(self, api: Api, make: Callable[[int], Callable[..., Any]]) -> None:
        super().__init__()
        self._api = api
        self._make = make

    def __missing__(self, version: int) -> Callable[..., Any]:
        if not self._api.serves(version):
            raise KeyError(version)
        codec = self[version] = self._make(version)
        return codec


class Api:
    def __init__(
        self,
        key: int,
        name: str,
        module: str,
        version_min: int,
        version_max: int,
        *,
        flexible_from: int | None,
        advertised_min: int | None = None,
        client_version_max: int | None = None,
        listeners: tuple[str, ...] = (CLIENT, INTERNAL),
    ) -> None:
        self.key = key
        self.name = name
        self.version_min = version_min
        self.version_max = version_max
        # Later versions are for nodes only.
        self.client_version_max = version_max if client_version_max is None else client_version_max
        self.advertised_min = version_min if advertised_min is None else advertised_min
        # None when no version is flexible.
        self.flexible_from = flexible_from
        self.listeners = listeners
        self._module = module
        # For a server: (buffer, position) -> (request, next position), and response -> parts.
        self.decode_request = Codecs(self, lambda version: decoder(self.request, version))
        self.encode_response = Codecs(self, lambda version: encoder(self.response, version))
        # For a client, which every node is to the others.
        self.encode_request = Codecs(self, lambda version: encoder(self.request, version))
        self.decode_response = Codecs(self, lambda version: decoder(self.response, version))

    def __repr__(self) -> str:
        return f"<{self.name} {self.version_min}-{self.version_max}>"

    @cached_property
    def request(self) -> type[Message]:
        request: type[Message] = self._message("Request")
        return request

    @cached_property
    def response(self) -> type[Response]:
        response: type[Response] = self._message("Response")
        return response

    def serves(self, version: int, listener: str = INTERNAL) -> bool:
        return self.version_min <= version <= self.version_max_on(listener)

    def version_max_on(self, listener: str) -> int:
        return self.client_version_max if listener == CLIENT else self.version_max

    def is_flexible(self, version: int) -> bool:
        return self.flexible_from is not None and version >= self.flexible_from

    def request_header_version(self, version: int) -> int:
        return 2 if self.is_flexible(version) else 1

    def response_header_version(self, version: int) -> int:
        # A client that does not know our versions yet must be able to read this response (KIP-511).
        return 1 if self.is_flexible(version) and self.key != API_VERSIONS else 0

    def _message(self, suffix: str) -> Any:
        return getattr(import_module(f"penstock.protocol.messages.{self._module}"), self.name + suffix)


# For requests that only nodes send to each other.
NODES = (INTERNAL,)

APIS: dict[int, Api] = {
    api.key: api
    for api in (
        Api(0, "Produce", "produce", 3, 13, flexible_from=9, advertised_min=0),
        Api(1, "Fetch", "fetch", 4, 18, flexible_from=12),
        Api(2, "ListOffsets", "offsets", 1, 11, flexible_from=6),
        Api(3, "Metadata", "topics", 0, 13, flexible_from=9),
        Api(8, "OffsetCommit", "groups", 2, 10, flexible_from=8),
        Api(9, "OffsetFetch", "groups", 1, 10, flexible_from=6),
        Api(10, "FindCoordinator", "groups", 0, 6, flexible_from=3),
        Api(11, "JoinGroup", "groups", 0, 9, flexible_from=6),
        Api(12, "Heartbeat", "groups", 0, 4, flexible_from=4),
        Api(13, "LeaveGroup", "groups", 0, 5, flexible_from=4),
        Api(14, "SyncGroup", "groups", 0, 5, flexible_from=4),
        Api(15, "DescribeGroups", "groups", 0, 6, flexible_from=5),
        Api(16, "ListGroups", "groups", 0, 5, flexible_from=3),
        # Version 0 is refused, but librdkafka takes a broker without it for one without SASL.
        Api(17, "SaslHandshake", "security", 0, 1, flexible_from=None),
        Api(18, "ApiVersions", "cluster", 0, 4, flexible_from=3),
        Api(19, "CreateTopics", "topics", 2, 7, flexible_from=5),
        Api(20, "DeleteTopics", "topics", 1, 6, flexible_from=4),
        Api(21, "DeleteRecords", "offsets", 0, 2, flexible_from=2),
        Api(22, "InitProducerId", "produce", 0, 5, flexible_from=2),
        Api(23, "OffsetForLeaderEpoch", "offsets", 2, 4, flexible_from=4),
        # Clients send one transaction, up to version 3.
        Api(24, "AddPartitionsToTxn", "transactions", 0, 5, flexible_from=3, client_version_max=3),
        Api(25, "AddOffsetsToTxn", "transactions", 0, 4, flexible_from=3),
        Api(26, "EndTxn", "transactions", 0, 5, flexible_from=3),
        Api(27, "WriteTxnMarkers", "transactions", 1, 2, flexible_from=1),
        Api(28, "TxnOffsetCommit", "transactions", 0, 5, flexible_from=3),
        Api(29, "DescribeAcls", "security", 1, 3, flexible_from=2),
        Api(30, "CreateAcls", "security", 1, 3, flexible_from=2),
        Api(31, "DeleteAcls", "security", 1, 3, flexible_from=2),
        Api(32, "DescribeConfigs", "configs", 1, 4, flexible_from=4),
        Api(33, "AlterConfigs", "configs", 0, 2, flexible_from=2),
        Api(35, "DescribeLogDirs", "placement", 1, 5, flexible_from=2),
        Api(36, "SaslAuthenticate", "security", 0, 2, flexible_from=2),
        Api(37, "CreatePartitions", "topics", 0, 3, flexible_from=2),
        Api(42, "DeleteGroups", "groups", 0, 2, flexible_from=2),
        Api(43, "ElectLeaders", "placement", 0, 2, flexible_from=2),
        Api(44, "IncrementalAlterConfigs", "configs", 0, 1, flexible_from=1),
        Api(45, "AlterPartitionReassignments", "placement", 0, 1, flexible_from=0),
        Api(46, "ListPartitionReassignments", "placement", 0, 0, flexible_from=0),
        Api(47, "OffsetDelete", "groups", 0, 0, flexible_from=None),
        Api(48, "DescribeClientQuotas", "quotas", 0, 1, flexible_from=1),
        Api(49, "AlterClientQuotas", "quotas", 0, 1, flexible_from=1),
        Api(50, "DescribeUserScramCredentials", "security", 0, 0, flexible_from=0),
        Api(51, "AlterUserScramCredentials", "security", 0, 0, flexible_from=0),
        Api(52, "Vote", "quorum", 0, 2, flexible_from=0, listeners=NODES),
        Api(53, "BeginQuorumEpoch", "quorum", 0, 1, flexible_from=1, listeners=NODES),
        Api(54, "EndQuorumEpoch", "quorum", 0, 1, flexible_from=1, listeners=NODES),
        Api(55, "DescribeQuorum", "quorum", 0, 2, flexible_from=0),
        Api(56, "AlterPartition", "brokers", 2, 3, flexible_from=0, listeners=NODES),
        Api(57, "UpdateFeatures", "cluster", 0, 2, flexible_from=0),
        Api(58, "Envelope", "forwarding", 0, 0, flexible_from=0, listeners=NODES),
        Api(59, "FetchSnapshot", "quorum", 0, 1, flexible_from=0, listeners=NODES),
        Api(60, "DescribeCluster", "cluster", 0, 2, flexible_from=0),
        Api(61, "DescribeProducers", "transactions", 0, 0, flexible_from=0),
        Api(62, "BrokerRegistration", "brokers", 0, 4, flexible_from=0, listeners=NODES),
        Api(63, "BrokerHeartbeat", "brokers", 0, 2, flexible_from=0, listeners=NODES),
        Api(64, "UnregisterBroker", "brokers", 0, 0, flexible_from=0),
        Api(65, "DescribeTransactions", "transactions", 0, 0, flexible_from=0),
        Api(66, "ListTransactions", "transactions", 0, 1, flexible_from=0),
        Api(67, "AllocateProducerIds", "brokers", 0, 0, flexible_from=0, listeners=NODES),
        # Refused, but served: otherwise librdkafka would wait forever for a broker that offers it.
        Api(68, "ConsumerGroupHeartbeat", "consumer_groups", 0, 1, flexible_from=0),
        Api(73, "AssignReplicasToDirs", "brokers", 0, 0, flexible_from=0, listeners=NODES),
        Api(74, "ListConfigResources", "configs", 0, 1, flexible_from=0),
        Api(75, "DescribeTopicPartitions", "topics", 0, 0, flexible_from=0),
        Api(80, "AddRaftVoter", "quorum", 0, 1, flexible_from=0),
        Api(81, "RemoveRaftVoter", "quorum", 0, 0, flexible_from=0),
    )
}


def error_response(request: Message, version: int, error: int, message: str | None = None) -> Response:
    """A response with the same error for everything in the request, where the client expects it."""
    return APIS[request.KEY].response.for_error(request, version, error, message)


def advertised(listener: str) -> list[Api]:
    """The APIs that ApiVersions lists on a listener, ordered by key."""
    assert listener in (CLIENT, INTERNAL), listener
    return [api for api in APIS.values() if listener in api.listeners]
