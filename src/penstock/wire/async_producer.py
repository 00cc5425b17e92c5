"""The asyncio producer: many callers, whose records travel together, and a result for each record.

It is idempotent: what it retries is stored once, and in the order of the calls within a partition. A call that
fails says whether its record may be stored. A caller that is cancelled gives up the answer, not the record.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from penstock.model import TopicPartition
from penstock.protocol.compression import Codec
from penstock.protocol.records import Header
from penstock.wire import calls
from penstock.wire.async_client import AsyncClient
from penstock.wire.cluster import TopicInfo
from penstock.wire.errors import ProduceFailed, TimedOut, UnknownTopic, WireError
from penstock.wire.gathering import Gathering, Sink, sizes_of
from penstock.wire.producing import Producing
from penstock.wire.record_batches import partitions_of

ALL = -1
# Before compression. Small enough for any topic's limit, large enough that headers do not matter.
BATCH_BYTES = 256 * 1024
BUFFER_BYTES = 32 * 1024 * 1024
# To one broker. While two requests are in flight records are gathered for the third.
IN_FLIGHT = 2
# How long the number of a topic's partitions is believed, as in Java's client (metadata.max.age.ms).
TOPIC_AGE_MS = 300_000


class Message(NamedTuple):
    """A record to be produced. Its partition is given, or that of its key, or any."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[Header] = ()
    partition: int | None = None
    # Default: now.
    timestamp_ms: int | None = None


class Stored(NamedTuple):
    partition: int
    # -1: stored, but the broker does not say where, because it had the record already.
    offset: int
    timestamp_ms: int


