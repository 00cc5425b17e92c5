"""Orders of three shops, from a producer to SQL: a complete pipeline in one file.

    penstock serve --data-dir shop-data &
    python examples/pipeline.py --bootstrap 127.0.0.1:9092

Ten minutes of orders go into a topic. A stream adds up the revenue of each shop and minute into a second topic, and
the orders are archived as Parquet. Then five more minutes arrive: the stream goes on where it stopped, and one SQL
query reads the archived orders, and those that only the brokers have, as one table.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, from_json, struct, to_json, window
from pyspark.sql.functions import sum as total

from penstock.spark import session
from penstock.spark.jobs import archive, table

OPENING = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
SHOPS = ("Bergen", "Oslo", "Stavanger")
ORDER = "at TIMESTAMP, shop STRING, cents BIGINT"
REVENUE = "minute TIMESTAMP, shop STRING, cents BIGINT"
PARTITIONS = 3
# When it arrives its minute is over and told; the stream leaves it out, the table has it.
LATE_ORDER = {"at": OPENING.isoformat(), "shop": "Oslo", "cents": 100_000}


def main() -> None:
    parser = argparse.ArgumentParser(description="A complete pipeline: topic, stream, archive, SQL.")
    parser.add_argument("--bootstrap", default="127.0.0.1:9092", metavar="HOST:PORT", help="any broker")
    parser.add_argument("--directory", default="pipeline-data", type=Path, help="for archive and checkpoint")
    parser.add_argument("--name", default="shop", help="what the names of its topics begin with")
    given = parser.parse_args()
    bootstrap, archived, checkpoint = (
        given.bootstrap,
        given.directory / "archive",
        given.directory / "checkpoint",
    )
    orders, revenue = f"{given.name}-orders", f"{given.name}-revenue"

    create_topics(bootstrap, orders, revenue)
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",  # nobody looks at the page of a job of a minute
    }
    spark = session("pipeline", **settings)
    spark.sparkContext.setLogLevel("ERROR")

    print(produce(bootstrap, orders, made_up(minutes=range(10))), "orders in ten minutes")
    add_up(spark, bootstrap, orders, revenue, checkpoint)
    print(archive(spark, bootstrap, orders, archived, value_schema=ORDER).records, "orders archived")

    print(produce(bootstrap, orders, [LATE_ORDER, *made_up(minutes=range(10, 15))]), "orders since then")
    add_up(spark, bootstrap, orders, revenue, checkpoint)

    print("\nThe best of the minutes that are over:")
    read(spark, bootstrap, revenue, REVENUE).createOrReplaceTempView("revenue")
    spark.sql("""
        SELECT date_format(minute, 'HH:mm') AS minute, shop, cents / 100 AS revenue
        FROM revenue
        ORDER BY cents DESC
        LIMIT 5
    """).show()

    print("All orders, archived or not:")
    table(spark, bootstrap, orders, archived, view="orders")
    spark.sql("""
        SELECT shop, count(*) AS orders, sum(cents) / 100 AS revenue, date_format(max(at), 'HH:mm:ss') AS newest
        FROM orders
        GROUP BY shop
        ORDER BY shop
    """).show()
    spark.stop()


def create_topics(bootstrap: str, *names: str) -> None:
    # librdkafka would tell of each of its attempts to reach a broker; that there is none is said once, below.
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    topics = [NewTopic(name, num_partitions=PARTITIONS) for name in names]
    for name, created in admin.create_topics(topics, request_timeout=10).items():
        try:
            created.result()
        except KafkaException as error:
            why = error.args[0]
            exists = why.code() == KafkaError.TOPIC_ALREADY_EXISTS
            advice = "--name chooses other names" if exists else f"--bootstrap is {bootstrap}"
            sys.exit(f"topic {name} cannot be made: {why.str()} ({advice})")


def made_up(minutes: range) -> Iterator[dict[str, Any]]:
    """A hundred orders a minute, the same every time, and up to 20 seconds out of order."""
    dice = random.Random(minutes.start)
    for number in range(100 * len(minutes)):
        seconds = 60 * minutes.start + 0.6 * number + dice.uniform(0, 20)
        at = OPENING + timedelta(seconds=seconds)
        yield {"at": at.isoformat(), "shop": dice.choice(SHOPS), "cents": dice.randrange(500, 20_000)}


def produce(bootstrap: str, topic: str, orders: Iterable[dict[str, Any]]) -> int:
    """Send orders as JSON, keyed by shop, with any Kafka client; how many there were."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    count = 0
    for order in orders:
        producer.produce(topic, json.dumps(order), key=order["shop"])
        count += 1
    if left := producer.flush(30):
        sys.exit(f"{left} orders were not acknowledged within 30 seconds")
    return count


def add_up(spark: SparkSession, bootstrap: str, orders: str, revenue: str, checkpoint: Path) -> None:
    """Revenue of each shop and minute, by the time of the order, for all that is there now.

    A minute is told once, when it is over for good: half a minute later, by the newest order seen.
    """
    stream = spark.readStream.format("penstock").option("kafka.bootstrap.servers", bootstrap)
    stream = stream.option("subscribe", orders).option("startingOffsets", "earliest")
    minutes = (
        parsed(stream.load(), ORDER)
        .withWatermark("at", "30 seconds")
        .groupBy(window("at", "1 minute"), "shop")
        .agg(total("cents").alias("cents"))
    )
    told = minutes.select(
        col("shop").alias("key"),
        to_json(struct(col("window.start").alias("minute"), "shop", "cents")).alias("value"),
    )
    writer = told.writeStream.format("penstock").option("kafka.bootstrap.servers", bootstrap)
    writer = writer.option("topic", revenue).option("checkpointLocation", str(checkpoint))
    writer.outputMode("append").trigger(availableNow=True).start().awaitTermination()


def read(spark: SparkSession, bootstrap: str, topic: str, schema: str) -> DataFrame:
    reader = spark.read.format("penstock").option("kafka.bootstrap.servers", bootstrap)
    return parsed(reader.option("subscribe", topic).load(), schema)


def parsed(records: DataFrame, schema: str) -> DataFrame:
    return records.select(from_json(col("value").cast("string"), schema).alias("parsed")).select("parsed.*")


if __name__ == "__main__":
    main()
