"""Who asks, which rights each API needs, and what a client hears that lacks one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from penstock.broker.handlers.routes import HANDLERS
from penstock.broker.network.authorization import (
    ALL_OPERATIONS,
    ANONYMOUS,
    DENIED,
    Operation,
    Principal,
    ResourceType,
)
from penstock.protocol.apis import APIS, CLIENT, Api
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import UnregisterBrokerRequest
from penstock.protocol.messages.cluster import DescribeClusterRequest
from penstock.protocol.messages.groups import HeartbeatRequest, OffsetCommitRequest
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreateTopicsRequest,
    MetadataRequest,
    MetadataRequestTopic,
)
from tests.broker.stage import Peer, Stage
from tests.protocol.samples import Samples

# Before anybody has said who they are, or telling only what every client must know.
OPEN = {"ApiVersions", "SaslHandshake", "SaslAuthenticate", "DescribeCluster"}
# Other rules have another version, so that no connection remembers decisions of the last ones.
VERSIONS = count(1)
Question = tuple[Principal, str, Operation, ResourceType, str]


class Rules:
    """An authorizer that does as the test says, and remembers what it was asked."""

    def __init__(self, allows: Callable[[Operation, ResourceType, str], bool]) -> None:
        self.version = next(VERSIONS)
        self.asked: list[Question] = []
        self._allows = allows

    def allows(self, principal: object, host: str, operation: int, resource: int, name: str) -> bool:
        assert isinstance(principal, Principal)
        self.asked.append((principal, host, Operation(operation), ResourceType(resource), name))
        return self._allows(Operation(operation), ResourceType(resource), name)

    def allows_any(self, principal: object, host: str, operation: int, resource: int) -> bool:
        return False


def nothing(operation: Operation, resource: ResourceType, name: str) -> bool:
    return False


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_every_api_names_the_rights_it_needs(api: Api) -> None:
    assert bool(HANDLERS[api.key].rights) == (api.name not in OPEN)


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_what_only_nodes_ask_needs_the_right_of_a_node(api: Api) -> None:
    if CLIENT not in api.listeners:
        (right,) = HANDLERS[api.key].rights
        assert (right.operation, right.resource) == (Operation.CLUSTER_ACTION, ResourceType.CLUSTER)
        assert right.name is not None, "checked before the handler runs"


CHECKED_FIRST = [
    api
    for api in APIS.values()
    if CLIENT in api.listeners and any(right.name is not None for right in HANDLERS[api.key].rights)
]


@pytest.mark.parametrize("api", CHECKED_FIRST, ids=lambda api: api.name)
def test_a_request_without_the_right_is_answered_with_the_error_of_its_kind(api: Api, stage: Stage) -> None:
    stage.server.authorizer = Rules(nothing)
    peer = Peer(stage)
    right = next(right for right in HANDLERS[api.key].rights if right.name is not None)
    samples = Samples(api.name)
    told = set()
    for _ in range(20):
        answer = peer.call(samples.message(api.request, api.version_max), api.version_max)
        told.add(answer.first_error())
    # Nothing was asked for in some of them.
    assert told - {ErrorCode.NONE} == {DENIED[right.resource]}
    assert not peer.is_closed


def test_everybody_is_anonymous_and_the_authorizer_hears_who_asks_what(stage: Stage) -> None:
    stage.server.authorizer = rules = Rules(nothing)
    answer = Peer(stage).call(UnregisterBrokerRequest(broker_id=7), 0)
    assert answer.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert rules.asked == [
        (ANONYMOUS, "10.0.0.1", Operation.ALTER, ResourceType.CLUSTER, "kafka-cluster"),
    ]
    assert str(ANONYMOUS) == "User:ANONYMOUS"


def test_a_right_on_one_group_is_none_on_another(stage: Stage) -> None:
    stage.server.authorizer = Rules(lambda operation, resource, name: name == "mine")
    peer = Peer(stage)
    assert peer.call(HeartbeatRequest(group_id="mine"), 4).error_code == ErrorCode.NOT_COORDINATOR
    assert peer.call(HeartbeatRequest(group_id="yours"), 4).error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert peer.call(OffsetCommitRequest(group_id="yours"), 8).topics == []


def test_without_an_authorizer_everything_goes_to_its_handler(stage: Stage) -> None:
    assert stage.server.authorizer is None
    answer = Peer(stage).call(UnregisterBrokerRequest(broker_id=7), 0)
    assert answer.error_code == ErrorCode.BROKER_ID_NOT_REGISTERED


def test_clients_are_told_the_operations_they_may_perform(stage: Stage) -> None:
    peer = Peer(stage)
    topic = CreatableTopic(name="t", num_partitions=1, replication_factor=1)
    peer.call(CreateTopicsRequest(topics=[topic]), 7)
    in_cluster = DescribeClusterRequest(include_cluster_authorized_operations=True)
    of_topic = MetadataRequest(
        topics=[MetadataRequestTopic(name="t")], include_topic_authorized_operations=True
    )
    assert peer.call(in_cluster, 1).cluster_authorized_operations == ALL_OPERATIONS[ResourceType.CLUSTER]
    assert peer.call(of_topic, 9).topics[0].topic_authorized_operations == ALL_OPERATIONS[ResourceType.TOPIC]

    stage.server.authorizer = Rules(lambda operation, *_: operation in (Operation.READ, Operation.DESCRIBE))
    assert peer.call(in_cluster, 1).cluster_authorized_operations == 1 << Operation.DESCRIBE
    expected = 1 << Operation.READ | 1 << Operation.DESCRIBE
    assert peer.call(of_topic, 9).topics[0].topic_authorized_operations == expected


def test_operations_and_resources_have_kafkas_numbers() -> None:
    assert ALL_OPERATIONS == {
        ResourceType.CLUSTER: 0b1111110100000,
        ResourceType.TOPIC: 0b110111111000,
        ResourceType.GROUP: 0b110101001000,
    }
    assert [int(resource) for resource in ResourceType] == [2, 3, 4, 5]
