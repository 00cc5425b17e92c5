"""The two speeds of ``penstock.columnar.columns``: on the compiled kernel, and on the same file interpreted.

Interpreted, Python checks every index, so a mistake that reads foreign memory when compiled is an IndexError here:
whatever feeds the kernel bad bytes does so at both speeds (``at_both_speeds``).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from struct import pack_into
from typing import Any

import pytest
from crc32c import crc32c

import penstock.columnar
from penstock.columnar import columns as installed
from penstock.protocol.records import CRC_START, HEADER_SIZE, patch

SOURCE = Path(penstock.columnar.__file__).parent


def load(name: str, alias: str) -> Any:
    """The module from its .py, even if a compiled one stands beside it."""
    loader = importlib.machinery.SourceFileLoader(alias, str(SOURCE / f"{name}.py"))
    specification = importlib.util.spec_from_loader(alias, loader)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[alias] = module  # dataclasses look themselves up
    loader.exec_module(module)
    return module


def interpreted() -> Any:
    columns = load("columns", "interpreted_columns")
    columns.kernel = load("kernel", "interpreted_kernel")
    columns.IS_COMPILED = columns.kernel.IS_COMPILED
    assert not columns.IS_COMPILED
    # A run of tests reads enough for the warning about the slow kernel, and warnings are errors.
    columns._patience = 2**60
    return columns


INTERPRETED = interpreted()
SPEEDS = [
    pytest.param(
        installed,
        id="compiled",
        marks=pytest.mark.skipif(not installed.IS_COMPILED, reason="the kernel is not compiled here"),
    ),
    pytest.param(INTERPRETED, id="interpreted"),
]
at_both_speeds = pytest.mark.parametrize("columns", SPEEDS)


def everything(columns: Any, records: Any, **settings: Any) -> Any:
    return columns.decode(records, **{"start": 0, "end": 2**62, "headers": True, **settings})


def rows(decoded: Any) -> list[tuple[Any, ...]]:
    """(offset, timestamp in ms, key, value, headers) of each row; every array is checked by Arrow on the way."""
    arrays = [decoded.offset, decoded.timestamp, decoded.key, decoded.value, decoded.headers]
    for array in [*arrays, decoded.timestamp_type]:
        array.validate(full=True)
        assert len(array) == decoded.count
    headers = [[(item["key"], item["value"]) for item in items or ()] for items in arrays[4].to_pylist()]
    # Python's datetime holds less than Arrow's timestamps.
    timestamps = [microseconds // 1000 for microseconds in arrays[1].cast("int64").to_pylist()]
    return list(zip(arrays[0].to_pylist(), timestamps, arrays[2].to_pylist(), arrays[3].to_pylist(), headers))


def fix_crc(batch: bytearray) -> bytearray:
    """Make a batch that was tampered with pass for whole, so that its inside is looked at."""
    pack_into(">I", batch, 17, crc32c(memoryview(batch)[CRC_START:]))
    return batch


def changed(batch: bytearray, **fields: int) -> bytearray:
    """A copy with other values in its header, and the CRC to match."""
    batch = bytearray(batch)
    for name, value in fields.items():
        layout, at = {
            "length": (">i", 8),
            "magic": (">b", 16),
            "attributes": (">h", 21),
            "last_offset_delta": (">i", 23),
            "base_timestamp": (">q", 27),
            "max_timestamp": (">q", 35),
            "producer_id": (">q", 43),
            "count": (">i", 57),
        }[name]
        pack_into(layout, batch, at, value)
    return fix_crc(batch)


def at_offset(batch: bytearray, base_offset: int) -> bytearray:
    batch = bytearray(batch)
    patch(batch, 0, base_offset, 7)
    return batch


def with_body(batch: bytearray, body: bytes, **fields: int) -> bytearray:
    """The batch's header before another body."""
    replaced = bytearray(batch[:HEADER_SIZE]) + body
    return changed(replaced, length=len(replaced) - 12, **fields)
