"""Streaming queries as tests run them: started again and again on one checkpoint, into a table that shows all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.spark.topics import Topics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

DEADLINE_S = 90

Key = tuple[str, int, int]


class Table:
    """An idempotent table: what a batch wrote is replaced when Spark writes that batch again."""

    def __init__(self) -> None:
        self.batches: dict[int, list[tuple[Key, bytes]]] = {}
        self.fail_after: int | None = None

    def write(self, frame: DataFrame, batch: int) -> None:
        rows = frame.select("topic", "partition", "offset", "value").collect()
        self.batches[batch] = [((row[0], row[1], row[2]), bytes(row[3])) for row in rows]
        if self.fail_after is not None and batch >= self.fail_after:
            raise RuntimeError("the table is full")

    @property
    def rows(self) -> list[tuple[Key, bytes]]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]

    @property
    def sizes(self) -> list[int]:
        return [len(self.batches[number]) for number in sorted(self.batches)]


class Stream:
    """A query with a checkpoint, started as often as the test likes."""

    def __init__(self, spark: SparkSession, bootstrap: str, checkpoint: Path) -> None:
        self._spark = spark
        self._bootstrap = bootstrap
        self.checkpoint = checkpoint
        self.table = Table()
        self.queries: list[StreamingQuery] = []

    def start(
        self, *, trigger: dict[str, Any] | None = None, source: str = "penstock", **options: str
    ) -> StreamingQuery:
        given = {"kafka.bootstrap.servers": self._bootstrap, "startingOffsets": "earliest", **options}
        frame = self._spark.readStream.format(source).options(**given).load()
        writer = frame.writeStream.foreachBatch(self.table.write)
        writer = writer.option("checkpointLocation", str(self.checkpoint)).trigger(
            **(trigger or {"processingTime": "50 milliseconds"})
        )
        query = writer.start()
        self.queries.append(query)
        return query

    def drain(self, **options: str) -> StreamingQuery:
        """Read what there is, and end."""
        query = self.start(trigger={"availableNow": True}, **options)
        assert query.awaitTermination(DEADLINE_S), "the query did not end"
        return query

    def stop(self) -> None:
        for query in self.queries:
            query.stop()


def expected(topic: str, partition: int, *numbers: int) -> list[tuple[Key, bytes]]:
    return [((topic, partition, number), b"%d" % number) for number in numbers]


def send(topics: Topics, topic: str, partition: int, first: int, end: int) -> None:
    topics.send(topic, [b"%d" % number for number in range(first, end)], partition=partition)
