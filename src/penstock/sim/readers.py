"""Consumers with assigned partitions: each reads every partition of every topic, from its leader.

A reader has a fetch session with every broker and checks every response: checksums, order, epochs, the high
watermark. It sends the leader epoch it knows and the epoch of the last batch it read (KIP-320), so a leader that
lacks something the reader has read reports that. It is a violation: what was read is committed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from crc32c import crc32c

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)
from penstock.protocol.records import CRC_START, CorruptBatch, batches, decode_records
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.loop import start
from penstock.sim.report import Violation
from penstock.sim.topics import EARLIEST, Topics, list_offset

FETCH_WAIT_MS = 500
RECORDS_BYTES_MAX = 1 << 24
TOPIC_IDS_SINCE_VERSION = 13
READ_UNCOMMITTED = 0
READ_COMMITTED = 1


class Position:
    """A reader's position in a partition."""

    def __init__(self) -> None:
        self.offset = 0
        # Leader epoch of the last batch read.
        self.epoch = -1


class _Asking(NamedTuple):
    """What a reader knew when it sent a fetch."""

    asked_ms: float
    broker: int
    # Partitions that the broker leads; of the other partitions it is a nearer replica.
    led: list[Place]
    # The acknowledged deletions.
    deleted: dict[Place, tuple[int, int]]


