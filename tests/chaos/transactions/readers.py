"""Readers of what is committed: one that follows all the time, auditors that begin again, and the last reading."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from tests.chaos.clients import Client
from tests.chaos.cluster_clients import cluster_settings, is_absence, patiently
from tests.chaos.ledger import Ledger, Place
from tests.chaos.transactions.bank import Chain, Outcomes, Transfers, differences

# A transfer that is found in one partition is found in the others when those have leaders again.
SETTLED_S = 180.0


class Seer(Protocol):
    def seen(self, partition: int, offset: int, value: bytes) -> None: ...


class Reading:
    """One consumer of all partitions of a topic, from the beginning, that gives its records to somebody."""

    def __init__(self, bootstrap: str, places: Sequence[Place], seer: Seer, isolation: str) -> None:
        self._consumer = Consumer(
            cluster_settings(
                bootstrap,
                group_id="nobody",
                isolation_level=isolation,
                enable_auto_commit=False,
                auto_offset_reset="error",
                check_crcs=True,
                enable_partition_eof=True,
                fetch_wait_max_ms=50,
                retry_backoff_ms=50,
            )
        )
        self._seer = seer
        self._positions: dict[int, int] = {}
        # Those that were once read to their end: the last stable offset, of those who read what is committed.
        self.ended: set[int] = set()
        self.count = 0
        self._consumer.assign([TopicPartition(*place, 0) for place in places])

    def step(self) -> None:
        for message in self._consumer.consume(1000, timeout=0.1):
            error, partition = message.error(), message.partition()
            if error is None:
                offset, value = message.offset(), message.value()
                assert partition is not None and offset is not None and value is not None
                before = self._positions.get(partition, -1)
                assert offset > before, f"{partition}:{offset} was given after {before}"
                self._positions[partition] = offset
                self._seer.seen(partition, offset, value)
                self.count += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                assert partition is not None
                self.ended.add(partition)
            elif error.code() == KafkaError._AUTO_OFFSET_RESET or not is_absence(error):
                raise KafkaException(error)

    def close(self) -> None:
        self._consumer.close()


class Follower(Client):
    """Reads all the time."""

    def __init__(
        self, name: str, bootstrap: str, ledger: Ledger, places: Sequence[Place], seer: Seer
    ) -> None:
        super().__init__(name, ledger)
        self._reading = Reading(bootstrap, places, seer, "read_committed")

    def step(self) -> None:
        self._reading.step()

    def finish(self) -> None:
        self._reading.close()

    @property
    def count(self) -> int:
        return self._reading.count


class Auditor(Client):
    """Reads the accounts from the beginning to their ends, again and again, and adds up."""

    def __init__(
        self,
        bootstrap: str,
        ledger: Ledger,
        places: Sequence[Place],
        outcomes: Outcomes,
        seed: int,
        rest_s: float,
    ) -> None:
        super().__init__("auditor", ledger)
        self._address = bootstrap
        self._places = places
        self._outcomes = outcomes
        self._choose = random.Random(seed)
        self._rest_s = rest_s
        self.audits = 0
        self.records = 0

    def step(self) -> None:
        transfers = Transfers("auditor", self._ledger, self._outcomes)
        reading = Reading(self._address, self._places, transfers, "read_committed")
        try:
            if read_until_settled(reading, transfers, len(self._places), self._stopping.is_set):
                self.audits += 1
                self.records += reading.count
        finally:
            reading.close()
        self.pause(self._choose.uniform(0, 2 * self._rest_s))


def read_until_settled(
    reading: Reading, transfers: Transfers, partitions: int, is_given_up: Callable[[], bool] = lambda: False
) -> bool:
    """Read to the end, then on until each transfer found so far is whole, and see that the sum holds.

    Partitions end at different moments, so a transfer may be in one and not yet in another. Those that are found
    while others are waited for may be incomplete: what they lack is allowed for in the sum.
    """
    deadline = time.monotonic() + SETTLED_S
    while len(reading.ended) < partitions:
        if is_given_up():
            return False
        reading.step()
        assert time.monotonic() < deadline, f"no end of {set(range(partitions)) - reading.ended}"
    waited_for = transfers.unsettled
    while waited_for & transfers.unsettled:
        if is_given_up():
            return False
        reading.step()
        assert time.monotonic() < deadline, f"{sorted(waited_for & transfers.unsettled)[:5]} are torn"
    transfers.check_sum()
    return True


def read_everything(bootstrap: str, places: Sequence[Place], seer: Seer, isolation: str) -> int:
    """All that there is, when nobody writes any more."""
    ends = ends_of(bootstrap, places, isolation)
    reading = Reading(bootstrap, places, seer, isolation)
    try:
        deadline = time.monotonic() + SETTLED_S
        while len(reading.ended) < len(ends):
            reading.step()
            assert time.monotonic() < deadline, f"no end of {set(ends) - reading.ended}"
        return reading.count
    finally:
        reading.close()


def ends_of(bootstrap: str, places: Sequence[Place], isolation: str) -> dict[int, int]:
    """The last stable offset of each partition, or its high watermark, as its leader tells it."""
    level = (
        IsolationLevel.READ_COMMITTED if isolation == "read_committed" else IsolationLevel.READ_UNCOMMITTED
    )
    admin = AdminClient(cluster_settings(bootstrap))

    def ask() -> dict[int, int]:
        asked = {TopicPartition(*place): OffsetSpec.latest() for place in places}  # type: ignore[no-untyped-call]
        answers = admin.list_offsets(asked, isolation_level=level, request_timeout=10)
        return {one.partition: future.result().offset for one, future in answers.items()}

    found: dict[int, int] = patiently(ask)
    return found


def assert_agree(ledger: Ledger, what: str, one: Transfers | Chain, other: Transfers | Chain) -> None:
    for difference in differences(one.records, other.records)[:20]:
        ledger.violated(f"{what}: {difference}")
