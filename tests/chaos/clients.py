"""The clients of a chaos run: threads that go on working while the broker dies under them.

All are confluent-kafka (librdkafka), configured to be patient: a broker that is away is waited for, so every
record is acknowledged in the end, and a producer that gives up has met a bug. Each client writes what it was
promised into the ledger. A client that fails in another way than a dead broker explains says so there too.

What a newcomer gets wrong: an answer that did not come is neither yes nor no. The request may have been
carried out before the kill, so such an item is dropped from what is expected, not counted as failed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.chaos.ledger import Ledger, Place, Reading, decode_value, encode_value, identity_of

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
PATIENCE_S = 60.0
READS_PER_COMMIT = 3

# librdkafka would by default forget the brokers it knows when none answers, and take a second to ask again.
_RECONNECT = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "metadata.recovery.strategy": "none",
    "log_level": 2,
}


def settings(bootstrap: str, **more: Any) -> dict[str, Any]:
    named = {name.replace("_", "."): value for name, value in more.items()}
    return {"bootstrap.servers": bootstrap, **_RECONNECT, **named}


class Client(threading.Thread):
    """A thread that repeats ``step`` until told to stop. An exception in it is a broken promise."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        super().__init__(name=name, daemon=True)
        self._ledger = ledger
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.step()
            self.finish()
        except Exception as error:
            self._ledger.violated(f"{self.name} failed: {error!r}")

    def step(self) -> None:
        raise AssertionError("each client has its own")

    def finish(self) -> None:
        """The last words, in the thread."""

    def stop(self) -> None:
        self._stopping.set()

    def pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)


