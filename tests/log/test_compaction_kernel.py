"""The inner loops of compaction, compiled and interpreted: which records of a batch stay."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import random
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

import penstock.log
from penstock.log import compaction_kernel as installed
from penstock.protocol.records import (
    CorruptBatch,
    Record,
    RecordFields,
    decode_records,
    encode_batch,
    rebuilt,
    unfold,
)


def interpreted() -> Any:
    """The module from its .py, even if a compiled one stands beside it: there Python checks every index."""
    path = Path(penstock.log.__file__).parent / "compaction_kernel.py"
    loader = importlib.machinery.SourceFileLoader("interpreted_compaction_kernel", str(path))
    specification = importlib.util.spec_from_loader(loader.name, loader)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    assert not module.IS_COMPILED
    return module


SPEEDS = [
    pytest.param(
        installed,
        id="compiled",
        marks=pytest.mark.skipif(not installed.IS_COMPILED, reason="the kernel is not compiled here"),
    ),
    pytest.param(interpreted(), id="interpreted"),
]
at_both_speeds = pytest.mark.parametrize("kernel", SPEEDS)
NOW = 1_700_000_000_000


def body_of(*records: RecordFields) -> bytes:
    return unfold(encode_batch(records), 0, 1 << 20)[1]


def selected(
    kernel: Any,
    table: Any,
    records: list[RecordFields],
    base_offset: int,
    *,
    base: int = NOW,
    drop_below: int = 0,
) -> tuple[list[Record], int]:
    """The records that stay, read back with the ordinary decoder; and how many tombstones are among them."""
    body = body_of(*records)
    kept, count, tombstones, max_timestamp = kernel.select(
        table, body, len(records), base_offset, len(records) - 1, records[0][0], base, drop_below
    )
    header, _ = unfold(encode_batch(records, base_offset=base_offset), 0, 1 << 20)
    batch = rebuilt(header._replace(base_timestamp=base, count=count), kept)
    found = decode_records(batch, bytes_max=1 << 20)
    assert len(found) == count
    assert max_timestamp == max((record.timestamp for record in found), default=-1)
    return found, tombstones


@at_both_speeds
def test_only_the_last_record_of_a_key_stays(kernel: Any) -> None:
    table = kernel.KeyTable(1000, 0.9)
    records: list[RecordFields] = [
        (NOW, b"a", b"1", ()),
        (NOW + 5, b"b", b"2", (("h", b"x"),)),
        (NOW - 7, b"a", b"3", ()),
        (NOW, None, b"no key", ()),
        (NOW + 1, b"", b"an empty key", ()),
    ]
    kernel.note_keys(table, body_of(*records), 5, 100, 4)
    assert table.count == 3
    found, tombstones = selected(kernel, table, records, 100)
    assert [(record.offset, record.key, record.value) for record in found] == [
        (101, b"b", b"2"),
        (102, b"a", b"3"),
        (104, b"", b"an empty key"),
    ]
    assert [record.timestamp for record in found] == [NOW + 5, NOW - 7, NOW + 1]
    assert found[0].headers == [("h", b"x")]
    assert tombstones == 0


@at_both_speeds
def test_timestamps_survive_a_new_base(kernel: Any) -> None:
    table = kernel.KeyTable(1000, 0.9)
    records: list[RecordFields] = [(NOW, b"a", None, ()), (NOW + 70_000, b"b", b"x" * 300, ())]
    found, tombstones = selected(kernel, table, records, 7, base=NOW + 86_400_000)
    assert [(record.offset, record.timestamp, record.value) for record in found] == [
        (7, NOW, None),
        (8, NOW + 70_000, b"x" * 300),
    ]
    assert tombstones == 1


@at_both_speeds
def test_tombstones_go_only_below_the_given_offset(kernel: Any) -> None:
    table = kernel.KeyTable(1000, 0.9)
    records: list[RecordFields] = [(NOW, b"a", None, ()), (NOW, b"b", None, ()), (NOW, b"c", b"1", ())]
    found, tombstones = selected(kernel, table, records, 10, drop_below=11)
    assert [record.key for record in found] == [b"b", b"c"]
    assert tombstones == 1


@at_both_speeds
def test_a_full_table_finds_every_key(kernel: Any) -> None:
    table = kernel.KeyTable(24 * 1000, 0.9)
    assert (table.slots, table.capacity) == (1000, 900)
    digests = [blake2b(b"%d" % number, digest_size=16).digest() for number in range(901)]
    for offset, digest in enumerate(digests[:900]):
        assert table.has_room(1)
        kernel.note_key(table, digest, offset)
    assert not table.has_room(1)
    kernel.note_key(table, digests[3], 5000)
    assert table.count == 900
    found = [kernel.last_offset(table, digest) for digest in digests]
    assert found == [0, 1, 2, 5000, *range(4, 900), -1]


@at_both_speeds
def test_damaged_records_are_refused_without_reading_beyond_them(kernel: Any) -> None:
    chance = random.Random(5)
    body = body_of(*[(NOW + place, b"key%d" % place, b"v" * place, (("h", b"x"),)) for place in range(20)])
    refused = 0
    for _ in range(3000):
        damaged = bytearray(body)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.choice(
                [0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)]
            )
        data = bytes(damaged[: chance.randint(0, len(damaged))]) if chance.random() < 0.3 else bytes(damaged)
        outcomes = []
        for loop, arguments in (
            (kernel.note_keys, (data, 20, 0, 19)),
            (kernel.select, (data, 20, 0, 19, NOW, NOW + 1, 0)),
        ):
            try:
                loop(kernel.KeyTable(24 * 100, 0.9), *arguments)
                outcomes.append(True)
            except CorruptBatch:
                outcomes.append(False)
        refused += outcomes == [False, False]
    assert refused > 500


def test_both_speeds_agree() -> None:
    if not installed.IS_COMPILED:
        pytest.skip("the kernel is not compiled here")
    slow = interpreted()
    chance = random.Random(9)
    for _ in range(50):
        records: list[RecordFields] = [
            (
                NOW + chance.randint(-(2**40), 2**40),
                chance.choice([None, b"", chance.randbytes(chance.randint(0, 3))]),
                chance.choice([None, chance.randbytes(chance.randint(0, 200))]),
                (),
            )
            for _ in range(chance.randint(1, 60))
        ]
        body = body_of(*records)
        results = []
        for kernel in (installed, slow):
            table = kernel.KeyTable(24 * 200, 0.9)
            kernel.note_keys(table, body, len(records), 50, len(records) - 1)
            results.append(
                kernel.select(table, body, len(records), 50, len(records) - 1, records[0][0], NOW, 0)
            )
        assert results[0] == results[1]
