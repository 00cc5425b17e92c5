"""`penstock bench`: measure a broker from this machine.

The client's CPU time is part of the result: when it is close to the elapsed time, the client was measured, not the
broker. `benchmarks/` compares brokers on one machine.
"""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.cli import client
from penstock.cli.client import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, settle
from penstock.cli.connection import Brokers
from penstock.cli.drawing import progress_bar
from penstock.cli.failures import Failure
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config
from penstock.cli.output import show_json, show_table
from penstock.cli.produce import (
    BATCH_BYTES,
    DELIVERY_TIMEOUT_MS,
    LINGER_MS,
    Acks,
    Compression,
    await_topic,
    producer_settings,
)

app = typer.Typer(add_completion=False, help="Measure a broker: produce, consume, latency.")

PERCENTILES = {"p50": 0.50, "p99": 0.99, "p99.9": 0.999}
# A consumer that receives nothing for this long gives up.
SILENCE_S = 10.0
BATCH_RECORDS = 10_000
# Sent first and not counted: librdkafka takes half a second to get a producer id.
WARM_UP_RECORDS = 100
STAMP_BYTES = 8
# Records between two polls for acknowledgements and updates of the bar.
POLL_EVERY = 100

Topic = Annotated[
    str | None,
    typer.Option(
        "--topic", metavar="TOPIC", help="Created if missing, and kept. Default: a temporary topic."
    ),
]
Partitions = Annotated[
    int, typer.Option("--partitions", min=1, metavar="N", help="Partitions, if it creates the topic.")
]
Records = Annotated[int, typer.Option("--records", min=1, metavar="N")]
Size = Annotated[
    int, typer.Option("--size", min=STAMP_BYTES, metavar="BYTES", help="Size of each record's value.")
]
Rate = Annotated[float | None, typer.Option("--rate", min=0.001, metavar="N", help="Records a second.")]
Compress = Annotated[Compression, typer.Option("--compression", "-z")]
AcksOption = Annotated[Acks, typer.Option("--acks")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@app.command()
def produce(
    *,
    records: Records = 100_000,
    size: Size = 1_000,
    rate: Rate = None,
    compression: Compress = Compression.NONE,
    acks: AcksOption = Acks.ALL,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, metavar="BYTES")] = BATCH_BYTES,
    linger_ms: Annotated[float, typer.Option("--linger-ms", min=0, metavar="MS")] = LINGER_MS,
    partitions: Partitions = 1,
    topic: Topic = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Produce records at full speed or at --rate, and measure the acknowledgements."""
    admin = client.connect(bootstrap)
    settings = producer_settings(bootstrap, compression, acks)
    settings |= {"batch.size": batch_size, "linger.ms": linger_ms}
    with _topic(admin, topic, partitions) as name:
        load = Load(Producer(settings), name, size)
        load.send(WARM_UP_RECORDS, rate, "warming up")
        stopwatch = Stopwatch()
        load.send(records, rate, "producing")
        result = stopwatch.result("produce", records, records * size)
    latency_ms = percentiles(load.latencies_ms[WARM_UP_RECORDS:])
    _show({**result, "topic": name, "latency_ms": latency_ms}, as_json=as_json)


@app.command()
def consume(
    *,
    records: Records = 100_000,
    size: Size = 1_000,
    compression: Compress = Compression.NONE,
    partitions: Partitions = 1,
    topic: Topic = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Consume existing records. A topic with too few records is filled first, which is not measured."""
    admin = client.connect(bootstrap)
    with _topic(admin, topic, partitions) as name:
        numbers = client.partition_numbers(admin, name)
        starts = client.start_offsets(admin, name, numbers)
        missing = records - sum(client.end_offsets(admin, name, numbers).values()) + sum(starts.values())
        if missing > 0:
            producer = Producer(producer_settings(bootstrap, compression, Acks.ALL))
            Load(producer, name, size).send(missing, None, "filling")
        stopwatch = Stopwatch()
        consumer = _consumer(bootstrap, {"queued.min.messages": 1_000_000})
        try:
            consumer.assign([TopicPartition(name, number, starts[number]) for number in numbers])
            count, total_bytes, first_ms = _drain(consumer, records, stopwatch)
            result = stopwatch.result("consume", count, total_bytes)
        finally:
            consumer.close()
    _show({**result, "topic": name, "first_record_ms": round(first_ms, 3)}, as_json=as_json)


