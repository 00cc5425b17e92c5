"""The clients of compacted topics: a writer for each partition, and readers of everything, again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.chaos.clients import CODECS, Client
from tests.chaos.cluster_clients import cluster_settings, is_absence
from tests.chaos.compaction.model import Entry, PartitionModel
from tests.chaos.ledger import Ledger, Place, offset_in, place_of

DELIVERY_S = 120.0
READING_S = 60.0
VALUE_BYTES_MAX = 300
TOMBSTONES = 0.15
# How many records a writer may be ahead of their acknowledgements.
AHEAD = 2000


def random_entry(choose: random.Random, keys: int) -> Entry:
    # Some keys are written often, some once in a long while.
    number = int(keys * choose.random() ** 3)
    headers: tuple[tuple[str, bytes | None], ...] = ()
    if choose.random() < 0.3:
        headers = (("n", b"%d" % choose.randrange(100)), ("nothing", None))
    value = None
    if choose.random() >= TOMBSTONES:
        # Also an empty one, which is not a tombstone.
        value = choose.randbytes(choose.choice((0, choose.randrange(VALUE_BYTES_MAX))))
    # Not in order, as with producers whose clocks differ.
    now_ms = time.time_ns() // 1_000_000
    return Entry(b"key-%d" % number, value, headers, now_ms - choose.randrange(2000))


class KeyedWriter(Client):
    """Writes random keys, values and tombstones to a partition that nobody else writes to."""

    def __init__(
        self,
        number: int,
        bootstrap: str,
        ledger: Ledger,
        model: PartitionModel,
        *,
        keys: int,
        seed: int,
        rate: float,
    ) -> None:
        codec = CODECS[number % len(CODECS)]
        super().__init__(f"writer of {model.place.topic}-{model.place.partition} ({codec})", ledger)
        self._model = model
        self._keys = keys
        self._random = random.Random(seed)
        self._rate = rate
        self._sent = 0
        self._producer = Producer(
            cluster_settings(
                bootstrap,
                enable_idempotence=True,
                acks="all",
                compression_codec=codec,
                linger_ms=self._random.choice((0, 2, 10)),
                batch_num_messages=self._random.choice((1, 7, 60)),
                message_timeout_ms=int(DELIVERY_S * 1000),
                queue_buffering_max_messages=AHEAD,
                retry_backoff_ms=50,
            )
        )

    def step(self) -> None:
        burst = self._random.randrange(1, 60)
        for _ in range(burst):
            self._send(random_entry(self._random, self._keys))
        self._producer.poll(0)
        self.pause(self._random.uniform(0.5, 1.5) * burst / self._rate)

    def finish(self) -> None:
        left = self._producer.flush(DELIVERY_S)
        assert left == 0, f"{left} records were not acknowledged {DELIVERY_S:g} s after the last fault"

    def _send(self, entry: Entry) -> None:
        offset = self._model.writing(entry)
        while not self._is_abandoned:
            try:
                self._producer.produce(
                    self._model.place.topic,
                    entry.value,
                    entry.key,
                    partition=self._model.place.partition,
                    timestamp=entry.timestamp,
                    headers=list(entry.headers),
                    on_delivery=partial(self._delivered, offset),
                )
                return
            except BufferError:  # nobody takes records for now
                self._producer.poll(0.05)

    def _delivered(self, offset: int, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._ledger.violated(f"{self.name} gave up record {offset}: {error}")
        else:
            # A new leader need not know where a record is that was written before.
            self._model.acknowledged(offset, message.offset())


class Auditor(Client):
    """Reads whole topics from the start, again and again, and follows what is read to the end of the log."""

    def __init__(
        self,
        bootstrap: str,
        ledger: Ledger,
        models: Sequence[PartitionModel],
        *,
        isolation: str,
        rest_s: float,
    ) -> None:
        super().__init__(f"auditor ({isolation})", ledger)
        self._models = {model.place: model for model in models}
        self._addresses = bootstrap
        self._isolation = isolation
        self._rest_s = rest_s
        self.readings = 0
        self.records = 0

    def step(self) -> None:
        readings = {place: model.begin_reading(self.name) for place, model in self._models.items()}
        ends = {place: reading.end_offset for place, reading in readings.items()}

        def saw(place: Place, offset: int, entry: Entry) -> None:
            readings[place].saw(self._models[place], offset, entry)
            self.records += 1

        if read_all(self._addresses, ends, saw, isolation=self._isolation, goes_on=self._goes_on):
            for place, reading in readings.items():
                self._models[place].end_reading(reading)
            self.readings += 1
        self.pause(self._rest_s)

    def _goes_on(self) -> bool:
        return not self._is_abandoned


def read_all(
    bootstrap: str,
    ends: Mapping[Place, int],
    saw: Callable[[Place, int, Entry], None],
    *,
    isolation: str = "read_uncommitted",
    goes_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Read partitions from offset 0 to their ends, which are at or behind ``ends``; whether it got there.

    An error is raised unless it says no more than that a broker is away. An offset out of range is an error.
    """
    consumer = Consumer(
        cluster_settings(
            bootstrap,
            group_id="nobody",
            enable_auto_commit=False,
            auto_offset_reset="error",
            check_crcs=True,
            enable_partition_eof=True,
            isolation_level=isolation,
            fetch_wait_max_ms=50,
        )
    )
    try:
        consumer.assign([TopicPartition(*place, 0) for place in ends])
        ended: set[Place] = set()
        deadline = time.monotonic() + READING_S
        while len(ended) < len(ends):
            if not goes_on():
                return False
            for message in consumer.consume(2000, timeout=0.1):
                error = message.error()
                if error is None:
                    if place_of(message) not in ended:
                        saw(place_of(message), offset_in(message), entry_in(message))
                    deadline = time.monotonic() + READING_S
                elif error.code() == KafkaError._PARTITION_EOF:
                    # A new leader may take a moment to know how much is committed.
                    if offset_in(message) >= ends[place_of(message)]:
                        ended.add(place_of(message))
                elif not is_absence(error):
                    raise KafkaException(error)
            assert time.monotonic() < deadline, f"no more to read, and no end: {set(ends) - ended}"
        return True
    finally:
        consumer.close()


def entry_in(message: Message) -> Entry:
    key = message.key()
    assert isinstance(key, bytes), f"a record without a key at {message.offset()}"
    headers: Any = message.headers() or ()
    return Entry(key, message.value(), tuple(headers), message.timestamp()[1])
