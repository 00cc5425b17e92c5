"""JSON values to typed columns: `parse` turns a column of bytes into the columns of a schema, and `error`.

Used inside tasks by ``archive``, ``table`` and ``snapshot``, so it takes an Arrow schema: Spark's DDL strings
can be read on the driver only, where `arrow_schema` does it.

A value is valid as a whole or invalid as a whole. An invalid one has null in every column and a sentence in
``error``; it never raises. A null value (a tombstone) has null columns and a null ``error``.

Values are not parsed one by one: Arrow's reader is several times faster on many values joined by newlines. But it
stops at the first bad one and ignores line ends: it would read `{"a":1}{"a":2}` as two rows. So only values that
begin and end with a brace are joined. Then no JSON can span a seam (after `}` and a newline nothing valid
continues with `{`, and a string cannot contain a bare newline), every value gives at least one row, and as many
rows as values means one row each.

A block that fails is halved until it is small. Then `Suspicion` rejects, value by value, what Arrow would
certainly refuse, and Arrow reads the rest, one by one if necessary (slow: 0.2 ms a call). Only Arrow decides what
is valid, so the result for a value does not depend on its neighbours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from penstock.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

ERROR = "error"
ERROR_CHARACTERS_MAX = 200
# Of the joined text. Arrow's blocks are counted in 32 bits, and a smaller block stays in the CPU's cache.
BLOCK_BYTES_MAX = 4 << 20
# A failed block of no more rows is gone through value by value instead of being halved again.
SMALL_BLOCK = 1024
JSON_WHITESPACE = " \t\r\n"
# What a date and a timestamp begin with; a date holds no more.
DATE = re.compile(r"\d{4}-\d\d-\d\d")


def arrow_schema(schema: str | StructType | pa.Schema) -> pa.Schema:
    """The schema of the parsed columns, from Spark's DDL (`"id BIGINT, name STRING"`), a StructType, or Arrow.

    On the driver only. Raises SparkOptionError for what cannot be read, and for types that JSON has not.
    """
    found = schema if isinstance(schema, pa.Schema) else _from_spark(schema)
    if len(found) == 0:
        raise SparkOptionError("the schema of the values has no columns; add some, such as 'id BIGINT'")
    names: set[str] = set()
    for field in found:
        if field.name.lower() == ERROR:
            raise SparkOptionError(
                f"the schema of the values has a column {field.name}, which is reserved; rename it"
            )
        # Spark takes names that differ in case only for one.
        if field.name.lower() in names:
            raise SparkOptionError(f"the schema of the values has two columns {field.name}")
        names.add(field.name.lower())
        _readable_as(field.type, field.name)
    # Any column may be missing from a value.
    return pa.schema([field.with_nullable(True).remove_metadata() for field in found])


def schema_text(schema: pa.Schema) -> str:
    """A schema in a form that lasts: Spark's own JSON."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415  # the driver's half

    return from_arrow_schema(schema, prefer_timestamp_ntz=True).json()


def ddl_of(text: str) -> str:
    """What `schema_text` was made of, as a person would write it."""
    from pyspark.sql.types import StructType  # noqa: PLC0415  # the driver's half

    columns = StructType.fromJson(json.loads(text))
    return ", ".join(f"{each.name} {each.dataType.simpleString()}" for each in columns)


def parsed_schema(schema: pa.Schema) -> pa.Schema:
    """What `parse` returns for a schema of `arrow_schema`."""
    return schema.append(pa.field(ERROR, pa.string()))