class AsyncProducer:
    """A producer on a client's connections.

    ``acks=-1`` waits for all replicas in sync, ``acks=1`` for the leader alone.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        acks: int = ALL,
        codec: Codec = Codec.NONE,
        linger_ms: int = 0,
        batch_bytes: int = BATCH_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
        deadline_ms: int | None = None,
    ) -> None:
        """``deadline_ms`` is for each record, from the call to its acknowledgement; default: the client's."""
        if acks not in (ALL, 1):
            raise ValueError(
                f"acks={acks}: an idempotent producer needs acknowledgements; use -1 (all) or 1 (the leader)"
            )
        self._client = client
        self._shell = client.shell
        self._loop = asyncio.get_running_loop()
        core = client.shell.core
        self._producing = Producing(
            core, acks=acks, in_flight=IN_FLIGHT, fails_alone=True, deadline_ms=deadline_ms
        )
        self._gathering = Gathering(
            core, self._producing, codec=codec, batch_bytes=batch_bytes, linger_ms=linger_ms
        )
        self._shell.after_events.append(self._report)
        self._shell.on_close.append(self._stop)
        self._chance = random.Random()
        # Where records without a key go now, by topic.
        self._sticky: dict[str, int] = {}
        # When each topic's partitions were last looked up, and the lookups under way.
        self._known_since_ms: dict[str, int] = {}
        self._lookups: dict[str, asyncio.Task[TopicInfo]] = {}
        self._buffer_bytes = buffer_bytes
        self.buffered_bytes = 0
        # Calls that wait for room, in order, with the bytes they need; and those that wait for everything.
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._flushing: list[asyncio.Future[None]] = []
        self.is_closed = False

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[Header] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Stored:
        """Store one record.

        Raises:
            ProduceFailed: not stored, or nobody knows; see ``may_be_stored``.
            UnknownTopic: there is no such topic or partition, so nothing is stored.
        """
        if timestamp_ms is None:
            timestamp_ms = time.time_ns() // 1_000_000
        row = (timestamp_ms, key, value, headers)
        sizes = sizes_of([row])
        try:
            info = await self._topic(topic)
            if partition is not None:
                _check_partition(topic, info, partition)
            await self._reserve(sizes[0])
        except UnknownTopic:
            raise
        except WireError as error:
            raise ProduceFailed(error, may_be_stored=False) from None
        if partition is None:
            if key is None:
                partition = self._anywhere(topic, info)
            else:
                partition = partitions_of([key], len(info.partitions))[0]
        done: asyncio.Future[int | ProduceFailed] = self._loop.create_future()

        def take(first: int, count: int, offset: int, error: ProduceFailed | None) -> None:
            self._free(sizes[0])
            if not done.done():
                done.set_result(error or offset)

        self._gathering.add(TopicPartition(topic, partition), [row], sizes, take, self._shell.now_ms())
        self._shell.act_soon()
        outcome = await done
        if isinstance(outcome, ProduceFailed):
            raise outcome
        return Stored(partition, outcome, timestamp_ms)

    async def produce_many(self, topic: str, messages: Sequence[Message]) -> list[Stored | ProduceFailed]:
        """Store records, each with a result of its own. Those of one partition keep their order.

        Raises:
            UnknownTopic: there is no such topic or partition, so nothing is stored.
        """
        if not messages:
            return []
        now_ms = time.time_ns() // 1_000_000
        rows = [
            (now_ms if timestamp_ms is None else timestamp_ms, key, value, headers)
            for value, key, headers, _, timestamp_ms in messages
        ]
        sizes = sizes_of(rows)
        total = sum(sizes)
        try:
            info = await self._topic(topic)
            for each in messages:
                if each.partition is not None:
                    _check_partition(topic, info, each.partition)
            await self._reserve(total)
        except UnknownTopic:
            raise
        except WireError as error:
            return [ProduceFailed(error, may_be_stored=False)] * len(rows)
        places = self._places(topic, info, messages)
        outcomes: list[Stored | ProduceFailed] = [_NOTHING] * len(rows)
        done = self._loop.create_future()
        left = len(rows)

        def taken(partition: int, numbers: Sequence[int]) -> Sink:
            def take(first: int, count: int, offset: int, error: ProduceFailed | None) -> None:
                nonlocal left
                step = offset >= 0
                for number in numbers[first : first + count]:
                    outcomes[number] = error or Stored(partition, offset, rows[number][0])
                    offset += step
                left -= count
                if not left:
                    self._free(total)
                    if not done.done():
                        done.set_result(None)

            return take

        for partition, numbers in places.items():
            self._gathering.add(
                TopicPartition(topic, partition),
                [rows[number] for number in numbers],
                [sizes[number] for number in numbers],
                taken(partition, numbers),
                self._shell.now_ms(),
            )
        self._shell.act_soon()
        await done
        return outcomes

    async def flush(self) -> None:
        """Wait until every record has its result."""
        while self.buffered_bytes:
            done = self._loop.create_future()
            self._flushing.append(done)
            await done

    async def close(self) -> None:
        """Flush and close. What has no result by its deadline fails as it would without closing."""
        if not self.is_closed:
            self.is_closed = True
            try:
                if not self._shell.is_closed:
                    await self.flush()
            finally:
                self._stop()
                self._shell.after_events.remove(self._report)
                self._shell.on_close.remove(self._stop)

    # Private

    def _stop(self) -> None:
        """Fail what has no result yet."""
        self.is_closed = True
        self._gathering.close()
        self._producing.close()
        self._report()
        for lookup in self._lookups.values():
            lookup.cancel()

    async def _topic(self, topic: str) -> TopicInfo:
        if self.is_closed:
            raise WireError("this producer is closed")
        self._shell.check_usable()
        info = self._shell.core.cluster.topics.get(topic)
        now_ms = self._shell.now_ms()
        is_old = now_ms - self._known_since_ms.get(topic, -TOPIC_AGE_MS) >= TOPIC_AGE_MS
        if info is not None and not is_old:
            return info
        lookup = self._lookups.get(topic)
        if lookup is None:
            lookup = self._lookups[topic] = self._loop.create_task(
                self._client.do(calls.topic(topic), deadline_ms=self._producing.deadline_ms)
            )
            lookup.add_done_callback(lambda task: self._looked_up(topic, task))
        if info is not None:
            # The old number will do until the new one is there.
            return info
        return await asyncio.shield(lookup)

    def _looked_up(self, topic: str, task: asyncio.Task[TopicInfo]) -> None:
        del self._lookups[topic]
        if not task.cancelled() and task.exception() is None:
            self._known_since_ms[topic] = self._shell.now_ms()

    async def _reserve(self, size: int) -> None:
        """Take room in the buffer, after those who came before. Anything fits into an empty one."""
        if self._waiting or not self._fits(size):
            turn = self._loop.create_future()
            self._waiting.append((turn, size))
            seconds = self._producing.deadline_ms / 1000
            try:
                async with asyncio.timeout(seconds):
                    await turn
            except BaseException as error:
                if turn.done() and not turn.cancelled():
                    # It got the room, and was cancelled in the same moment.
                    self._free(size)
                else:
                    self._waiting.remove((turn, size))
                if isinstance(error, TimeoutError):
                    words = f"the buffer of {self._buffer_bytes} bytes was full for {seconds:g} s"
                    raise TimedOut(words) from None
                raise
        else:
            self.buffered_bytes += size
        if self.is_closed:
            self._free(size)
            raise WireError("this producer is closed")

    def _fits(self, size: int) -> bool:
        return not self.buffered_bytes or self.buffered_bytes + size <= self._buffer_bytes

    def _free(self, size: int) -> None:
        self.buffered_bytes -= size
        while self._waiting and self._fits(self._waiting[0][1]):
            turn, wanted = self._waiting.popleft()
            self.buffered_bytes += wanted
            turn.set_result(None)
        if not self.buffered_bytes:
            for done in self._flushing:
                if not done.done():
                    done.set_result(None)
            self._flushing.clear()

    def _places(self, topic: str, info: TopicInfo, messages: Sequence[Message]) -> dict[int, list[int]]:
        """The numbers of the messages for each partition."""
        count = len(info.partitions)
        keys = [each.key if each.partition is None else None for each in messages]
        chosen = partitions_of(keys, count) if any(key is not None for key in keys) else [-1] * len(keys)
        places: dict[int, list[int]] = {}
        anywhere = -1
        for number, (message, of_key) in enumerate(zip(messages, chosen)):
            partition = of_key if message.partition is None else message.partition
            if partition < 0:
                if anywhere < 0:
                    anywhere = self._anywhere(topic, info)
                partition = anywhere
            places.setdefault(partition, []).append(number)
        return places

    def _anywhere(self, topic: str, info: TopicInfo) -> int:
        """The same partition until its pile is sent: one batch is better than one in every partition."""
        partition = self._sticky.get(topic, -1)
        if partition not in info.partitions or not self._gathering.has_pile(TopicPartition(topic, partition)):
            led = [number for number, each in info.partitions.items() if each.leader >= 0]
            partition = self._sticky[topic] = self._chance.choice(led or list(info.partitions))
        return partition

    def _report(self) -> None:
        """Tell callers what the last events brought."""
        producing = self._producing
        acked, producing.acked = producing.acked, []
        for on_ack, base_offset in acked:
            on_ack(base_offset)
        failed, producing.failed = producing.failed, []
        for on_failure, error, may_be_stored in failed:
            on_failure(error, may_be_stored)


def _check_partition(topic: str, info: TopicInfo, partition: int) -> None:
    if partition not in info.partitions:
        raise UnknownTopic(f"topic {topic} has no partition {partition}; it has {len(info.partitions)}")


_NOTHING = ProduceFailed(WireError("no result"), may_be_stored=True)
