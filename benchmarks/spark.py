"""Our source against Spark's own Kafka connector, and the archive against Spark's Parquet writer.

One session, one broker, one topic of four partitions for each kind of data, and both sides take turns on it:
ours, theirs, ours, theirs. A figure is the median of the rounds' ratios, so that a busy moment of the machine
falls on a pair and not on one side. Every pair must also agree on what it read. CPU seconds are those of the
JVM and all Python workers. Both run with their defaults: a larger ``kafka.max.poll.records`` gives the connector
10 to 20 % more. Skipped with a word where the connector's jars cannot be had.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.process import MeasuredBroker, Wire, frame, settle
from benchmarks.requests import PRODUCE_VERSION, create, produce_request, pump
from penstock.protocol.compression import Codec
from penstock.protocol.records import RecordFields, encode_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 4
BATCH_BYTES = 100_000
# Different batches of a topic, sent again and again: enough that no cache of the processor holds them.
DISTINCT_BATCHES = 100
STREAM_RECORDS = 1_000_000
ROUNDS = 3
SOURCE_TARGET = 1.0
ARCHIVE_TARGET = 3.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Data(NamedTuple):
    value_bytes: int
    codec: Codec
    records: int

    @property
    def topic(self) -> str:
        return f"{self.value_bytes}-bytes-{self.codec.name.lower()}"


DATA = (
    Data(100, Codec.NONE, 4_000_000),
    Data(100, Codec.LZ4, 4_000_000),
    Data(1000, Codec.NONE, 2_000_000),
    Data(1000, Codec.LZ4, 2_000_000),
)


class Ran(NamedTuple):
    elapsed_s: float
    # What was read, to be compared with the other side's.
    found: object
    # What came before the first record could, where that is not part of the time above.
    start_s: float = 0.0


def run() -> dict[str, Any]:
    from tests.spark.jars import connector_jars
    from tests.tools import Missing

    from penstock.spark import session

    try:
        class_path = os.pathsep.join(connector_jars())
    except Missing as missing:
        return {"skipped": f"Spark's Kafka connector cannot be had: {missing}"}
    scratch = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "2g",
        "spark.driver.extraClassPath": class_path,
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={scratch}",
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch),
        "spark.sql.shuffle.partitions": str(PARTITIONS),
    }
    spark = session("penstock benchmark", f"local[{os.cpu_count()}]", **settings)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with MeasuredBroker({"log.segment.bytes": str(256 << 20)}) as broker:
            return _measured(spark, broker, scratch)
    finally:
        spark.stop()
        shutil.rmtree(scratch, ignore_errors=True)


def _measured(spark: SparkSession, broker: MeasuredBroker, scratch: Path) -> dict[str, Any]:
    bootstrap = "{}:{}".format(*broker.address)
    wire = Wire(broker.address)
    figures: dict[str, Any] = {}
    for number, data in enumerate(DATA):
        fill(wire, data)
        if number == 0:
            _warm_up(spark, bootstrap, data, scratch)
        for name, action in ACTIONS.items():
            figures[f"{name} {data.topic}"] = _compare(
                spark,
                data.records,
                ours=partial(action, spark, "penstock", bootstrap, data, scratch),
                theirs=partial(action, spark, "kafka", bootstrap, data, scratch),
            )
    wire.close()
    worst = min(row["ratio"] for row in figures.values())
    archive = _compare(
        spark,
        DATA[0].records,
        ours=partial(_archive, spark, bootstrap, DATA[0], scratch),
        theirs=partial(_parquet, spark, bootstrap, DATA[0], scratch),
    )
    return {
        **figures,
        f"archive {DATA[0].topic}": archive,
        "worst_source_ratio": worst,
        "source_target": SOURCE_TARGET,
        "archive_ratio": archive["ratio"],
        "archive_target": ARCHIVE_TARGET,
        "met": worst >= SOURCE_TARGET and archive["ratio"] >= ARCHIVE_TARGET,
    }


# What is compared


def _to_noop(spark: SparkSession, form: str, bootstrap: str, data: Data, scratch: Path) -> Ran:
    """Every column of every record, into nothing."""
    began = time.perf_counter()
    _read(spark, form, bootstrap, data.topic).write.format("noop").mode("overwrite").save()
    return Ran(time.perf_counter() - began, None)


def _group(spark: SparkSession, form: str, bootstrap: str, data: Data, scratch: Path) -> Ran:
    began = time.perf_counter()
    records = _read(spark, form, bootstrap, data.topic).selectExpr(
        "partition", "pmod(xxhash64(key), 32) as bucket", "length(value) as size", "offset"
    )
    counted = records.groupBy("partition", "bucket").agg({"*": "count", "size": "sum", "offset": "max"})
    groups = counted.collect()
    return Ran(time.perf_counter() - began, sorted(map(tuple, groups)))


def _stream(spark: SparkSession, form: str, bootstrap: str, data: Data, scratch: Path) -> Ran:
    """The whole topic in batches of a million records. The time is that of its triggers, with all that Spark does
    in them; the start, paid once in a stream's life, is told apart.
    """
    stream = spark.readStream.format(form).option("kafka.bootstrap.servers", bootstrap)
    stream = stream.option("subscribe", data.topic).option("startingOffsets", "earliest")
    records = stream.option("maxOffsetsPerTrigger", str(STREAM_RECORDS)).load()
    checkpoint = tempfile.mkdtemp(dir=scratch)
    began = time.perf_counter()
    writer = records.writeStream.format("noop").option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    batches = [progress for progress in query.recentProgress if progress.numInputRows]
    whole_s = time.perf_counter() - began
    triggers_s = sum(batch.durationMs["triggerExecution"] for batch in batches) / 1000
    return Ran(triggers_s, [batch.numInputRows for batch in batches], whole_s - triggers_s)


def _archive(spark: SparkSession, bootstrap: str, data: Data, scratch: Path) -> Ran:
    from penstock.spark.jobs import archive

    target = Path(tempfile.mkdtemp(dir=scratch))
    began = time.perf_counter()
    archive(spark, bootstrap, data.topic, target / "archive")
    return Ran(time.perf_counter() - began, _rows_once(target))


def _parquet(spark: SparkSession, bootstrap: str, data: Data, scratch: Path) -> Ran:
    """The same columns with the same compression, through the JVM."""
    target = Path(tempfile.mkdtemp(dir=scratch))
    began = time.perf_counter()
    reader = spark.read.format("penstock").option("kafka.bootstrap.servers", bootstrap)
    records = reader.option("subscribe", data.topic).option("includeHeaders", "true").load()
    writer = records.write.option("compression", "zstd").option("parquet.compression.codec.zstd.level", "1")
    writer.parquet(str(target / "parquet"))
    return Ran(time.perf_counter() - began, _rows_once(target))


def _rows_once(target: Path) -> int:
    """How many rows were written. The files go, so that the page cache is not filled with them."""
    import pyarrow.parquet as pq

    rows: int = sum(pq.read_metadata(path).num_rows for path in target.rglob("*.parquet"))
    shutil.rmtree(target)
    return rows


ACTIONS: dict[str, Callable[[SparkSession, str, str, Data, Path], Ran]] = {
    "noop": _to_noop,
    "group": _group,
    "stream": _stream,
}


def _read(spark: SparkSession, form: str, bootstrap: str, topic: str) -> DataFrame:
    reader = spark.read.format(form).option("kafka.bootstrap.servers", bootstrap)
    return reader.option("subscribe", topic).load()


# Measuring


def _compare(
    spark: SparkSession, records: int, ours: Callable[[], Ran], theirs: Callable[[], Ran]
) -> dict[str, float]:
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    jvm = gateway.proc.pid
    for warm_up in (ours, theirs):
        warm_up()
    rounds: list[tuple[Ran, Ran]] = []
    cpu_s: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        (mine, mine_cpu_s), (other, other_cpu_s) = _timed(jvm, ours), _timed(jvm, theirs)
        assert mine.found == other.found, f"they disagree: {mine.found}, {other.found}"
        rounds.append((mine, other))
        cpu_s.append((mine_cpu_s, other_cpu_s))
    middle = statistics.median
    figures = {
        "ours_records_per_s": round(records / middle(mine.elapsed_s for mine, _ in rounds)),
        "theirs_records_per_s": round(records / middle(other.elapsed_s for _, other in rounds)),
        "ratio": round(middle(other.elapsed_s / mine.elapsed_s for mine, other in rounds), 2),
        "ours_cpu_s": round(middle(mine for mine, _ in cpu_s), 2),
        "theirs_cpu_s": round(middle(other for _, other in cpu_s), 2),
    }
    if any(mine.start_s for mine, _ in rounds):
        figures["ours_start_s"] = round(middle(mine.start_s for mine, _ in rounds), 2)
        figures["theirs_start_s"] = round(middle(other.start_s for _, other in rounds), 2)
    return figures


def _warm_up(spark: SparkSession, bootstrap: str, data: Data, scratch: Path) -> None:
    """Give the JVM's compiler time for both sides: the first runs of either are several times slower."""
    for form in ("penstock", "kafka"):
        for action in ACTIONS.values():
            action(spark, form, bootstrap, data, scratch)


