"""The rules of `penstock doctor`. Each is a function of one snapshot that yields what it finds, with advice.

A finding is about a topic, a group and topic, a broker or a partition, so that a hundred partitions with the same
trouble are one line. ``rule`` and ``subject`` together identify it from one examination to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from penstock.monitoring.durations import duration_text, seconds_text
from penstock.monitoring.hanging import Hanging
from penstock.monitoring.hot import HotPartition, KeyShare
from penstock.monitoring.lag import PartitionLag, Retention
from penstock.wire.log_dirs import Replica
from penstock.wire.surveys import BrokerView, LogDirectory, PartitionView, TopicView

NO_LEADER = -1
DAY_MS = 86_400_000
# How many partitions, names and the like a line lists.
SHOWN_MAX = 5
KEY_CHARACTERS_MAX = 40


class Severity(IntEnum):
    # Nothing is wrong, but something could not be seen.
    INFO = 0
    WARNING = 1
    # Records are lost or cannot be read or written, or will be soon.
    CRITICAL = 2


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    severity: Severity
    # What it is about.
    subject: str
    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class Thresholds:
    # A group is not said to fall behind before its next record is this old.
    lag_s: float = 30.0
    # The part of the retention time that is left to a group.
    loss_part: float = 0.2
    loss_part_critical: float = 0.05
    # Time left before retention by size, which has no time of its own.
    loss_by_size_s: float = 6 * 3600.0
    loss_by_size_s_critical: float = 3600.0
    # The used part of a disk.
    disk: float = 0.8
    disk_critical: float = 0.9
    clock_ms: int = 10_000
    certificate_ms: int = 30 * DAY_MS
    certificate_ms_critical: int = 7 * DAY_MS


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate that a broker shows to clients."""

    broker: int
    not_after_ms: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known of a cluster at one time. What could not be seen is empty, and in ``unseen``."""

    time_ms: int
    topics: Mapping[str, TopicView] = field(default_factory=dict)
    min_in_sync: Mapping[str, int] = field(default_factory=dict)
    retentions: Mapping[str, Retention] = field(default_factory=dict)
    brokers: tuple[BrokerView, ...] = ()
    directories: tuple[LogDirectory, ...] = ()
    replicas: tuple[Replica, ...] = ()
    lags: tuple[PartitionLag, ...] = ()
    # Kafka's words, by group.
    group_states: Mapping[str, str] = field(default_factory=dict)
    hot: tuple[HotPartition, ...] = ()
    hanging: tuple[Hanging, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    unseen: tuple[str, ...] = ()


Rule = Callable[[Snapshot, Thresholds], Iterator[Finding]]


def examine(snapshot: Snapshot, thresholds: Thresholds | None = None) -> list[Finding]:
    """The findings of all rules, the most severe first."""
    limits = thresholds or Thresholds()
    found = [finding for rule in RULES for finding in rule(snapshot, limits)]
    # Within a severity in the order of the rules.
    return sorted(found, key=lambda each: -each.severity)


# Replication


def offline_partitions(snapshot: Snapshot, _: Thresholds) -> Iterator[Finding]:
    for topic, numbers in _partitions(snapshot, lambda _, each: each.leader == NO_LEADER):
        replicas = _ids(id for number in numbers for id in snapshot.topics[topic].partitions[number].replicas)
        yield Finding(
            "offline-partitions",
            Severity.CRITICAL,
            topic,
            f"{_of_partitions(snapshot, topic, numbers)} without a leader: nobody can read or write them",
            f"start the brokers that have their replicas ({replicas}); if those are lost for good, "
            f"`penstock brokers elect {topic}:{_listed(numbers, ',')} --unclean` takes any other replica and "
            "gives up records that only they had",
        )


def below_minimum(snapshot: Snapshot, _: Thresholds) -> Iterator[Finding]:
    def is_below(topic: str, each: PartitionView) -> bool:
        return each.leader != NO_LEADER and len(each.in_sync) < _minimum(snapshot, topic, each)

    for topic, numbers in _partitions(snapshot, is_below):
        yield Finding(
            "below-min-insync",
            Severity.CRITICAL,
            topic,
            f"{_of_partitions(snapshot, topic, numbers)} with fewer replicas in sync than "
            f"min.insync.replicas={snapshot.min_in_sync[topic]}: writes with acks=all are refused",
            f"bring back {_missing(snapshot, topic, numbers)}; see `penstock brokers`",
        )


def under_replicated(snapshot: Snapshot, _: Thresholds) -> Iterator[Finding]:
    def is_behind(topic: str, each: PartitionView) -> bool:
        minimum = _minimum(snapshot, topic, each)
        return each.leader != NO_LEADER and minimum <= len(each.in_sync) < len(each.replicas)

    for topic, numbers in _partitions(snapshot, is_behind):
        yield Finding(
            "under-replicated",
            Severity.WARNING,
            topic,
            f"{_of_partitions(snapshot, topic, numbers)} with a replica that is behind or stopped: "
            f"{_missing(snapshot, topic, numbers)}",
            "start the broker if it is stopped; if it runs, look for a slow disk or network: compress, give "
            "replication a network of its own, or add brokers",
        )


def stopped_brokers(snapshot: Snapshot, _: Thresholds) -> Iterator[Finding]:
    for broker in snapshot.brokers:
        if broker.is_fenced:
            yield Finding(
                "stopped-broker",
                Severity.WARNING,
                f"broker {broker.id}",
                "registered but not running, or cut off from the controller",
                f"start it; if it will not come back, `penstock brokers unregister {broker.id}`",
            )


def clocks(snapshot: Snapshot, thresholds: Thresholds) -> Iterator[Finding]:
    for broker in snapshot.brokers:
        ahead_ms = broker.clock_ahead_ms or 0
        if abs(ahead_ms) >= thresholds.clock_ms:
            direction = "ahead of" if ahead_ms > 0 else "behind"
            yield Finding(
                "wrong-clock",
                Severity.WARNING,
                f"broker {broker.id}",
                f"its clock is {duration_text(abs(ahead_ms))} {direction} the others",
                "set the clock and run NTP: retention, timestamps and certificates go by it",
            )


# Disks


def disks(snapshot: Snapshot, thresholds: Thresholds) -> Iterator[Finding]:
    for directory in snapshot.directories:
        subject = f"broker {directory.broker} {directory.path}"
        if directory.is_offline:
            yield Finding(
                "offline-disk",
                Severity.CRITICAL,
                subject,
                "the directory failed and is not used any more",
                "look into the broker's log, replace the disk and restart the broker: replicas are copied again",
            )
            continue
        if not directory.total_bytes or directory.usable_bytes is None:
            continue
        used = 1 - directory.usable_bytes / directory.total_bytes
        if used >= thresholds.disk:
            is_critical = used >= thresholds.disk_critical
            yield Finding(
                "disk-nearly-full",
                Severity.CRITICAL if is_critical else Severity.WARNING,
                subject,
                f"{used:.0%} of the disk is used",
                "add brokers or disks, or keep less: `penstock configs set TOPIC retention.ms=...`",
            )


def cleaners(snapshot: Snapshot, _: Thresholds) -> Iterator[Finding]:
    for replica in snapshot.replicas:
        if replica.cleaning is not None and replica.cleaning.set_aside is not None:
            yield Finding(
                "cleaner-set-aside",
                Severity.WARNING,
                f"{replica.topic}-{replica.partition} on broker {replica.broker}",
                f"the replica is not compacted any more and grows: {replica.cleaning.set_aside}",
                "look into the broker's log; a damaged replica is replaced when its broker restarts",
            )


# Groups


def lost_records(snapshot: Snapshot, _: Thresholds) -> Iterator[Finding]:
    for (group, topic), lags in _by_group(snapshot, lambda each: each.lost_records > 0):
        lost = sum(each.lost_records for each in lags)
        yield Finding(
            "lost-records",
            Severity.CRITICAL,
            f"group {group} topic {topic}",
            f"{_up_to(snapshot, topic)}{lost} records of {_places(lags)} were deleted before they were read",
            f"keep records longer (`penstock configs set {topic} retention.ms=...`), and let the group read faster "
            "or remove it: `penstock groups delete`",
        )


def nearly_lost(snapshot: Snapshot, thresholds: Thresholds) -> Iterator[Finding]:
    found: dict[tuple[str, str], list[tuple[PartitionLag, Severity]]] = {}
    for each in snapshot.lags:
        severity = _loss_severity(each, snapshot.retentions.get(each.topic), thresholds)
        if severity is not None:
            found.setdefault((each.group, each.topic), []).append((each, severity))
    for (group, topic), pairs in found.items():
        soonest = min(each.loss_s or 0 for each, _ in pairs)
        when = f"in {seconds_text(soonest)} at the earliest" if soonest > 0 else "at any moment"
        by = "/".join(sorted({each.loss_by or "" for each, _ in pairs}))
        yield Finding(
            "nearly-lost-records",
            max(severity for _, severity in pairs),
            f"group {group} topic {topic}",
            f"retention by {by} deletes unread records of {_places([each for each, _ in pairs])} {when}",
            f"{_start(snapshot, group)}keep records longer until it has caught up: "
            f"`penstock configs set {topic} {'retention.ms' if 'time' in by else 'retention.bytes'}=...`",
        )


def growing_lag(snapshot: Snapshot, thresholds: Thresholds) -> Iterator[Finding]:
    def is_behind(each: PartitionLag) -> bool:
        return each.is_growing and each.lag_s is not None and each.lag_s >= thresholds.lag_s

    for (group, topic), lags in _by_group(snapshot, is_behind):
        rate = sum(each.lag_per_s or 0 for each in lags)
        oldest = max(each.lag_s or 0 for each in lags)
        partitions = len(snapshot.topics[topic].partitions) if topic in snapshot.topics else len(lags)
        advice = (
            f"add consumers, up to {partitions}, one for each partition; make processing faster; "
            "for more than that, add partitions (`penstock topics add-partitions`)"
        )
        yield Finding(
            "growing-lag",
            Severity.WARNING,
            f"group {group} topic {topic}",
            f"{sum(each.lag_records or 0 for each in lags)} records behind in {_places(lags)} and "
            f"{rate:.3g} more every second; the next one is {seconds_text(oldest)} old",
            "start its consumers: the group has no members" if _is_empty(snapshot, group) else advice,
        )


def beyond_end(snapshot: Snapshot, _: Thresholds) -> Iterator[Finding]:
    for (group, topic), lags in _by_group(snapshot, lambda each: each.is_beyond_end):
        yield Finding(
            "beyond-end",
            Severity.WARNING,
            f"group {group} topic {topic}",
            f"it has committed offsets that {_places(lags)} does not have: the topic was made again, or its log "
            "was cut by an unclean election",
            "its consumers go on by auto.offset.reset, which may skip or repeat records; choose the place with "
            f"`penstock groups offsets reset {group} --topic {topic} --to ...`",
        )


# Partitions


def hot_partitions(snapshot: Snapshot, _: Thresholds) -> Iterator[Finding]:
    for each in snapshot.hot:
        compared = (
            "while the others get nothing" if each.times is None else f"{each.times:.1f} times the others"
        )
        keys = ", ".join(map(_key_text, each.keys))
        yield Finding(
            "hot-partition",
            Severity.WARNING,
            str(each.at),
            f"{each.records_per_s:.0f} records a second, {compared}"
            + (f"; heaviest keys of recent records: {keys}" if keys else ""),
            "choose keys that spread better: split a heavy key by adding a suffix, or send records that need no "
            "order without a key; more partitions help only if several keys share this one",
        )


def hanging_transactions(snapshot: Snapshot, _: Thresholds) -> Iterator[Finding]:
    for each in snapshot.hanging:
        at, offset = each.at, each.producer.open_since_offset
        yield Finding(
            "hanging-transaction",
            Severity.CRITICAL,
            str(at),
            f"no coordinator will end the transaction of producer {each.producer.producer_id} that is open since "
            f"offset {offset}: read-committed consumers stop there, and the log is not compacted beyond it",
            f"`penstock transactions abort {at.topic} --partition {at.partition} --start-offset {offset}`",
        )


# Security


def certificates(snapshot: Snapshot, thresholds: Thresholds) -> Iterator[Finding]:
    for each in snapshot.certificates:
        left_ms = each.not_after_ms - snapshot.time_ms
        if left_ms > thresholds.certificate_ms:
            continue
        is_critical = left_ms <= thresholds.certificate_ms_critical
        yield Finding(
            "certificate-expires",
            Severity.CRITICAL if is_critical else Severity.WARNING,
            f"broker {each.broker}",
            f"its certificate ends in {duration_text(left_ms)}"
            if left_ms > 0
            else "its certificate has ended",
            "put a new one in the same place: brokers read changed files without a restart",
        )


def unseen(snapshot: Snapshot, _: Thresholds) -> Iterator[Finding]:
    if snapshot.unseen:
        yield Finding(
            "not-seen",
            Severity.INFO,
            "this examination",
            f"could not see: {'; '.join(snapshot.unseen)}",
            "for all of it the user needs Describe on the cluster, the topics and the groups, "
            "DescribeConfigs and Read on the topics",
        )


# Later ones are shown below earlier ones of the same severity.
RULES: tuple[Rule, ...] = (
    offline_partitions,
    below_minimum,
    lost_records,
    nearly_lost,
    disks,
    hanging_transactions,
    certificates,
    under_replicated,
    stopped_brokers,
    growing_lag,
    beyond_end,
    hot_partitions,
    cleaners,
    clocks,
    unseen,
)


def _loss_severity(each: PartitionLag, retention: Retention | None, limits: Thresholds) -> Severity | None:
    if each.loss_s is None:
        return None
    if each.loss_by == "time" and retention is not None and retention.time_ms:
        warning_s = limits.loss_part * retention.time_ms / 1000
        critical_s = limits.loss_part_critical * retention.time_ms / 1000
    else:
        warning_s, critical_s = limits.loss_by_size_s, limits.loss_by_size_s_critical
    if each.loss_s > warning_s:
        return None
    return Severity.CRITICAL if each.loss_s <= critical_s else Severity.WARNING


def _partitions(
    snapshot: Snapshot, is_wanted: Callable[[str, PartitionView], bool]
) -> Iterator[tuple[str, list[int]]]:
    for topic, view in snapshot.topics.items():
        numbers = [number for number, each in view.partitions.items() if is_wanted(topic, each)]
        if numbers:
            yield topic, numbers


def _by_group(
    snapshot: Snapshot, is_wanted: Callable[[PartitionLag], bool]
) -> Iterable[tuple[tuple[str, str], list[PartitionLag]]]:
    found: dict[tuple[str, str], list[PartitionLag]] = {}
    for each in snapshot.lags:
        if is_wanted(each):
            found.setdefault((each.group, each.topic), []).append(each)
    return found.items()


def _minimum(snapshot: Snapshot, topic: str, each: PartitionView) -> int:
    """As brokers count: a partition with fewer replicas needs only those (KIP-966)."""
    return min(snapshot.min_in_sync.get(topic, 1), len(each.replicas))


def _of_partitions(snapshot: Snapshot, topic: str, numbers: list[int]) -> str:
    count = len(snapshot.topics[topic].partitions)
    return f"{len(numbers)} of {count} partitions ({_listed(numbers)})"


def _places(lags: list[PartitionLag]) -> str:
    numbers = [each.partition for each in lags]
    return f"partition{'' if len(numbers) == 1 else 's'} {_listed(numbers)}"


def _missing(snapshot: Snapshot, topic: str, numbers: list[int]) -> str:
    """The brokers whose replicas are not in sync."""
    partitions = snapshot.topics[topic].partitions
    return _ids(
        id for number in numbers for id in partitions[number].replicas if id not in partitions[number].in_sync
    )


def _ids(brokers: Iterable[int]) -> str:
    ids = sorted(set(brokers))
    return f"broker{'' if len(ids) == 1 else 's'} {_listed(ids)}"


def _listed(numbers: list[int], separator: str = ", ") -> str:
    shown = separator.join(map(str, numbers[:SHOWN_MAX]))
    return shown if len(numbers) <= SHOWN_MAX else f"{shown}{separator}..."


def _up_to(snapshot: Snapshot, topic: str) -> str:
    """Offsets are counted, and some may have had no record."""
    retention = snapshot.retentions.get(topic)
    is_compacted = retention is not None and retention.time_ms is None and retention.size_bytes is None
    return "up to " if is_compacted else ""


def _is_empty(snapshot: Snapshot, group: str) -> bool:
    return snapshot.group_states.get(group) == "Empty"


def _start(snapshot: Snapshot, group: str) -> str:
    return "start its consumers; " if _is_empty(snapshot, group) else "add consumers; "


def _key_text(each: KeyShare) -> str:
    if each.key is None:
        return f"none ({each.share:.0%})"
    text = each.key.decode(errors="backslashreplace")
    shown = text if len(text) <= KEY_CHARACTERS_MAX else f"{text[:KEY_CHARACTERS_MAX]}..."
    return f"{shown} ({each.share:.0%})"
