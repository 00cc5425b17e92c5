"""Power loss under load: with every message flushed, dropping all that no fsync covered costs nothing.

``lossy.py`` says how it is known what was covered, ``power.py`` what is dropped. The last test turns the
flushing off and expects records to be lost: otherwise the others would prove nothing.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos import lossy
from tests.chaos.administrator import Administrator
from tests.chaos.brokers import ROLLING, ChaosBroker, completed_segments
from tests.chaos.clients import CODECS, Client, Committer, GroupReader, Writer, running
from tests.chaos.errands import create_topics, produce, read_everything
from tests.chaos.ledger import Ledger, Place
from tests.chaos.power import Disk, PowerLoss
from tests.support import wait_until

pytestmark = pytest.mark.chaos

LOADED = [Place("loaded", partition) for partition in range(3)]
PRUNED = [Place("pruned", 0)]
MARKED = [Place("marked", partition) for partition in range(16)]
RECORDS_PER_SECOND = 300
SHARE_OF_TIME = 0.3
# A slow machine may take so many times as long for as much to happen.
PATIENCE = 3


@contextmanager
def witnessed(settings: Mapping[str, str]) -> Iterator[tuple[ChaosBroker, PowerLoss]]:
    """A broker whose fsyncs are written down."""
    with tempfile.TemporaryDirectory(prefix="penstock-power-") as scratch:
        data_dir = Path(scratch, "data")
        power = PowerLoss(data_dir, Path(scratch, "witness"))
        entry = ["-P", lossy.__file__, str(power.journal), str(power.attic)]
        with ChaosBroker(settings, data_dir=data_dir, entry=entry) as broker:
            yield broker, power


@pytest.mark.parametrize(
    "flushing",
    [{"log.flush.interval.messages": "1"}, {"penstock.durability": "flushed"}],
    ids=["flush every message", "flushed"],
)
def test_what_was_acknowledged_survives_power_loss_when_flushed(
    chaos_seconds: float, seed: int, flushing: dict[str, str]
) -> None:
    choose = random.Random(seed)
    ledger = Ledger()
    seconds = chaos_seconds * SHARE_OF_TIME
    losses = lost_bytes = lost_names = 0
    with witnessed({**ROLLING, **flushing}) as (broker, power):
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

        def lacking() -> list[str]:
            """What has not happened often enough for the test to say something."""
            happened = {
                "power losses": (losses, seconds / 5),
                "bytes dropped": (lost_bytes, 1),
                "records acknowledged": (ledger.acknowledged_count, 100 * seconds),
                "records seen": (ledger.seen_count, 50 * seconds),
                "rolls": (completed_segments(broker.data_dir), seconds),
                "commits": (committer.commits, 5 * seconds),
                "looks at commits": (committer.looks, seconds / 8),
                "changes of topics": (administrator.acknowledged, seconds),
                "looks at topics": (administrator.looks, seconds / 8),
            }
            return [f"{count} {what}" for what, (count, least) in happened.items() if count < least]

        with running(clients, ledger):
            missing: list[str] = []
            deadline = time.monotonic() + seconds
            while not ledger.violations:
                if time.monotonic() > deadline:
                    missing = lacking()
                    if not missing or time.monotonic() > deadline + PATIENCE * chaos_seconds:
                        break
                time.sleep(choose.uniform(0.05, 1.2))
                if choose.random() < 0.2:
                    broker.stop()
                else:
                    broker.kill()
                while choose.random() < 0.2:
                    broker.start_and_kill(choose.uniform(0.1, 0.5))
                if choose.random() < 0.8:
                    damage = power.strike(choose.choice(list(Disk)), choose)
                    losses += 1
                    lost_bytes += damage.lost_bytes
                    lost_names += damage.lost_names
                broker.start()
                ledger.restarted()
            ledger.raise_violations()
            assert not missing, f"too little happened: {missing}"
            acknowledged = ledger.acknowledged_count
            wait_until(
                lambda: ledger.acknowledged_count > acknowledged, 30, "writes go on after a power loss"
            )
        rolls = completed_segments(broker.data_dir)
        # Once more, with nobody writing: everything that is there was acknowledged, and flushed.
        broker.kill()
        power.strike(Disk.STRICT, choose)
        broker.start()
        ledger.check(read_everything(broker.bootstrap, LOADED + PRUNED))
        broker.assert_no_traceback()

    print(
        f"\nseed {seed}: {losses} power losses, {broker.kills} kills, {lost_bytes} bytes and {lost_names}"
        f" names dropped, {ledger.acknowledged_count} records acknowledged, {ledger.seen_count} seen on the way,"
        f" {rolls} rolls, {reader.commits}+{committer.commits} commits, {administrator.acknowledged} changes"
        f" of topics, {committer.looks}+{administrator.looks} looks"
    )


def test_a_created_topic_survives_a_power_loss_at_once(seed: int) -> None:
    with witnessed({}) as (broker, power):
        create_topics(broker.bootstrap, LOADED)
        broker.kill()
        power.strike(Disk.STRICT, random.Random(seed))
        broker.start()
        readings = read_everything(broker.bootstrap, LOADED)
        assert [reading.records for reading in readings.values()] == [[], [], []]


def test_without_flushing_a_power_loss_does_lose_acknowledged_records(seed: int) -> None:
    ledger = Ledger()
    place = LOADED[0]
    with witnessed({}) as (broker, power):
        create_topics(broker.bootstrap, LOADED)
        produce(broker.bootstrap, ledger, place, range(500))
        broker.kill()
        damage = power.strike(Disk.STRICT, random.Random(seed))
        broker.start()
        readings = read_everything(broker.bootstrap, LOADED)
        assert damage.lost_bytes + damage.lost_names > 0
        assert ledger.acknowledged_count == 500
        assert ledger.lost(readings) == 500
        with pytest.raises(AssertionError, match="lost"):
            ledger.check(readings)
