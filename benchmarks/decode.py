"""Record batches to Arrow columns and back on one core, CRC and codec included, without a broker.

A response of 8 MiB in batches of 16 KiB, as a Java producer sends them by default, is decoded in one call; encoding
makes batches of the same size. Each figure is the best of several turns, in CPU time. The
interpreted kernel, where there was no compiler, gets a small part of the same data.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa

from penstock.columnar import columns as compiled
from penstock.protocol.compression import Codec
from penstock.protocol.records import encode_batch

RESPONSE_BYTES = 8 * 1024 * 1024
INTERPRETED_BYTES = RESPONSE_BYTES // 32
BATCH_BYTES = 16 * 1024
VALUE_BYTES = (100, 1000)
TURNS = 7
# Decoding values of 100 bytes, uncompressed, compiled.
TARGET = 10.0

NOW_MS = 1_700_000_000_000


def run() -> dict[str, Any]:
    from tests.columnar.kernels import INTERPRETED

    result: dict[str, Any] = {
        "unit": "million records per second of one core",
        "is_compiled": compiled.IS_COMPILED,
    }
    for value_bytes in VALUE_BYTES:
        values = _values(value_bytes)
        for codec in Codec:
            row = _measure(compiled, codec, values) if compiled.IS_COMPILED else {}
            slow = _measure(INTERPRETED, codec, values[: INTERPRETED_BYTES // value_bytes])
            row.update({f"{name}_interpreted": rate for name, rate in slow.items()})
            result[f"{value_bytes}_bytes_{codec.name.lower()}"] = row
    best = result[f"{VALUE_BYTES[0]}_bytes_none"].get("decode", 0.0)
    return {**result, "target": TARGET, "met": best >= TARGET}


def _measure(columns: Any, codec: Codec, values: list[bytes]) -> dict[str, float]:
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
        "decode": round(len(values) / _best_s(decode) / 1e6, 2),
        "encode": round(len(values) / _best_s(encode) / 1e6, 2),
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
