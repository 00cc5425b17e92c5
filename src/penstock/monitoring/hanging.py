"""Transactions that hang: a partition's leader has one open, and no coordinator will ever end it (KIP-664)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.model import TopicPartition
from penstock.wire import Client
from penstock.wire.transaction_admin import (
    DescribedTransaction,
    ListedTransaction,
    ListFilter,
    PartitionProducer,
)

# In these states the coordinator will still end the transaction in its partitions.
UNFINISHED = frozenset(("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"))
# Partitions in one request for their producers.
PARTITIONS_PER_REQUEST = 1_000


class Hanging(NamedTuple):
    """A transaction that is open in a partition."""

    at: TopicPartition
    producer: PartitionProducer
    # Who wrote it, as far as a coordinator remembers.
    transactional_id: str | None


def producers_of(
    client: Client, places: Sequence[TopicPartition]
) -> dict[TopicPartition, list[PartitionProducer]]:
    """The producers of many partitions, in portions."""
    found: dict[TopicPartition, list[PartitionProducer]] = {}
    for first in range(0, len(places), PARTITIONS_PER_REQUEST):
        found |= client.partition_producers(places[first : first + PARTITIONS_PER_REQUEST])
    return found


def hanging_transactions(
    client: Client, producers: Mapping[TopicPartition, Sequence[PartitionProducer]], before_ms: int
) -> list[Hanging]:
    """The open transactions without a record since ``before_ms`` that no coordinator will end."""
    suspects = [
        (at, producer)
        for at, each in producers.items()
        for producer in each
        if producer.open_since_offset is not None and producer.last_timestamp < before_ms
    ]
    owners = owners_of(client, [producer.producer_id for _, producer in suspects])
    described = {
        each.transactional_id: client.describe_transaction(each.transactional_id) for each in owners.values()
    }
    found = []
    for at, producer in suspects:
        owner = owners.get(producer.producer_id)
        if owner is None:
            found.append(Hanging(at, producer, None))
        elif not will_end(described[owner.transactional_id], at, producer):
            found.append(Hanging(at, producer, owner.transactional_id))
    return found


def owners_of(client: Client, producer_ids: Sequence[int]) -> dict[int, ListedTransaction]:
    """By producer id, the transactional ids that coordinators know."""
    if not producer_ids:
        return {}
    wanted = ListFilter(producer_ids=tuple(dict.fromkeys(producer_ids)))
    return {each.producer_id: each for each in client.list_transactions(wanted)}


def will_end(described: DescribedTransaction | None, at: TopicPartition, producer: PartitionProducer) -> bool:
    """Whether the coordinator will write a marker for this producer into this partition."""
    return (
        described is not None
        and described.producer_id == producer.producer_id
        and described.state in UNFINISHED
        and at in described.partitions
    )
