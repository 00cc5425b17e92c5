"""Finds the replica that a consumer should read from (KIP-392)."""

from __future__ import annotations

from typing import Protocol

from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.metadata.image import Image
from penstock.protocol.listeners import ListenerDescription


class BrokerView(Protocol):
    """The broker that leads the partition, as this module sees it."""

    @property
    def node_id(self) -> int: ...

    @property
    def rack(self) -> str | None: ...

    @property
    def image(self) -> Image: ...


def nearest_replica(
    broker: BrokerView, hosted: HostedPartition, rack: str, offset: int, listener: ListenerDescription
) -> int:
    """An in-sync replica in the consumer's rack that has the offset; -1 when none is better than this broker.

    ``listener`` is the one the consumer came in on; it cannot reach brokers that do not have it.

    ``hosted`` is led here. For an offset that does not exist, the leader itself must answer: a consumer does not
    believe a follower's error, and would be sent back and forth without end.
    """
    if broker.rack == rack or offset < hosted.log.log_start_offset:
        return -1
    brokers = broker.image.brokers
    for replica in hosted.image.isr:
        known = brokers.get(replica)
        if (
            known is not None
            and known.rack == rack
            and known.is_active
            and known.endpoint_for(listener) is not None
            and replica != broker.node_id
            and hosted.replication.has(replica, offset)
        ):
            return replica
    return -1
