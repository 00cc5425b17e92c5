"""Files damaged while no broker runs: bits flipped, ends cut off, files gone.

A broker that finds such files starts all the same, serves nothing that is not as it was written, keeps all
that was written before the damage, makes again what can be made again, and deletes nothing: what it cannot
use is left under another name.

The directories to damage are made once, by a broker that was stopped and by one that was killed; each test
has a copy of one of them, with a topic for each harm.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from penstock.protocol.records import BatchHeader, batches
from tests.chaos.brokers import ChaosBroker
from tests.chaos.clients import patiently, read_everything, settings
from tests.chaos.ledger import Ledger, Place, Reading, encode_value, identity_of
from tests.chaos.test_crash import create_topics

pytestmark = pytest.mark.chaos

Harm = Callable[[Path, random.Random], None]

RECORDS = 600
RECORDS_PER_BATCH = 20
FIRST_TIMESTAMP = 1_700_000_000_000
SETTINGS = {
    "log.segment.bytes": "10000",
    "log.index.interval.bytes": "500",
    # A checkpoint of what was flushed would keep recovery from looking there.
    "log.flush.offset.checkpoint.interval.ms": "3600000",
}


# Harms that any file may suffer


def flip_a_bit(path: Path, choose: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        path.write_bytes(data)


def cut_off(path: Path, choose: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(choose.randrange(path.stat().st_size + 1))


def zeros(path: Path, choose: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def garbage(path: Path, choose: random.Random) -> None:
    path.write_bytes(choose.randbytes(max(20, path.stat().st_size)))


def removed(path: Path, choose: random.Random) -> None:
    path.unlink()


HARMS: list[Harm] = [flip_a_bit, cut_off, zeros, garbage, removed]
BESIDE_THE_RECORDS = {
    "offsets": ".index",
    "times": ".timeindex",
    "producers": ".snapshot",
    "epochs": "leader-epoch-checkpoint",
    "identity": "partition.metadata",
}


def harmed_topics() -> Iterator[tuple[Place, str, Harm]]:
    for kind, suffix in BESIDE_THE_RECORDS.items():
        for harm in HARMS:
            yield Place(f"{kind}.{harm.__name__}", 0), suffix, harm


RECORDS_PLACE = Place("records", 0)
PLACES = [RECORDS_PLACE, *(place for place, _, _ in harmed_topics())]


# The directories


class Original(NamedTuple):
    data_dir: Path
    ledger: Ledger


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Original]:
    made = {}
    for how in ("stopped", "killed"):
        ledger = Ledger()
        data_dir = tmp_path_factory.mktemp(how) / "data"
        with ChaosBroker(SETTINGS, data_dir=data_dir) as broker:
            create_topics(broker.bootstrap, PLACES)
            fill(broker.bootstrap, ledger)
            if how == "stopped":
                broker.stop()
            else:
                broker.kill()
        assert ledger.acknowledged_count == RECORDS * len(PLACES)
        made[how] = Original(data_dir, ledger)
    return made


def fill(bootstrap: str, ledger: Ledger) -> None:
    """Records one millisecond apart, so that a timestamp tells the offset."""

    def delivered(place: Place, identity: int, error: KafkaError | None, message: Message) -> None:
        assert error is None
        ledger.acknowledged(place, message.offset(), identity)

    producer = Producer(
        settings(bootstrap, enable_idempotence=True, batch_num_messages=RECORDS_PER_BATCH, linger_ms=5)
    )
    for place in PLACES:
        for sequence in range(RECORDS):
            identity = identity_of(0, sequence)
            producer.produce(
                place.topic,
                encode_value(identity, 100),
                partition=place.partition,
                timestamp=FIRST_TIMESTAMP + sequence,
                on_delivery=partial(delivered, place, identity),
            )
        producer.poll(0)
    assert producer.flush(30) == 0


class Copy:
    def __init__(self, original: Original, scratch: Path) -> None:
        self.data_dir = scratch / "data"
        self.ledger = original.ledger
        shutil.copytree(original.data_dir, self.data_dir)

    def files(self, place: Place, suffix: str) -> list[Path]:
        found = sorted((self.data_dir / f"{place.topic}-{place.partition}").glob(f"*{suffix}"))
        assert found or suffix == ".snapshot", f"no {suffix} to harm in {place}"
        return found

    def segments(self) -> list[Path]:
        return self.files(RECORDS_PLACE, ".log")

    def kept_bytes(self) -> int:
        """Of all that is, or was, part of the log."""
        directory = self.data_dir / f"{RECORDS_PLACE.topic}-{RECORDS_PLACE.partition}"
        return sum(path.stat().st_size for path in directory.glob("*.log*"))


@pytest.fixture(params=["stopped", "killed"])
def copy(request: pytest.FixtureRequest, originals: dict[str, Original], tmp_path: Path) -> Copy:
    return Copy(originals[request.param], tmp_path)


# The tests


def test_what_stands_beside_the_records_is_made_again(copy: Copy, seed: int) -> None:
    choose = random.Random(seed)
    for place, suffix, harm in harmed_topics():
        for path in copy.files(place, suffix):
            harm(path, choose)
    with ChaosBroker(SETTINGS, data_dir=copy.data_dir) as broker:
        copy.ledger.check(read_everything(broker.bootstrap, PLACES))
        assert_timestamps_lead_to_offsets(broker.bootstrap, choose)
        write_one_more(broker.bootstrap)
        readings = read_everything(broker.bootstrap, PLACES)
        copy.ledger.check(readings)
        assert {len(reading.records) for reading in readings.values()} == {RECORDS + 1}


@pytest.mark.parametrize("harm", HARMS, ids=[harm.__name__ for harm in HARMS])
def test_a_damaged_checkpoint_costs_time_only(copy: Copy, harm: Harm, seed: int) -> None:
    choose = random.Random(seed)
    for path in copy.data_dir.glob("*-checkpoint"):
        harm(path, choose)
    with ChaosBroker(SETTINGS, data_dir=copy.data_dir) as broker:
        copy.ledger.check(read_everything(broker.bootstrap, PLACES))


def flip_at(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


class Damage(NamedTuple):
    """Where the records of a damaged log end, and how many bytes went with it that nobody can keep."""

    offset: int
    gone_bytes: int = 0


def some_batch(path: Path) -> tuple[int, BatchHeader]:
    found = list(batches(path.read_bytes()))
    return found[len(found) // 2]


def flip_in_a_middle_segment(copy: Copy, within: int) -> Damage:
    path = copy.segments()[2]
    position, header = some_batch(path)
    flip_at(path, position + within)
    return Damage(header.base_offset)


def cut_a_middle_segment(copy: Copy) -> Damage:
    path = copy.segments()[2]
    position, header = some_batch(path)
    gone = path.stat().st_size - position - 30
    with path.open("r+b") as file:
        file.truncate(position + 30)
    return Damage(header.base_offset, gone)


def remove_a_middle_segment(copy: Copy) -> Damage:
    path = copy.segments()[2]
    gone = path.stat().st_size
    path.unlink()
    return Damage(int(path.stem), gone)


def cut_the_last_segment(copy: Copy) -> Damage:
    path = copy.segments()[-1]
    position, header = some_batch(path)
    gone = path.stat().st_size - position - 100
    with path.open("r+b") as file:
        file.truncate(position + 100)
    return Damage(header.base_offset, gone)


def empty_the_last_segment(copy: Copy) -> Damage:
    path = copy.segments()[-1]
    gone = path.stat().st_size
    path.write_bytes(b"")
    return Damage(int(path.stem), gone)


def garbage_behind_the_last_segment(copy: Copy) -> Damage:
    with copy.segments()[-1].open("ab") as file:
        file.write(random.Random(5).randbytes(1000))
    return Damage(RECORDS, -1000)


def zeros_behind_the_last_segment(copy: Copy) -> Damage:
    with copy.segments()[-1].open("ab") as file:
        file.write(bytes(1000))
    return Damage(RECORDS, -1000)


LOG_HARMS: dict[str, Callable[[Copy], Damage]] = {
    "a flipped bit in a record": lambda copy: flip_in_a_middle_segment(copy, 200),
    "a flipped bit in a base offset": lambda copy: flip_in_a_middle_segment(copy, 5),
    "a flipped bit in a length": lambda copy: flip_in_a_middle_segment(copy, 10),
    "a flipped bit in a format number": lambda copy: flip_in_a_middle_segment(copy, 16),
    "a flipped bit in a checksum": lambda copy: flip_in_a_middle_segment(copy, 18),
    "a flipped bit in a last offset": lambda copy: flip_in_a_middle_segment(copy, 25),
    "a shorter segment": cut_a_middle_segment,
    "a missing segment": remove_a_middle_segment,
    "a torn end": cut_the_last_segment,
    "an empty last segment": empty_the_last_segment,
    "garbage at the end": garbage_behind_the_last_segment,
    "zeros at the end": zeros_behind_the_last_segment,
}


@pytest.mark.parametrize("harm", LOG_HARMS)
def test_damaged_records_are_never_served_and_those_before_them_are(copy: Copy, harm: str) -> None:
    before_bytes = copy.kept_bytes()
    damage = LOG_HARMS[harm](copy)
    with ChaosBroker(SETTINGS, data_dir=copy.data_dir) as broker:
        reading = read_everything(broker.bootstrap, [RECORDS_PLACE])[RECORDS_PLACE]
        assert_is_beginning_of_original(reading, damage)
        broker.restart(kill=True)
        assert_is_beginning_of_original(
            read_everything(broker.bootstrap, [RECORDS_PLACE])[RECORDS_PLACE], damage
        )
        assert copy.kept_bytes() + damage.gone_bytes >= before_bytes, "bytes were deleted"


def assert_is_beginning_of_original(reading: Reading, damage: Damage) -> None:
    assert reading.start_offset == 0
    offsets = [offset for offset, _ in reading.records]
    assert offsets == list(range(len(offsets)))
    assert len(offsets) >= damage.offset
    assert all(identity == identity_of(0, offset) for offset, identity in reading.records)


def assert_timestamps_lead_to_offsets(bootstrap: str, choose: random.Random) -> None:
    consumer = Consumer(settings(bootstrap, group_id="nobody"))
    try:
        for sequence in choose.sample(range(RECORDS), 20):
            wanted = [TopicPartition(*place, FIRST_TIMESTAMP + sequence) for place in PLACES]
            found = patiently(lambda wanted=wanted: consumer.offsets_for_times(wanted, timeout=5))
            assert {(one.topic, one.offset) for one in found} == {(place.topic, sequence) for place in PLACES}
    finally:
        consumer.close()


def write_one_more(bootstrap: str) -> None:
    """With the same producer id? No: with a new one; the damaged state may not stand in its way."""
    errors = []
    producer = Producer(settings(bootstrap, enable_idempotence=True, message_timeout_ms=10_000))
    for place in PLACES:
        producer.produce(
            place.topic,
            encode_value(identity_of(1, 0), 100),
            partition=place.partition,
            on_delivery=lambda error, _: errors.append(error),
        )
    producer.flush(20)
    assert errors == [None] * len(PLACES)
