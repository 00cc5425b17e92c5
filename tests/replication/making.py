"""A leader, its followers and a controller of a few words, for tests of the cores."""

from __future__ import annotations

from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import (
    EpochEndOffset,
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from penstock.replication.events import Assignment, IsrProposal
from penstock.replication.partition import Partition

LAG_MAX_MS = 10_000
TOPIC = bytes(15) + b"\x01"


def end_offset_of(partition: Partition, replica: int) -> int:
    """What a leader knows a follower to have; -1 when it has not fetched in this epoch."""
    follower = partition._followers.get(replica)
    return -1 if follower is None else follower.end_offset


class LiveBrokers:
    """What ``live`` says."""

    def __init__(self, *brokers: int) -> None:
        self.epochs: dict[int, int | None] = {broker: 100 + broker for broker in brokers}

    def live(self, broker: int) -> int | None:
        return self.epochs.get(broker)


class Leading:
    """Broker 1, elected to lead replicas 1, 2 and 3, with what follows from it."""

    def __init__(
        self,
        isr: tuple[int, ...] = (1, 2, 3),
        *,
        replicas: tuple[int, ...] = (1, 2, 3),
        end_offset: int = 0,
        high_watermark: int = 0,
        min_isr: int = 2,
        leader_epoch: int = 1,
    ) -> None:
        self.brokers = LiveBrokers(1, 2, 3, 4)
        # Followers that have stopped fetching.
        self.silent: set[int] = set()
        self.now_ms = 0
        self.end_offset = end_offset
        self.partition = Partition(
            1,
            live=self.brokers.live,
            lag_max_ms=LAG_MAX_MS,
            min_isr=min_isr,
            high_watermark=high_watermark,
            is_silent=lambda broker, since_ms, now_ms: broker in self.silent,
        )
        self.assignment = Assignment(1, leader_epoch, 1, replicas, isr)
        assert self.assign()

    def assign(self, **changes: Any) -> bool:
        self.assignment = self.assignment._replace(**changes)
        taken = self.partition.assign(self.assignment, end_offset=self.end_offset, now_ms=self.now_ms)
        self.partition.check()
        return taken

    def append(self, count: int = 1) -> None:
        self.end_offset += count
        self.partition.appended(self.end_offset)
        self.partition.check()

    def fetch(
        self, replica: int, offset: int, *, broker_epoch: int | None = None, log_start_offset: int = 0
    ) -> ErrorCode:
        epoch = 100 + replica if broker_epoch is None else broker_epoch
        error = self.partition.fetched_by(
            replica, epoch, offset, self.end_offset, self.now_ms, log_start_offset=log_start_offset
        )
        self.partition.check()
        return error

    def propose(self) -> IsrProposal | None:
        proposal = self.partition.proposal(self.now_ms)
        self.partition.check()
        return proposal

    def members(self) -> list[int] | None:
        """Whom a proposal made now would have in sync."""
        proposal = self.propose()
        return None if proposal is None else [broker for broker, _ in proposal.isr]

    def commit(self, proposal: IsrProposal) -> None:
        """The controller does as it is asked, and we hear of it."""
        before = self.assignment
        isr = tuple([broker for broker, _ in proposal.isr])
        eligible = () if len(isr) >= self.partition.min_isr else (*before.elr, *before.isr)
        self.assignment = before._replace(
            isr=isr,
            elr=tuple([broker for broker in eligible if broker not in isr]),
            partition_epoch=proposal.partition_epoch + 1,
        )
        self.partition.answered(proposal, ErrorCode.NONE, self.assignment, self.now_ms)
        self.partition.check()

    def refuse(self, proposal: IsrProposal, error: int | None) -> None:
        self.partition.answered(proposal, error, None, self.now_ms)
        self.partition.check()

    @property
    def high_watermark(self) -> int:
        return self.partition.high_watermark


def following(
    leader: int = 2, *, leader_epoch: int = 1, end_offset: int = 0, high_watermark: int = 0
) -> Partition:
    partition = Partition(
        1, live=LiveBrokers(1, 2, 3).live, lag_max_ms=LAG_MAX_MS, min_isr=2, high_watermark=high_watermark
    )
    taken = partition.assign(
        Assignment(leader, leader_epoch, 1, (1, 2, 3), (1, 2, 3)), end_offset=end_offset, now_ms=0
    )
    assert taken
    partition.check()
    return partition


def key(index: int) -> tuple[bytes, int]:
    return TOPIC, index


def data(
    index: int,
    records: bytes = b"",
    *,
    error: ErrorCode = ErrorCode.NONE,
    high_watermark: int = 0,
    log_start_offset: int = 0,
    diverging: tuple[int, int] | None = None,
) -> PartitionData:
    return PartitionData(
        partition_index=index,
        error_code=error,
        high_watermark=high_watermark,
        log_start_offset=log_start_offset,
        diverging_epoch=None
        if diverging is None
        else EpochEndOffset(epoch=diverging[0], end_offset=diverging[1]),
        records=records,
    )


def response(session_id: int, *partitions: PartitionData, error: ErrorCode = ErrorCode.NONE) -> FetchResponse:
    topics = [FetchableTopicResponse(topic_id=TOPIC, partitions=list(partitions))] if partitions else []
    return FetchResponse(error_code=error, session_id=session_id, responses=topics)


def named(request: FetchRequest | None) -> list[int]:
    assert request is not None
    return [asked.partition for topic in request.topics for asked in topic.partitions]


def forgotten(request: FetchRequest | None) -> list[int]:
    assert request is not None
    return [index for topic in request.forgotten_topics_data for index in topic.partitions]
