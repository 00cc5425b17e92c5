"""The librdkafka clients of a cluster under faults: writers, members of a group, and one that only commits.

They differ from those of ``clients.py`` in what they may meet: leaders and coordinators move, nodes fall silent
without closing a connection, so each request has a short time of its own while a record has a long one. As
there, an answer that did not come is neither yes nor no.

What a newcomer gets wrong: a writer must never give a record up. librdkafka cannot know whether a record that
timed out was stored, so it stops for good (a fatal error), and the test calls that a broken promise.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.chaos.clients import Client
from tests.chaos.errands import is_absence as is_absence_of_one
from tests.chaos.errands import settings
from tests.chaos.ledger import Ledger, Place, Reading, encode_value, identity_of, offset_in, seen_in
from tests.support import wait_until

# How long a record may take: longer than any fault and the recovery from it.
DELIVERY_S = 180.0
# How long one request may take before the client looks for another way.
REQUEST_MS = 4000
READS_PER_COMMIT = 3
# What says no more than that a leader or a coordinator is elsewhere, or not there for now.
_MOVED = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.NOT_CONTROLLER,
    KafkaError._NO_OFFSET,
    KafkaError._TIMED_OUT,
    KafkaError._MAX_POLL_EXCEEDED,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._OFFSET_NOT_AVAILABLE if hasattr(KafkaError, "_OFFSET_NOT_AVAILABLE") else 0,
}


def is_absence(error: KafkaError) -> bool:
    return is_absence_of_one(error) or (error.code() in _MOVED and error.code() != 0)


def cluster_settings(
    bootstrap: str, security: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    return settings(
        bootstrap,
        security,
        socket_timeout_ms=REQUEST_MS,
        topic_metadata_refresh_interval_ms=5000,
        **more,
    )


def patiently(ask: Callable[[], Any], deadline_s: float = DELIVERY_S) -> Any:
    """Ask until somebody answers."""

    def answer() -> tuple[Any] | None:
        try:
            return (ask(),)
        except KafkaException as error:
            if not is_absence(error.args[0]):
                raise
            return None

    (found,) = wait_until(answer, deadline_s, "an answer")  # type: ignore[misc]
    return found


class ClusterWriter(Client):
    """An idempotent producer with acks=all: bursts to random partitions, every record awaited at the end."""

    def __init__(
        self,
        number: int,
        bootstrap: str,
        ledger: Ledger,
        places: Sequence[Place],
        seed: int,
        rate: float,
        security: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"writer {number}", ledger)
        self._number = number
        self._places = places
        self._random = random.Random(seed)
        self._rate = rate
        self._sequences = dict.fromkeys(places, 0)
        self._placeless: set[tuple[Place, int]] = set()
        self._producer = Producer(
            cluster_settings(
                bootstrap,
                security,
                enable_idempotence=True,
                acks="all",
                compression_codec=self._random.choice(("none", "lz4", "zstd")),
                linger_ms=self._random.choice((0, 5)),
                # A batch that is refused again and again (by a full disk) may not be put together the same
                # way each time, and then librdkafka stops; a batch of one record always is.
                batch_num_messages=1,
                message_timeout_ms=int(DELIVERY_S * 1000),
                request_timeout_ms=REQUEST_MS,
                queue_buffering_max_messages=2000,
                retry_backoff_ms=20,
                retry_backoff_max_ms=200,
            )
        )

    def step(self) -> None:
        burst = self._random.randrange(1, 40)
        for _ in range(burst):
            place = self._random.choice(self._places)
            self._send(place, identity_of(self._number, self._sequences[place]))
            self._sequences[place] += 1
        self._producer.poll(0)
        self.pause(self._random.uniform(0.5, 1.5) * burst / self._rate)

    def finish(self) -> None:
        left = self._producer.flush(DELIVERY_S)
        assert left == 0, f"{left} records were not acknowledged {DELIVERY_S:g} s after the last fault"

    def _send(self, place: Place, identity: int) -> None:
        value = encode_value(identity, self._random.randrange(20, 300))
        while not self._is_abandoned:
            try:
                self._producer.produce(
                    place.topic,
                    value,
                    partition=place.partition,
                    on_delivery=partial(self._delivered, place, identity),
                )
                return
            except BufferError:  # nobody takes records for now
                self._producer.poll(0.05)

    def _delivered(self, place: Place, identity: int, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._ledger.unknown(place, identity)
            self._ledger.violated(f"{self.name} gave up a record to {place}: {error}")
        elif message.offset() is None:
            # It was there already, from an attempt whose answer was lost; a new leader need not know where.
            self._placeless.add((place, identity))
        else:
            self._ledger.acknowledged(place, offset_in(message), identity)

    def check(self, readings: dict[Place, Reading]) -> None:
        """What was acknowledged without an offset is there too; once, as the ledger has seen to."""
        found = {(place, identity) for place, reading in readings.items() for _, identity in reading.records}
        missing = self._placeless - found
        assert not missing, f"{self.name}: {len(missing)} records were acknowledged and are nowhere"


class Commits:
    """What a group has been promised: offsets that were committed never go back, whoever asks and when."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._acknowledged: defaultdict[Place, int] = defaultdict(lambda: -1)
        self._attempted: defaultdict[Place, int] = defaultdict(lambda: -1)
        self.count = 0
        self.looks = 0

    def attempted(self, offsets: dict[Place, int]) -> None:
        with self._lock:
            for place, offset in offsets.items():
                self._attempted[place] = max(self._attempted[place], offset)

    def acknowledged(self, offsets: dict[Place, int]) -> None:
        with self._lock:
            self.count += 1
            for place, offset in offsets.items():
                if offset < self._acknowledged[place]:
                    self._ledger.violated(
                        f"{place}: a commit of {offset} was accepted after one of {self._acknowledged[place]}"
                    )
                self._acknowledged[place] = max(self._acknowledged[place], offset)

    def promised(self) -> dict[Place, int]:
        """To be taken before somebody asks what is committed."""
        with self._lock:
            return dict(self._acknowledged)

    def found(self, who: str, promised: dict[Place, int], offsets: dict[Place, int]) -> None:
        """What somebody was told, who began to ask when ``promised`` was true."""
        with self._lock:
            self.looks += 1
            for place, offset in offsets.items():
                least, most = promised.get(place, -1), self._attempted[place]
                # -1001 is librdkafka's word for no commit at all.
                told = max(offset, -1)
                if not least <= told <= most:
                    self._ledger.violated(
                        f"{who}: {place} was committed at {least}, is {told} (tried up to {most})"
                    )


