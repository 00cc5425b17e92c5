"""Input and output of the replication cores.

``Assignment`` is a partition's entry in the metadata, ``IsrProposal`` what its leader sends to the controller.
An effect is the outcome of a fetch response for one partition. The shell carries the effects out in order and
then tells the ``Fetcher`` where the partition's log ends (``moved``) or that an effect failed (``failed``).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from penstock.environment import Buffer

NO_LEADER = -1
NO_EPOCH = -1

# (topic id, partition index). Not the name: a recreated topic has another id.
PartitionKey: TypeAlias = tuple[bytes, int]


class Assignment(NamedTuple):
    """A partition in the committed metadata. Ordered by leader epoch, then by partition epoch."""

    leader: int
    leader_epoch: int
    partition_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    # Eligible leader replicas: may lead although not in sync (KIP-966).
    elr: tuple[int, ...] = ()
    # The leader was not in sync when elected: committed records may be lost (KIP-704).
    is_recovering: bool = False


class IsrProposal(NamedTuple):
    """A change of the in-sync replicas, valid for one partition epoch only. Never sent twice: a retry is a new
    proposal, built from the current state (KAFKA-15353)."""

    leader_epoch: int
    partition_epoch: int
    # (broker, broker epoch); -1 if a member has not fetched since this leader was elected.
    isr: tuple[tuple[int, int], ...]


class Append(NamedTuple):
    """Append the records, if any, and note the leader's offsets."""

    key: PartitionKey
    records: Buffer
    high_watermark: int
    leader_log_start: int
    # (offset, partition epoch) for ``Partition.learned_replicated``.
    replicated_before: tuple[int, int] = (-1, NO_EPOCH)


class Truncate(NamedTuple):
    """Our log diverges from the leader's. In the leader's log, ``epoch`` ends at ``end_offset``."""

    key: PartitionKey
    epoch: int
    end_offset: int


class StartOver(NamedTuple):
    """The leader's log begins after our end, or ends before our start: drop everything and continue at ``at``."""

    key: PartitionKey
    at: int


class Remove(NamedTuple):
    """The leader has a newer leader epoch. Do not fetch until we have learned of it too."""

    key: PartitionKey
    error: int


class Backoff(NamedTuple):
    """The leader cannot serve the partition now. The fetch is retried after a pause."""

    key: PartitionKey
    error: int


Effect: TypeAlias = Append | Truncate | StartOver | Remove | Backoff
