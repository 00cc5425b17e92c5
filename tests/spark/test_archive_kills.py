"""The archive under SIGKILL: of its driver at every step of a commit, of the JVM, of Python workers, at random.

The archive runs in a process of its own (`tests/spark/archiver.py`) while records are produced. After every kill it
is started again, while what is left of the killed one may still be at work; at the end the table must equal the
topic, record by record. PENSTOCK_SPARK_KILLS says how many kills (three unless told; more in `make spark-long`,
where Delta and Iceberg have their share), PENSTOCK_SPARK_SEED which.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.columnar.columns import encode
from penstock.protocol.compression import Codec
from penstock.spark.jobs.tables import format_at, left_over, open_table
from penstock.spark.jobs.tables.state import State
from penstock.spark.ranges import OffsetRange
from penstock.spark.reading import ReadSettings, read
from penstock.wire import Client, TopicPartition
from penstock.wire.producer import Producer
from tests.spark.tables import shown
from tests.spark.topics import Topics

KILLS = int(os.environ.get("PENSTOCK_SPARK_KILLS", "3"))
SEED = int(os.environ.get("PENSTOCK_SPARK_SEED", "1"))
KILLS_OF = {"parquet": KILLS} | ({"delta": KILLS // 4, "iceberg": KILLS // 4} if KILLS > 3 else {})
PARTITIONS = 3
# A commit takes the driver about so many steps on the disk; merging small files is one more commit.
STEPS_PER_COMMIT = 14
DEADLINE_S = 240.0
REPOSITORY = Path(__file__).parents[2]


class Archiver:
    """The process, and its JVM and Python workers, which are all of its session."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.archiver", *arguments],
                cwd=REPOSITORY,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def members(self, word: str = "") -> list[int]:
        """The other processes of the session whose command line has a word in it."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == self.process.pid:
                continue
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if os.getsid(int(entry.name)) == self.process.pid:
                    command = (entry / "cmdline").read_bytes().decode(errors="replace")
                    if word in command:
                        found.append(int(entry.name))
        return sorted(found)

    def kill_all(self) -> None:
        self.process.kill()
        for pid in self.members():
            kill(pid)
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def tail(self) -> str:
        return self.log()[-5000:]


def kill(pid: int) -> bool:
    """False if it was gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class Feed:
    """Produces records that say where they belong, and do not compress well: files fill quickly."""

    def __init__(self, client: Client, topic: str) -> None:
        self._producer = Producer(client)
        self._topic = topic
        self._random = np.random.default_rng(SEED)
        self.ends = [0] * PARTITIONS

    def more(self, count: int) -> None:
        for partition in range(PARTITIONS):
            begin = self.ends[partition]
            noise = self._random.bytes(count * 48).hex()
            texts = [
                b"%d/%d/%s" % (partition, begin + number, noise[number * 96 : number * 96 + 96].encode())
                for number in range(count)
            ]
            stamps = pa.array(np.full(count, time.time_ns() // 1_000_000))
            values = pa.array(texts, pa.binary())
            for encoded in encode(values, values, None, stamps, codec=Codec.NONE):
                self._producer.send(TopicPartition(self._topic, partition), encoded.batch)
            self.ends[partition] += count
        self._producer.flush()


class Trial:
    """One table, and the archivers that come and go."""

    def __init__(self, bootstrap: str, topic: str, feed: Feed, scratch: Path, format: str) -> None:
        self.bootstrap = bootstrap
        self.topic = topic
        self.feed = feed
        self.format = format
        self.location = scratch / "table"
        self._scratch = scratch
        self._all: list[Archiver] = []

    def start(self, *arguments: str) -> Archiver:
        number = len(self._all)
        for former in self._all[:-1]:
            former.kill_all()  # of the last one, what is left may still be writing
        spark = self._scratch / f"spark-{number}"
        spark.mkdir()
        given = [
            self.bootstrap,
            self.topic,
            str(self.location),
            str(spark),
            "--format",
            self.format,
            *arguments,
        ]
        self._all.append(Archiver(given, self._scratch / f"archiver-{number}.log"))
        return self._all[-1]

    def end(self) -> None:
        for each in self._all:
            each.kill_all()

    def state(self) -> State | None:
        return open_table(self.location, self.format).load() if format_at(self.location) else None

    # What is waited for, while records keep coming

    def until_at_work(self, archiver: Archiver) -> None:
        """It has committed something, and has more to do; or is dead already."""
        before = self.state()
        batch = -1 if before is None else before.batch

        def has_committed() -> bool:
            state = self.state()
            return archiver.status is not None or (state is not None and state.batch > batch + 1)

        self._feed_until(archiver, has_committed, "the archiver commits")

    def until_caught_up(self, archiver: Archiver) -> None:
        ends = list(self.feed.ends)

        def has_caught_up() -> bool:
            state = self.state()
            held = {} if state is None else {at.partition: span.end for at, span in state.spans.items()}
            is_there = all(held.get(partition, 0) >= end for partition, end in enumerate(ends))
            return is_there or archiver.status is not None

        self._feed_until(archiver, has_caught_up, "the archive goes on")
        assert archiver.status is None, f"the archive died of a dead worker\n{archiver.tail()}"

    def until_dead(self, archiver: Archiver) -> int:
        self._feed_until(archiver, lambda: archiver.status is not None, "the archiver dies")
        return archiver.process.wait()

    def _feed_until(self, archiver: Archiver, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}\n{archiver.tail()}"
            self.feed.more(200)
            time.sleep(0.1)


@pytest.mark.parametrize("format", KILLS_OF)
@pytest.mark.timeout(300 + 120 * KILLS)
def test_the_table_equals_the_topic_whoever_is_killed(
    bootstrap: str, topics: Topics, unique: Callable[[str], str], tmp_path: Path, format: str
) -> None:
    seed = random.Random(f"{SEED} {format}")
    topic = topics.create(unique("killed"), PARTITIONS)
    with Client(bootstrap) as client:
        trial = Trial(bootstrap, topic, Feed(client, topic), tmp_path, format)
        try:
            kills = list(itertools.islice(_kills(trial, seed), KILLS_OF[format]))
            archiver = trial.start("--once")
            status = archiver.process.wait(DEADLINE_S)
            assert status == 0, f"the last run ended with {status}\n{archiver.tail()}"
        finally:
            trial.end()
        print(f"{format}, seed {SEED}: {', '.join(kills)}; {sum(trial.feed.ends)} records")
        check(trial, client)


def _kills(trial: Trial, seed: random.Random) -> Iterator[str]:
    """Kill somebody, and say whom; as often as somebody asks."""
    steps = itertools.cycle(seed.sample(range(1, 3 * STEPS_PER_COMMIT), 3 * STEPS_PER_COMMIT - 1))
    for kind in itertools.cycle(["jvm", "step", "step", "driver", "step"]):
        step = next(steps)
        archiver = trial.start(*(["--die-after", str(step)] if kind == "step" else []))
        trial.until_at_work(archiver)
        if kind == "step":
            assert trial.until_dead(archiver) == -signal.SIGKILL, archiver.tail()
            yield f"the driver after step {step}"
            continue
        # Workers come first: the archive must survive that by itself.
        trial.feed.more(3000)
        time.sleep(seed.uniform(0, 0.3))
        workers = archiver.members("pyspark.daemon")
        if workers and (KILLS == 3 or seed.random() < 0.5) and kill(seed.choice(workers)):
            yield "a worker"
            trial.until_caught_up(archiver)
        trial.feed.more(3000)
        time.sleep(seed.uniform(0, 0.7))
        if kind == "jvm":
            (java, *_) = archiver.members("java")
            kill(java)
            status = archiver.process.wait(DEADLINE_S)
            assert status != 0, "an archive without Spark said that all is well"
        else:
            archiver.process.kill()
            archiver.process.wait()
        yield f"the {kind}"


def check(trial: Trial, client: Client) -> None:
    table = open_table(trial.location, trial.format)
    state = table.load()
    assert state is not None
    assert {at.partition: span for at, span in state.spans.items()} == {
        partition: (0, end) for partition, end in enumerate(trial.feed.ends)
    }
    assert state.gaps == ()
    assert left_over(table, state) == []
    if trial.format == "parquet":
        assert shown(trial.location) == {each.path for each in state.files}
    settings = ReadSettings(trial.bootstrap, headers=True)
    for partition, end in enumerate(trial.feed.ends):
        files = [each for each in state.files if each.partition == partition]
        archived = pa.concat_tables(pq.ParquetFile(table.root / each.path).read() for each in files)
        archived = archived.sort_by("offset").combine_chunks()
        batches = read(settings, OffsetRange(trial.topic, partition, 0, end))
        produced = pa.Table.from_batches(batches).combine_chunks()
        assert archived.num_rows == produced.num_rows == end
        assert archived.equals(produced), f"partition {partition} differs"
        places = [value.split(b"/")[:2] for value in archived.column("value").to_pylist()]
        assert places == [[b"%d" % partition, b"%d" % offset] for offset in range(end)]
