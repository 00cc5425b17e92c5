"""Takes samples of a cluster with a wire client: the shell around ``lag.py``, ``hot.py`` and ``findings.py``.

For all groups and partitions together one sample takes a few requests to each broker: the groups, their committed
offsets, the starts and ends of partitions, and one small fetch for the next record of each lagging reader. What a
record's age was is remembered, so that a watch fetches again only where a group has moved.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.model import TopicPartition
from penstock.monitoring.findings import NO_LEADER, Certificate, Snapshot
from penstock.monitoring.hanging import Hanging, hanging_transactions
from penstock.monitoring.hot import HotPartition, heaviest_keys, hot_partitions
from penstock.monitoring.lag import (
    MIN_IN_SYNC,
    POLICY,
    SIZE,
    TIME,
    LagSample,
    LagTracker,
    PartitionSample,
    parse_retention,
)
from penstock.protocol.compression import TooLarge
from penstock.protocol.records import CorruptBatch, batches, decode_records
from penstock.wire import EARLIEST, LATEST, Client, OffsetAt, WireError
from penstock.wire import surveys as wire
from penstock.wire.calls import Call
from penstock.wire.core import Core, Steps, Task
from penstock.wire.links import Address
from penstock.wire.surveys import Disks, ReadAt, TopicView
from penstock.wire.unread import Unread

SETTINGS = (POLICY, TIME, SIZE, MIN_IN_SYNC)
# Of how many readers the next record is fetched in one sample, those with the most records behind first.
AGES_MAX = 100_000
READERS_PER_CALL = 5_000
# Kafka's transaction.max.timeout.ms: no transaction of a coordinator is open for longer.
TRANSACTION_MS_MAX = 15 * 60_000
# Of a hot partition the last records are sampled for their keys.
KEY_RECORDS = 2_000
KEY_BYTES = 1024 * 1024
KEY_PARTITIONS_MAX = 5
CONNECT_TIMEOUT_S = 5.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Survey:
    """A sample for ``LagTracker``, and what was learned on the way."""

    sample: LagSample
    topics: Mapping[str, TopicView]
    settings: Mapping[str, Mapping[str, str]]
    # Kafka's words, of the groups that were listed.
    group_states: Mapping[str, str]
    disks: Disks
    unseen: tuple[str, ...]


class Collector:
    """Not for several threads. ``context`` is that of the client, to look at the brokers' certificates."""

    def __init__(
        self,
        client: Client,
        *,
        context: ssl.SSLContext | None = None,
        read_committed: bool = False,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        monotonic_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
    ) -> None:
        self._client = client
        self._context = context
        self._read_committed = read_committed
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms
        # The next records of readers that have not moved since the last sample, by topic id.
        self._unread: dict[tuple[bytes, ReadAt], Unread] = {}
        self._tracker = LagTracker()
        self._last: LagSample | None = None

    def _asked(self, what: str, steps: Callable[[Core, Task[Result]], Steps[Result]]) -> Result:
        return self._client.do(Call(what, steps))

    def survey(self, groups: Sequence[str] | None = None, *, with_everything: bool = False) -> Survey:
        """A sample of these groups, or of all. With everything it has also the partitions that no group reads.

        Raises WireError if the cluster cannot be asked at all.
        """
        unseen = _Unseen()
        topics = self._asked("looking up topics", wire.topic_views)
        states: dict[str, str] = {}
        if groups is None:
            listed, refusals = self._asked("listing groups", wire.list_groups)
            states = {each.name: each.state for each in listed}
            unseen.add_brokers("groups", refusals)
        committed = self._committed(groups if groups is not None else list(states), unseen)
        places = {at for offsets in committed.values() for at in offsets}
        if with_everything:
            places |= {
                TopicPartition(name, number) for name, view in topics.items() for number in view.partitions
            }
        wanted = sorted(
            at for at in places if at.topic in topics and at.partition in topics[at.topic].partitions
        )
        names = list(dict.fromkeys(at.topic for at in wanted))
        settings = self._settings(names, unseen)
        retentions = {name: parse_retention(each) for name, each in settings.items()}
        disks = Disks([], [], {})
        if with_everything or any(each.size_bytes is not None for each in retentions.values()):
            disks = self._asked("looking at disks", wire.disks)
            unseen.add_brokers("disks", disks.refusals)
        partitions = self._partitions(wanted, topics, disks, unseen)
        time_ms, monotonic_ms = self._wall_ms(), self._monotonic_ms()
        is_compacted = {name for name, each in settings.items() if "compact" in each.get(POLICY, "")}
        unread = self._next_records(committed, partitions, is_compacted, unseen)
        sample = LagSample(time_ms, monotonic_ms, partitions, committed, unread, retentions)
        return Survey(sample, topics, settings, states, disks, unseen.lines())

    def snapshot(self, hot_times: float) -> Snapshot:
        """What the rules of ``findings.py`` look at. The first one has no rates: take a second, some time later."""
        survey = self.survey(with_everything=True)
        unseen = list(survey.unseen)
        brokers = self._asked("describing the cluster", wire.brokers)
        if isinstance(brokers, str):
            unseen.append(f"brokers ({brokers})")
            brokers = []
        sample, last = survey.sample, self._last
        lags = self._tracker.figures(sample)
        hot: list[HotPartition] = []
        if last is not None:
            elapsed_s = (sample.monotonic_ms - last.monotonic_ms) / 1000
            hot = hot_partitions(last.partitions, sample.partitions, elapsed_s, hot_times)
            hot = [self._with_keys(each, sample) for each in hot[:KEY_PARTITIONS_MAX]] + hot[
                KEY_PARTITIONS_MAX:
            ]
        self._last = sample
        minimums = {name: each.get(MIN_IN_SYNC, "") for name, each in survey.settings.items()}
        return Snapshot(
            time_ms=sample.time_ms,
            topics=survey.topics,
            min_in_sync={name: int(text) for name, text in minimums.items() if text.isdecimal()},
            retentions=sample.retentions,
            brokers=tuple(brokers),
            directories=tuple(survey.disks.directories),
            replicas=tuple(survey.disks.replicas),
            lags=tuple(lags),
            group_states=survey.group_states,
            hot=tuple(hot),
            hanging=tuple(self._hanging(survey.topics, sample.time_ms, unseen)),
            certificates=tuple(self._certificates(unseen)),
            unseen=tuple(unseen),
        )

    # Private

    def _committed(self, groups: Sequence[str], unseen: _Unseen) -> dict[str, dict[TopicPartition, int]]:
        answers = self._asked(
            "reading committed offsets", lambda core, task: wire.committed_offsets(core, task, groups)
        )
        found: dict[str, dict[TopicPartition, int]] = {}
        for group, answer in answers.items():
            if isinstance(answer, str):
                unseen.add("the offsets of groups", group, answer)
            else:
                found[group] = answer
        return found

    def _settings(self, names: Sequence[str], unseen: _Unseen) -> dict[str, Mapping[str, str]]:
        answers = self._asked(
            "reading the settings of topics",
            lambda core, task: wire.topic_settings(core, task, names, SETTINGS),
        )
        found: dict[str, Mapping[str, str]] = {}
        for name, answer in answers.items():
            if isinstance(answer, str):
                unseen.add("the settings of topics", name, answer)
            else:
                found[name] = answer
        return found

    def _partitions(
        self, wanted: Sequence[TopicPartition], topics: Mapping[str, TopicView], disks: Disks, unseen: _Unseen
    ) -> dict[TopicPartition, PartitionSample]:
        # Offline partitions are findings, not something that could not be seen.
        led = [at for at in wanted if topics[at.topic].partitions[at.partition].leader != NO_LEADER]
        starts = self._offsets(led, EARLIEST, unseen)
        ends = self._offsets(list(starts), LATEST, unseen)
        stable = (
            self._offsets(list(ends), LATEST, unseen, read_committed=True) if self._read_committed else ends
        )
        sizes = {(each.topic, each.partition, each.broker): each.size_bytes for each in disks.replicas}
        found = {}
        for at, end in stable.items():
            view = topics[at.topic]
            size = sizes.get((*at, view.partitions[at.partition].leader))
            # Both grow between the two questions; an end that was asked for later is not below the start.
            start = min(starts[at].offset, ends[at].offset)
            found[at] = PartitionSample(view.topic_id, start, max(end.offset, start), ends[at].offset, size)
        return found

    def _offsets(
        self, wanted: Sequence[TopicPartition], spec: int, unseen: _Unseen, *, read_committed: bool = False
    ) -> dict[TopicPartition, OffsetAt]:
        answers = self._asked(
            "listing offsets",
            lambda core, task: wire.offsets(
                core, task, dict.fromkeys(wanted, spec), read_committed=read_committed
            ),
        )
        found = {}
        for at, answer in answers.items():
            if isinstance(answer, str):
                unseen.add("the offsets of partitions", str(at), answer)
            else:
                found[at] = answer
        return found

    def _next_records(
        self,
        committed: Mapping[str, Mapping[TopicPartition, int]],
        partitions: Mapping[TopicPartition, PartitionSample],
        is_compacted: set[str],
        unseen: _Unseen,
    ) -> dict[tuple[TopicPartition, int], Unread | None]:
        lagging: dict[ReadAt, int] = {}
        for offsets in committed.values():
            for at, offset in offsets.items():
                partition = partitions.get(at)
                if (
                    partition is not None
                    and (offset := max(offset, partition.log_start_offset)) < partition.end_offset
                ):
                    lagging[ReadAt(at, offset)] = partition.end_offset - offset
        readers = sorted(lagging, key=lambda reader: -lagging[reader])[:AGES_MAX]
        if len(lagging) > len(readers):
            unseen.note(
                f"the ages of {len(lagging) - len(readers)} smaller lags, beyond the first {AGES_MAX}"
            )
        keys = {reader: (partitions[reader.at].topic_id, reader) for reader in readers}
        known = {reader: self._unread[key] for reader, key in keys.items() if key in self._unread}
        answers: dict[ReadAt, Unread | str | None] = {}
        left = [reader for reader in readers if reader not in known]
        # Each portion has a deadline of its own.
        for first in range(0, len(left), READERS_PER_CALL):
            portion = left[first : first + READERS_PER_CALL]
            answers |= self._asked(
                "looking at unread records",
                lambda core, task, portion=portion: wire.unread(  # type: ignore[misc]
                    core, task, portion, read_committed=self._read_committed
                ),
            )
        found: dict[tuple[TopicPartition, int], Unread | None] = dict(known.items())
        for reader, answer in answers.items():
            if isinstance(answer, str):
                unseen.add("the next records in partitions", str(reader.at), answer)
            else:
                found[reader] = answer
        # A record that is compacted away is not the next one any more.
        self._unread = {
            keys[reader]: each
            for reader in readers
            if reader.at.topic not in is_compacted and (each := found.get(reader)) is not None
        }
        return found

    def _with_keys(self, hot: HotPartition, sample: LagSample) -> HotPartition:
        partition = sample.partitions[hot.at]
        offset = max(partition.log_start_offset, partition.high_watermark - KEY_RECORDS)
        try:
            fetched = self._client.fetch(hot.at, offset, bytes_max=KEY_BYTES, wait_ms=0)
            records = [
                (record.key, len(record.key or b"") + len(record.value or b""))
                for position, header in batches(fetched.records)
                if not header.is_control
                for record in decode_records(fetched.records, position, bytes_max=16 * KEY_BYTES)
            ]
        except (WireError, CorruptBatch, TooLarge):
            # The keys are an extra; the partition is hot without them.
            return hot
        return replace(hot, keys=heaviest_keys(records))

    def _hanging(self, topics: Mapping[str, TopicView], time_ms: int, unseen: list[str]) -> list[Hanging]:
        places = [
            TopicPartition(name, number)
            for name, view in topics.items()
            for number, each in view.partitions.items()
            if each.leader != NO_LEADER
        ]
        answers = self._asked("describing producers", lambda core, task: wire.producers(core, task, places))
        refused = _Unseen()
        for at, answer in answers.items():
            if isinstance(answer, str):
                refused.add("the transactions in partitions", str(at), answer)
        producers = {at: answer for at, answer in answers.items() if not isinstance(answer, str)}
        try:
            return hanging_transactions(self._client, producers, time_ms - TRANSACTION_MS_MAX)
        except WireError as error:
            refused.note(f"who owns open transactions ({error})")
            return []
        finally:
            unseen += refused.lines()

    def _certificates(self, unseen: list[str]) -> Iterable[Certificate]:
        if self._context is None or self._context.verify_mode == ssl.CERT_NONE:
            return
        for broker, address in self._asked("looking up brokers", wire.addresses).items():
            try:
                yield Certificate(broker, _not_after_ms(address, self._context))
            except OSError as error:
                unseen.append(f"the certificate of broker {broker} ({error.strerror or error})")


def _not_after_ms(address: Address, context: ssl.SSLContext) -> int:
    with (
        socket.create_connection(address, timeout=CONNECT_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=address.host) as secured,
    ):
        found = secured.getpeercert() or {}
    return int(ssl.cert_time_to_seconds(str(found["notAfter"])) * 1000)


class _Unseen:
    """What could not be seen, as few lines."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[str]] = {}
        self._notes: list[str] = []

    def add(self, what: str, name: str, reason: str) -> None:
        self._found.setdefault((what, reason), []).append(name)

    def add_brokers(self, what: str, refusals: Mapping[int, str]) -> None:
        for broker, reason in refusals.items():
            self.add(f"{what} of brokers", str(broker), reason)

    def note(self, line: str) -> None:
        self._notes.append(line)

    def lines(self) -> tuple[str, ...]:
        found = [
            f"{what} {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({reason})"
            for (what, reason), names in self._found.items()
        ]
        return tuple(found + self._notes)
