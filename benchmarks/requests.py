"""What one small request costs the broker: CPU time per pipelined one-record Produce and per small Fetch.

The loader sends the same prepared bytes over and over from this process, keeping a window of requests in
flight, so nearly all CPU of the broker's process is the broker's own.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from benchmarks.process import MeasuredBroker, Wire, frame, settle
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest
from penstock.protocol.records import encode_batch

PRODUCE_VERSION = 9
FETCH_VERSION = 12
REQUESTS = 200_000
WINDOW = 200
PRODUCE_TARGET_US = 25.0
FETCH_TARGET_US = 40.0


def run() -> dict[str, Any]:
    results = {}
    with MeasuredBroker() as broker:
        wire = Wire(broker.address)
        create(wire, "small", 1)
        one = bytes(batch(1, 100))
        produce = frame(produce_request("small", one), PRODUCE_VERSION)
        pump(wire.socket, produce, 20_000, WINDOW)
        cpu_us, rate = _measured(broker, wire, produce)
        results["produce_cpu_us"] = round(cpu_us, 2)
        results["produce_requests_per_s"] = round(rate)

        create(wire, "tail", 1)
        wire.call(produce_request("tail", one), PRODUCE_VERSION)
        fetch = frame(fetch_request("tail", 0, 1 << 20), FETCH_VERSION)
        pump(wire.socket, fetch, 20_000, WINDOW)
        cpu_us, rate = _measured(broker, wire, fetch)
        results["fetch_cpu_us"] = round(cpu_us, 2)
        results["fetch_requests_per_s"] = round(rate)
        wire.close()
    results["produce_target_us"] = PRODUCE_TARGET_US
    results["fetch_target_us"] = FETCH_TARGET_US
    results["met"] = (
        results["produce_cpu_us"] <= PRODUCE_TARGET_US and results["fetch_cpu_us"] <= FETCH_TARGET_US
    )
    return results


def _measured(broker: MeasuredBroker, wire: Wire, request: bytes) -> tuple[float, float]:
    settle()
    cpu_before, began = broker.cpu_s, time.perf_counter()
    pump(wire.socket, request, REQUESTS, WINDOW)
    elapsed = time.perf_counter() - began
    return (broker.cpu_s - cpu_before) / REQUESTS * 1e6, REQUESTS / elapsed


def pump(connection: socket.socket, request: bytes, count: int, window: int) -> None:
    """Send one request ``count`` times with ``window`` in flight, and count the answers."""
    connection.setblocking(False)
    many = memoryview(request * window)
    sent_bytes = answered = 0
    total_bytes = len(request) * count
    pending = bytearray()
    buffer = bytearray(1 << 20)
    while answered < count:
        allowed = min(total_bytes, (answered + window) * len(request))
        if sent_bytes < allowed:
            start = sent_bytes % len(request)
            end = min(start + allowed - sent_bytes, len(many))
            with suppress(BlockingIOError):
                sent_bytes += connection.send(many[start:end])
        try:
            received = connection.recv_into(buffer)
            assert received, "the broker closed the connection"
        except BlockingIOError:
            select.select([connection], [connection] if sent_bytes < allowed else [], [], 10)
            continue
        pending += memoryview(buffer)[:received]
        at = 0
        while len(pending) - at >= 4:
            size = struct.unpack_from(">i", pending, at)[0]
            if len(pending) - at < 4 + size:
                break
            at += 4 + size
            answered += 1
        del pending[:at]
    connection.setblocking(True)


def create(wire: Wire, name: str, partitions: int) -> None:
    topic = CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
    response = wire.call(CreateTopicsRequest(topics=[topic]), 7)
    assert response.topics[0].error_code == 0, response


def batch(count: int, value_bytes: int) -> bytearray:
    now_ms = time.time_ns() // 1_000_000
    return encode_batch([(now_ms, None, b"x" * value_bytes, [])] * count)


def produce_request(topic: str, records: bytes, partition: int = 0, acks: int = -1) -> ProduceRequest:
    data = PartitionProduceData(index=partition, records=records)
    return ProduceRequest(
        acks=acks, timeout_ms=30_000, topic_data=[TopicProduceData(name=topic, partition_data=[data])]
    )


def fetch_request(topic: str, offset: int, bytes_max: int, partition: int = 0) -> FetchRequest:
    wanted = FetchPartition(partition=partition, fetch_offset=offset, partition_max_bytes=bytes_max)
    return FetchRequest(
        max_wait_ms=500,
        min_bytes=1,
        max_bytes=bytes_max,
        session_epoch=-1,
        topics=[FetchTopic(topic=topic, partitions=[wanted])],
    )