def parse(values: pa.Array | pa.ChunkedArray, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of ``schema`` and ``error``, a row for each value."""
    whole = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return _Parsing(schema).run(whole)


def with_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The records of a batch with their parsed columns behind them."""
    parsed = parse(batch.column("value"), schema)
    return pa.RecordBatch.from_arrays(
        [*batch.columns, *parsed.columns], schema=pa.schema([*batch.schema, *parsed.schema])
    )


def parse_frame(records: DataFrame, schema: str | StructType | pa.Schema) -> DataFrame:
    """A DataFrame with a column ``value``, with the parsed columns behind its own."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415  # the driver's half
    from pyspark.sql.types import StructType  # noqa: PLC0415

    columns = arrow_schema(schema)
    refuse_taken(columns, records.columns)
    added = from_arrow_schema(parsed_schema(columns), prefer_timestamp_ntz=True)

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield with_columns(batch, columns)

    return records.mapInArrow(task, StructType([*records.schema.fields, *added.fields]))


def refuse_taken(schema: pa.Schema, taken: list[str]) -> None:
    """Raise SparkOptionError if a parsed column has the name of one that the records have already."""
    held = {name.lower() for name in taken}
    for name in [*schema.names, ERROR]:
        if name.lower() in held:
            raise SparkOptionError(
                f"the records have a column {name} already; rename it in the schema of the values"
            )


class _Parsing:
    """One call of `parse`: which rows are bad and why, and the tables of the good ones."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        readable = pa.schema([pa.field(each.name, _readable_as(each.type, each.name)) for each in schema])
        self._options = pj.ParseOptions(explicit_schema=readable, unexpected_field_behavior="ignore")
        # In the order of the rows that were tried.
        self._good: list[pa.Table] = []
        self._errors: dict[int, str] = {}

    def run(self, values: pa.Array) -> pa.RecordBatch:
        count = len(values)
        # Where each row stands among the good ones; null for a bad or a null value.
        rows = pc.indices_nonzero(pc.is_valid(values))
        texts = values.take(rows)
        try:
            texts = pc.cast(texts, pa.string())
        except pa.ArrowInvalid:
            rows, texts = self._decoded(rows, texts)
        rows, texts = self._bracketed(rows, texts)
        for start, end in _blocks(texts):
            self._parse(rows.slice(start, end - start), texts.slice(start, end - start))
        place = self._places(count, rows)
        good = pa.concat_tables([self._schema.empty_table(), *self._good]).combine_chunks()
        columns = [good.column(name).combine_chunks().take(place) for name in self._schema.names]
        errors: list[str | None] = [None] * count
        for row, reason in self._errors.items():
            errors[row] = reason
        return pa.RecordBatch.from_arrays(
            [*columns, pa.array(errors, pa.string())], schema=parsed_schema(self._schema)
        )

    def _decoded(self, rows: pa.Array, data: pa.Array) -> tuple[pa.Array, pa.Array]:
        """The values that are UTF-8. One by one: it is rare, and a copy of each is no great cost."""
        kept, texts = [], []
        for row, value in zip(rows.to_pylist(), data.to_pylist()):
            try:
                texts.append(value.decode())
                kept.append(row)
            except UnicodeDecodeError:
                self._errors[row] = "not UTF-8"
        return pa.array(kept, rows.type), pa.array(texts, pa.string())

    def _bracketed(self, rows: pa.Array, texts: pa.Array) -> tuple[pa.Array, pa.Array]:
        """The values that could be one JSON object each."""
        could_be = _is_bracketed(texts)
        if pc.all(could_be).as_py() is not False:
            return rows, texts
        texts = pc.ascii_trim(texts, characters=JSON_WHITESPACE)
        could_be = _is_bracketed(texts)
        for row in rows.filter(pc.invert(could_be)).to_pylist():
            self._errors[row] = "not a JSON object"
        return rows.filter(could_be), texts.filter(could_be)

    def _parse(self, rows: pa.Array, texts: pa.Array) -> None:
        try:
            self._good.append(self._read(texts))
            return
        except pa.ArrowException as error:
            if len(texts) == 1:
                self._errors[rows[0].as_py()] = _reason(str(error))
                return
        if len(texts) <= SMALL_BLOCK and (bad := self._certainly_bad(texts)):
            self._errors.update((rows[at].as_py(), reason) for at, reason in bad.items())
            rest = pa.array([at for at in range(len(texts)) if at not in bad], pa.int64())
            if len(rest):
                self._parse(rows.take(rest), texts.take(rest))
            return
        half = len(texts) // 2
        self._parse(rows.slice(0, half), texts.slice(0, half))
        self._parse(rows.slice(half), texts.slice(half))

    def _certainly_bad(self, texts: pa.Array) -> dict[int, str]:
        suspicion = Suspicion(self._schema)
        found = ((at, suspicion.reason(text)) for at, text in enumerate(texts.to_pylist()))
        return {at: reason for at, reason in found if reason is not None}

    def _read(self, texts: pa.Array) -> pa.Table:
        """Raises ArrowInvalid if any of the values is bad."""
        lines = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts), "\n")
        text = lines[0].as_buffer()
        options = pj.ReadOptions(use_threads=False, block_size=text.size + 1)
        table = pj.read_json(pa.BufferReader(text), read_options=options, parse_options=self._options)
        if table.num_rows != len(texts):
            raise pa.ArrowInvalid("more than one JSON object")
        return table.select(self._schema.names).cast(self._schema)

    def _places(self, count: int, tried: pa.Array) -> pa.Array:
        """For each row its place among the good ones, null where it has none."""
        has_place = np.zeros(count, bool)
        has_place[tried.to_numpy()] = True
        has_place[list(self._errors)] = False
        return pa.array(np.cumsum(has_place) - 1, mask=~has_place)


class Suspicion:
    """What Arrow would surely refuse, told cheaply: a tenth of what it costs to ask Arrow about one value."""

    def __init__(self, schema: pa.Schema) -> None:
        self._fields = [(each.name, _misfit(each.type, each.name)) for each in schema]

    def reason(self, text: str) -> str | None:
        """Why the value is bad; None if it may be good."""
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            # Arrow also knows `Inf`.
            return None if "Inf" in text else f"{error.msg} at character {error.pos}"
        except (ValueError, RecursionError):
            return None  # numbers of thousands of digits, thousands of brackets
        for name, misfit in self._fields:
            found = value.get(name)
            if found is not None and (reason := misfit(found)) is not None:
                return reason
        return None