class Reader:
    """A consumer that reads every partition of its topics from its leader."""

    def __init__(
        self,
        client: Client,
        checkers: ClientCheckers,
        topics: Topics,
        name: str,
        *,
        rack: str | None = None,
        # A broker that is cut off may answer for a deleted topic with the same name, in the same epoch. Only the
        # id distinguishes them, as in Kafka.
        by_id: bool = False,
        isolation_level: int = READ_UNCOMMITTED,
    ) -> None:
        self._client = client
        self._chance = client.chance
        self._checkers = checkers
        self._topics = topics
        self.name = name
        self._isolation_level = isolation_level
        version = self._chance.choice([11, 12, 13, 15, 17])
        self.version = max(version, TOPIC_IDS_SINCE_VERSION) if by_id else version
        self.positions: dict[Place, Position] = {}
        # Sent to leaders, which may then name a nearer replica.
        self._rack = rack or ""
        # The nearer replica, and the leader epoch in which the leader named it.
        self._nearer: dict[Place, tuple[int, int]] = {}
        self.read_nearby = 0
        # The last high watermark from the leader of an epoch.
        self._watermarks: dict[tuple[Place, int], int] = {}

    async def run(self) -> None:
        client = self._client
        polling: dict[int, bool] = {}
        while True:
            names = self._names()
            await client.refresh(names)
            for name in names:
                for place in client.places.get(name, []):
                    self.positions.setdefault(place, Position())
            for broker in sorted(client.brokers):
                if broker not in polling:
                    polling[broker] = True
                    start(client.process, self._poll(broker))
            await client.pause(self._chance.uniform(500, 3_000))

    def _names(self) -> list[str]:
        """The topics to read."""
        return self._topics.alive()

    def offset(self, place: Place) -> int:
        """The offset after the last record read."""
        position = self.positions.get(place)
        return 0 if position is None else position.offset

    def _led_by(self, broker: int) -> list[Place]:
        return [
            place
            for place in self.positions
            if place.topic_id not in self._topics.deleting and self._source(place) == broker
        ]

    def _source(self, place: Place) -> int | None:
        """The broker to read a partition from."""
        leadership = self._client.leader(place)
        if leadership is None:
            return None
        nearer, epoch = self._nearer.get(place, (-1, -1))
        return nearer if epoch == leadership.epoch and nearer in self._client.brokers else leadership.broker

    async def _poll(self, broker: int) -> None:
        """Fetch from one broker for ever, in one session after another."""
        client = self._client
        session_id = session_epoch = 0
        in_session: dict[Place, tuple[int, int]] = {}
        while True:
            places = self._led_by(broker)
            if not places:
                session_id = session_epoch = 0
                await client.pause(300)
                continue
            if session_epoch == 0 or any(place not in places for place in in_session):
                session_id, session_epoch, in_session = 0, 0, {}
            asked = {}
            for place in places:
                now = (self.positions[place].offset, client.leaders[place].epoch)
                if in_session.get(place) != now:
                    asked[place] = now
                    in_session[place] = now
            request = fetch_request(
                [(place, self.positions[place], client.leaders[place].epoch) for place in asked],
                self.version,
                session_id,
                session_epoch,
                rack=self._rack,
                isolation_level=self._isolation_level,
            )
            # The state at the time of the request: it may change before the response.
            asking = _Asking(
                client.process.loop.now_ms,
                broker,
                [place for place in in_session if self._nearer.get(place) != (broker, in_session[place][1])],
                {place: self._checkers.starts.acknowledged(place) for place in in_session},
            )
            response: FetchResponse | None = await client.call(
                broker, request, self.version, timeout_ms=FETCH_WAIT_MS + 5_000, channel="fetch"
            )
            if response is None or response.error_code:
                session_id = session_epoch = 0
                in_session = {}
                await client.back_off()
                await client.refresh([place.topic for place in places])
                continue
            session_id, session_epoch = response.session_id, session_epoch + 1
            for place in asking.led:
                if _was_answered(response, place, self.version):
                    epoch, now_ms = in_session[place][1], client.process.loop.now_ms
                    self._checkers.leaders.answered(place, epoch, asking.asked_ms, now_ms, self.name)
            if not await self._received(response, dict(in_session), asking):
                await client.back_off()
                await client.refresh([place.topic for place in places])

    async def _received(
        self, response: FetchResponse, asked: dict[Place, tuple[int, int]], asking: _Asking
    ) -> bool:
        """Check a response; True if no partition, asked for by (offset, leader epoch), has an error."""
        by_name = {
            (
                place.topic_id if self.version >= TOPIC_IDS_SINCE_VERSION else place.topic,
                place.partition,
            ): place
            for place in asked
        }
        is_good = True
        for topic in response.responses:
            named = topic.topic_id if self.version >= TOPIC_IDS_SINCE_VERSION else topic.topic
            for data in topic.partitions:
                place = by_name.get((named, data.partition_index))
                if place is None or place.topic_id in self._topics.deleting:
                    continue
                position, epoch = self.positions[place], asked[place][1]
                is_leader = place in asking.led
                if not is_leader and (data.error_code or data.diverging_epoch is not None):
                    # Only errors from the leader count.
                    self._nearer.pop(place, None)
                    continue
                if data.preferred_read_replica >= 0:
                    self._nearer[place] = (data.preferred_read_replica, epoch)
                    continue
                if data.diverging_epoch is not None and data.diverging_epoch.end_offset >= 0:
                    raise Violation(
                        f"lost write: {self.name} read {place} to {position.offset}, epoch {position.epoch}, "
                        f"and the leader says it diverges at {data.diverging_epoch}"
                    )
                if data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                    await self._out_of_range(place, position)
                elif data.error_code:
                    self._refused(place, ErrorCode(data.error_code))
                    is_good = False
                else:
                    self._checkers.starts.saw(
                        place,
                        data.log_start_offset,
                        self.name,
                        epoch=epoch if is_leader else -1,
                        since=asking.deleted.get(place),
                    )
                    self.read_nearby += not is_leader
                    if is_leader:  # a restarted follower has to learn the high watermark first
                        self._watermark_moved(place, epoch, data)
                    if position.offset < asked[place][0]:
                        continue  # a late response: another broker has answered since, and it begins again
                    try:
                        self._read(place, position, data)
                    except CorruptBatch as error:
                        raise Violation(
                            f"{self.name} was served damaged bytes of {place}: {error}"
                        ) from error
        return is_good

    def _refused(self, place: Place, error: ErrorCode) -> None:
        """The leader answered with this error."""

    def _watermark_moved(self, place: Place, epoch: int, data: PartitionData) -> None:
        key, high_watermark = (place, epoch), data.high_watermark
        known = self._watermarks.get(key, 0)
        if high_watermark < known:
            raise Violation(
                f"{self.name}: the high watermark of {place} in epoch {key[1]} fell from {known} to "
                f"{high_watermark}"
            )
        self._watermarks[key] = max(known, high_watermark)

    def _read(self, place: Place, position: Position, data: PartitionData) -> None:
        records, high_watermark = record_bytes(data), data.high_watermark
        for at, header in batches(records):
            if header.size > len(records) - at:
                break  # cut off by the limit
            if crc32c(memoryview(records)[at + CRC_START : at + header.size]) != header.crc:
                raise Violation(f"{self.name} was served a damaged batch of {place} at {header.base_offset}")
            if header.last_offset >= high_watermark:
                raise Violation(
                    f"{self.name} was served {place} to {header.last_offset}, beyond the high watermark "
                    f"{high_watermark}"
                )
            for record in decode_records(records, at, bytes_max=RECORDS_BYTES_MAX):
                if record.offset < position.offset:
                    continue  # the batch begins before the requested offset
                assert record.value is not None
                self._checkers.polls.polled_from(place, position.offset, record.offset, self.name)
                self._checkers.values.saw(place, record.offset, record.value, header.leader_epoch, self.name)
                self._checkers.values.times.setdefault(place, {})[record.offset] = record.timestamp
                self._checkers.promises.read(place, record.offset, record.value, self.name)
                if header.leader_epoch < position.epoch:
                    raise Violation(
                        f"{place} at {record.offset}: epoch {header.leader_epoch} after {position.epoch}"
                    )
                position.offset, position.epoch = record.offset + 1, header.leader_epoch

    async def _out_of_range(self, place: Place, position: Position) -> None:
        leadership = self._client.leader(place)
        if leadership is None:
            return
        start = await list_offset(self._client, place, EARLIEST)
        if start is None:
            return
        if start <= position.offset:
            raise Violation(
                f"lost write: {self.name} read {place} to {position.offset}, which the leader of epoch "
                f"{leadership.epoch} says is out of range; it starts at {start}"
            )
        self._checkers.starts.saw(place, start, self.name)
        position.offset, position.epoch = start, -1


