"""Hot partitions: those that get many times what the other partitions of their topic get, and the keys behind it.

The measure is the mean of the *other* partitions. The mean of all of them would hide the hot one: of two partitions
none can have more than twice the mean, however one-sided they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.model import TopicPartition
from penstock.monitoring.lag import PartitionSample

# A partition below both is not hot, whatever the others get.
RECORDS_PER_S_MIN = 10.0
BYTES_PER_S_MIN = 100_000.0
KEYS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class KeyShare:
    # None: records without a key.
    key: bytes | None
    records: int
    bytes: int
    # Of the bytes of all records in the sample.
    share: float


@dataclass(frozen=True, slots=True)
class HotPartition:
    topic: str
    partition: int
    records_per_s: float
    # None: the sizes of the topic's partitions are not known, or retention has deleted some of them meanwhile.
    bytes_per_s: float | None
    # How many times the mean of the others, in records or in bytes; None if the others get nothing.
    times: float | None
    # The heaviest keys in a sample of recent records, heaviest first.
    keys: tuple[KeyShare, ...] = ()

    @property
    def at(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


def hot_partitions(
    before: Mapping[TopicPartition, PartitionSample],
    after: Mapping[TopicPartition, PartitionSample],
    elapsed_s: float,
    times_min: float,
) -> list[HotPartition]:
    """Those above ``times_min`` times the mean of the others of their topic, hottest first."""
    if elapsed_s <= 0:
        return []
    by_topic: dict[str, list[TopicPartition]] = {}
    for at, sample in after.items():
        if at in before and before[at].topic_id == sample.topic_id:
            by_topic.setdefault(at.topic, []).append(at)
    found = []
    for partitions in by_topic.values():
        if len(partitions) < 2:
            continue
        records = {
            at: max(0, after[at].high_watermark - before[at].high_watermark) / elapsed_s for at in partitions
        }
        grown = {at: _growth(before[at].size_bytes, after[at].size_bytes) for at in partitions}
        sizes = {at: size / elapsed_s for at, size in grown.items() if size is not None}
        has_sizes = len(sizes) == len(partitions)
        for at in partitions:
            measured = [_times(at, records, RECORDS_PER_S_MIN, times_min)]
            if has_sizes:
                measured.append(_times(at, sizes, BYTES_PER_S_MIN, times_min))
            ratios = [each for each in measured if each is not None]
            if ratios:
                times = max(ratios)
                found.append(
                    HotPartition(
                        at.topic,
                        at.partition,
                        records[at],
                        sizes[at] if has_sizes else None,
                        None if times == float("inf") else times,
                    )
                )
    return sorted(found, key=lambda each: (-(each.times or float("inf")), each.at))


def heaviest_keys(
    records: Iterable[tuple[bytes | None, int]], count: int = KEYS_SHOWN
) -> tuple[KeyShare, ...]:
    """Of the key and size of each record in a sample, the keys with the most bytes."""
    by_key: dict[bytes | None, list[int]] = {}
    total = 0
    for key, size in records:
        held = by_key.setdefault(key, [0, 0])
        held[0] += 1
        held[1] += size
        total += size
    heaviest = sorted(by_key.items(), key=lambda each: (-each[1][1], each[0] or b""))[:count]
    return tuple(
        KeyShare(key, records, size, size / total if total else 0.0) for key, (records, size) in heaviest
    )


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None or after < before else after - before


def _times(
    at: TopicPartition, rates: Mapping[TopicPartition, float], rate_min: float, times_min: float
) -> float | None:
    """How many times the mean of the others it gets, if that makes it hot."""
    rate = rates[at]
    if rate < rate_min:
        return None
    mean = (sum(rates.values()) - rate) / (len(rates) - 1)
    times = rate / mean if mean > 0 else float("inf")
    return times if times > times_min else None
