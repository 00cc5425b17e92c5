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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.chaos.errands import PATIENCE_S, is_absence, patiently, settings
from tests.chaos.ledger import Ledger, Place, encode_value, identity_of, offset_in, seen_in

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
ABANDONED_S = 5.0
READS_PER_COMMIT = 3


class Client(threading.Thread):
    """A thread that repeats ``step`` until told to stop. An exception in it is a broken promise."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        super().__init__(name=name, daemon=True)
        self._ledger = ledger
        self._stopping = threading.Event()
        self._is_abandoned = False

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.step()
            if not self._is_abandoned:
                self.finish()
        except Exception as error:
            self._ledger.violated(f"{self.name} failed: {error!r}")

    def step(self) -> None:
        raise AssertionError("each client has its own")

    def finish(self) -> None:
        """The last words, in the thread."""

    def stop(self) -> None:
        self._stopping.set()

    def abandon(self) -> None:
        """Stop, and wait for nothing: the test has failed already."""
        self._is_abandoned = True
        self._stopping.set()

    def pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)


@contextmanager
def running(clients: Sequence[Client], ledger: Ledger) -> Iterator[None]:
    """Let clients work, and in the end wait until each has said its last words."""
    for client in clients:
        client.start()
    try:
        yield
    except BaseException:
        for client in clients:
            client.abandon()
        for client in clients:
            client.join(ABANDONED_S)
        raise
    for client in clients:
        client.stop()
    for client in clients:
        client.join(2 * PATIENCE_S)
        if client.is_alive():
            ledger.violated(f"{client.name} hangs")


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
            self._ledger.acknowledged(place, offset_in(message), identity)
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
            place, offset, identity = seen_in(message)
            self._ledger.seen(place, offset, identity)
            positions[place] = offset + 1
        self._positions.update(positions)
        self._reads += 1
        # Not after every read: what was read since the last commit is read again after a restart.
        if self._positions and self._reads % READS_PER_COMMIT == 0:
            self._commit(self._positions)
            self._positions = {}

    def finish(self) -> None:
        if self._consumer is not None:
            leaving, self._consumer = self._consumer, None
            leaving.close()
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
        if self._consumer is None:
            return  # or inside ``close``, where librdkafka no longer asks anybody
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

    In turn, because the client repeats a commit that a kill interrupted: with one partition only, that would
    hide that the commit before it was lost.
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
