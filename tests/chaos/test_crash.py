"""SIGKILL at random moments under load: what was acknowledged is there, once, in order, and stays the same.

The page cache survives the death of a process, so nothing here needs an fsync; what is tested is that what
the broker wrote in the end is what it needs in the beginning, wherever it was interrupted: in the middle of
a batch, of a roll, of a checkpoint, of recovery itself.
"""

from __future__ import annotations

import random
import time
from functools import partial

import pytest
from confluent_kafka import KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.chaos.administrator import Administrator
from tests.chaos.brokers import ROLLING, ChaosBroker, completed_segments
from tests.chaos.clients import CODECS, Client, Committer, GroupReader, Writer, read_everything, settings
from tests.chaos.ledger import Ledger, Place, encode_value, identity_of
from tests.support import wait_until

pytestmark = pytest.mark.chaos

LOADED = [Place("loaded", partition) for partition in range(3)]
PRUNED = [Place("pruned", partition) for partition in range(2)]
MARKED = [Place("marked", partition) for partition in range(32)]
RECORDS_PER_SECOND = 600


def create_topics(bootstrap: str, places: list[Place]) -> None:
    admin = AdminClient(settings(bootstrap))
    partitions: dict[str, int] = {}
    for place in places:
        partitions[place.topic] = max(partitions.get(place.topic, 0), place.partition + 1)
    for future in admin.create_topics([NewTopic(name, count) for name, count in partitions.items()]).values():
        future.result()


def produce(bootstrap: str, ledger: Ledger, place: Place, sequences: range, *, writer: int = 0) -> None:
    """Send some records and see each of them acknowledged."""
    producer = Producer(settings(bootstrap, enable_idempotence=True, message_timeout_ms=10_000))
    failures = []

    def delivered(identity: int, error: KafkaError | None, message: Message) -> None:
        if error is None:
            ledger.acknowledged(place, message.offset(), identity)
        else:
            failures.append(error)

    for sequence in sequences:
        identity = identity_of(writer, sequence)
        producer.produce(
            place.topic,
            encode_value(identity, 100),
            partition=place.partition,
            on_delivery=partial(delivered, identity),
        )
    producer.flush(20)
    assert not failures, failures[0]


def stop_all(clients: list[Client], ledger: Ledger) -> None:
    for client in clients:
        client.stop()
    for client in clients:
        client.join(120)
        if client.is_alive():
            ledger.violated(f"{client.name} hangs")


def test_what_was_acknowledged_survives_kills_at_random_moments(chaos_seconds: float, seed: int) -> None:
    choose = random.Random(seed)
    ledger = Ledger()
    with ChaosBroker(ROLLING) as broker:
        create_topics(broker.bootstrap, LOADED + PRUNED + MARKED)
        writers = [
            Writer(
                number,
                broker.bootstrap,
                ledger,
                LOADED + PRUNED,
                choose.randrange(2**32),
                codec=codec,
                rate=RECORDS_PER_SECOND,
            )
            for number, codec in enumerate(CODECS)
        ]
        reader = GroupReader(broker.bootstrap, ledger, ["loaded"], "readers")
        committer = Committer(broker.bootstrap, ledger, MARKED, "committers")
        administrator = Administrator(broker.bootstrap, ledger, PRUNED, choose.randrange(2**32))
        clients: list[Client] = [*writers, reader, committer, administrator]
        for client in clients:
            client.start()
        try:
            deadline = time.monotonic() + chaos_seconds
            stops = 0
            while time.monotonic() < deadline and not ledger.violations:
                time.sleep(choose.uniform(0.05, 1.3))
                if choose.random() < 0.1:
                    broker.stop()
                    stops += 1
                else:
                    broker.kill()
                while choose.random() < 0.3:
                    broker.start_and_kill(choose.uniform(0.05, 0.5))
                broker.start()
                ledger.restarted()
            acknowledged = ledger.acknowledged_count
            wait_until(lambda: ledger.acknowledged_count > acknowledged, 30, "writes go on after the last kill")
        finally:
            stop_all(clients, ledger)
        rolls = completed_segments(broker.data_dir)
        readings = read_everything(broker.bootstrap, LOADED + PRUNED)
        ledger.check(readings)
        broker.assert_no_traceback()

    print(
        f"\nseed {seed}: {broker.kills} kills, {stops} stops, {ledger.acknowledged_count} records acknowledged,"
        f" {ledger.seen_count} seen on the way, {rolls} rolls, {reader.commits}+{committer.commits} commits,"
        f" {reader.resumptions} resumptions, {administrator.acknowledged} changes of topics,"
        f" {committer.looks}+{administrator.looks} looks"
    )
    assert broker.kills >= chaos_seconds / 4
    assert ledger.acknowledged_count >= 200 * chaos_seconds
    assert ledger.seen_count >= 50 * chaos_seconds
    assert rolls >= chaos_seconds
    assert committer.commits >= 5 * chaos_seconds
    assert min(reader.resumptions, committer.looks, administrator.looks) >= chaos_seconds / 8
    assert administrator.acknowledged >= chaos_seconds


@pytest.mark.parametrize("records_after", [0, 10], ids=["empty", "with records"])
def test_a_topic_made_again_inherits_nothing_from_the_checkpoints_of_its_namesake(records_after: int) -> None:
    place = Place("again", 0)
    with ChaosBroker({"log.flush.offset.checkpoint.interval.ms": "3600000"}) as broker:
        admin = AdminClient(settings(broker.bootstrap))
        create_topics(broker.bootstrap, [place])
        produce(broker.bootstrap, Ledger(), place, range(100))
        for future in admin.delete_records([TopicPartition(*place, 60)]).values():
            future.result()
        broker.restart()  # writes the checkpoints, and they are not written again for an hour
        for future in admin.delete_topics(["again"]).values():
            future.result()
        create_topics(broker.bootstrap, [place])
        ledger = Ledger()
        produce(broker.bootstrap, ledger, place, range(records_after))
        broker.restart(kill=True)
        ledger.check(read_everything(broker.bootstrap, [place]))
        produce(broker.bootstrap, ledger, place, range(records_after, records_after + 5))
        readings = read_everything(broker.bootstrap, [place])
        ledger.check(readings)
        assert [offset for offset, _ in readings[place].records] == list(range(records_after + 5))