def _misfit(kind: pa.DataType, path: str) -> Callable[[Any], str | None]:
    """A function that says why a JSON value surely does not fit a type."""
    wanted, accepted, fits = _expectation(kind)
    children: list[tuple[str | None, Callable[[Any], str | None]]] = []
    if pa.types.is_struct(kind):
        children = [(each.name, _misfit(each.type, f"{path}.{each.name}")) for each in kind]
    elif pa.types.is_list(kind):
        children = [(None, _misfit(kind.value_type, f"{path}.[]"))]

    def misfit(value: Any) -> str | None:
        if type(value) not in accepted:
            return f"{path} is {_JSON_NAMES[type(value)]}, not {wanted}"
        if fits is not None and not fits(value):
            return f"{path} is no {kind}: {value}"[:ERROR_CHARACTERS_MAX]
        for name, child in children:
            for found in value if name is None else (value.get(name),):
                if found is not None and (reason := child(found)) is not None:
                    return reason
        return None

    return misfit


def _expectation(kind: pa.DataType) -> tuple[str, tuple[type, ...], Callable[[Any], Any] | None]:
    """What JSON calls a type, Python's types for it, and what else a value must be."""
    if pa.types.is_struct(kind):
        return "object", (dict,), None
    if pa.types.is_list(kind):
        return "array", (list,), None
    if pa.types.is_boolean(kind):
        return "boolean", (bool,), None
    if pa.types.is_decimal(kind):
        return "number", (int, float, str), None
    if pa.types.is_floating(kind):
        return "number", (int, float), None
    if pa.types.is_integer(kind):
        limit = 1 << kind.bit_width - 1
        return "number", (int, float), lambda value: isinstance(value, int) and -limit <= value < limit
    if pa.types.is_date(kind):
        return "string", (str,), DATE.fullmatch
    return "string", (str,), DATE.match if pa.types.is_timestamp(kind) else None


_JSON_NAMES = {dict: "object", list: "array", bool: "boolean", int: "number", float: "number", str: "string"}


def _from_spark(schema: str | StructType) -> pa.Schema:
    from pyspark.errors import PySparkException  # noqa: PLC0415  # the driver's half
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415
    from pyspark.sql.types import StructType  # noqa: PLC0415

    if isinstance(schema, str):
        try:
            parsed = StructType.fromDDL(schema)
        except PySparkException as error:
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            raise SparkOptionError(
                f"the schema of the values cannot be read: {first}; write it like 'id BIGINT, name STRING'"
            ) from None
    else:
        parsed = schema
    if not isinstance(parsed, StructType):  # DDL of one bare type, such as `INT`
        raise SparkOptionError(
            "the schema of the values has no columns; write it like 'id BIGINT, name STRING'"
        )
    try:
        return to_arrow_schema(parsed, timezone="UTC")
    except PySparkException as error:
        raise SparkOptionError(f"the schema of the values has a type that Arrow lacks: {error}") from None


def _readable_as(kind: pa.DataType, name: str) -> pa.DataType:
    """The type in which Arrow's JSON reader reads a column that is then cast to ``kind``."""
    if pa.types.is_struct(kind):
        return pa.struct(
            [pa.field(each.name, _readable_as(each.type, f"{name}.{each.name}")) for each in kind]
        )
    if pa.types.is_list(kind):
        return pa.list_(_readable_as(kind.value_type, f"{name}[]"))
    if pa.types.is_date(kind):
        return pa.string()  # it would read a number of days
    if (
        pa.types.is_signed_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_decimal(kind)
    ):
        return kind
    advice = "a STRUCT of the fields that you need" if pa.types.is_map(kind) else "STRING"
    raise SparkOptionError(f"column {name} of the values cannot be {kind}; use {advice}")


def _is_bracketed(texts: pa.Array) -> pa.Array:
    return pc.and_(pc.starts_with(texts, "{"), pc.ends_with(texts, "}"))


def _blocks(texts: pa.Array) -> Iterator[tuple[int, int]]:
    """Runs of rows whose text together is no more than a block; a longer value is a run by itself."""
    ends = pc.cumulative_sum(pc.cast(pc.binary_length(texts), pa.int64())).to_numpy()
    start = 0
    while start < len(texts):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(ends.searchsorted(before + BLOCK_BYTES_MAX, side="right")))
        yield start, end
        start = end


_TYPE_CHANGED = re.compile(r"Column\(/?(?P<path>.*)\) changed from (?P<wanted>\w+) to (?P<found>\w+)")
_TWICE = re.compile(r"Column\(/?(?P<path>.*)\) was specified twice")
_NO_SUCH = re.compile(r"Failed to convert JSON to (?P<kind>.+), couldn't parse: ?(?P<text>.*)", re.DOTALL)


def _reason(message: str) -> str:
    """Arrow's words about one value as a person would say them."""
    text = re.sub(r" in row \d+$", "", message.removeprefix("JSON parse error: ")).rstrip(".")
    if found := _TYPE_CHANGED.match(text):
        text = f"{found['path'].replace('/', '.')} is {found['found']}, not {found['wanted']}"
    elif found := _TWICE.match(text):
        text = f"{found['path'].replace('/', '.')} is there twice"
    elif found := _NO_SUCH.match(text):
        text = f"no {found['kind']}: {found['text']}"
    return text[:ERROR_CHARACTERS_MAX]