def fetch_request(
    asked: list[tuple[Place, Position, int]],
    version: int,
    session_id: int,
    session_epoch: int,
    *,
    rack: str = "",
    isolation_level: int = READ_UNCOMMITTED,
) -> FetchRequest:
    by_id = version >= TOPIC_IDS_SINCE_VERSION
    return FetchRequest(
        max_wait_ms=FETCH_WAIT_MS,
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=isolation_level,
        session_id=session_id,
        session_epoch=session_epoch,
        rack_id=rack,
        topics=[
            FetchTopic(
                topic="" if by_id else place.topic,
                topic_id=place.topic_id if by_id else bytes(16),
                partitions=[
                    FetchPartition(
                        partition=place.partition,
                        current_leader_epoch=epoch,
                        fetch_offset=position.offset,
                        last_fetched_epoch=position.epoch,
                        partition_max_bytes=1 << 18,
                    )
                ],
            )
            for place, position, epoch in asked
        ],
    )


def _was_answered(response: FetchResponse, place: Place, version: int) -> bool:
    """Whether a partition is in the response, without an error."""
    named = place.topic_id if version >= TOPIC_IDS_SINCE_VERSION else place.topic
    return any(
        data.partition_index == place.partition and not data.error_code
        for topic in response.responses
        if named == (topic.topic_id if version >= TOPIC_IDS_SINCE_VERSION else topic.topic)
        for data in topic.partitions
    )


def record_bytes(data: PartitionData) -> bytes:
    records: Any = data.records
    return bytes(records or b"")
