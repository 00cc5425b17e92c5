"""A client that wants ten times its quota, and what another client notices of it.

First the other client is alone: it sends a small Produce every few milliseconds and waits for the answer. Then the
greedy one keeps five requests in flight, as Kafka's producers do, and would send ten times its quota. It must be
held to its quota, and the other's latency must stay as it was.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

from benchmarks.process import MeasuredBroker, Wire, frame, settle
from benchmarks.requests import PRODUCE_VERSION, batch, create, produce_request
from penstock.protocol.apis import APIS
from penstock.protocol.messages.metadata_records import QuotaEntityPart
from penstock.protocol.messages.produce import ProduceResponse
from penstock.protocol.messages.quotas import AlterClientQuotasRequest, QuotaAlteration, QuotaOp
from penstock.protocol.requests import request_frame
from penstock.protocol.schema import decode

SECONDS = float(os.environ.get("PENSTOCK_BENCH_SECONDS") or 30)
QUOTA_BYTES = 1_000_000
WANTED_BYTES = 10 * QUOTA_BYTES
GREEDY = b"greedy"
GREEDY_RECORD_BYTES = 100_000
IN_FLIGHT = 5
INTERVAL_S = 0.005
OFF_MAX = 0.1
LATENCY_RATIO_MAX = 1.5


def run() -> dict[str, Any]:
    with MeasuredBroker() as broker:
        wire = Wire(broker.address)
        create(wire, "greedy", 1)
        create(wire, "other", 1)
        _set_quota(wire)
        other = frame(produce_request("other", batch(1, 100)), PRODUCE_VERSION)
        _latencies(wire, other, 1.0)
        settle()
        quiet = _latencies(wire, other, SECONDS)
        greedy = _Greedy(broker.address)
        greedy.start()
        noisy = _latencies(wire, other, SECONDS)
        rate = greedy.finish()
        wire.close()
    off = rate / QUOTA_BYTES - 1
    ratio = _percentile(noisy, 99) / _percentile(quiet, 99)
    return {
        "seconds": SECONDS,
        "quota_kb_per_s": QUOTA_BYTES / 1000,
        "wanted_kb_per_s": WANTED_BYTES / 1000,
        "got_kb_per_s": round(rate / 1000, 1),
        "off_percent": round(100 * off, 1),
        "throttle_time_max_ms": greedy.throttle_ms_max,
        "quiet_p50_ms": round(_percentile(quiet, 50), 2),
        "quiet_p99_ms": round(_percentile(quiet, 99), 2),
        "noisy_p50_ms": round(_percentile(noisy, 50), 2),
        "noisy_p99_ms": round(_percentile(noisy, 99), 2),
        "p99_ratio": round(ratio, 2),
        "met": abs(off) <= OFF_MAX and ratio <= LATENCY_RATIO_MAX,
    }


class _Greedy:
    """Sends and receives in a thread of its own, which mostly waits."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._wire = Wire(address)
        request = produce_request("greedy", batch(1, GREEDY_RECORD_BYTES))
        self._frame = b"".join(request_frame(APIS[request.KEY], PRODUCE_VERSION, 1, GREEDY, request))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._is_wanted = True
        self._began = 0.0
        self._elapsed = 0.0
        self._bytes = 0
        self.throttle_ms_max = 0

    def start(self) -> None:
        self._began = time.perf_counter()
        self._thread.start()

    def finish(self) -> float:
        """Stop, and the bytes per second that were acknowledged."""
        self._elapsed = time.perf_counter() - self._began
        acknowledged = self._bytes
        self._is_wanted = False
        self._thread.join()
        self._wire.close()
        return acknowledged / self._elapsed

    def _run(self) -> None:
        sent = 0
        in_flight: deque[int] = deque()
        while self._is_wanted:
            while len(in_flight) < IN_FLIGHT:
                ahead_s = sent / WANTED_BYTES - (time.perf_counter() - self._began)
                if ahead_s > 0:
                    time.sleep(ahead_s)
                self._wire.socket.sendall(self._frame)
                in_flight.append(GREEDY_RECORD_BYTES)
                sent += GREEDY_RECORD_BYTES
            answer = decode(ProduceResponse, PRODUCE_VERSION, self._wire.receive()[5:])
            assert not answer.responses[0].partition_responses[0].error_code, answer
            self._bytes += in_flight.popleft()
            self.throttle_ms_max = max(self.throttle_ms_max, answer.throttle_time_ms)


def _set_quota(wire: Wire) -> None:
    entity = [QuotaEntityPart(entity_type="client-id", entity_name=GREEDY.decode())]
    ops = [QuotaOp(key="producer_byte_rate", value=float(QUOTA_BYTES))]
    request = AlterClientQuotasRequest(entries=[QuotaAlteration(entity=entity, ops=ops)])
    assert not wire.call(request, 1).entries[0].error_code


def _latencies(wire: Wire, request: bytes, seconds: float) -> list[float]:
    """In ms, sorted."""
    found = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        wire.socket.sendall(request)
        wire.receive()
        took = time.perf_counter() - began
        found.append(took * 1000)
        time.sleep(max(0.0, INTERVAL_S - took))
    return sorted(found)


def _percentile(values: list[float], percent: int) -> float:
    return values[min(len(values) - 1, len(values) * percent // 100)]