class GroupMember(Client):
    """One of several members that read everything together and commit what they have read."""

    def __init__(
        self,
        number: int,
        bootstrap: str,
        ledger: Ledger,
        commits: Commits,
        topics: Sequence[str],
        group: str,
        security: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"member {number} of {group}", ledger)
        self._commits = commits
        self._topics = list(topics)
        self._settings = cluster_settings(
            bootstrap,
            security,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            check_crcs=True,
            session_timeout_ms=10_000,
            heartbeat_interval_ms=1000,
            fetch_wait_max_ms=100,
            retry_backoff_ms=50,
        )
        self._consumer = self._joined()
        self._is_to_leave = False
        self._is_leaving = False
        self._positions: dict[Place, int] = {}
        self._reads = 0
        self.assignments = 0

    def leave_and_join(self) -> None:
        """Soon, in its own thread; what it has read and not committed is read again by whoever comes next."""
        self._is_to_leave = True

    def step(self) -> None:
        if self._is_to_leave:
            self._is_to_leave = False
            self._leave()
            self._positions.clear()
            self._consumer = self._joined()
        for message in self._consumer.consume(500, timeout=0.1):
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._AUTO_OFFSET_RESET or not is_absence(error):
                    raise KafkaException(error)
                continue
            place, offset, identity = seen_in(message)
            self._ledger.seen(place, offset, identity)
            before = self._positions.get(place)
            if before is not None and offset != before:
                self._ledger.violated(f"{self.name}: {place} goes on at {offset}, not at {before}")
            self._positions[place] = offset + 1
        self._reads += 1
        if self._positions and self._reads % READS_PER_COMMIT == 0:
            self._commit(dict(self._positions))

    def finish(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self._is_leaving = True
        self._consumer.close()
        self._is_leaving = False

    def _joined(self) -> Consumer:
        consumer = Consumer(self._settings)
        consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked)
        return consumer

    def _commit(self, positions: dict[Place, int]) -> None:
        self._commits.attempted(positions)
        try:
            answered = self._consumer.commit(
                offsets=[TopicPartition(*place, offset) for place, offset in positions.items()],
                asynchronous=False,
            )
        except KafkaException as error:
            if not is_absence(error.args[0]):
                raise
            return
        self._commits.acknowledged(
            {Place(one.topic, one.partition): one.offset for one in answered if one.error is None}
        )

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Runs inside ``consume``: what was committed must be what we begin with."""
        self.assignments += 1
        self._positions.clear()
        if not partitions or self._is_leaving:
            return  # inside ``close`` librdkafka no longer asks anybody
        promised = self._commits.promised()
        told = patiently(lambda: consumer.committed(partitions, timeout=REQUEST_MS / 1000))
        self._commits.found(
            self.name, promised, {Place(one.topic, one.partition): one.offset for one in told}
        )

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._positions.clear()


class ClusterCommitter(Client):
    """Commits made-up offsets, ever larger, for many partitions in turn, and looks whether they stay.

    It is no member of its group, so nothing but the coordinator itself keeps an old commit from coming last.
    """

    def __init__(self, bootstrap: str, ledger: Ledger, places: Sequence[Place], group: str) -> None:
        super().__init__(f"committer of {group}", ledger)
        self._places = list(places)
        self._consumer = Consumer(
            cluster_settings(bootstrap, group_id=group, enable_auto_commit=False, retry_backoff_ms=50)
        )
        self.commits = Commits(ledger)
        self._attempted = 0

    def step(self) -> None:
        self._attempted += 1
        place = self._places[self._attempted % len(self._places)]
        offsets = {place: self._attempted}
        self.commits.attempted(offsets)
        try:
            answered = self._consumer.commit(
                offsets=[TopicPartition(*place, self._attempted)], asynchronous=False
            )
            if all(one.error is None for one in answered):
                self.commits.acknowledged(offsets)
        except KafkaException as error:
            if not is_absence(error.args[0]):
                raise
        if self._attempted % (4 * len(self._places)) == 0:
            self.look()
        self.pause(0.02)

    def finish(self) -> None:
        self.look()
        self._consumer.close()

    def look(self) -> None:
        promised = self.commits.promised()
        asked = [TopicPartition(*place) for place in self._places]
        told = patiently(lambda: self._consumer.committed(asked, timeout=REQUEST_MS / 1000))
        self.commits.found(self.name, promised, {Place(one.topic, one.partition): one.offset for one in told})
