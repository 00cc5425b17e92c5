"""Leader hints (KIP-951): Produce and Fetch responses name the leader of a partition led elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.broker.broker import Broker
from penstock.broker.network.connection import Call
from penstock.model import BrokerId
from penstock.protocol.messages.fetch import PartitionData
from penstock.protocol.messages.leader_hints import LeaderIdAndEpoch, NodeEndpoint
from penstock.protocol.messages.produce import PartitionProduceResponse


def name_leader(
    broker: Broker,
    topic: str,
    index: int,
    result: PartitionProduceResponse | PartitionData,
    leaders: dict[int, None],
) -> None:
    """Put the partition's leader into its result and into ``leaders``, unless it is this broker, which refused."""
    known = broker.image.topics.get(topic)
    if known is not None and 0 <= index < len(known.partitions):
        partition = known.partitions[index]
        if partition.leader not in (-1, broker.node_id):
            result.current_leader = LeaderIdAndEpoch(
                leader_id=partition.leader, leader_epoch=partition.leader_epoch
            )
            leaders[partition.leader] = None


def endpoints_of(broker: Broker, call: Call, nodes: Iterable[int]) -> list[NodeEndpoint]:
    members = [broker.image.brokers.get(BrokerId(node)) for node in nodes]
    found = [(member, member.endpoint_for(call.listener)) for member in members if member is not None]
    return [
        NodeEndpoint(node_id=member.id, host=endpoint.host, port=endpoint.port, rack=member.rack)
        for member, endpoint in found
        if endpoint is not None
    ]
