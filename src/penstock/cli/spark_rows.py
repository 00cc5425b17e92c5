"""Values of Spark's rows as people and programs read them: cells of a table, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from penstock.cli.output import bytes_text, show_table

# Cells of records are shown to so many characters.
CELL_CHARACTERS_MAX = 60


def show_rows(columns: Iterable[str], rows: Iterable[Sequence[Any]]) -> None:
    """A job's table: headings as elsewhere, amounts of bytes and times as people read them."""
    names = list(columns)
    shown = [
        [
            bytes_text(each) if "bytes" in name and isinstance(each, int | float) else cell(each)
            for name, each in zip(names, row)
        ]
        for row in rows
    ]
    show_table([name.upper().replace("_", " ") for name in names], shown)


def speed_text(records: int, seconds: float) -> str:
    return f"{seconds:.1f} s ({records / max(seconds, 0.001):,.0f} records/s)"


def cell(value: Any) -> str | int | None:
    """A value in a table: one line, not too long."""
    told = plain(value)
    if told is None or (isinstance(told, int) and not isinstance(told, bool)):
        return told
    if isinstance(told, float):
        return str(told)  # with all its digits
    text = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return text if len(text) <= CELL_CHARACTERS_MAX else f"{text[: CELL_CHARACTERS_MAX - 1]}…"


def column_values(column: Any) -> list[Any]:
    """An Arrow column as Python's values."""
    try:
        return list(column.to_pylist())
    except OverflowError:
        return [_value(each) for each in column]


def _value(scalar: Any) -> Any:
    """Records may be of times that Python's calendar has not: these are told as the numbers they are."""
    try:
        return scalar.as_py()
    except OverflowError:
        number = getattr(scalar, "value", None)  # None of what only holds such a time
        return "outside of the calendar" if number is None else f"{number} {scalar.type}"


def plain(value: Any) -> Any:
    """A value of a row as JSON has it; bytes as text, with what is not UTF-8 escaped."""
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="backslashreplace")
    if isinstance(value, datetime):
        shown = value if value.tzinfo is None else value.astimezone(UTC)
        return shown.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, date | Decimal):
        return str(value)
    if isinstance(value, dict):
        return {str(plain(name)): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return value if isinstance(value, str | int | float | bool | None) else str(value)
