"""Record batches to Arrow columns and back on one core, CRC and codec included, without a broker.

A response of 8 MiB in batches of 16 KiB, as a Java producer sends them by default, is decoded in one call; encoding
makes batches of the same size. Each figure is the best of several turns, in records per second of CPU time. The
interpreted kernel, where there was no compiler, gets a small part of the same data.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa

from penstock.protocol.compression import Codec
from penstock.protocol.records import encode_batch
from penstock.spark import columns as compiled

RESPONSE_BYTES = 8 * 1024 * 1024
INTERPRETED_BYTES = RESPONSE_BYTES // 32
BATCH_BYTES = 16 * 1024
VALUE_BYTES = (100, 1000)
TURNS = 7
TARGET_RECORDS_PER_S = 10_000_000

NOW_MS = 1_700_000_000_000


def run() -> dict[str, Any]:
    from tests.spark.kernels import INTERPRETED

    result: dict[str, Any] = {"compiled": compiled.IS_COMPILED}
    for value_bytes in VALUE_BYTES:
        values = _values(value_bytes)
        for codec in Codec:
            row: dict[str, Any] = {}
            for name, columns, size in (
                ("compiled", compiled, RESPONSE_BYTES),
                ("interpreted", INTERPRETED, INTERPRETED_BYTES),
            ):
                if name == "interpreted" or columns.IS_COMPILED:
                    row[name] = _measure(columns, codec, values[: size // value_bytes])
            result[f"{codec.name.lower()}_{value_bytes}_bytes"] = row
    best = result[f"none_{VALUE_BYTES[0]}_bytes"].get("compiled", {}).get("decoded_records_per_s", 0)
    return {**result, "target_records_per_s": TARGET_RECORDS_PER_S, "met": best >= TARGET_RECORDS_PER_S}


def _measure(columns: Any, codec: Codec, values: list[bytes]) -> dict[str, int]:
    per_batch = BATCH_BYTES // len(values[0])
    data = b"".join(
        encode_batch(
            [
                (NOW_MS + number, b"key-%d" % (number % 1000), values[number], ())
                for number in range(first, min(first + per_batch, len(values)))
            ],
            base_offset=first,
            codec=codec,
        )
        for first in range(0, len(values), per_batch)
    )

    def decode() -> Any:
        return columns.decode(data, start=0, end=len(values))

    decoded = decode()
    assert decoded.count == len(values)
    timestamps = decoded.timestamp.cast(pa.timestamp("ms")).cast(pa.int64())

    def encode() -> Any:
        return columns.encode(
            decoded.key, decoded.value, None, timestamps, codec=codec, batch_bytes_max=BATCH_BYTES
        )

    return {
        "decoded_records_per_s": round(len(values) / _best_s(decode)),
        "encoded_records_per_s": round(len(values) / _best_s(encode)),
    }


def _best_s(work: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(TURNS):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def _values(size: int) -> list[bytes]:
    """Events as people send them: JSON, of which about half is new in each."""
    random = Random(1)
    values = []
    for number in range(RESPONSE_BYTES // size):
        text = ""
        while len(text) < size:
            event = {
                "id": number,
                "user": f"user-{random.randrange(10_000)}",
                "amount": random.randrange(10**6) / 100,
                "state": random.choice(("open", "paid", "sent", "closed")),
            }
            text += json.dumps(event)
        values.append(text[:size].encode())
    return values
