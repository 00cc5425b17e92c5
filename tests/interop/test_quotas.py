"""Real clients over their quota: they are told, wait, and lose nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Producer

from penstock.cli.main import run
from tests.interop.adapters.confluent import ConfluentClient

Unique = Callable[[str], str]

RATE = 400_000
VALUE = bytes(20_000)
RECORDS = 60


def test_librdkafka_is_held_to_its_quota_and_hears_of_it(
    bootstrap: str, reference: ConfluentClient, unique: Unique
) -> None:
    client_id, topic = unique("client"), unique("t")
    reference.create_topic(topic)
    entity = ("--client-id", client_id, "--bootstrap", bootstrap)
    assert run(["quotas", "set", f"producer_byte_rate={RATE}", *entity]) == 0
    throttled_s: list[float] = []
    failed: list[Any] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "client.id": client_id,
            "batch.size": len(VALUE),
            "throttle_cb": lambda event: throttled_s.append(event.throttle_time),
        }
    )
    began = time.monotonic()
    for _ in range(RECORDS):
        producer.produce(topic, VALUE, on_delivery=lambda error, _: failed.append(error) if error else None)
    assert producer.flush(60) == 0
    elapsed_s = time.monotonic() - began
    assert not failed
    # A burst of a second is free, and the last request is not waited for.
    assert elapsed_s >= (RECORDS - 1) * len(VALUE) / RATE - 1
    producer.poll(0)
    assert any(event > 0 for event in throttled_s)
    assert run(["quotas", "remove", *entity]) == 0
