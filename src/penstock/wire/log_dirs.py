"""What brokers have on their disks: the size of each replica, and how far it is compacted (DescribeLogDirs).

Each broker knows only its own replicas, so every broker is asked. How far a replica is compacted only our own
brokers say, for compacted topics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.placement import (
    DescribableLogDirTopic,
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
)
from penstock.wire.core import Core, Question, Steps, Task
from penstock.wire.errors import BUSY, BrokerRefused, UnsupportedBroker, words_of
from penstock.wire.links import Ask, Channel, Failed
from penstock.wire.operations import back_off, refresh

DESCRIBE_LOG_DIRS = 35
# The first version that has room for fields of our own.
TAGS_SINCE_VERSION = 2


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last pass of the cleaner over a replica's log."""

    ended_ms: int
    duration_ms: int
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int


@dataclass(frozen=True, slots=True)
class Cleaning:
    # Of what may be compacted, and the part of it that is not compacted yet.
    cleanable_bytes: int
    dirty_bytes: int
    first_dirty_offset: int
    last_run: LastRun | None
    # Why the replica is not compacted any more; None if it is.
    set_aside: str | None

    @property
    def dirty_ratio(self) -> float:
        return self.dirty_bytes / self.cleanable_bytes if self.cleanable_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Replica:
    topic: str
    partition: int
    broker: int
    size_bytes: int
    # None if its topic is not compacted, its log is not open, or the broker does not say.
    cleaning: Cleaning | None


def replicas(core: Core, task: Task[Any], wanted: Mapping[str, Sequence[int]] | None) -> Steps[list[Replica]]:
    """The replicas of these partitions, by topic, or of all; in order."""
    message = DescribeLogDirsRequest(
        topics=None
        if wanted is None
        else [
            DescribableLogDirTopic(topic=topic, partitions=list(numbers)) for topic, numbers in wanted.items()
        ],
        include_cleaning=True,
    )
    ask = Ask(DESCRIBE_LOG_DIRS, lambda _: message, version_min=TAGS_SINCE_VERSION)
    while True:
        yield from refresh(core, task, [])
        brokers = dict(core.cluster.brokers)
        answers = yield [Question(address, Channel.CONTROL, ask) for address in brokers.values()]
        found: list[Replica] = []
        is_whole = True
        for broker, answer in zip(brokers, answers):
            if isinstance(answer, Failed):
                if answer.is_unsupported:
                    raise UnsupportedBroker(answer.why)
                task.trouble, is_whole = answer.why, False
                continue
            code = answer.message.error_code
            if code in BUSY:
                task.trouble, is_whole = f"broker {broker}: {words_of(code)}", False
            elif code != ErrorCode.NONE:
                raise BrokerRefused(f"{task.what}: broker {broker}: {words_of(code)}", code)
            # A directory whose disk has failed lists no topics.
            found += [
                replica_of(topic.name, broker, each)
                for directory in answer.message.results
                for topic in directory.topics
                for each in topic.partitions
            ]
        if is_whole:
            return sorted(found, key=lambda each: (each.topic, each.partition, each.broker))
        yield from back_off(core, task)


def replica_of(topic: str, broker: int, each: DescribeLogDirsPartition) -> Replica:
    return Replica(topic, each.partition_index, broker, each.partition_size, _cleaning(each))


def _cleaning(each: DescribeLogDirsPartition) -> Cleaning | None:
    told = each.cleaning
    if told is None:
        return None
    run = told.last_run
    return Cleaning(
        told.cleanable_bytes,
        told.dirty_bytes,
        told.first_dirty_offset,
        None
        if run is None
        else LastRun(
            run.ended_ms,
            run.duration_ms,
            run.bytes_before,
            run.bytes_after,
            run.records_before,
            run.records_after,
        ),
        told.set_aside,
    )
