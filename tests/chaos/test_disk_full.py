"""A full disk: writes are refused with an error that clients repeat, everything else goes on.

The disk is a small tmpfs, so ENOSPC is real: short writes, files that cannot be created, snapshots and indexes
that cannot be written. Mounting one needs root; without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.chaos.brokers import ROLLING, ChaosBroker
from tests.chaos.clients import Client, Writer, running
from tests.chaos.errands import PATIENCE_S, create_topics, produce, read_everything, settings
from tests.chaos.ledger import Ledger, Place, encode_value, identity_of
from tests.interop.test_sasl import client_settings, put
from tests.interop.test_tls import address
from tests.support import wait_until
from tests.tls.files import TlsFiles

pytestmark = pytest.mark.chaos

PLACES = [Place("loaded", partition) for partition in range(3)]
DISK_BYTES = 16 << 20
LEFT_BYTES = 2 << 20
MECHANISM = "SCRAM-SHA-256"


@contextlib.contextmanager
def full_is_enough() -> Iterator[None]:
    """The broker may write between the question how much is free and the writing of as much."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


class SmallDisk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, left_bytes: int) -> None:
        """Somebody else's file takes all but this many bytes."""
        with full_is_enough():
            self._ballast.write_bytes(bytes(max(0, self.free_bytes - left_bytes)))

    def fill_rest(self) -> None:
        with full_is_enough(), self._ballast.open("ab") as file:
            file.write(bytes(self.free_bytes))

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "penstock-test", str(path)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode:
        print(f"no small disk to fill: {mounted.stderr.strip()}")
        pytest.skip(f"a small disk cannot be mounted here (it needs root): {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        # Lazily, because a broker of a failed test may be on its way out.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def writers_of(broker: ChaosBroker, ledger: Ledger) -> list[Client]:
    # Single records: when a batch is refused again and again, librdkafka may not put it together the same way
    # ("unable to reconstruct MessageSet"), because it draws the time until the next attempt for each record.
    codecs = ("none", "lz4")
    return [
        Writer(number, broker.bootstrap, ledger, PLACES, number, codec=codec, rate=2000, batch_records=[1])
        for number, codec in enumerate(codecs)
    ]


def wait_until_full(broker: ChaosBroker) -> None:
    wait_until(lambda: "cannot write" in broker.log_tail() or not broker.is_running, 60, "the disk is full")
    assert broker.is_running, f"the broker ended\n{broker.log_tail()}"


def assert_reads_go_on(broker: ChaosBroker, ledger: Ledger) -> None:
    assert ledger.acknowledged_count > 0
    readings = read_everything(broker.bootstrap, PLACES)
    # Acknowledged meanwhile, perhaps: that is not missing, it came later.
    ends = {place: reading.records[-1][0] for place, reading in readings.items() if reading.records}
    assert ledger.lost(readings, ends) == 0


def test_writes_are_refused_while_the_disk_is_full_and_go_on_after(disk: SmallDisk) -> None:
    ledger = Ledger()
    with ChaosBroker(ROLLING, data_dir=disk.path / "data") as broker:
        create_topics(broker.bootstrap, PLACES)
        disk.fill(LEFT_BYTES)
        clients = writers_of(broker, ledger)
        with running(clients, ledger):
            wait_until_full(broker)
            assert_reads_go_on(broker, ledger)
            error = refusal(broker.bootstrap)
            assert error.code() == KafkaError.KAFKA_STORAGE_ERROR, error
            assert broker.is_running
            before = ledger.acknowledged_count
            disk.empty()
            wait_until(
                lambda: ledger.acknowledged_count > before, 30, "writes go on when there is room again"
            )
        ledger.check(read_everything(broker.bootstrap, PLACES))
        broker.restart(kill=True)
        ledger.check(read_everything(broker.bootstrap, PLACES))
        broker.assert_no_traceback()
    print(f"\n{ledger.acknowledged_count} records acknowledged, {before} before the disk was full")


def refusal(bootstrap: str) -> KafkaError:
    """What a producer that does not repeat is told."""
    errors: list[KafkaError | None] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        errors.append(error)

    producer = Producer(settings(bootstrap, retries=0, message_timeout_ms=int(PATIENCE_S * 1000)))
    producer.produce("loaded", bytes(300_000), partition=0, on_delivery=delivered)
    producer.flush(2 * PATIENCE_S)
    (error,) = errors
    assert error is not None, "a full disk took a record"
    return error


def test_everything_but_writing_goes_on_while_the_disk_is_full(disk: SmallDisk) -> None:
    """Also for those who come now: a new producer and a new topic are written down in the reserve."""
    ledger = Ledger()
    with ChaosBroker(ROLLING, data_dir=disk.path / "data") as broker:
        create_topics(broker.bootstrap, PLACES)
        produce(broker.bootstrap, ledger, PLACES[0], range(100))
        disk.fill(0)
        newcomer = Producer(settings(broker.bootstrap, enable_idempotence=True, message_timeout_ms=3000))
        # It is stored or not, as the last pages happen to have room; what is read below must be a value of ours.
        value = encode_value(identity_of(9, 0), 100)
        newcomer.produce("loaded", value, key=bytes(10_000), partition=0)
        newcomer.flush(5)
        admin = AdminClient(settings(broker.bootstrap))
        # More than goes into the last page of the metadata log.
        for number in range(30):
            name = f"late-{number}"
            admin.create_topics([NewTopic(name, 1)], request_timeout=PATIENCE_S)[name].result()
        assert len(admin.list_topics(timeout=PATIENCE_S).topics) > 30, "it is still there"
        assert refusal(broker.bootstrap).code() == KafkaError.KAFKA_STORAGE_ERROR
        consumer = Consumer(settings(broker.bootstrap, group_id="late"))
        with pytest.raises(KafkaException):
            consumer.commit(offsets=[TopicPartition("loaded", 0, 10)], asynchronous=False)
        assert broker.is_running, f"the broker ended\n{broker.log_tail()}"
        assert ledger.lost(read_everything(broker.bootstrap, PLACES)) == 0

        disk.empty()
        admin.create_topics([NewTopic("late", 1)])["late"].result()
        produce(broker.bootstrap, ledger, PLACES[0], range(100, 200))
        consumer.commit(offsets=[TopicPartition("loaded", 0, 10)], asynchronous=False)
        broker.restart(kill=True)
        assert "late" in admin.list_topics(timeout=PATIENCE_S).topics
        assert ledger.lost(read_everything(broker.bootstrap, PLACES)) == 0
        assert consumer.committed([TopicPartition("loaded", 0)], timeout=PATIENCE_S)[0].offset == 10
        consumer.close()
        broker.assert_no_traceback()


def test_deleting_records_makes_room(disk: SmallDisk) -> None:
    """The space of a removed segment comes back: nobody holds its files open."""
    ledger = Ledger()
    with ChaosBroker(ROLLING, data_dir=disk.path / "data") as broker:
        create_topics(broker.bootstrap, PLACES)
        disk.fill(LEFT_BYTES)
        clients = writers_of(broker, ledger)
        with running(clients, ledger):
            wait_until_full(broker)
            admin = AdminClient(settings(broker.bootstrap))
            ends = {place: ledger.last_acknowledged(place) for place in PLACES}
            for place, end in ends.items():
                ledger.asked_to_prune(place, end)
            for future in admin.delete_records(
                [TopicPartition(*place, end) for place, end in ends.items()]
            ).values():
                future.result()
            before = ledger.acknowledged_count
            wait_until(lambda: ledger.acknowledged_count > before + 500, 30, "writes go on in the room made")
            disk.empty()
        ledger.check(read_everything(broker.bootstrap, PLACES))


def test_a_broker_killed_on_a_full_disk_comes_back_when_there_is_room(disk: SmallDisk) -> None:
    ledger = Ledger()
    with ChaosBroker(ROLLING, data_dir=disk.path / "data") as broker:
        create_topics(broker.bootstrap, PLACES)
        disk.fill(LEFT_BYTES)
        clients = writers_of(broker, ledger)
        with running(clients, ledger):
            wait_until_full(broker)
            broker.kill()
            disk.fill_rest()
            # It may start or refuse to; it may not crash, and it may not harm what is there.
            with contextlib.suppress(AssertionError):
                broker.start()
            if broker.is_running:
                assert_reads_go_on(broker, ledger)
                broker.kill()
            broker.assert_no_traceback()
            disk.empty()
            broker.start()
            before = ledger.acknowledged_count
            wait_until(
                lambda: ledger.acknowledged_count > before, 30, "writes go on when there is room again"
            )
        ledger.check(read_everything(broker.bootstrap, PLACES))


def test_a_disk_that_one_user_fills_is_read_by_others_and_free_when_that_users_topic_is_gone(
    disk: SmallDisk, tmp_path: Path
) -> None:
    files = TlsFiles(tmp_path)
    listeners = {
        "listeners": "PLAINTEXT://127.0.0.1:0,SASL_SSL://127.0.0.1:0",
        "sasl.enabled.mechanisms": MECHANISM,
        **files.settings("none"),
    }
    with ChaosBroker({**ROLLING, **listeners}, data_dir=disk.path / "data") as broker:
        once: dict[str, Any] = {"retries": 0, "message.timeout.ms": int(PATIENCE_S * 1000)}
        users, producers = {}, {}
        for user in ("alice", "mallory"):
            put(broker, user)
            users[user] = client_settings(broker, files, MECHANISM, user=user)
            producers[user] = Producer({**users[user], **once})
        codes: list[int] = []

        def delivered(error: KafkaError | None, _: Message) -> None:
            codes.append(0 if error is None else error.code())

        def send(user: str, size: int) -> int:
            """The error that a producer is told which does not repeat; 0 if there is none."""
            producers[user].produce(user, bytes(size), on_delivery=delivered)
            assert producers[user].flush(2 * PATIENCE_S) == 0
            return codes[-1]

        written = 10
        assert [send("alice", 1_000) for _ in range(written)] == [0] * written
        for user in ("mallory", "alice"):
            refused = wait_until(partial(send, user, 900_000), PATIENCE_S, "there is no room for anybody")
            assert refused == KafkaError.KAFKA_STORAGE_ERROR
        assert count_of(users["alice"], "alice", written) >= written
        admin = AdminClient(settings(address(broker, "PLAINTEXT")))
        admin.delete_topics(["mallory"])["mallory"].result(PATIENCE_S)
        wait_until(lambda: send("alice", 1_000) == 0, PATIENCE_S, "there is room again")
        broker.assert_no_traceback()


def count_of(user: dict[str, str], topic: str, at_least: int) -> int:
    """How many records a user reads."""
    with closing(Consumer({**user, "group.id": topic, "enable.auto.commit": False})) as consumer:
        consumer.assign([TopicPartition(topic, 0, 0)])
        found: list[Message] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < at_least and time.monotonic() < deadline:
            found += [record for record in consumer.consume(at_least, 0.5) if record.error() is None]
        return len(found)
