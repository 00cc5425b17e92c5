"""What goes into the replication cores and what comes out of them.

``Assignment`` is what the metadata says of a partition, ``IsrProposal`` what its leader asks the controller
for. The effects are what a fetch response means for one partition; the shell carries them out in their order
and then tells the ``Fetcher`` where the partition stands (``moved``) or that it could not (``failed``).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from penstock.environment import Buffer

NO_LEADER = -1
NO_EPOCH = -1

# (topic id, partition index): a topic's name may come back under another id.
PartitionKey: TypeAlias = tuple[bytes, int]


class Assignment(NamedTuple):
    """A partition as the committed metadata has it. Two epochs order them: leader's first, then partition's."""

    leader: int
    leader_epoch: int
    partition_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    # Eligible to lead although not in sync (KIP-966).
    elr: tuple[int, ...] = ()
    # Elected outside the in-sync replicas: committed records may be gone (KIP-704).
    is_recovering: bool = False


class IsrProposal(NamedTuple):
    """A change of the in-sync replicas, compared with and set on the partition epoch. Never sent twice: a
    retry is built anew from the state (KAFKA-15353)."""

    leader_epoch: int
    partition_epoch: int
    # (broker, broker epoch); -1 where a member has not fetched since this leader was elected.
    isr: tuple[tuple[int, int], ...]


class Append(NamedTuple):
    """Append the records, if there are any, and take note of the leader's offsets."""

    key: PartitionKey
    records: Buffer
    high_watermark: int
    leader_log_start: int


class Truncate(NamedTuple):
    """Our log holds records that the leader's does not; its own end of the epoch where they part."""

    key: PartitionKey
    epoch: int
    end_offset: int


class StartOver(NamedTuple):
    """The leader's log begins behind our end, or ends before our beginning: drop everything and go on there."""

    key: PartitionKey
    at: int


class Remove(NamedTuple):
    """The leader knows a newer leader epoch. Nothing is fetched until we have heard of it too."""

    key: PartitionKey
    error: int


class Backoff(NamedTuple):
    """The leader cannot serve the partition, for now. It is asked again after a while."""

    key: PartitionKey
    error: int


Effect: TypeAlias = Append | Truncate | StartOver | Remove | Backoff
