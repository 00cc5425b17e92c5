"""Files damaged while no broker runs: bits flipped, ends cut off, files gone.

A broker that finds such files starts all the same, serves nothing that is not as it was written, keeps all
that was written before the damage, makes again what can be made again, and deletes nothing: what it cannot
use is left under another name.

The directories to damage are made once, by a broker that was stopped and by one that was killed; each test
has a copy of one of them, with a topic for each harm.

After a kill all of a log is looked at again. After a clean stop it is taken as it is, as Kafka does: there
the checksum of each batch, which travels with it to the client, is what stands between damage and a reader.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from penstock.protocol.records import BatchHeader, batches
from tests.chaos.brokers import ChaosBroker
from tests.chaos.errands import PATIENCE_S, create_topics, patiently, read_everything, settings
from tests.chaos.ledger import Place, Reading, encode_value, identity_of, place_of, seen_in

pytestmark = pytest.mark.chaos

Harm = Callable[[Path, random.Random], None]

RECORDS = 600
RECORDS_PER_BATCH = 20
# Long enough for a client to try a few times, when it has read all that it must be able to read.
IDLE_S = 2.0
FIRST_TIMESTAMP = 1_700_000_000_000
SETTINGS = {
    "log.segment.bytes": "10000",
    "log.index.interval.bytes": "500",
    # A checkpoint of what was flushed would keep recovery from looking there.
    "log.flush.offset.checkpoint.interval.ms": "3600000",
    # The records are of a time long past.
    "log.retention.ms": "-1",
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
            # A topic id with one other bit is another topic's: its directory is set aside, as it must be.
            if (kind, harm) != ("identity", flip_a_bit):
                yield Place(f"{kind}.{harm.__name__}", 0), suffix, harm


@dataclass(frozen=True)
class Damage:
    """What a harm did to a log."""

    # The records before this offset are as they were.
    offset: int
    # So many bytes of batches were removed or spoilt by the harm itself: nobody can keep them.
    gone_bytes: int = 0


# Harms to the records themselves


def a_middle_batch(segment: Path) -> tuple[int, BatchHeader]:
    found = list(batches(segment.read_bytes()))
    return found[len(found) // 2]


def flip_at(within: int, segments: list[Path]) -> Damage:
    path = segments[2]
    position, header = a_middle_batch(path)
    data = bytearray(path.read_bytes())
    data[position + within] ^= 0x10
    path.write_bytes(data)
    return Damage(header.base_offset)


def shorten(number: int, segments: list[Path]) -> Damage:
    path = segments[number]
    position, header = a_middle_batch(path)
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.truncate(position + 100)
    return Damage(header.base_offset, size - position)


def remove_segment(segments: list[Path]) -> Damage:
    size = segments[2].stat().st_size
    segments[2].unlink()
    return Damage(int(segments[2].stem), size)


def empty_last(segments: list[Path]) -> Damage:
    size = segments[-1].stat().st_size
    segments[-1].write_bytes(b"")
    return Damage(int(segments[-1].stem), size)


def lengthen(tail: bytes, segments: list[Path]) -> Damage:
    with segments[-1].open("ab") as file:
        file.write(tail)
    return Damage(RECORDS)


RECORD_HARMS: dict[str, Callable[[list[Path]], Damage]] = {
    "flip.record": partial(flip_at, 200),
    "flip.length": partial(flip_at, 10),
    "flip.magic": partial(flip_at, 16),
    "flip.checksum": partial(flip_at, 18),
    "flip.last.offset": partial(flip_at, 25),
    "shorter.segment": partial(shorten, 2),
    "torn.end": partial(shorten, -1),
    "empty.end": empty_last,
    "garbage.end": partial(lengthen, random.Random(5).randbytes(1000)),
    "zeros.end": partial(lengthen, bytes(1000)),
    # What no checksum covers.
    "flip.base.offset": partial(flip_at, 5),
    "missing.segment": remove_segment,
}
NOT_COVERED = ("flip.base.offset", "missing.segment")

BESIDE = [place for place, _, _ in harmed_topics()]
RECORD_PLACES = [Place(name, 0) for name in RECORD_HARMS]
PLACES = BESIDE + RECORD_PLACES


# The directories


class Copy:
    def __init__(self, original: Path, scratch: Path, *, was_stopped: bool) -> None:
        self.was_stopped = was_stopped
        self.data_dir = scratch / "data"
        shutil.copytree(original, self.data_dir)

    def files(self, place: Place, suffix: str) -> list[Path]:
        return sorted((self.data_dir / f"{place.topic}-{place.partition}").glob(f"*{suffix}"))

    def log_bytes(self, place: Place) -> int:
        """Of all that is, or was, part of the log."""
        directory = self.data_dir / f"{place.topic}-{place.partition}"
        return sum(path.stat().st_size for path in directory.glob("*.log*"))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for how in ("stopped", "killed"):
        made[how] = tmp_path_factory.mktemp(how) / "data"
        with ChaosBroker(SETTINGS, data_dir=made[how]) as broker:
            create_topics(broker.bootstrap, PLACES)
            fill(broker.bootstrap, PLACES, RECORDS, writer=0)
            if how == "stopped":
                broker.stop()
            else:
                broker.kill()
    return made


@pytest.fixture(params=["stopped", "killed"])
def copy(request: pytest.FixtureRequest, originals: dict[str, Path], tmp_path: Path) -> Copy:
    return Copy(originals[request.param], tmp_path, was_stopped=request.param == "stopped")


def fill(bootstrap: str, places: list[Place], count: int, *, writer: int) -> None:
    """Write to every partition, in small batches, records one millisecond apart."""
    errors: list[KafkaError | None] = []
    producer = Producer(
        settings(bootstrap, enable_idempotence=True, batch_num_messages=RECORDS_PER_BATCH, linger_ms=5)
    )
    for place in places:
        for sequence in range(count):
            producer.produce(
                place.topic,
                encode_value(identity_of(writer, sequence), 100),
                partition=place.partition,
                timestamp=FIRST_TIMESTAMP + sequence,
                on_delivery=lambda error, _: errors.append(error),
            )
        producer.poll(0)
    assert producer.flush(30) == 0
    assert errors == [None] * count * len(places)


# The tests


def test_what_stands_beside_the_records_is_made_again(copy: Copy, seed: int) -> None:
    choose = random.Random(seed)
    harmed = 0
    for place, suffix, harm in harmed_topics():
        for path in copy.files(place, suffix):
            harm(path, choose)
            harmed += 1
    assert harmed > 5 * len(HARMS)
    # The index of a log that was closed is believed, and it has no checksum.
    misled = [Place("times.flip_a_bit", 0)] if copy.was_stopped else []
    with ChaosBroker(SETTINGS, data_dir=copy.data_dir) as broker:
        assert_all_there(read_everything(broker.bootstrap, BESIDE))
        assert_timestamps_lead_to_offsets(
            broker.bootstrap, [place for place in BESIDE if place not in misled], choose
        )
        fill(broker.bootstrap, BESIDE, 1, writer=1)
        readings = read_everything(broker.bootstrap, BESIDE)
        for reading in readings.values():
            assert reading.records.pop() == (RECORDS, identity_of(1, 0))
        assert_all_there(readings)


def change_a_number(path: Path, choose: random.Random) -> None:
    """It still looks like a checkpoint: a log begins, or was flushed, elsewhere."""
    *lines, last = path.read_text().splitlines()
    head, _, number = last.rpartition(" ")
    path.write_text("\n".join([*lines, f"{head} {int(number) ^ 8}"]) + "\n")


CHECKPOINT_HARMS = [*HARMS, change_a_number]


@pytest.mark.parametrize("harm", CHECKPOINT_HARMS, ids=[harm.__name__ for harm in CHECKPOINT_HARMS])
def test_a_damaged_checkpoint_costs_time_only(
    originals: dict[str, Path], tmp_path: Path, harm: Harm, seed: int
) -> None:
    copy = Copy(originals["stopped"], tmp_path, was_stopped=True)
    checkpoints = list(copy.data_dir.glob("*checkpoint"))
    assert checkpoints
    for path in checkpoints:
        harm(path, random.Random(seed))
    with ChaosBroker(SETTINGS, data_dir=copy.data_dir) as broker:
        assert_all_there(read_everything(broker.bootstrap, PLACES))


def test_damaged_records_are_never_served_and_those_before_them_are(copy: Copy) -> None:
    bytes_before = {place: copy.log_bytes(place) for place in RECORD_PLACES}
    damages = {place: RECORD_HARMS[place.topic](copy.files(place, ".log")) for place in RECORD_PLACES}
    places = [place for place in RECORD_PLACES if not (copy.was_stopped and place.topic in NOT_COVERED)]
    with ChaosBroker(SETTINGS, data_dir=copy.data_dir) as broker:
        # Of a log that was looked at when the broker started everything can be read to its end.
        least = {place: damages[place].offset if copy.was_stopped else sys.maxsize for place in places}
        readings, refused = read_what_can_be_read(broker.bootstrap, least)
        wrong = [
            f"{place.topic}: {reading.records[:1]}..{reading.records[-1:]}, damaged at {damages[place].offset}"
            for place, reading in readings.items()
            if not is_beginning_of_original(reading, damages[place].offset)
        ]
        assert not wrong, "\n".join(wrong)
        assert copy.was_stopped or not refused, refused
        # The others do not suffer with them.
        assert_all_there(read_everything(broker.bootstrap, BESIDE))
        broker.restart(kill=True)  # and now all of it is looked at
        read_everything(broker.bootstrap, [place for place in places if place not in refused])
    deleted = {
        place.topic: bytes_before[place] - copy.log_bytes(place) - damages[place].gone_bytes
        for place in places
        if copy.log_bytes(place) + damages[place].gone_bytes < bytes_before[place]
    }
    assert not deleted, f"bytes were deleted: {deleted}"


def read_what_can_be_read(bootstrap: str, least: dict[Place, int]) -> tuple[dict[Place, Reading], set[Place]]:
    """The records before the first error of each partition, and the partitions that had one.

    ``least`` is how many records each has that must come, however long that takes.
    """
    places = list(least)
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
    readings = {place: Reading(0) for place in places}
    ended: set[Place] = set()
    refused: set[Place] = set()
    try:
        consumer.assign([TopicPartition(*place, 0) for place in places])
        idle_since = time.monotonic()
        while len(ended | refused) < len(places):
            owed = any(
                len(readings[place].records) < least[place] for place in least.keys() - ended - refused
            )
            if time.monotonic() > idle_since + (PATIENCE_S if owed else IDLE_S):
                break
            for message in consumer.consume(1000, timeout=0.1):
                place = place_of(message)
                error = message.error()
                if error is None and place not in refused:
                    _, offset, identity = seen_in(message)
                    readings[place].records.append((offset, identity))
                    idle_since = time.monotonic()
                elif error is not None and error.code() == KafkaError._PARTITION_EOF:
                    ended.add(place)
                elif error is not None:
                    refused.add(place)
    finally:
        consumer.close()
    # librdkafka repeats in silence what it is told to repeat, as for a log that cannot be used.
    return readings, refused | (set(places) - ended)


def is_beginning_of_original(reading: Reading, least: int) -> bool:
    expected = [(offset, identity_of(0, offset)) for offset in range(len(reading.records))]
    return reading.records == expected and least <= len(expected) <= RECORDS


def assert_all_there(readings: dict[Place, Reading]) -> None:
    missing = {
        place.topic: len(reading.records)
        for place, reading in readings.items()
        if not is_beginning_of_original(reading, RECORDS)
    }
    assert not missing, missing


def assert_timestamps_lead_to_offsets(bootstrap: str, places: list[Place], choose: random.Random) -> None:
    consumer = Consumer(settings(bootstrap, group_id="nobody"))
    try:
        for sequence in choose.sample(range(RECORDS), 20):
            wanted = [TopicPartition(*place, FIRST_TIMESTAMP + sequence) for place in places]
            found = patiently(partial(consumer.offsets_for_times, wanted, timeout=5))
            misled = {one.topic: one.offset for one in found if one.offset != sequence}
            assert not misled, f"{misled}, not {sequence}"
    finally:
        consumer.close()
