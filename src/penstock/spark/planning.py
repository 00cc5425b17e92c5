"""From what a user subscribed to, and where to begin, to ranges of offsets: the driver's half of reading.

Batch reads are planned once, streams for every micro-batch: ``available`` says how far the topics reach,
``limited`` how much of it the next micro-batch takes, ``ranges`` what its tasks read. What a newcomer gets wrong:
an answer from a broker that has just started may lack topics, or tell of one that was deleted long ago. A partition
that was there and is not is asked for again for a while, and its offset is never forgotten; a stream that forgot it
would read everything once more. Only a topic with another id is a new one, whatever its name, and begins anew.
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
# A broker hears a moment later of a topic that was made at another.
UNHEARD_OF_S = 2.0
# New partitions and topics are found so soon. An idle stream looks for records a hundred times a second.
METADATA_AGE_S = 1.0
# What is read of a partition to learn how large its records are.
SAMPLE_BYTES = 128 * 2**10


@dataclass(frozen=True, slots=True)
class Available:
    """What a stream could read, at one moment."""

    # Where each partition's next record comes from: where the stream stands, or where the log begins.
    starts: Offsets
    # Up to where records can be read. A partition that is gone keeps the stream's own offset.
    ends: Offsets
    # Where the logs begin, of those partitions that have something to read.
    log_starts: Offsets
    # Which topics the ends are of.
    topic_ids: dict[str, bytes]

    @property
    def backlog(self) -> Offsets:
        return {each: max(0, end - self.starts[each]) for each, end in self.ends.items()}


@dataclass(frozen=True, slots=True)
class _Look:
    """What there is now of the partitions that somebody needs."""

    # How far each partition reaches that can be seen, needed or not.
    latest: Offsets
    # Those that end before what is needed of them.
    shrunk: set[TopicPartition]
    # Topics of which there is another now, and the ids of those that were needed.
    replaced: dict[str, bytes]


class Planner:
    """Asks the brokers. It remembers which partitions it saw last, for a moment, and which topics they were."""

    def __init__(self, options: SourceOptions, client: Client) -> None:
        self._options = options
        self._settings = options.read
        self._client = client
        self._seen: set[TopicPartition] | None = None
        self._seen_at = 0.0
        # Of the topics as they were seen last: a plan is for them, and for no other that gets the name of one.
        self.topic_ids: dict[str, bytes] = {}
        # As they were seen first. Offsets that do not say which topics they are of are taken to be of these.
        self._first_ids: dict[str, bytes] = {}
        # Those of a stream that were told to be gone, and have not come back.
        self._gone: set[TopicPartition] = set()
        # Topics by name and id that are believed to have been replaced, and those of them that were told.
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
                    f"{options.starting.option} {starts[each]} of {each} lies behind "
                    f"{options.ending.option} {ends[each]}; nothing could be read"
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
            # What is another topic than was asked for may be so only to a broker that has not heard yet.
            if missing is None and (is_late or not self._foreign()):
                return list(self._options.subscription.assigned) or sorted(found)
            if missing is not None and is_late:
                raise SparkOptionError(missing)
            time.sleep(GONE_PAUSE_S)

    def _missing(self, found: set[TopicPartition]) -> str | None:
        """What is subscribed to and not among those found, in words."""
        subscription = self._options.subscription
        present = {each.topic for each in found}
        for topic in subscription.named_topics or ():
            if topic not in present:
                where = self._settings.bootstrap
                return f"topic {topic} does not exist at {where}; create it, or mind the spelling"
        for each in subscription.assigned:
            if each not in found:
                topic, number = each
                count = sum(other.topic == topic for other in found)
                return f"assign names partition {number} of topic {topic}, which has {count}, from 0 on"
        return None

    def _foreign(self) -> bool:
        """Whether offsets were given of a topic that there is not, but another of its name."""
        places = (self._options.starting, self._options.ending)
        return any(self._is_other(*each) for place in places for each in place.topic_ids.items())

    def _is_other(self, topic: str, topic_id: bytes) -> bool:
        """Whether the topic of this name is known to be another than the one with this id."""
        current = self.topic_ids.get(topic, NO_TOPIC_ID)
        return NO_TOPIC_ID not in (current, topic_id) and current != topic_id

    def _visible(self) -> set[TopicPartition]:
        """Every partition of the topics that are subscribed to and exist."""
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
        """The offset of a place in each partition.

        Raises:
            SparkOptionError: the place does not say it for all of them, or names a time after every record.
            DataLossError: a given offset is not, or no longer, in the log.
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
        """For read_committed the last stable offset: what is behind it may still be aborted."""
        return self._list(dict.fromkeys(partitions, LATEST))

    def _list(self, times: Mapping[TopicPartition, int]) -> Offsets:
        if not times:
            return {}
        found = self._client.list_offsets(dict(times), read_committed=self._settings.read_committed)
        return {each: found[each].offset for each in times}

    def _at_times(self, place: Place, times: Mapping[TopicPartition, int]) -> Offsets:
        # Asked before the times: what comes in between would lie before an end that is asked later, and be skipped.
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
        offsets: Offsets = {}
        for each, offset in requested.items():
            if offset == EARLIEST or each.topic in foreign:
                offsets[each] = earliest[each]
            elif offset == LATEST:
                offsets[each] = latest[each]
            elif earliest[each] <= offset <= latest[each]:
                offsets[each] = offset
            else:
                bounds = f"from {earliest[each]} to {latest[each]}"
                lose(
                    self._settings,
                    f"{place.option} asks for offset {offset} of {each}, which reaches {bounds}",
                )
                offsets[each] = min(max(offset, earliest[each]), latest[each])
        return offsets

    # Streams

    def available(self, start: StreamOffset, *, until: StreamOffset | None = None) -> Available:
        """How far the topics reach now, or reached at ``until``.

        A stream at ``start`` whose partitions have vanished, have fewer records than it has read, or are those of a
        new topic with an old name, has lost data: with ``failOnDataLoss`` that is an error. Without it, a new topic
        is read from its beginning.
        """
        look = self._look(start)
        latest, replaced = look.latest, look.replaced
        if until is not None:
            # Made since the run began, so for the next run, which will tell of it.
            newer = {each.topic for each in latest if self._is_newer(each.topic, until)}
            latest = {each: offset for each, offset in latest.items() if each.topic not in newer}
            if not self._settings.fail_on_data_loss:
                replaced = {topic: old for topic, old in replaced.items() if topic not in newer}
        self._lose_replaced(replaced, "the stream has read the old one")
        for each in sorted(look.shrunk & latest.keys()):
            self._lose_shrunk(each, start.offsets[each], latest[each])
        stands_at = start.without(replaced)
        # An idle stream looks many times a second: it asks where logs begin only when there is something to read.
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
                # A stream may stand behind `until`, and retention may have overtaken the stream.
                ends[each] = max(reach, stood_at)
                starts[each] = min(max(stood_at, earliest.get(each, stood_at)), ends[each])
        # A topic that is not there now, or has no id to a broker, is still the one that it was.
        current = {each.topic: self.topic_ids[each.topic] for each in latest}
        known = {topic: now for topic, now in current.items() if now != NO_TOPIC_ID}
        return Available(starts, ends, earliest, self.named(start).topic_ids | known)

    def _look(self, needed: StreamOffset) -> _Look:
        """How far each partition reaches that can be seen, and what of that is not as it is ``needed``.

        A broker that has just started may not show everything yet, or show what is no more; so what is missing is
        looked for again for a while. What is gone after that is data loss, told once.
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
                # Deleted a moment ago. The brokers' next answer will say so too.
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
            lose(self._settings, f"{_names(gone)} no longer there: topics were deleted or made anew")
            self._gone |= gone
        self._believed |= replaced.items()
        return _Look(latest, shrunk, replaced)

    def _replaced(self, needed: StreamOffset, visible: set[TopicPartition]) -> dict[str, bytes]:
        """Which of the topics that are needed have become others, and the ids that they had."""
        ids = self.named(needed).topic_ids
        topics = {each.topic for each in needed.offsets} & {each.topic for each in visible}
        return {topic: ids[topic] for topic in topics & ids.keys() if self._is_other(topic, ids[topic])}

    def named(self, offsets: StreamOffset) -> StreamOffset:
        """The same, with the ids of all topics that were ever seen."""
        topics = {each.topic for each in offsets.offsets}
        first = {topic: self._first_ids[topic] for topic in topics & self._first_ids.keys()}
        return StreamOffset(offsets.offsets, first | offsets.topic_ids)

    def _is_newer(self, topic: str, until: StreamOffset) -> bool:
        return topic in until.topic_ids and self._is_other(topic, until.topic_ids[topic])

    def _shrunk(self, needed: Offsets, latest: Offsets) -> set[TopicPartition]:
        short = {each for each in needed.keys() & latest.keys() if latest[each] < needed[each]}
        if short and self._settings.read_committed:
            # What lies behind an open transaction is not stable, but it is there.
            ends = self._client.list_offsets(dict.fromkeys(short, LATEST))
            short = {each for each in short if ends[each].offset < needed[each]}
        return short

    def reach(self) -> StreamOffset:
        """How far the subscribed partitions reach now, of those that can be seen. Complains about nothing."""
        latest = self.latest(self._visible_assigned())
        return StreamOffset(latest, {each.topic: self.topic_ids[each.topic] for each in latest})

    def present(self, offsets: StreamOffset) -> Offsets:
        """Those of the offsets whose partitions are there, and in the topics that they are of."""
        visible = self._visible_assigned(age_s_max=METADATA_AGE_S)
        there = offsets.without(self._replaced(offsets, visible))
        return {each: offset for each, offset in there.items() if each in visible}

    def _visible_assigned(self, *, age_s_max: float = 0.0) -> set[TopicPartition]:
        """What of the subscription can be seen, as of now or of ``age_s_max`` ago."""
        now = time.monotonic()
        if self._seen is None or now - self._seen_at > age_s_max:
            visible = self._visible()
            assigned = self._options.subscription.assigned
            self._seen = visible.intersection(assigned) if assigned else visible
            self._seen_at = now
        return self._seen

    def limited(self, available: Available) -> Offsets:
        """Where the next micro-batch ends: as far as the limits per trigger let it."""
        options, backlog = self._options, available.backlog
        if options.offsets_max is not None:
            backlog = share(backlog, options.offsets_max)
        if options.bytes_max is not None:
            sizes = {each: self._record_bytes(each, available) for each, count in backlog.items() if count}
            wanted = {each: round(backlog[each] * size) for each, size in sizes.items()}
            room = share(wanted, options.bytes_max)
            for each, size in sizes.items():
                if room[each] < wanted[each]:  # or rounding would leave a record out that fits
                    backlog[each] = min(backlog[each], max(1, int(room[each] / size)))
        total = available.backlog
        return {
            # What is not limited ends where it ends, also where that is behind the stream's own offset.
            each: end if backlog[each] >= total[each] else available.starts[each] + backlog[each]
            for each, end in available.ends.items()
        }

    def _record_bytes(self, partition: TopicPartition, available: Available) -> float:
        """About how many bytes one offset is worth, from the batches that would be read next."""
        start = available.starts[partition]
        try:
            sample = self._client.fetch(partition, start, bytes_max=SAMPLE_BYTES, wait_ms=0).records
        except OffsetOutOfRange as error:  # retention has moved since we asked
            start = error.log_start_offset
            sample = self._client.fetch(partition, start, bytes_max=SAMPLE_BYTES, wait_ms=0).records
        position, next_offset = 0, start
        while len(sample) - position >= HEADER_SIZE:
            header = decode_header(sample, position)
            if position + header.size > len(sample) and position:
                break
            next_offset = max(next_offset, header.next_offset)
            position += header.size
        return max(1.0, position / max(1, next_offset - start))

    def ranges(
        self, start: StreamOffset, end: StreamOffset, earliest: Offsets | None = None
    ) -> list[OffsetRange]:
        """What the tasks of a micro-batch read. ``earliest`` saves asking, if it was asked just now.

        Spark asks for the same again after a crash, perhaps much later: what has gone meanwhile is data loss too.
        """
        # A batch that was planned with a new topic reads all of it, wherever the stream stood in the old one. One
        # that was planned just now was planned from offsets with ids, also where the checkpoint has none.
        begun_in = (start if earliest is None else self.named(start)).topic_ids
        replaced = {topic: old for topic, old in begun_in.items() if end.topic_ids.get(topic, old) != old}
        # Where the first batch of all begins is asked anew: then it is its end that is of an old topic.
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
        # Where partitions end that do not reach as far as was planned.
        reach: Offsets = {}
        if earliest is None or not moved <= earliest.keys():
            look = self._look(StreamOffset({each: ends[each] for each in moved}, end.topic_ids))
            self._lose_replaced(look.replaced, "a micro-batch of the old one was not finished")
            for each in sorted(look.shrunk):
                reach[each] = look.latest[each]
                lose(
                    self._settings,
                    f"{each} was to be read up to offset {ends[each]} but ends at {reach[each]} now: its topic was "
                    "made anew, or lost what it had",
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
        """Tell, once, of topics that there are others of now; they are given with the ids that they had."""
        for topic, old in sorted(replaced.items() - self._told):
            now = self.topic_ids.get(topic)
            ids = f"id {format_id(old)}" + ("" if now is None else f", now {format_id(now)}")
            lose(
                self._settings,
                f"topic {topic} was deleted and made anew ({ids}), and {why}: its offsets mean nothing in the new "
                "one, and records that were not read are gone",
                way_on,
            )
            self._told.add((topic, old))

    def _lose_shrunk(self, partition: TopicPartition, offset: int, end: int) -> None:
        lose(
            self._settings,
            f"{partition} was read up to offset {offset} but ends at {end} now: its topic was made anew",
        )


def _matches(subscription: Subscription, topic: str) -> bool:
    if subscription.pattern is None:
        return True
    # Anywhere in the name, as Spark's Kafka source looks for it.
    return topic not in INTERNAL_TOPICS and re.search(subscription.pattern, topic) is not None


def _names(partitions: Iterable[TopicPartition]) -> str:
    names = [str(each) for each in sorted(partitions)]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _uncovered(place: Place, partitions: set[TopicPartition]) -> str:
    missing, foreign = partitions - place.values.keys(), place.values.keys() - partitions
    rule = f"{place.option} must name every partition that is read, and no other"
    if missing:
        advice = " (-2 is earliest, -1 is latest)" if place.kind == "offsets" else ""
        return f"{rule}: {_names(missing)} missing{advice}"
    return f"{rule}: {_names(foreign)} not subscribed to, or not there"
