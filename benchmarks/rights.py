"""What authorization costs: broker CPU per small Produce and Fetch with an authorizer, against one without.

Two brokers take turns, because the machine's speed changes from minute to minute. The client is a super user: from
the second request on, a connection remembers what was decided, so how many ACLs there are makes no difference.

PENSTOCK_BENCH_REQUESTS is the number of requests per turn.
"""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from typing import Any

from benchmarks.process import MeasuredBroker, Wire, frame, settle
from benchmarks.requests import (
    FETCH_VERSION,
    PRODUCE_VERSION,
    WINDOW,
    batch,
    create,
    fetch_request,
    produce_request,
    pump,
)

ROUNDS = 5
TARGET = 1.1
AUTHORIZED = {"authorizer.class.name": "acls", "super.users": "User:ANONYMOUS"}


def run() -> dict[str, Any]:
    requests = int(os.environ.get("PENSTOCK_BENCH_REQUESTS", "100000"))
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        brokers = {
            kind: stack.enter_context(MeasuredBroker(settings))
            for kind, settings in (("without", {}), ("with", AUTHORIZED))
        }
        wires = {kind: Wire(broker.address) for kind, broker in brokers.items()}
        one = bytes(batch(1, 100))
        for wire in wires.values():
            create(wire, "small", 1)
            create(wire, "tail", 1)
            wire.call(produce_request("tail", one), PRODUCE_VERSION)
        loads = {
            "produce": frame(produce_request("small", one), PRODUCE_VERSION),
            "fetch": frame(fetch_request("tail", 0, 1 << 20), FETCH_VERSION),
        }
        for name, load in loads.items():
            spent: dict[str, list[float]] = {kind: [] for kind in brokers}
            for kind in brokers:
                pump(wires[kind].socket, load, requests // 5, WINDOW)
            for _ in range(ROUNDS):
                for kind, broker in brokers.items():
                    settle()
                    before = broker.cpu_s
                    pump(wires[kind].socket, load, requests, WINDOW)
                    spent[kind].append((broker.cpu_s - before) / requests * 1e6)
            for kind, times in spent.items():
                results[f"{name}_cpu_us_{kind}"] = round(statistics.median(times), 2)
            ratio = statistics.median(spent["with"]) / statistics.median(spent["without"])
            results[f"{name}_ratio"] = round(ratio, 3)
        for wire in wires.values():
            wire.close()
    results["target"] = TARGET
    results["met"] = results["produce_ratio"] <= TARGET
    return results
