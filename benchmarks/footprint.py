"""What it costs to be there: CPU from exec to ready, resident memory, file descriptors.

Measured on an empty directory, and with 10,000 partitions that hold data, after a clean stop.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.process import MeasuredBroker, Wire
from benchmarks.requests import PRODUCE_VERSION, batch, fetch_request
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest

TOPICS = 100
PARTITIONS_PER_TOPIC = 100
STARTS = 5
EMPTY_CPU_TARGET_S = 0.35
FULL_CPU_TARGET_S = 3.0
EMPTY_MB_TARGET = 80.0
FULL_MB_TARGET = 250.0


def run() -> dict[str, Any]:
    starts = []
    for _ in range(STARTS):
        with MeasuredBroker() as broker:
            starts.append(broker.start_cpu_s)
            wire = Wire(broker.address)
            wire.call(fetch_request("nothing", 0, 1), 12)
            empty_mb = broker.resident_mb
            wire.close()
    with MeasuredBroker() as broker:
        wire = Wire(broker.address)
        _fill(wire)
        filled_mb, descriptors = broker.resident_mb, broker.descriptors
        wire.close()
        broker.stop()
        broker.start()
        restart_cpu_s, restart_mb = broker.start_cpu_s, broker.resident_mb
        wire = Wire(broker.address)
        _write_everywhere(wire)
        used_mb, descriptors = broker.resident_mb, max(descriptors, broker.descriptors)
        wire.close()
    empty_cpu_s = statistics.median(starts)
    return {
        "partitions": TOPICS * PARTITIONS_PER_TOPIC,
        "start_cpu_s": round(empty_cpu_s, 3),
        "idle_mb": round(empty_mb, 1),
        "start_with_partitions_cpu_s": round(restart_cpu_s, 2),
        "idle_with_partitions_mb": round(restart_mb, 1),
        "all_partitions_in_use_mb": round(max(filled_mb, used_mb), 1),
        "descriptors": descriptors,
        "targets": {
            "start_cpu_s": EMPTY_CPU_TARGET_S,
            "idle_mb": EMPTY_MB_TARGET,
            "start_with_partitions_cpu_s": FULL_CPU_TARGET_S,
            "with_partitions_mb": FULL_MB_TARGET,
        },
        "met": empty_cpu_s <= EMPTY_CPU_TARGET_S
        and empty_mb <= EMPTY_MB_TARGET
        and restart_cpu_s <= FULL_CPU_TARGET_S
        and max(filled_mb, used_mb, restart_mb) <= FULL_MB_TARGET,
    }


def _fill(wire: Wire) -> None:
    for index in range(TOPICS):
        topic = CreatableTopic(
            name=f"topic-{index}", num_partitions=PARTITIONS_PER_TOPIC, replication_factor=1
        )
        response = wire.call(CreateTopicsRequest(topics=[topic]), 7)
        assert response.topics[0].error_code == 0, response
    _write_everywhere(wire)


def _write_everywhere(wire: Wire) -> None:
    records = bytes(batch(1, 100))
    data = [PartitionProduceData(index=index, records=records) for index in range(PARTITIONS_PER_TOPIC)]
    for index in range(TOPICS):
        topic = TopicProduceData(name=f"topic-{index}", partition_data=data)
        response = wire.call(ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=[topic]), PRODUCE_VERSION)
        for partition in response.responses[0].partition_responses:
            assert partition.error_code == 0, partition
