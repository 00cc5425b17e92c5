"""The script that ``test_standalone`` hands to ``spark-submit``: nothing in it says where it runs.

It reads a topic, writes it to a second one, streams that to a third, and prints what it saw as one line of JSON:
the master, the records, and the sessions of the Python processes in which its tasks ran.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import pyarrow as pa

from penstock.spark import session


def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For each task how many records it read, and which session it belongs to."""
    rows = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"rows": [rows], "session_id": [os.getsid(0)]})


def main(bootstrap: str, source: str, copy: str, streamed: str, checkpoint: str) -> None:
    spark = session("submitted", **{"spark.ui.enabled": "false"})
    brokers = {"kafka.bootstrap.servers": bootstrap}

    records = spark.read.format("penstock").options(**brokers, subscribe=source).load()
    tasks = records.mapInArrow(where, "rows long, session_id long").collect()
    copied = records.select("key", "value").write.format("penstock").mode("append")
    copied.options(**brokers, topic=copy).save()

    stream = spark.readStream.format("penstock").options(
        **brokers, subscribe=copy, startingOffsets="earliest"
    )
    writer = stream.load().select("key", "value").writeStream.format("penstock")
    writer = writer.options(**brokers, topic=streamed, checkpointLocation=checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()

    seen = {
        "master": spark.sparkContext.master,
        "records": sum(task.rows for task in tasks),
        "session_ids": sorted({task.session_id for task in tasks}),
    }
    print(json.dumps(seen))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
