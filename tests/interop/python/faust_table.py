"""A faust application with a table: the last value of each key, where an empty value deletes the key.

Arguments: bootstrap, application id, source, data directory. It says "running" once the table is recovered from its
changelog, and answers each line on its standard input with the table and with how many records it has processed.
"""

# It runs in an environment of its own, which has faust.
# mypy: disable-error-code="import-not-found, untyped-decorator"

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import faust

PARTITIONS = 3


def main(bootstrap: str, application: str, source: str, directory: str) -> None:
    app = faust.App(
        application,
        broker=f"kafka://{bootstrap}",
        store="rocksdb://?driver=rocksdict",
        datadir=directory,
        topic_partitions=PARTITIONS,
        topic_replication_factor=1,
        web_enabled=False,
        broker_commit_interval=0.2,
        # What a killed process leaves behind in its group is to be gone soon.
        broker_session_timeout=6.0,
        broker_heartbeat_interval=0.5,
    )
    table = app.Table("latest", partitions=PARTITIONS)
    records = app.topic(
        source, key_type=bytes, value_type=bytes, value_serializer="raw", key_serializer="raw"
    )
    processed = 0

    @app.agent(records)
    async def keep(stream: Any) -> None:
        nonlocal processed
        async for key, value in stream.items():
            name = key.decode()
            if value:
                table[name] = value.decode()
            elif name in table:
                del table[name]
            processed += 1

    @app.task
    async def answer() -> None:
        print("running", flush=True)
        while await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
            print(json.dumps({"processed": processed, "table": dict(table.items())}), flush=True)

    faust.Worker(app, loglevel="INFO", redirect_stdouts=False, quiet=True).execute_from_commandline()


if __name__ == "__main__":
    main(*sys.argv[1:])
