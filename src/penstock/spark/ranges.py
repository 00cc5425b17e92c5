"""Offsets and ranges of offsets: the arithmetic of planning, with no broker in it.

Offsets are ``{TopicPartition: offset}`` here and Kafka's JSON, ``{"topic": {"0": 123}}``, in Spark's checkpoint.
An offset is the next one to read, so a range's end is exclusive. It is valid in one topic only, not in a
recreated topic of the same name: a ``StreamOffset`` has the topics' ids. A range of 100 offsets may hold fewer
than 100 records, because compaction and transactions leave gaps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, floor
from typing import Any, NamedTuple, TypeAlias

from penstock.model import NO_TOPIC_ID, TopicPartition, format_id, parse_id

Offsets: TypeAlias = dict[TopicPartition, int]

OFFSET_MAX = 2**63 - 1
# Separates a topic's name from its id. Not allowed in topic names.
ID_SIGN = "@"


class OffsetRange(NamedTuple):
    topic: str
    partition: int
    start: int
    end: int  # exclusive

    @property
    def size(self) -> int:
        """The number of offsets, including gaps."""
        return self.end - self.start

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} [{self.start}, {self.end})"


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """A stream's position: offsets and the ids of their topics."""

    offsets: Offsets
    # By name, where known. Spark's Kafka source does not store ids, and users do not write them.
    topic_ids: dict[str, bytes] = field(default_factory=dict)

    def without(self, topics: Iterable[str]) -> Offsets:
        left_out = set(topics)
        return {each: offset for each, offset in self.offsets.items() if each.topic not in left_out}


def to_json(
    offsets: Mapping[TopicPartition, int], topic_ids: Mapping[str, bytes] | None = None
) -> dict[str, dict[str, int]]:
    """Sorted by topic and partition, because Spark compares offsets by their text.

    The topics' ids follow, each as a topic without partitions: ``"orders@KkOLcoYySkKAMbbx2U7vCg": {}``. Readers of
    Kafka's plain JSON, such as Spark's Kafka source on the same checkpoint, accept that.
    """
    nested: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        nested.setdefault(topic, {})[str(partition)] = offset
    for topic in list(nested):
        topic_id = (topic_ids or {}).get(topic, NO_TOPIC_ID)
        if topic_id != NO_TOPIC_ID:
            nested[f"{topic}{ID_SIGN}{format_id(topic_id)}"] = {}
    return nested


def from_json(nested: Mapping[str, Mapping[str, int]]) -> StreamOffset:
    """Parse the output of ``to_json``, with or without ids. Raises ValueError."""
    if not isinstance(nested, Mapping):
        raise ValueError(f"offsets must be a JSON object of topics, not {nested!r}")
    offsets: Offsets = {}
    topic_ids: dict[str, bytes] = {}
    for topic, partitions in nested.items():
        if not isinstance(partitions, Mapping):
            raise ValueError(f"topic {topic} needs a JSON object of partitions, not {partitions!r}")
        if ID_SIGN in topic and not partitions:
            name, _, text = topic.partition(ID_SIGN)
            topic_ids[name] = _topic_id(name, text)
        for partition, offset in partitions.items():
            if not str(partition).isdecimal():
                raise ValueError(f"topic {topic} has no partition {partition!r}: partitions are numbers")
            if not _is_whole(offset):
                raise ValueError(f"{topic}-{partition} needs a whole number, not {offset!r}")
            if not -OFFSET_MAX <= offset <= OFFSET_MAX:
                raise ValueError(f"{topic}-{partition} needs a number of 64 bits, not {offset}")
            offsets[TopicPartition(topic, int(partition))] = offset
    return StreamOffset(offsets, topic_ids)


def split(
    ranges: Iterable[OffsetRange], *, partitions_min: int | None = None, records_max: int | None = None
) -> list[OffsetRange]:
    """Split ranges for tasks: none larger than ``records_max``, at least ``partitions_min`` in total.

    Empty ranges are left out. Pieces of one range differ in size by at most one offset and stay in order.
    """
    whole = [each for each in ranges if each.size > 0]
    pieces = [1 if records_max is None else ceil(each.size / records_max) for each in whole]
    wanted = 0 if partitions_min is None else min(partitions_min, sum(each.size for each in whole))
    missing = wanted - sum(pieces)
    if missing > 0:
        # Split the range with the largest pieces once more, until there are enough.
        largest = [(-each.size / count, index) for index, (each, count) in enumerate(zip(whole, pieces))]
        heapq.heapify(largest)
        for _ in range(missing):
            _, index = largest[0]
            pieces[index] += 1
            heapq.heapreplace(largest, (-whole[index].size / pieces[index], index))
    return [piece for each, count in zip(whole, pieces) for piece in _cut(each, count)]


def share(backlog: Mapping[TopicPartition, int], limit: int) -> Offsets:
    """How much of each partition's backlog fits into ``limit``, in proportion to the backlogs.

    As in Spark's Kafka source every partition with a backlog gets at least one, so that none starves.
    """
    total = sum(amount for amount in backlog.values() if amount > 0)
    shares: Offsets = {}
    for partition, amount in backlog.items():
        if amount <= 0:
            shares[partition] = 0
        elif total <= limit:
            shares[partition] = amount
        else:
            fair = limit * (amount / total)
            shares[partition] = min(amount, ceil(fair) if fair < 1 else floor(fair))
    return shares


def _cut(whole: OffsetRange, count: int) -> list[OffsetRange]:
    bounds = [whole.start + whole.size * index // count for index in range(count + 1)]
    return [whole._replace(start=start, end=end) for start, end in pairwise(bounds)]


def _topic_id(topic: str, text: str) -> bytes:
    try:
        return parse_id(text)
    except ValueError:
        raise ValueError(f"topic {topic} has no id {text!r}: ids are 22 letters, digits, - and _") from None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
