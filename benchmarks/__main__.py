"""Runs the benchmarks: ``python -m benchmarks [NAME …] [--json]``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

BENCHMARKS = {
    "footprint": "CPU to start, memory, descriptors",
    "requests": "broker CPU per small request",
    "rights": "broker CPU per small request with ACLs, against without",
    "throughput": "large batches in and out, against the bare machine",
    "batching": "what batching in the client is worth",
    "kafka": "the same load on Apache Kafka",
    "tls": "librdkafka over TLS, beside Apache Kafka over TLS and our own plain listener",
    "replication": "three copies against one, on three brokers",
    "failover": "how long clients wait when a broker is gone",
    "scale": "a hundred thousand partitions on three brokers",
    "transactions": "transactions a second, and exactly once against at least once; also on Apache Kafka",
    "compaction": "a large topic compacted under load (PENSTOCK_BENCH_KEYS, PENSTOCK_BENCH_RECORDS)",
    "cleaning": "what cleaning costs beside Apache Kafka",
    "quotas": "a client at ten times its quota, and what another notices (PENSTOCK_BENCH_SECONDS)",
    "offsets": "a million commits, and loading the group coordinator",
    "spark": "reading topics with Spark, against its own Kafka connector; the archive against its Parquet writer",
    "wire_async": "our asyncio client: records produced and fetched per second of its CPU",
    "decode": "record batches to Arrow and back, on one core",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    given = parser.parse_args()
    unknown = set(given.names) - BENCHMARKS.keys()
    if unknown:
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    console = Console(stderr=given.json)
    results: dict[str, Any] = {}
    for name in given.names or BENCHMARKS:
        console.print(f"[bold]{name}[/bold]: {BENCHMARKS[name]}")
        results[name] = result = importlib.import_module(f"benchmarks.{name}").run()
        if not given.json:
            console.print(_table(result))
    if given.json:
        json.dump(results, sys.stdout, indent=2)
        print()
    return 0 if all(result.get("met", True) for result in results.values()) else 1


def _table(result: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    for name, value in result.items():
        table.add_row(name.replace("_", " "), json.dumps(value))
    return table


if __name__ == "__main__":
    sys.exit(main())