def _timed(jvm: int, action: Callable[[], Ran]) -> tuple[Ran, float]:
    """And the CPU seconds of it all."""
    settle()
    cpu_before_s = tree_cpu_s(jvm)
    ran = action()
    return ran, tree_cpu_s(jvm) - cpu_before_s


def tree_cpu_s(root: int) -> float:
    """What a process, its descendants, and those of them that have ended have used."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                parents[int(name)] = int(fields[1])
                used[int(name)] = sum(map(int, fields[11:15]))
    total, wave = 0, [root]
    while wave:
        total += sum(used[pid] for pid in wave)
        wave = [pid for pid, parent in parents.items() if parent in wave]
    return total / CLOCK_TICKS


# Making the data


def fill(wire: Wire, data: Data) -> None:
    """The topic's records, as a producer with batches of about a hundred kilobytes would have sent them."""
    create(wire, data.topic, PARTITIONS)
    batch_records = BATCH_BYTES // data.value_bytes
    generator = random.Random(data.value_bytes)
    distinct = min(DISTINCT_BATCHES, data.records // batch_records // PARTITIONS)
    repeats, rest = divmod(data.records, distinct * batch_records * PARTITIONS)
    assert rest == 0, f"{data.records} records cannot be made of whole batches"
    for _ in range(distinct):
        batch = bytes(encode_batch(_records(generator, batch_records, data.value_bytes), codec=data.codec))
        for partition in range(PARTITIONS):
            request = frame(produce_request(data.topic, batch, partition), PRODUCE_VERSION)
            pump(wire.socket, request, repeats, min(repeats, 5))


def _records(generator: random.Random, count: int, value_bytes: int) -> Iterator[RecordFields]:
    """Events as JSON: about half of a value are names that repeat, half are digits that do not."""
    now_ms = time.time_ns() // 1_000_000
    for number in range(count):
        names = range(value_bytes // 24 + 1)
        value = ", ".join(f'"reading_{name:02}": {generator.randrange(10**9):09}' for name in names)
        key = b"user-%07d" % generator.randrange(10**6)
        yield now_ms + number, key, value.encode()[:value_bytes].ljust(value_bytes), []
