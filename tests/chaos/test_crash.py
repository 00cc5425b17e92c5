"""SIGKILL at random moments under load: what was acknowledged is there, once, in order, and stays the same.

The page cache survives the death of a process, so nothing here needs an fsync; what is tested is that what
the broker wrote in the end is what it needs in the beginning, wherever it was interrupted: in the middle of
a batch, of a roll, of a checkpoint, of recovery itself.
"""

from __future__ import annotations

import random
import time

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from tests.chaos.administrator import Administrator
from tests.chaos.brokers import ROLLING, ChaosBroker, completed_segments
from tests.chaos.clients import CODECS, Client, Committer, GroupReader, Writer, running
from tests.chaos.errands import create_topics, produce, read_everything, read_with_kafka_python, settings
from tests.chaos.ledger import Ledger, Place
from tests.support import wait_until

pytestmark = pytest.mark.chaos

LOADED = [Place("loaded", partition) for partition in range(3)]
PRUNED = [Place("pruned", partition) for partition in range(2)]
MARKED = [Place("marked", partition) for partition in range(32)]
RECORDS_PER_SECOND = 600
# A slow machine may take so many times as long again for as much to happen.
PATIENCE = 3


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
        stops = 0

        def lacking() -> list[str]:
            """What has not happened often enough for the test to say something."""
            happened = {
                "kills": (broker.kills, chaos_seconds / 4),
                "records acknowledged": (ledger.acknowledged_count, 200 * chaos_seconds),
                "records seen": (ledger.seen_count, 50 * chaos_seconds),
                "rolls": (completed_segments(broker.data_dir), chaos_seconds),
                "commits": (committer.commits, 5 * chaos_seconds),
                "resumptions": (reader.resumptions, chaos_seconds / 8),
                "looks at commits": (committer.looks, chaos_seconds / 8),
                "looks at topics": (administrator.looks, chaos_seconds / 8),
                "changes of topics": (administrator.acknowledged, chaos_seconds),
            }
            return [f"{count} {what}" for what, (count, least) in happened.items() if count < least]

        with running(clients, ledger):
            missing: list[str] = []
            deadline = time.monotonic() + chaos_seconds
            while not ledger.violations:
                if time.monotonic() > deadline:
                    missing = lacking()
                    if not missing or time.monotonic() > deadline + PATIENCE * chaos_seconds:
                        break
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
            ledger.raise_violations()
            assert not missing, f"too little happened: {missing}"
            acknowledged = ledger.acknowledged_count
            wait_until(
                lambda: ledger.acknowledged_count > acknowledged, 30, "writes go on after the last kill"
            )
        rolls = completed_segments(broker.data_dir)
        readings = read_everything(broker.bootstrap, LOADED + PRUNED)
        ledger.check(readings)
        assert read_with_kafka_python(broker.bootstrap, LOADED[0]) == readings[LOADED[0]]
        broker.assert_no_traceback()

    print(
        f"\nseed {seed}: {broker.kills} kills, {stops} stops, {ledger.acknowledged_count} records acknowledged"
        f", {ledger.seen_count} seen on the way, {rolls} rolls, {reader.commits}+{committer.commits} commits,"
        f" {reader.resumptions} resumptions, {administrator.acknowledged} changes of topics,"
        f" {committer.looks}+{administrator.looks} looks"
    )


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


def test_deleted_records_stay_deleted_after_a_kill_at_once() -> None:
    place = Place("pruned", 0)
    ledger = Ledger()
    with ChaosBroker() as broker:
        create_topics(broker.bootstrap, [place])
        produce(broker.bootstrap, ledger, place, range(100))
        admin = AdminClient(settings(broker.bootstrap))
        ledger.asked_to_prune(place, 50)
        for future in admin.delete_records([TopicPartition(*place, 50)]).values():
            future.result()
        broker.restart(kill=True)
        readings = read_everything(broker.bootstrap, [place])
        ledger.check(readings)
        assert readings[place].start_offset == 50
