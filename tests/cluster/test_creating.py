"""Topics that several brokers are asked for at the same moment, and changes that any broker passes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import UnregisterBrokerRequest
from penstock.protocol.messages.topics import MetadataRequest, MetadataRequestTopic
from tests.cluster.cluster import Cluster
from tests.cluster.wire import METADATA_VERSION, Address, Wire

TRIES = 10


def asked_for(address: Address, topic: str) -> int:
    """The error that a client sees which asks a broker for a topic that it wants to write to."""
    with Wire(address, timeout_s=30) as wire:
        request = MetadataRequest(topics=[MetadataRequestTopic(name=topic)], allow_auto_topic_creation=True)
        (found,) = wire.call(request, METADATA_VERSION).topics
        assert found.error_code or found.partitions
        return int(found.error_code)


def test_a_topic_that_every_broker_is_asked_for_at_once_is_there_for_all(
    shared_cluster: Cluster, unique: Callable[[str], str]
) -> None:
    addresses = [node.address for node in shared_cluster.nodes.values()]
    with ThreadPoolExecutor(len(addresses)) as threads:
        for _ in range(TRIES):
            topic = unique("topic")
            errors = list(threads.map(lambda address, topic=topic: asked_for(address, topic), addresses))
            assert errors == [ErrorCode.NONE] * len(addresses)


def test_a_broker_that_runs_cannot_be_unregistered(shared_cluster: Cluster) -> None:
    for node in shared_cluster.nodes.values():
        with Wire(node.address) as wire:
            response = wire.call(UnregisterBrokerRequest(broker_id=1), 0)
            assert response.error_code == ErrorCode.INVALID_REQUEST
            assert "running" in response.error_message
