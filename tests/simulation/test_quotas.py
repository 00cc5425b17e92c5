"""Quotas that change while clients write and read: they are delayed, and nothing they were promised is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.broker.broker import Broker
from penstock.broker.handlers import produce
from penstock.broker.network.connection import Call
from penstock.metadata.quotas import PRODUCER_BYTE_RATE
from penstock.protocol.messages.produce import (
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from penstock.sim.plans import Plan, plan_for
from penstock.sim.swarm import Run
from tests.simulation.lean import lean

SEED = 1


def plan(seed: int) -> Plan:
    return replace(
        lean(seed, seconds=10, generation=6),
        quota_interval_ms=500.0,
        produce_interval_ms=100.0,
        compaction=None,
        has_receipts=False,
    )


def test_clients_over_changing_quotas_lose_nothing() -> None:
    run = Run(plan(SEED))
    report = run.run()
    assert report.is_good, report.violation
    assert report.counts["quotas changed"] >= 5
    assert report.counts["connections seen delayed"] >= 3


def test_a_broker_that_drops_what_is_over_a_quota_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the batches of a client that is delayed are acknowledged and not written."""
    write = produce.produce

    def acknowledge_only(broker: Broker, request: ProduceRequest, call: Call) -> Any:
        throttling, now_ms = broker.throttling, broker.environment.clock.now_ms()
        bucket = throttling._bucket(call, PRODUCER_BYTE_RATE) if throttling.limits_produce else None
        (topic,) = request.topic_data
        (data,) = topic.partition_data
        if bucket is None or bucket.level(now_ms) >= len(data.records or b""):
            return write(broker, request, call)
        hosted = broker.partitions.get(topic.name or broker.image.topic_name(topic.topic_id), data.index)
        end_offset = 0 if hosted is None else hosted.log.log_end_offset
        result = PartitionProduceResponse(index=data.index, base_offset=end_offset, log_append_time_ms=-1)
        response = TopicProduceResponse(
            name=topic.name, topic_id=topic.topic_id, partition_responses=[result]
        )
        return ProduceResponse(responses=[response])

    monkeypatch.setattr(produce, "produce", acknowledge_only)
    assert Run(plan(SEED)).run().violation is not None


def test_some_plans_of_the_sixth_generation_have_quotas_and_none_of_the_fifth() -> None:
    sixth = [plan_for(seed, seconds=60, generation=6) for seed in range(20)]
    assert {each.quota_interval_ms for each in sixth} == {0.0, 1_000.0, 4_000.0}
    for each in sixth:
        fifth = plan_for(each.seed, seconds=60, generation=5)
        assert fifth == replace(each, generation=5, quota_interval_ms=0.0, has_guest=False)
