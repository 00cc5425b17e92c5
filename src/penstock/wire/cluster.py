"""The client's cache of the cluster's metadata: brokers, topics and partition leaders.

A response may come from a broker that is behind, so a known leader is replaced only by one of a newer epoch
(KIP-320); a broker refuses requests for partitions it does not lead anyway. A topic is identified by its id: with
another id the epochs start again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.model import NO_TOPIC_ID, TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.listeners import SecurityProtocol
from penstock.wire.errors import BadBootstrap
from penstock.wire.links import Address

NO_LEADER = -1
PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    # A broker's id; -1 without a leader.
    leader: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class TopicInfo:
    name: str
    # 16 bytes; all zero when the broker is too old to have ids.
    topic_id: bytes
    partitions: Mapping[int, PartitionInfo]
    is_internal: bool


class Cluster:
    def __init__(self, bootstrap: list[Address]) -> None:
        self.bootstrap = bootstrap
        self.brokers: dict[int, Address] = {}
        self.controller_id = NO_LEADER
        self.topics: dict[str, TopicInfo] = {}
        self.names: dict[bytes, str] = {}
        # The coordinators of groups, and of transactional ids.
        self.coordinators: dict[str, Address] = {}
        self.transaction_coordinators: dict[str, Address] = {}

    def start_over(self) -> None:
        """Forget everything but the bootstrap list."""
        self.brokers, self.topics, self.names = {}, {}, {}
        self.coordinators, self.transaction_coordinators = {}, {}

    def learn(self, response: Any) -> None:
        """Update the cache from any Metadata response."""
        if response.brokers:
            self.brokers = {each.node_id: Address(each.host, each.port) for each in response.brokers}
            self.controller_id = response.controller_id
        for topic in response.topics:
            if topic.name is None:
                continue
            if topic.error_code in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID):
                self.forget(topic.name)
            elif topic.error_code == ErrorCode.NONE:
                self._learn_topic(topic)

    def _learn_topic(self, topic: Any) -> None:
        known = self.topics.get(topic.name)
        if known is not None and known.topic_id != topic.topic_id:
            self.forget(topic.name)
            known = None
        partitions = {}
        for each in topic.partitions:
            info = PartitionInfo(each.leader_id, each.leader_epoch)
            before = known.partitions.get(each.partition_index) if known is not None else None
            is_older = before is not None and 0 <= info.leader_epoch < before.leader_epoch
            partitions[each.partition_index] = before if before is not None and is_older else info
        self.topics[topic.name] = TopicInfo(
            topic.name, topic.topic_id, dict(sorted(partitions.items())), topic.is_internal
        )
        if topic.topic_id != NO_TOPIC_ID:
            self.names[topic.topic_id] = topic.name

    def forget(self, name: str) -> None:
        gone = self.topics.pop(name, None)
        if gone is not None:
            self.names.pop(gone.topic_id, None)

    def hint(self, at: TopicPartition, current_leader: Any, endpoints: Iterable[Any]) -> bool:
        """Learn the leader that came with an error response (KIP-951). Returns whether it is new."""
        topic = self.topics.get(at.topic)
        if current_leader is None or topic is None or current_leader.leader_id < 0:
            return False
        known = topic.partitions.get(at.partition)
        if known is None or current_leader.leader_epoch <= known.leader_epoch:
            return False
        for each in endpoints:
            self.brokers[each.node_id] = Address(each.host, each.port)
        if current_leader.leader_id not in self.brokers:
            return False
        info = PartitionInfo(current_leader.leader_id, current_leader.leader_epoch)
        self.topics[at.topic] = replace(topic, partitions={**topic.partitions, at.partition: info})
        return True

    def leader(self, at: TopicPartition) -> tuple[Address, TopicInfo, PartitionInfo] | None:
        """The leader of a partition; None when it is unknown."""
        topic = self.topics.get(at.topic)
        partition = topic.partitions.get(at.partition) if topic is not None else None
        if topic is None or partition is None:
            return None
        address = self.brokers.get(partition.leader)
        return None if address is None else (address, topic, partition)

    def check(self) -> None:
        for topic_id, name in self.names.items():
            assert self.topics[name].topic_id == topic_id, name


def parse_bootstrap(text: str) -> list[Address]:
    """Parse ``host:port,host:port``; an IPv6 host is in brackets. As in Java's clients extra commas are ignored,
    and a listener's name may precede the host. Raises BadBootstrap.
    """
    parts = [part.strip() for part in text.split(",")]
    addresses = [_parse_address(part) for part in parts if part]
    if not addresses:
        raise BadBootstrap(f"{text!r} has no broker; write HOST:PORT, such as 127.0.0.1:9092")
    return list(dict.fromkeys(addresses))


def _parse_address(text: str) -> Address:
    protocol, _, rest = text.rpartition("://")
    if protocol and protocol.upper() != SecurityProtocol.PLAINTEXT.name:
        raise BadBootstrap(f"{text!r}: write {rest}, and set security.protocol to {protocol.lower()}")
    host, _, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise BadBootstrap(f"{text!r} is ambiguous; write an IPv6 address as [::1]:9092")
    if not host:
        raise BadBootstrap(f"{text!r} is not a broker address; write HOST:PORT, such as 127.0.0.1:9092")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= PORT_MAX):
        raise BadBootstrap(f"{port!r} in {text!r} is not a port; a port is 1 to {PORT_MAX}")
    return Address(host, int(port))