@app.command()
def latency(
    *,
    records: Records = 10_000,
    size: Size = 100,
    rate: Annotated[float, typer.Option("--rate", min=0.001, metavar="N", help="Records a second.")] = 1_000,
    compression: Compress = Compression.NONE,
    acks: AcksOption = Acks.ALL,
    partitions: Partitions = 1,
    topic: Topic = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Measure latency from producer to consumer and to the acknowledgement, at a steady rate."""
    admin = client.connect(bootstrap)
    settings = producer_settings(bootstrap, compression, acks) | {"linger.ms": 0}
    with _topic(admin, topic, partitions) as name:
        numbers = client.partition_numbers(admin, name)
        ends = client.end_offsets(admin, name, numbers)
        consumer = _consumer(bootstrap, {"fetch.wait.max.ms": 500})
        consumer.assign([TopicPartition(name, number, ends[number]) for number in numbers])
        receiver = Receiver(consumer, WARM_UP_RECORDS + records)
        load = Load(Producer(settings), name, size, stamped=True)
        try:
            receiver.start()
            load.send(WARM_UP_RECORDS, rate, "warming up")
            stopwatch = Stopwatch()
            load.send(records, rate, "measuring")
            receiver.join()
            result = stopwatch.result("latency", records, records * size)
        finally:
            receiver.stop()
            consumer.close()
    came = len(receiver.latencies_ms) - WARM_UP_RECORDS
    if came < records:
        raise Failure(f"only {max(0, came)} of {records} records came back; is the broker healthy?")
    _show(
        {
            **result,
            "topic": name,
            "latency_ms": percentiles(receiver.latencies_ms[WARM_UP_RECORDS:]),
            "ack_ms": percentiles(load.latencies_ms[WARM_UP_RECORDS:]),
        },
        as_json=as_json,
    )


class Stopwatch:
    """Elapsed time and the CPU time of this process, including librdkafka's threads."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._wall

    def result(self, benchmark: str, records: int, total_bytes: int) -> dict[str, Any]:
        seconds, cpu = self.elapsed_s(), time.process_time() - self._cpu
        return {
            "benchmark": benchmark,
            "records": records,
            "bytes": total_bytes,
            "seconds": round(seconds, 6),
            "records_per_s": round(records / seconds, 1),
            "mb_per_s": round(total_bytes / seconds / 1e6, 3),
            "client_cpu_s": round(cpu, 6),
            "client_cpu_us_per_record": round(cpu / records * 1e6, 3),
        }


class Load:
    """Sends records of one size round-robin and notes when each is acknowledged."""

    def __init__(self, producer: Producer, topic: str, size: int, *, stamped: bool = False) -> None:
        self._producer = producer
        self._topic = topic
        self._partition_count = await_topic(producer, topic)
        self._stamped = stamped
        # Hex of random bytes compresses to half, like much real text.
        self._value = random.Random(size).randbytes(size // 2 + 1).hex().encode()[:size]
        # In the order of acknowledgement.
        self.latencies_ms = array("d")
        self._error: KafkaError | None = None

    def send(self, records: int, rate: float | None, description: str) -> None:
        """Send and wait for every acknowledgement. Raises Failure when a record is refused."""
        try:
            self._send(records, rate, description)
        except KeyboardInterrupt:
            # Queued records would recreate the topic after it is deleted.
            self._producer.purge()
            client.flush(self._producer, CONNECT_TIMEOUT_S)
            raise

    def _send(self, records: int, rate: float | None, description: str) -> None:
        producer, topic, value = self._producer, self._topic, self._value
        with progress_bar(description, records) as bar, self._collecting(rate):
            started = time.perf_counter()
            for number in range(records):
                if rate is not None and (left := started + number / rate - time.perf_counter()) > 0:
                    time.sleep(left)
                if self._stamped:
                    value = time.perf_counter_ns().to_bytes(STAMP_BYTES, "big") + self._value[STAMP_BYTES:]
                while True:
                    try:
                        producer.produce(
                            topic, value, None, number % self._partition_count, on_delivery=self._delivered
                        )
                        break
                    except BufferError:
                        client.collect(producer, 1)
                if number % POLL_EVERY == 0:
                    client.collect(producer, 0)
                    bar.show(number)
        client.flush(producer, DELIVERY_TIMEOUT_MS / 1000 + CONNECT_TIMEOUT_S)
        if self._error is not None:
            raise Failure(f"a record was not delivered: {client.explain_error(self._error)}")

    @contextmanager
    def _collecting(self, rate: float | None) -> Iterator[None]:
        """Poll in a thread while the sender sleeps between records, so that latencies end at the acknowledgement.

        At full speed there is no sleep, and a thread would only compete with the sender for the GIL.
        """
        if rate is None:
            yield
            return
        stopped = threading.Event()

        def collect() -> None:
            while not stopped.is_set():
                self._producer.poll(0.1)

        thread = threading.Thread(target=collect, name="acknowledgements", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._error = self._error or error
        else:
            self.latencies_ms.append((message.latency() or 0.0) * 1000)


class Receiver:
    """A thread that reads stamped records and notes the age of each."""

    def __init__(self, consumer: Consumer, records: int) -> None:
        self._consumer = consumer
        self._records = records
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        # In the order of arrival.
        self.latencies_ms = array("d")

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the last record, or until nothing arrives for SILENCE_S."""
        self._thread.join()

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        heard_at = time.perf_counter()
        while len(self.latencies_ms) < self._records and not self._stopped:
            message = self._consumer.poll(0.1)
            now_ns = time.perf_counter_ns()
            if message is not None and message.error() is None:
                stamp = int.from_bytes((message.value() or b"")[:STAMP_BYTES], "big")
                self.latencies_ms.append((now_ns - stamp) / 1e6)
                heard_at = now_ns / 1e9
            elif now_ns / 1e9 - heard_at > SILENCE_S:
                return


def percentiles(samples: Sequence[float]) -> dict[str, float | None]:
    """Percentiles by nearest rank: each value is one of the samples."""
    ordered = sorted(samples)
    found: dict[str, float | None] = {
        name: round(ordered[math.ceil(share * len(ordered)) - 1], 3) if ordered else None
        for name, share in PERCENTILES.items()
    }
    return {**found, "max": round(ordered[-1], 3) if ordered else None}


@contextmanager
def _topic(admin: AdminClient, name: str | None, partitions: int) -> Iterator[str]:
    """The named topic, created if missing; or a temporary topic, deleted afterwards."""
    topic = name or f"penstock-bench-{uuid.uuid4().hex[:8]}"
    client.create_topic(admin, NewTopic(topic, num_partitions=partitions))
    try:
        yield topic
    finally:
        if name is None:
            settle(admin.delete_topics([topic], request_timeout=REQUEST_TIMEOUT_S)[topic])


def _consumer(bootstrap: Brokers, extra: dict[str, Any]) -> Consumer:
    return Consumer(
        client.settings(
            bootstrap,
            {
                "group.id": f"penstock-bench-{uuid.uuid4().hex[:8]}",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                **extra,
            },
        )
    )


def _drain(consumer: Consumer, records: int, stopwatch: Stopwatch) -> tuple[int, int, float]:
    """Read ``records`` records. Returns the count, their bytes, and the ms until the first."""
    count, total_bytes, first_ms = 0, 0, 0.0
    heard_s = 0.0
    with progress_bar("consuming", records) as bar:
        while count < records:
            batch = consumer.consume(min(BATCH_RECORDS, records - count), 0.1)
            for message in batch:
                if (error := message.error()) is not None:
                    raise KafkaException(error)
                total_bytes += len(message)
            if batch:
                first_ms = first_ms or stopwatch.elapsed_s() * 1000
                heard_s = stopwatch.elapsed_s()
                count += len(batch)
                bar.show(count)
            elif stopwatch.elapsed_s() - heard_s > SILENCE_S:
                raise Failure(f"only {count} of {records} records came; is the broker healthy?")
    return count, total_bytes, first_ms


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        show_json(result)
        return
    rows: list[tuple[str, str]] = []
    for name, value in result.items():
        if isinstance(value, dict):
            rows += [(f"{name} {each}", f"{amount:,}") for each, amount in value.items()]
        else:
            rows.append((name, value if isinstance(value, str) else f"{value:,}"))
    show_table(("QUANTITY", "VALUE"), rows)