class Writer(Client):
    """An idempotent producer: bursts of keyed records to random partitions, every one awaited at the end."""

    def __init__(
        self,
        number: int,
        bootstrap: str,
        ledger: Ledger,
        places: Sequence[Place],
        seed: int,
        *,
        codec: str,
        rate: float,
        batch_records: Sequence[int] = (5, 50, 500),
    ) -> None:
        super().__init__(f"writer {number} ({codec})", ledger)
        self._number = number
        self._places = places
        self._random = random.Random(seed)
        self._rate = rate
        self._sequences = dict.fromkeys(places, 0)
        self._producer = Producer(
            settings(
                bootstrap,
                enable_idempotence=True,
                acks="all",
                compression_codec=codec,
                linger_ms=self._random.choice((0, 2, 10)),
                batch_num_messages=self._random.choice(batch_records),
                message_timeout_ms=int(PATIENCE_S * 1000),
                queue_buffering_max_messages=2000,
                retry_backoff_ms=20,
                retry_backoff_max_ms=200,
            )
        )

    def step(self) -> None:
        burst = self._random.randrange(1, 80)
        for _ in range(burst):
            place = self._random.choice(self._places)
            identity = identity_of(self._number, self._sequences[place])
            self._send(place, identity)
            self._sequences[place] += 1
        self._producer.poll(0)
        self.pause(self._random.uniform(0.5, 1.5) * burst / self._rate)

    def finish(self) -> None:
        left = self._producer.flush(PATIENCE_S)
        assert left == 0, f"{left} records were not acknowledged {PATIENCE_S:g} s after the broker was back"

    def _send(self, place: Place, identity: int) -> None:
        value = encode_value(identity, self._random.randrange(20, 400))
        while True:
            try:
                self._producer.produce(
                    place.topic,
                    value,
                    key=b"%d" % (identity % 97),
                    partition=place.partition,
                    on_delivery=partial(self._delivered, place, identity),
                )
                return
            except BufferError:  # the broker is away: wait until it is back
                self._producer.poll(0.02)

    def _delivered(self, place: Place, identity: int, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self._ledger.acknowledged(place, message.offset(), identity)
        else:
            self._ledger.unknown(place, identity)
            self._ledger.violated(f"{self.name} gave up a record: {error}")


class GroupReader(Client):
    """A member of a group that reads everything and commits now and then.

    After each restart of the broker it begins again, as a consumer that crashed would: it must find what it
    committed, and what it reads from there, some of it for the second time, must be what it read before.
    """

    def __init__(self, bootstrap: str, ledger: Ledger, topics: Iterable[str], group: str) -> None:
        super().__init__(f"reader of {group}", ledger)
        self._topics = list(topics)
        self._settings = settings(
            bootstrap,
            group_id=group,
            # Static: the successor takes the place of the one that vanished without waiting for its session.
            group_instance_id="the only one",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            check_crcs=True,
            session_timeout_ms=6000,
            heartbeat_interval_ms=300,
            fetch_wait_max_ms=100,
        )
        self._consumer: Consumer | None = None
        self._restarts = 0
        self._committed: dict[Place, int] = {}
        self._attempted: dict[Place, int] = {}
        self._positions: dict[Place, int] = {}
        self._reads = 0
        self.commits = 0
        self.resumptions = 0

    def step(self) -> None:
        if self._restarts != self._ledger.restarts:
            self._restarts = self._ledger.restarts
            self.finish()
        if self._consumer is None:
            self._consumer = Consumer(self._settings)
            self._consumer.subscribe(self._topics, on_assign=self._assigned)
        positions: dict[Place, int] = {}
        for message in self._consumer.consume(500, timeout=0.1):
            error = message.error()
            if error is not None:
                if not is_absence(error):
                    raise KafkaException(error)
                continue
            place = Place(message.topic(), message.partition())
            self._ledger.seen(place, message.offset(), decode_value(message.value()))
            positions[place] = message.offset() + 1
        self._positions.update(positions)
        self._reads += 1
        # Not after every read: what was read since the last commit is read again after a restart.
        if self._positions and self._reads % READS_PER_COMMIT == 0:
            self._commit(self._positions)
            self._positions = {}

    def finish(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
            self._positions = {}

    def _commit(self, positions: dict[Place, int]) -> None:
        assert self._consumer is not None
        self._attempted.update(positions)
        try:
            self._consumer.commit(
                offsets=[TopicPartition(*place, offset) for place, offset in positions.items()],
                asynchronous=False,
            )
        except KafkaException as error:
            if not is_absence(error.args[0]):
                raise
            return  # whether it counts is not known
        self._committed.update(positions)
        self.commits += 1

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Runs inside ``consume``: what we committed must be what we begin with."""
        for one in patiently(lambda: consumer.committed(partitions, timeout=5)):
            place = Place(one.topic, one.partition)
            least, most = self._committed.get(place, -1), self._attempted.get(place, -1)
            if least >= 0 and not least <= one.offset <= most:
                self._ledger.violated(
                    f"{self.name}: {place} was committed at {least}, is {one.offset} (tried up to {most})"
                )
        self.resumptions += 1


class Committer(Client):
    """Commits made-up offsets, ever larger, for many partitions in turn, and looks whether they stay.

    In turn, because the client repeats a commit that a kill interrupted: with one partition only, the repeated
    commit would hide that the one before it was lost.
    """

    def __init__(self, bootstrap: str, ledger: Ledger, places: Sequence[Place], group: str) -> None:
        super().__init__(f"committer of {group}", ledger)
        self._places = list(places)
        self._consumer = Consumer(settings(bootstrap, group_id=group, enable_auto_commit=False))
        self._restarts = 0
        self._committed: dict[Place, int] = {}
        self._attempted = 0
        self.commits = 0
        self.looks = 0

    def step(self) -> None:
        if self._restarts != self._ledger.restarts:
            self._restarts = self._ledger.restarts
            self.look()
        self._attempted += 1
        place = self._places[self._attempted % len(self._places)]
        try:
            self._consumer.commit(offsets=[TopicPartition(*place, self._attempted)], asynchronous=False)
        except KafkaException as error:
            if not is_absence(error.args[0]):
                raise
            self._committed.pop(place, None)
            return
        self._committed[place] = self._attempted
        self.commits += 1
        self.pause(0.002)

    def finish(self) -> None:
        self.look()
        self._consumer.close()

    def look(self) -> None:
        asked = [TopicPartition(*place) for place in self._committed]
        if not asked:
            return
        for one in patiently(lambda: self._consumer.committed(asked, timeout=5)):
            place = Place(one.topic, one.partition)
            if one.offset != self._committed[place]:
                self._ledger.violated(
                    f"{self.name}: {place} was committed at {self._committed[place]}, is {one.offset}"
                )
        self.looks += 1


_ABSENCE = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._WAIT_COORD,
    KafkaError._RESOLVE,
    KafkaError._DESTROY,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NETWORK_EXCEPTION,
    # A generation that went on without us while we could not be heard.
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError._STATE,
    KafkaError._ASSIGNMENT_LOST,
}


def is_absence(error: KafkaError) -> bool:
    """Whether an error says no more than that the broker was away, or had been."""
    return error.code() in _ABSENCE


def patiently(ask: Callable[[], Any]) -> Any:
    """Ask until a broker answers."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            if not is_absence(error.args[0]) or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def read_everything(bootstrap: str, places: Sequence[Place]) -> dict[Place, Reading]:
    """Every record of these partitions, by assignment, with a client that checks the CRC of each batch."""
    consumer = Consumer(
        settings(
            bootstrap,
            group_id="nobody",
            enable_auto_commit=False,
            auto_offset_reset="error",
            check_crcs=True,
            enable_partition_eof=True,
            fetch_wait_max_ms=50,
        )
    )
    try:
        readings = {}
        for place in places:
            partition = TopicPartition(*place)
            low, _ = patiently(lambda partition=partition: consumer.get_watermark_offsets(partition, timeout=5))
            readings[place] = Reading(low)
        consumer.assign([TopicPartition(*place, reading.start_offset) for place, reading in readings.items()])
        ended: set[Place] = set()
        deadline = time.monotonic() + PATIENCE_S
        while len(ended) < len(readings):
            for message in consumer.consume(5000, timeout=0.1):
                place = Place(message.topic(), message.partition())
                error = message.error()
                if error is None:
                    readings[place].records.append((message.offset(), decode_value(message.value())))
                    deadline = time.monotonic() + PATIENCE_S
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(place)
                elif not is_absence(error):
                    raise KafkaException(error)
            assert time.monotonic() < deadline, f"no more to read, and no end: {set(readings) - ended}"
        return readings
    finally:
        consumer.close()
