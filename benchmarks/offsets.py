"""A million commits: how large the log of committed offsets becomes, and how long a coordinator takes to load it.

One broker, one group, so all commits go to one partition of ``__consumer_offsets``. Its size is looked at while the
commits go on. Then the broker is killed and started again, and somebody asks for the group's offsets until they are
there. The same is done with the cleaner turned off. Segments are smaller than Kafka's default of 100 MB, as the
active segment is never compacted.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.process import MeasuredBroker, Wire, cpu_s, frame, settle
from benchmarks.requests import create, pump
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
)

COMMITS = int(float(os.environ.get("PENSTOCK_BENCH_COMMITS") or 1_000_000))
SEGMENT_BYTES = 4 << 20
PARTITIONS = 100
WINDOW = 200
COMMIT_VERSION = 8
FETCH_VERSION = 8
COORDINATOR_VERSION = 4
GROUP = "committers"
COMMITTED = "committed"
LOADED_S = 120.0
# A pass of the cleaner may be due when the last commit is answered.
CALM_S = 3.0
TOPIC = "__consumer_offsets"
SETTINGS = {
    "offsets.topic.segment.bytes": str(SEGMENT_BYTES),
    "offsets.topic.num.partitions": "1",
    "log.cleaner.backoff.ms": "500",
}


def run() -> dict[str, Any]:
    return {
        "commits": COMMITS,
        "partitions_of_the_group": PARTITIONS,
        "segment_mb": SEGMENT_BYTES >> 20,
        "compacted": _measured(SETTINGS),
        "not_compacted": _measured({**SETTINGS, "log.cleaner.enable": "false"}),
    }


def _measured(settings: dict[str, str]) -> dict[str, Any]:
    with MeasuredBroker(settings) as broker:
        wire = Wire(broker.address)
        create(wire, COMMITTED, PARTITIONS)
        # The first question for a coordinator creates the topic of offsets.
        wire.call(FindCoordinatorRequest(key_type=0, coordinator_keys=[GROUP]), COORDINATOR_VERSION)
        _await_offsets(wire)
        sizes = []
        began, cpu_before = time.perf_counter(), broker.cpu_s
        turns = COMMITS // PARTITIONS
        rounds = max(1, turns // 20)
        for number in range(PARTITIONS):
            _commit(wire, number, 0)
        for turn in range(0, turns, rounds):
            for partition in range(PARTITIONS):
                request = frame(_commit_request(partition, turn + 1), COMMIT_VERSION)
                pump(wire.socket, request, min(rounds, turns - turn), WINDOW)
            sizes.append(_size(broker.data_dir))
        elapsed, cpu = time.perf_counter() - began, broker.cpu_s - cpu_before
        time.sleep(CALM_S)
        last = range(0, turns, rounds)[-1] + 1
        assert _await_offsets(wire) == dict.fromkeys(range(PARTITIONS), last), "commits were refused"
        at_rest = _size(broker.data_dir)
        wire.close()
        settle()
        # Not a clean stop, after which there might be a snapshot of the state to load.
        broker.kill()
        broker.start()
        wire = Wire(broker.address)
        began, cpu_before = time.perf_counter(), cpu_s(broker.pid)
        found = _await_offsets(wire)
        load_s, load_cpu_s = time.perf_counter() - began, cpu_s(broker.pid) - cpu_before
        start_cpu_s = broker.start_cpu_s
        wire.close()
        assert found == dict.fromkeys(range(PARTITIONS), last), "commits were lost"
    return {
        "commits_per_s": round(COMMITS / elapsed),
        "broker_cpu_us_per_commit": round(cpu / COMMITS * 1e6, 1),
        "largest_mb": round(max(sizes) / 1e6, 1),
        "at_rest_mb": round(at_rest / 1e6, 1),
        "loaded_in_s_after_the_start": round(load_s, 3),
        "load_cpu_s": round(load_cpu_s, 3),
        "start_cpu_s": round(start_cpu_s, 3),
    }


def _size(data_dir: Path) -> int:
    total = 0
    for path in data_dir.glob(f"{TOPIC}-*/*.log"):
        if path.exists():
            total += path.stat().st_size
    return total


def _commit(wire: Wire, partition: int, offset: int) -> None:
    answer = wire.call(_commit_request(partition, offset), COMMIT_VERSION)
    assert answer.topics[0].partitions[0].error_code == ErrorCode.NONE, answer


def _commit_request(partition: int, offset: int) -> OffsetCommitRequest:
    committed = OffsetCommitRequestPartition(
        partition_index=partition, committed_offset=offset, committed_metadata=""
    )
    topic = OffsetCommitRequestTopic(name=COMMITTED, partitions=[committed])
    return OffsetCommitRequest(group_id=GROUP, topics=[topic])


def _await_offsets(wire: Wire) -> dict[int, int]:
    """The group's offsets, as soon as its coordinator is there."""
    request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=GROUP, topics=None)])
    deadline = time.perf_counter() + LOADED_S
    while True:
        (group,) = wire.call(request, FETCH_VERSION).groups
        if group.error_code == ErrorCode.NONE:
            return {
                partition.partition_index: partition.committed_offset
                for topic in group.topics
                for partition in topic.partitions
            }
        assert time.perf_counter() < deadline, f"error {group.error_code}"
        time.sleep(0.002)
