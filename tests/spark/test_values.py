"""JSON values to columns: every value is judged alone, and none stops the others."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs import values

SCHEMA = values.arrow_schema(
    pa.schema(
        [
            ("id", pa.int64()),
            ("small", pa.int8()),
            ("name", pa.string()),
            ("amount", pa.float64()),
            ("paid", pa.bool_()),
            ("at", pa.timestamp("us", tz="UTC")),
            ("day", pa.date32()),
            ("price", pa.decimal128(10, 2)),
            ("tags", pa.list_(pa.string())),
            ("who", pa.struct([("age", pa.int32()), ("born", pa.date32())])),
        ]
    )
)


def parsed(*given: bytes | str | None, schema: pa.Schema = SCHEMA) -> list[dict[str, Any]]:
    data = [each.encode() if isinstance(each, str) else each for each in given]
    rows: list[dict[str, Any]] = values.parse(pa.array(data, pa.binary()), schema).to_pylist()
    return rows


def only(row: dict[str, Any]) -> dict[str, Any]:
    return {name: found for name, found in row.items() if found is not None}


def test_every_type_is_read() -> None:
    value = {
        "id": 9007199254740993,
        "small": -128,
        "name": "Ana é 😀",
        "amount": 1,
        "paid": True,
        "at": "2026-03-01T12:00:00.5+02:00",
        "day": "2026-03-01",
        "price": 12.5,
        "tags": ["a", None],
        "who": {"age": 44, "born": "1982-01-31", "more": 1},
        "unknown": [{"anything": {}}],
    }
    (row,) = parsed(json.dumps(value, indent=2))
    assert row == {
        "id": 9007199254740993,
        "small": -128,
        "name": "Ana é 😀",
        "amount": 1.0,
        "paid": True,
        "at": datetime(2026, 3, 1, 10, 0, 0, 500_000, UTC),
        "day": date(2026, 3, 1),
        "price": Decimal("12.50"),
        "tags": ["a", None],
        "who": {"age": 44, "born": date(1982, 1, 31)},
        "error": None,
    }


def test_missing_fields_and_nulls_are_null_and_no_error() -> None:
    assert [only(row) for row in parsed("{}", '{"id":null}', ' {"name":"x"}\n', None)] == [
        {},
        {},
        {"name": "x"},
        {},
    ]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "not a JSON object"),
        (b"5", "not a JSON object"),
        (b'[{"id":1}]', "not a JSON object"),
        (b'\xef\xbb\xbf{"id":1}', "not a JSON object"),
        (b'{"id":1', "not a JSON object"),
        (b'{"name":"\xff"}', "not UTF-8"),
        (b'{"id":1}{"id":2}', "more than one|Extra data"),
        (b'{"id":1,}', "Missing a name|property name"),
        (b'{"id":1,"id":2}', "id is there twice"),
        (b'{"id":"1"}', "id is string, not number"),
        (b'{"id":1.0}', "no int64: 1.0"),
        (b'{"id":9223372036854775808}', "no int64: 9223372036854775808"),
        (b'{"small":128}', "no int8: 128"),
        (b'{"name":1}', "name is number, not string"),
        (b'{"name":{}}', "name is object, not string"),
        (b'{"name":"a\nb"}', "encoding|control character"),
        (b'{"name":"\\ud800"}', "surrogate"),
        (b'{"amount":1e999}', "too big"),
        (b'{"paid":1}', "paid is number, not boolean"),
        (b'{"at":1700000000000}', "at is number, not string"),
        (b'{"at":"yesterday"}', "no timestamp.*: yesterday"),
        (b'{"at":"2026-13-01T00:00:00Z"}', "no timestamp.*: 2026-13-01"),
        (b'{"day":"2026-02-30"}', "2026-02-30"),
        (b'{"day":"1.3.2026"}', "1.3.2026"),
        (b'{"price":1.255}', "1.255"),
        (b'{"tags":["a",1]}', r"tags.\[\] is number, not string"),
        (b'{"who":{"age":"x"}}', "who.age is string, not number"),
    ],
)
def test_a_bad_value_is_null_in_every_column_and_says_why(value: bytes, reason: str) -> None:
    import re

    # Alone, and among others, where it is found another way.
    others = [b'{"id":1}', b'{"name":"a"}', b'{"amount":0.5}'] * 5
    for before in (0, 7):
        rows = parsed(*others[:before], value, *others[before:])
        bad = rows.pop(before)
        assert re.search(reason, str(bad["error"])), bad
        assert only(bad).keys() == {"error"}
        assert rows == parsed(*others)


def test_one_bad_value_among_many_costs_only_itself() -> None:
    data = [json.dumps({"id": number, "name": "x" * 100}) for number in range(50_000)]
    data[31_234] = '{"id":"one"}'
    rows = values.parse(pa.array(data, pa.binary()), SCHEMA)
    assert rows.column("error").null_count == 49_999
    assert rows.column("error")[31_234].as_py() == "id is string, not number"
    assert rows.column("id").to_pylist() == [None if at == 31_234 else at for at in range(50_000)]


def test_values_larger_than_a_block_are_read() -> None:
    large = json.dumps({"id": 1, "name": "x" * (values.BLOCK_BYTES_MAX + 1)})
    rows = parsed('{"id":0}', large, "bad", large)
    assert [row["id"] for row in rows] == [0, 1, None, 1]


def test_no_values_give_no_rows_but_the_columns() -> None:
    assert parsed() == []
    assert values.parse(pa.chunked_array([], pa.binary()), SCHEMA).schema == values.parsed_schema(SCHEMA)


def test_values_that_together_look_right_are_not_taken_for_each_other() -> None:
    """One value with two objects and one with none make two rows of two values."""
    rows = parsed('{"id":1}{"id":2}', " ", '{"id":3}\n{"id":4}', '{"id":5}')
    assert [(row["id"], row["error"] is None) for row in rows] == [
        (None, False),
        (None, False),
        (None, False),
        (5, True),
    ]


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.integers(-130, 130),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        ["2026-03-01", "2026-03-01T00:00:00Z", "2026-02-30", "2026-03-01T", "0001-01-01", "1.25"]
    ),
)
anything = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner))
)
objects = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.one_of(leaves, anything) for name in SCHEMA.names},
        "who": st.one_of(anything, st.fixed_dictionaries({}, optional={"age": leaves, "born": leaves})),
        "tags": st.one_of(anything, st.lists(leaves, max_size=3)),
    },
)


def spoiled(text: str, cut: int, inserted: str) -> str:
    at = cut % (len(text) + 1)
    return text[:at] + inserted + text[at:]


texts = st.one_of(
    objects.map(json.dumps),
    objects.map(lambda value: json.dumps(value, indent=1, ensure_ascii=False)),
    st.builds(
        spoiled,
        objects.map(json.dumps),
        st.integers(0, 10_000),
        st.sampled_from(["{", "}", '"', ",", "\n", "Inf", "-", "0", "{}", "\\", "\x00", "é"]),
    ),
    st.text(max_size=10),
)


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def same(left: Any, right: Any) -> bool:
    """NaN equals itself here."""
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


@settings(max_examples=80, deadline=None)
@given(st.lists(texts.map(encoded), max_size=12))
def test_the_fate_of_a_value_does_not_depend_on_its_neighbours(data: list[bytes]) -> None:
    together = parsed(*data)
    assert len(together) == len(data)
    for value, row in zip(data, together):
        (alone,) = parsed(value)
        assert (alone.pop("error") is None) == (row.pop("error") is None), value
        assert all(same(alone[name], row[name]) for name in alone), value


@settings(max_examples=200, deadline=None)
@given(texts)
def test_only_what_arrow_refuses_is_suspected(text: str) -> None:
    if values.Suspicion(SCHEMA).reason(text) if text.startswith("{") else None:
        (row,) = parsed(encoded(text))
        assert row["error"] is not None


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        (pa.schema([]), "no columns"),
        (pa.schema([("error", pa.string())]), "rename it"),
        (pa.schema([("a", pa.int32()), ("A", pa.int32())]), "two columns A"),
        (pa.schema([("a", pa.map_(pa.string(), pa.int32()))]), "use a STRUCT"),
        (pa.schema([("a", pa.struct([("b", pa.binary())]))]), "column a.b of the values cannot be binary"),
        (pa.schema([("a", pa.uint8())]), "cannot be uint8"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(schema: pa.Schema, complaint: str) -> None:
    with pytest.raises(SparkOptionError, match=complaint):
        values.arrow_schema(schema)


def test_a_parsed_column_may_not_hide_one_of_the_record() -> None:
    with pytest.raises(SparkOptionError, match="column Offset already"):
        values.refuse_taken(values.arrow_schema(pa.schema([("Offset", pa.int64())])), ["key", "offset"])


def test_a_frame_is_parsed_by_a_schema_in_ddl(spark: Any) -> None:
    records = spark.createDataFrame(
        [(1, b'{"id":7,"at":"2026-03-01T12:00:00Z","local":"2026-03-01T12:00:00"}'), (2, b"bad"), (3, None)],
        "offset BIGINT, value BINARY",
    )
    ddl = "id INT, at TIMESTAMP, local TIMESTAMP_NTZ, price DECIMAL(10, 2), tags ARRAY<STRING>"
    found = values.parse_frame(records, ddl).orderBy("offset")
    assert found.schema.simpleString() == (
        "struct<offset:bigint,value:binary,id:int,at:timestamp,local:timestamp_ntz,price:decimal(10,2),"
        "tags:array<string>,error:string>"
    )
    rows = found.collect()
    assert (rows[0].id, rows[0].at.timestamp(), rows[0].error) == (7, 1772366400.0, None)
    assert str(rows[0].local) == "2026-03-01 12:00:00"
    assert (rows[1].id, rows[1].error, rows[2].error) == (None, "not a JSON object", None)


@pytest.mark.parametrize(
    ("ddl", "complaint"),
    [
        ("id BIGINTT", "cannot be read"),
        ("INT", "has no columns"),
        ("a MAP<STRING, INT>", "STRUCT"),
        ("", "no columns"),
    ],
)
def test_a_wrong_ddl_is_refused_in_one_line(spark: Any, ddl: str, complaint: str) -> None:
    with pytest.raises(SparkOptionError, match=complaint) as caught:
        values.arrow_schema(ddl)
    assert "\n" not in str(caught.value)
