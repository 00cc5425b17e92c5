"""A quixstreams application with state: counts the records of each key, from 1 to 10 and again from 1.

Arguments: bootstrap, consumer group, source, target, state directory, and how many milliseconds each record takes.
It runs until it is killed.
"""

# It runs in an environment of its own, which has quixstreams.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
import time
from typing import Any

from quixstreams import Application


def main(bootstrap: str, group: str, source: str, target: str, directory: str, record_ms: str) -> None:
    app = Application(
        broker_address=bootstrap,
        consumer_group=group,
        state_dir=directory,
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_interval=0.1,
        # What a killed process leaves behind, a member and a transaction, is to be gone soon.
        consumer_extra_config={"session.timeout.ms": 6_000, "heartbeat.interval.ms": 500},
        producer_extra_config={"transaction.timeout.ms": 5_000, "linger.ms": 0},
    )

    def count(_: str, state: Any) -> str:
        time.sleep(int(record_ms) / 1000)
        counted = state.get("count", 0) + 1
        if counted == 10:
            # A tombstone in the changelog.
            state.delete("count")
        else:
            state.set("count", counted)
        return str(counted)

    records = app.dataframe(app.topic(source, key_deserializer="str", value_deserializer="str"))
    records = records.apply(count, stateful=True)
    records.to_topic(app.topic(target, key_serializer="str", value_serializer="str"))
    app.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
