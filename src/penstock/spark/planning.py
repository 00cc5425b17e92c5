"""Plan ranges of offsets from a subscription and its starting position: the driver's half of reading.

Batch reads are planned once, streams for every micro-batch: ``available`` is how far the topics reach,
``limited`` how much of that the next micro-batch takes, ``ranges`` what its tasks read. Metadata from a just
started broker may lack topics, or show topics that were deleted long ago. So a missing partition is looked up
again for a while, and its offset is never forgotten; otherwise the stream would read everything again. Only a
topic with another id is new, whatever its name, and is read from its beginning.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.model import NO_TOPIC_ID, TopicPartition, format_id
from penstock.protocol.records import HEADER_SIZE, decode_header
from penstock.spark.errors import SparkOptionError
from penstock.spark.options import INTERNAL_TOPICS, Place, SourceOptions, Subscription
from penstock.spark.ranges import OffsetRange, Offsets, StreamOffset, share, split
from penstock.spark.reading import GONE_AFTER_S, lose
from penstock.wire import EARLIEST, LATEST, Client, OffsetOutOfRange, UnknownTopic

GONE_PAUSE_S = 0.25
# A broker learns a moment later of a topic created through another broker.
UNHEARD_OF_S = 2.0
# How soon new partitions and topics are found. An idle stream polls a hundred times a second.
METADATA_AGE_S = 1.0
# Read from a partition to estimate the size of its records.
SAMPLE_BYTES = 128 * 2**10


@dataclass(frozen=True, slots=True)
class Available:
    """What a stream could read at one moment."""

    # The next offset to read of each partition: the stream's position, or the log start offset.
    starts: Offsets
    # The ends of what can be read. A partition that is gone keeps the stream's offset.
    ends: Offsets
    # Log start offsets of the partitions that have something to read.
    log_starts: Offsets
    # The ids of the ends' topics.
    topic_ids: dict[str, bytes]

    @property
    def backlog(self) -> Offsets:
        return {each: max(0, end - self.starts[each]) for each, end in self.ends.items()}


@dataclass(frozen=True, slots=True)
class _Look:
    """The current state of the needed partitions."""

    # The end of each visible partition, needed or not.
    latest: Offsets
    # Partitions that end before the needed offset.
    shrunk: set[TopicPartition]
    # Recreated topics, with the ids of the needed ones.
    replaced: dict[str, bytes]


class Planner:
    """Queries the brokers. Caches the visible partitions for a moment, and the topics' ids."""

    def __init__(self, options: SourceOptions, client: Client) -> None:
        self._options = options
        self._settings = options.read
        self._client = client
        self._seen: set[TopicPartition] | None = None
        self._seen_at = 0.0
        # The ids last seen: a plan is for these topics, not for later ones of the same names.
        self.topic_ids: dict[str, bytes] = {}
        # The ids first seen. Offsets without topic ids are taken to be of these topics.
        self._first_ids: dict[str, bytes] = {}
        # Partitions of a stream reported as gone that have not come back.
        self._gone: set[TopicPartition] = set()
        # Topics (name, id) known to be replaced, and those of them that were reported.
        self._believed: set[tuple[str, bytes]] = set()
        self._told: set[tuple[str, bytes]] = set()

    # Batch

    def batch_ranges(self) -> list[OffsetRange]:
        options = self._options
        partitions = self.partitions()
        starts = self.resolve(options.starting, partitions)
        ends = self.resolve(options.ending, partitions)
        ranges = []
        for each in partitions:
            if starts[each] > ends[each] and "offsets" in {options.starting.kind, options.ending.kind}:
                raise SparkOptionError(
                    f"{options.starting.option} {starts[each]} of {each} is after "
                    f"{options.ending.option} {ends[each]}; choose an earlier start or a later end"
                )
            ranges.append(OffsetRange(*each, starts[each], ends[each]))
        return split(ranges, partitions_min=options.partitions_min, records_max=options.records_max)

    # What is subscribed to

    def partitions(self) -> list[TopicPartition]:
        """All partitions of the subscription, in order. Raises SparkOptionError for one that does not exist."""
        deadline = time.monotonic() + UNHEARD_OF_S
        while True:
            found = self._visible()
            missing = self._missing(found)
            is_late = time.monotonic() > deadline
            # A different id may only mean that the broker is behind.
            if missing is None and (is_late or not self._foreign()):
                return list(self._options.subscription.assigned) or sorted(found)
            if missing is not None and is_late:
                raise SparkOptionError(missing)
            time.sleep(GONE_PAUSE_S)

    def _missing(self, found: set[TopicPartition]) -> str | None:
        """A message about a subscribed topic or partition that was not found."""
        subscription = self._options.subscription
        present = {each.topic for each in found}
        for topic in subscription.named_topics or ():
            if topic not in present:
                where = self._settings.bootstrap
                return f"topic {topic} does not exist at {where}; create it or correct the name"
        for each in subscription.assigned:
            if each not in found:
                topic, number = each
                count = sum(other.topic == topic for other in found)
                return f"assign has partition {number} of topic {topic}, which has only {count}, from 0 on"
        return None

    def _foreign(self) -> bool:
        """Whether offsets were given for a topic that has been recreated."""
        places = (self._options.starting, self._options.ending)
        return any(self._is_other(*each) for place in places for each in place.topic_ids.items())

    def _is_other(self, topic: str, topic_id: bytes) -> bool:
        """Whether the topic of this name is known to have another id."""
        current = self.topic_ids.get(topic, NO_TOPIC_ID)
        return NO_TOPIC_ID not in (current, topic_id) and current != topic_id

    def _visible(self) -> set[TopicPartition]:
        """Every partition of the subscribed topics that exist."""
        subscription = self._options.subscription
        topics = {
            name: topic
            for name, topic in self._client.topics(subscription.named_topics).items()
            if _matches(subscription, name)
        }
        for name, topic in topics.items():
            self.topic_ids[name] = topic.topic_id
            if topic.topic_id != NO_TOPIC_ID:  # as old brokers of Kafka answer
                self._first_ids.setdefault(name, topic.topic_id)
        return {TopicPartition(name, number) for name, topic in topics.items() for number in topic.partitions}

    # Where to begin and to end

    def resolve(self, place: Place, partitions: Iterable[TopicPartition]) -> Offsets:
        """The offset of a position in each partition.

        Raises:
            SparkOptionError: the position does not cover all partitions, or is a time after every record.
            DataLossError: a given offset is not in the log, or no longer.
        """
        asked = list(partitions)
        if place.kind == "earliest":
            return self.earliest(asked)
        if place.kind == "latest":
            return self.latest(asked)
        if place.kind == "time":
            return self._at_times(place, dict.fromkeys(asked, place.time_ms))
        if place.values.keys() != set(asked):
            raise SparkOptionError(_uncovered(place, set(asked)))
        if place.kind == "times":
            return self._at_times(place, place.values)
        return self._at_offsets(place)

    def earliest(self, partitions: Iterable[TopicPartition]) -> Offsets:
        return self._list(dict.fromkeys(partitions, EARLIEST))

    def latest(self, partitions: Iterable[TopicPartition]) -> Offsets:
        """The end offsets; for read_committed the last stable offsets: later records may still be aborted."""
        return self._list(dict.fromkeys(partitions, LATEST))

    def _list(self, times: Mapping[TopicPartition, int]) -> Offsets:
        if not times:
            return {}
        found = self._client.list_offsets(dict(times), read_committed=self._settings.read_committed)
        return {each: found[each].offset for each in times}

    def _at_times(self, place: Place, times: Mapping[TopicPartition, int]) -> Offsets:
        # Before the times: records that arrive in between would be before an end queried later, and be skipped.
        ends = self.latest(times) if place.is_late_latest else {}
        offsets = self._list(times)
        late = sorted(each for each, offset in offsets.items() if offset < 0)
        if late and not place.is_late_latest:
            raise SparkOptionError(
                f"{late[0]} has no record at or after {place.option} {times[late[0]]}; give an earlier time, or "
                "set startingOffsetsByTimestampStrategy to latest"
            )
        return offsets | {each: ends[each] for each in late}

    def _at_offsets(self, place: Place) -> Offsets:
        requested = place.values
        foreign = {topic: old for topic, old in place.topic_ids.items() if self._is_other(topic, old)}
        self._lose_replaced(foreign, f"{place.option} is for the old one", "on without them")
        earliest, latest = self.earliest(requested), self.latest(requested)
        reach = self._existing(requested, latest)
        offsets: Offsets = {}
        for each, offset in requested.items():
            if offset == EARLIEST or each.topic in foreign:
                offsets[each] = earliest[each]
            elif offset == LATEST:
                offsets[each] = latest[each]
            elif earliest[each] <= offset <= reach[each]:
                offsets[each] = offset
            else:
                bounds = f"from {earliest[each]} to {reach[each]}"
                lose(
                    self._settings,
                    f"{place.option} asks for offset {offset} of {each}, which reaches {bounds}",
                )
                offsets[each] = min(max(offset, earliest[each]), reach[each])
        return offsets

    # Streams

    def available(self, start: StreamOffset, *, until: StreamOffset | None = None) -> Available:
        """How far the topics reach now, or reached at ``until``.

        A stream at ``start`` has lost data if its partitions have vanished, end before its offsets, or belong to a
        recreated topic: with ``failOnDataLoss`` that is an error. Without it, a recreated topic is read from its
        beginning.
        """
        look = self._look(start)
        latest, replaced = look.latest, look.replaced
        if until is not None:
            # Created since the run began, so left for the next run, which will report it.
            newer = {each.topic for each in latest if self._is_newer(each.topic, until)}
            latest = {each: offset for each, offset in latest.items() if each.topic not in newer}
            if not self._settings.fail_on_data_loss:
                replaced = {topic: old for topic, old in replaced.items() if topic not in newer}
        self._lose_replaced(replaced, "the stream has read the old one")
        for each in sorted(look.shrunk & latest.keys()):
            self._lose_shrunk(each, start.offsets[each], latest[each])
        stands_at = start.without(replaced)
        # An idle stream polls many times a second: log start offsets are queried only if there is something to
        # read.
        earliest = self.earliest({each for each in latest if latest[each] != stands_at.get(each)})
        starts: Offsets = {}
        ends: Offsets = {}
        for each in latest.keys() | stands_at.keys():
            stood_at = stands_at.get(each)
            reach = latest.get(each)
            if until is not None and reach is not None:
                reach = min(until.offsets[each], reach) if each in until.offsets else None
            if reach is None:
                if stood_at is None:
                    continue  # newer than `until`
                starts[each] = ends[each] = stood_at
            elif stood_at is None or each in look.shrunk:
                starts[each], ends[each] = min(earliest[each], reach), reach
            else:
                # A stream may be past `until`, and retention may have overtaken the stream.
                ends[each] = max(reach, stood_at)
                starts[each] = min(max(stood_at, earliest.get(each, stood_at)), ends[each])
        # A topic that is missing now, or has no id on a broker, keeps its known id.
        current = {each.topic: self.topic_ids[each.topic] for each in latest}
        known = {topic: now for topic, now in current.items() if now != NO_TOPIC_ID}
        return Available(starts, ends, earliest, self.named(start).topic_ids | known)

    def _look(self, needed: StreamOffset) -> _Look:
        """The end of each visible partition, and how that differs from what is ``needed``.

        A just started broker may not show everything yet, or show deleted topics; so missing partitions are
        looked up again for a while. What is gone after that is data loss, reported once.
        """
        deadline = time.monotonic() + GONE_AFTER_S
        while True:
            visible = self._visible_assigned(age_s_max=METADATA_AGE_S)
            self._gone -= visible
            replaced = self._replaced(needed, visible)
            same = needed.without(replaced)
            gone = same.keys() - visible - self._gone
            try:
                latest = self.latest(visible)
            except UnknownTopic:
                # Deleted a moment ago. The next metadata response will show that too.
                if time.monotonic() > deadline:
                    raise
            else:
                shrunk = self._shrunk(same, latest)
                news = gone or shrunk or replaced.items() - self._believed
                if not news or time.monotonic() > deadline:
                    break
            self._seen = None
            time.sleep(GONE_PAUSE_S)
        if gone:
            lose(self._settings, f"{_names(gone)} gone: topics were deleted or recreated")
            self._gone |= gone
        self._believed |= replaced.items()
        return _Look(latest, shrunk, replaced)

    def _replaced(self, needed: StreamOffset, visible: set[TopicPartition]) -> dict[str, bytes]:
        """The needed topics that were recreated, with their old ids."""
        ids = self.named(needed).topic_ids
        topics = {each.topic for each in needed.offsets} & {each.topic for each in visible}
        return {topic: ids[topic] for topic in topics & ids.keys() if self._is_other(topic, ids[topic])}

    def named(self, offsets: StreamOffset) -> StreamOffset:
        """The same offsets, with the ids of all topics ever seen."""
        topics = {each.topic for each in offsets.offsets}
        first = {topic: self._first_ids[topic] for topic in topics & self._first_ids.keys()}
        return StreamOffset(offsets.offsets, first | offsets.topic_ids)

    def _is_newer(self, topic: str, until: StreamOffset) -> bool:
        return topic in until.topic_ids and self._is_other(topic, until.topic_ids[topic])

    def _shrunk(self, needed: Offsets, latest: Offsets) -> set[TopicPartition]:
        reach = self._existing(needed, latest)
        return {each for each in needed.keys() & latest.keys() if reach[each] < needed[each]}

    def _existing(self, needed: Offsets, latest: Offsets) -> Offsets:
        """Where the partitions end that seem to end before a needed offset; ``latest`` for the others.

        With read_committed, records after an open transaction cannot be read yet, but they exist.
        """
        short = [each for each in needed.keys() & latest.keys() if latest[each] < needed[each]]
        if not short or not self._settings.read_committed:
            return latest
        ends = self._client.list_offsets(dict.fromkeys(short, LATEST))
        return {**latest, **{each: ends[each].offset for each in short}}

    def reach(self) -> StreamOffset:
        """The ends of the subscribed partitions that are visible now. Never fails for missing ones."""
        latest = self.latest(self._visible_assigned())
        return StreamOffset(latest, {each.topic: self.topic_ids[each.topic] for each in latest})

    def present(self, offsets: StreamOffset) -> Offsets:
        """The offsets whose partitions exist, in the same topics."""
        visible = self._visible_assigned(age_s_max=METADATA_AGE_S)
        there = offsets.without(self._replaced(offsets, visible))
        return {each: offset for each, offset in there.items() if each in visible}

    def _visible_assigned(self, *, age_s_max: float = 0.0) -> set[TopicPartition]:
        """The visible partitions of the subscription, at most ``age_s_max`` old."""
        now = time.monotonic()
        if self._seen is None or now - self._seen_at > age_s_max:
            visible = self._visible()
            assigned = self._options.subscription.assigned
            self._seen = visible.intersection(assigned) if assigned else visible
            self._seen_at = now
        return self._seen

    def limited(self, available: Available) -> Offsets:
        """The end of the next micro-batch, within the limits per trigger."""
        options, backlog = self._options, available.backlog
        if options.offsets_max is not None:
            backlog = share(backlog, options.offsets_max)
        if options.bytes_max is not None:
            samples = {each: self._sample(each, available) for each, count in backlog.items() if count}
            wanted = {
                each: round(max(0, backlog[each] - gaps) * size) for each, (size, gaps) in samples.items()
            }
            room = share(wanted, options.bytes_max)
            for each, (size, gaps) in samples.items():
                if room[each] < wanted[each]:  # or rounding could leave out a record that fits
                    backlog[each] = min(backlog[each], gaps + max(1, int(room[each] / size)))
        total = available.backlog
        return {
            # An unlimited partition ends at its end, even if that is before the stream's offset.
            each: end if backlog[each] >= total[each] else available.starts[each] + backlog[each]
            for each, end in available.ends.items()
        }

    def _sample(self, partition: TopicPartition, available: Available) -> tuple[float, int]:
        """From the batches that would be read next: bytes per record, and offsets among them without a record.

        A compacted log is sparse at its beginning and dense at its end. So bytes per offset would say nothing of
        what comes behind the sample; there, every offset is taken to have a record.
        """
        start = available.starts[partition]
        try:
            sample = self._client.fetch(partition, start, bytes_max=SAMPLE_BYTES, wait_ms=0).records
        except OffsetOutOfRange as error:  # retention has deleted more meanwhile
            start = error.log_start_offset
            sample = self._client.fetch(partition, start, bytes_max=SAMPLE_BYTES, wait_ms=0).records
        position, next_offset, records = 0, start, 0
        while len(sample) - position >= HEADER_SIZE:
            header = decode_header(sample, position)
            if position + header.size > len(sample) and position:
                break
            next_offset = max(next_offset, header.next_offset)
            records += header.count
            position += header.size
        if position and not records:
            # Nothing is known of the records that follow: read on to the next sample, and hardly beyond.
            return SAMPLE_BYTES, next_offset - start
        return max(1.0, position / max(1, records)), max(0, next_offset - start - records)

    def ranges(
        self, start: StreamOffset, end: StreamOffset, earliest: Offsets | None = None
    ) -> list[OffsetRange]:
        """What the tasks of a micro-batch read. ``earliest`` saves a request if it was just queried.

        Spark asks for the same batch again after a crash, perhaps much later: records gone meanwhile are data
        loss too.
        """
        # A batch planned with a recreated topic reads all of it, wherever the stream was in the old one. One
        # planned just now was planned from offsets with ids, even if the checkpoint has none.
        begun_in = (start if earliest is None else self.named(start)).topic_ids
        replaced = {topic: old for topic, old in begun_in.items() if end.topic_ids.get(topic, old) != old}
        # The start of the very first batch is queried again: then its end belongs to an old topic.
        unfinished = {
            topic: end.topic_ids[topic] for topic, old in replaced.items() if self.topic_ids.get(topic) == old
        }
        self._lose_replaced(unfinished, "a micro-batch of the old one was not finished")
        self._lose_replaced(
            {topic: old for topic, old in replaced.items() if topic not in unfinished},
            "the stream has read the old one",
        )
        begins, ends = start.without(replaced), end.offsets
        moved = {each for each, offset in ends.items() if begins.get(each) != offset}
        # Ends of partitions that do not reach their planned ends.
        reach: Offsets = {}
        if earliest is None or not moved <= earliest.keys():
            look = self._look(StreamOffset({each: ends[each] for each in moved}, end.topic_ids))
            self._lose_replaced(look.replaced, "a micro-batch of the old one was not finished")
            for each in sorted(look.shrunk):
                reach[each] = look.latest[each]
                lose(
                    self._settings,
                    f"{each} was planned up to offset {ends[each]} but ends at {reach[each]} now: its topic was "
                    "recreated or lost records",
                )
            moved = {each for each in moved & look.latest.keys() if each.topic not in look.replaced}
            earliest = self.earliest(moved)
        known_topics = {each.topic for each in begins}
        ranges = []
        for each in sorted(moved & earliest.keys()):
            log_start, until = earliest[each], ends[each]
            begin = begins.get(each)
            if begin is None:
                if log_start > 0 and each.topic in known_topics:
                    lose(self._settings, f"records [0, {log_start}) of the new partition {each} went unread")
                begin = log_start
            elif until < begin:
                self._lose_shrunk(each, begin, until)
                begin = log_start
            elif begin < log_start:
                lost = OffsetRange(*each, begin, min(log_start, until))
                lose(
                    self._settings,
                    f"records {lost} are gone: retention or a deletion was faster than the stream",
                )
                begin = log_start
            ranges.append(OffsetRange(*each, begin, min(until, reach.get(each, until))))
        return split(
            ranges, partitions_min=self._options.partitions_min, records_max=self._options.records_max
        )

    def _lose_replaced(
        self, replaced: Mapping[str, bytes], why: str, way_on: str = "the new one from its beginning"
    ) -> None:
        """Report recreated topics once; ``replaced`` has their old ids."""
        for topic, old in sorted(replaced.items() - self._told):
            now = self.topic_ids.get(topic)
            ids = f"id {format_id(old)}" + ("" if now is None else f", now {format_id(now)}")
            lose(
                self._settings,
                f"topic {topic} was deleted and recreated ({ids}), and {why}: its offsets are invalid in the new "
                "one, and unread records are gone",
                way_on,
            )
            self._told.add((topic, old))

    def _lose_shrunk(self, partition: TopicPartition, offset: int, end: int) -> None:
        lose(
            self._settings,
            f"{partition} was read up to offset {offset} but ends at {end} now: its topic was recreated",
        )


def _matches(subscription: Subscription, topic: str) -> bool:
    if subscription.pattern is None:
        return True
    # Anywhere in the name, as in Spark's Kafka source.
    return topic not in INTERNAL_TOPICS and re.search(subscription.pattern, topic) is not None


def _names(partitions: Iterable[TopicPartition]) -> str:
    names = [str(each) for each in sorted(partitions)]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _uncovered(place: Place, partitions: set[TopicPartition]) -> str:
    missing, foreign = partitions - place.values.keys(), place.values.keys() - partitions
    rule = f"{place.option} must list exactly the partitions that are read"
    if missing:
        advice = " (-2 is earliest, -1 is latest)" if place.kind == "offsets" else ""
        return f"{rule}: {_names(missing)} missing{advice}"
    return f"{rule}: {_names(foreign)} not subscribed to, or not there"
