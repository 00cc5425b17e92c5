"""The topic settings, and the broker settings that are their defaults.

Names, types, limits and defaults are those of Kafka 4.3. ``SYNONYMS`` lists, per topic setting, the broker
settings used in its place, best first; some have other units. Within one source (say the command line)
``log.retention.ms`` wins over ``log.retention.hours``, but a source nearer to the topic wins over both, whichever
name it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.metadata.settings import (
    LONG_MAX,
    Setting,
    boolean,
    double,
    integer,
    long,
    refused,
    string,
    strings,
    table,
    without_meaning,
)

_DAY_MS = 24 * 3600 * 1000

# The broker setting that names the durability modes, and its values.
DURABILITY = "penstock.durability"
REPLICATED = "replicated"
FLUSHED = "flushed"

# A topic's creation time. Stored as a setting, because Kafka's records have no field for it and every client can
# read settings; clients cannot set it.
CREATED = "penstock.created.ms"

# The controller determines eligible leaders with it.
MIN_ISR = "min.insync.replicas"

# What happens to old records, and its values. An empty list keeps everything, as in Kafka (KIP-1161).
CLEANUP_POLICY = "cleanup.policy"
LOG_CLEANUP_POLICY = "log.cleanup.policy"
COMPACT = "compact"
DELETE = "delete"

NO_TIERS = "segments do not move to remote storage yet"
AS_PRODUCED = "batches are stored as the producer compressed them"
NO_THROTTLE = (
    "the throttle applies to every replica that a reassignment adds (follower.replication.throttled.rate)"
)

TOPIC: dict[str, Setting] = table(
    # Retention.
    long("retention.ms", 7 * _DAY_MS, "The age at which segments are deleted; -1: never.", -1),
    long("retention.bytes", -1, "The size above which a partition loses its oldest segments; -1: no limit."),
    long("file.delete.delay.ms", 60_000, "How long the files of a deleted segment stay on disk.", 0),
    # Compaction.
    strings(
        CLEANUP_POLICY,
        DELETE,
        "What happens to old records: deleted with their segment (delete), replaced by newer ones with the same "
        "key (compact), both (compact,delete), or nothing (an empty list).",
        *(COMPACT, DELETE),
    ),
    double(
        "min.cleanable.dirty.ratio",
        0.5,
        "The share of a log that is not compacted yet at which it is compacted.",
        0,
        1,
    ),
    long("min.compaction.lag.ms", 0, "The age at which a record may be compacted.", 0),
    long(
        "max.compaction.lag.ms",
        LONG_MAX,
        "The age of a record at which its log is compacted, whatever the share.",
        1,
    ),
    long(
        "delete.retention.ms",
        _DAY_MS,
        "How long a tombstone stays after it was first compacted, so that consumers see it.",
        0,
    ),
    # Limits of produce requests.
    integer("max.message.bytes", 1_048_588, "The largest record batch accepted, after compression.", 0),
    string(
        "message.timestamp.type",
        "CreateTime",
        "The timestamp of a record: the producer's (CreateTime) or the broker's (LogAppendTime).",
        *("CreateTime", "LogAppendTime"),
    ),
    long(
        "message.timestamp.after.max.ms",
        3_600_000,
        "How far a record's timestamp may be ahead of the broker's clock.",
        0,
    ),
    long(
        "message.timestamp.before.max.ms",
        LONG_MAX,
        "How far a record's timestamp may be behind the broker's clock.",
        0,
    ),
    integer(MIN_ISR, 1, "The smallest ISR with which acks=all is accepted.", 1),
    boolean(
        "unclean.leader.election.enable",
        False,
        "Whether a replica that lacks records may lead if there is no other; the records it lacks are lost.",
    ),
    # Segments and their indexes. Kafka's minimum for segment.bytes is 1 MiB since 4.0 (KIP-1030), 14 bytes
    # before. We keep 14: small segments are useful to try out retention, and a segment always holds at least one
    # batch.
    integer("segment.bytes", 1 << 30, "The size at which a new segment starts.", 14),
    long("segment.ms", 7 * _DAY_MS, "The age at which a new segment starts.", 1),
    integer("segment.index.bytes", 10 << 20, "The size of an index at which a new segment starts.", 4),
    integer("index.interval.bytes", 4096, "Bytes of log between two index entries.", 0),
    # Flushing.
    long(
        "flush.messages",
        LONG_MAX,
        "Records between two flushes of a log; with 1, a record is on disk before it is acknowledged.",
        1,
    ),
    long("flush.ms", LONG_MAX, "The longest time before a record is flushed to disk.", 0),
    # Not implemented yet.
    *refused(
        AS_PRODUCED,
        string(
            "compression.type",
            "producer",
            "The compression of stored batches; 'producer' stores them as sent.",
            *("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
        ),
    ),
    *refused(
        NO_TIERS, boolean("remote.storage.enable", False, "Whether old segments are moved to remote storage.")
    ),
    *without_meaning(
        AS_PRODUCED,
        integer("compression.gzip.level", -1, "The level for gzip.", -1, 9),
        integer("compression.lz4.level", 9, "The level for lz4.", 1, 17),
        integer("compression.zstd.level", 3, "The level for zstd.", -131_072, 22),
    ),
    *without_meaning(
        NO_TIERS,
        long("local.retention.bytes", -2, "Size of the local part of a log; -2 for retention.bytes.", -2),
        long("local.retention.ms", -2, "Age of the local part of a log; -2 for retention.ms.", -2),
        boolean("remote.log.copy.disable", False, "Stops copying segments to remote storage."),
        boolean(
            "remote.log.delete.on.disable", False, "Deletes remote segments when tiering is switched off."
        ),
    ),
    *without_meaning(
        NO_THROTTLE,
        strings("follower.replication.throttled.replicas", "", "Followers that copy within a quota."),
        strings("leader.replication.throttled.replicas", "", "Leaders that serve followers within a quota."),
    ),
    *without_meaning(
        "rolling is cheap, so logs may roll at the same time",
        long("segment.jitter.ms", 0, "The most by which segment.ms is shortened, at random.", 0),
    ),
    *without_meaning(
        "segment files grow as they are written",
        boolean("preallocate", False, "Whether a segment's file has its full size from the start."),
    ),
)


class Synonym(NamedTuple):
    # A broker setting.
    name: str
    # Converts its text to the topic setting's. Raises ValueError for a text that is not a valid value.
    convert: Callable[[str], str] = str


def _hours(text: str) -> str:
    return _scaled(text, 3600 * 1000)


def _minutes(text: str) -> str:
    return _scaled(text, 60 * 1000)


def _scaled(text: str, factor: int) -> str:
    # Any negative number means forever, which topics write as -1.
    return str(max(-1, int(text) * factor))


def _flush_messages(durability: str) -> str:
    return "1" if durability.strip() == FLUSHED else str(LONG_MAX)


SYNONYMS: dict[str, tuple[Synonym, ...]] = {
    CLEANUP_POLICY: (Synonym(LOG_CLEANUP_POLICY),),
    "compression.gzip.level": (Synonym("compression.gzip.level"),),
    "compression.lz4.level": (Synonym("compression.lz4.level"),),
    "compression.type": (Synonym("compression.type"),),
    "compression.zstd.level": (Synonym("compression.zstd.level"),),
    "delete.retention.ms": (Synonym("log.cleaner.delete.retention.ms"),),
    "file.delete.delay.ms": (Synonym("log.segment.delete.delay.ms"),),
    "flush.messages": (Synonym("log.flush.interval.messages"), Synonym(DURABILITY, _flush_messages)),
    "flush.ms": (Synonym("log.flush.interval.ms"), Synonym("log.flush.scheduler.interval.ms")),
    "index.interval.bytes": (Synonym("log.index.interval.bytes"),),
    "local.retention.bytes": (Synonym("log.local.retention.bytes"),),
    "local.retention.ms": (Synonym("log.local.retention.ms"),),
    "max.compaction.lag.ms": (Synonym("log.cleaner.max.compaction.lag.ms"),),
    "max.message.bytes": (Synonym("message.max.bytes"),),
    "message.timestamp.after.max.ms": (Synonym("log.message.timestamp.after.max.ms"),),
    "message.timestamp.before.max.ms": (Synonym("log.message.timestamp.before.max.ms"),),
    "message.timestamp.type": (Synonym("log.message.timestamp.type"),),
    "min.cleanable.dirty.ratio": (Synonym("log.cleaner.min.cleanable.ratio"),),
    "min.compaction.lag.ms": (Synonym("log.cleaner.min.compaction.lag.ms"),),
    MIN_ISR: (Synonym(MIN_ISR),),
    "preallocate": (Synonym("log.preallocate"),),
    "retention.bytes": (Synonym("log.retention.bytes"),),
    "retention.ms": (
        Synonym("log.retention.ms"),
        Synonym("log.retention.minutes", _minutes),
        Synonym("log.retention.hours", _hours),
    ),
    "segment.bytes": (Synonym("log.segment.bytes"),),
    "segment.index.bytes": (Synonym("log.index.size.max.bytes"),),
    "segment.jitter.ms": (Synonym("log.roll.jitter.ms"), Synonym("log.roll.jitter.hours", _hours)),
    "segment.ms": (Synonym("log.roll.ms"), Synonym("log.roll.hours", _hours)),
    "unclean.leader.election.enable": (Synonym("unclean.leader.election.enable"),),
}
