"""What plans since the fifth generation say about compacted topics.

Segments are small and the cleaner is always due, so that a run of a minute cleans each partition many times.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

NOTHING_EXPIRES = -1

# How often a plan has these faults, and their mean interval in ms.
COMPACTION_FAULTS = {
    # A replica comes back after tombstones may have gone.
    "absence": (0.5, 20_000.0),
    "killed job": (0.6, 3_000.0),
}


@dataclass(frozen=True, slots=True)
class Compaction:
    # Of the topic that stays.
    partitions: int
    policy: str
    segment_bytes: int
    dirty_ratio: float
    delete_retention_ms: int
    min_lag_ms: int
    # For the time that the policy is, or contains, delete.
    retention_ms: int
    # Keys in use at a time in each partition. Some are deleted for good, and others take their place.
    keys: int
    tombstones: float
    # Idempotent producers of each partition.
    producers: int
    # The transactional clients: whether they speak transactions v2.
    transactors: tuple[bool, ...]
    interval_ms: float
    # Whether the policy changes during the run.
    changes_policy: bool
    # Whether records are deleted (DeleteRecords).
    deletes_records: bool
    # Whether a second topic is deleted and created again repeatedly.
    recreates: bool

    @property
    def expires(self) -> bool:
        """Whether records may expire."""
        return self.retention_ms != NOTHING_EXPIRES and (self.changes_policy or "delete" in self.policy)

    @property
    def configs(self) -> dict[str, str]:
        """The settings of the topics."""
        return {
            "cleanup.policy": self.policy,
            "segment.bytes": str(self.segment_bytes),
            "min.cleanable.dirty.ratio": str(self.dirty_ratio),
            "delete.retention.ms": str(self.delete_retention_ms),
            "min.compaction.lag.ms": str(self.min_lag_ms),
            "retention.ms": str(self.retention_ms),
        }


def compaction_for(chance: Random) -> Compaction:
    policy = chance.choice(["compact", "compact", "compact,delete"])
    return Compaction(
        partitions=chance.choice([1, 2, 3]),
        policy=policy,
        segment_bytes=chance.choice([1_024, 2_048, 4_096]),
        dirty_ratio=chance.choice([0.0, 0.01, 0.3]),
        delete_retention_ms=chance.choice([0, 0, 1_000, 5_000, 3_600_000]),
        min_lag_ms=chance.choice([0, 0, 0, 2_000]),
        retention_ms=chance.choice([NOTHING_EXPIRES, NOTHING_EXPIRES, 15_000]),
        keys=chance.choice([3, 6, 12]),
        tombstones=chance.choice([0.1, 0.3, 0.5]),
        producers=chance.choice([1, 1, 2]),
        transactors=tuple(chance.random() < 0.6 for _ in range(chance.choice([0, 1, 2]))),
        interval_ms=chance.choice([200.0, 500.0, 1_500.0]),
        changes_policy=chance.random() < 0.3,
        deletes_records=chance.random() < 0.25,
        recreates=chance.random() < 0.3,
    )
