"""Format Spark rows as table cells and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from penstock.cli.output import bytes_text, show_table

# Longer cells are cut.
CELL_CHARACTERS_MAX = 60


def show_rows(columns: Iterable[str], rows: Iterable[Sequence[Any]]) -> None:
    """Show a job's table, with readable byte counts and times."""
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
    """A value as one short line."""
    told = plain(value)
    if told is None or (isinstance(told, int) and not isinstance(told, bool)):
        return told
    if isinstance(told, float):
        return str(told)  # all digits
    text = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return text if len(text) <= CELL_CHARACTERS_MAX else f"{text[: CELL_CHARACTERS_MAX - 1]}…"


def column_values(column: Any) -> list[Any]:
    """An Arrow column as Python values."""
    try:
        return list(column.to_pylist())
    except OverflowError:
        return [_value(each) for each in column]


def _value(scalar: Any) -> Any:
    """One value; a time outside Python's calendar is shown as a number."""
    try:
        return scalar.as_py()
    except OverflowError:
        number = getattr(scalar, "value", None)  # None for a nested value that contains such a time
        return "outside of the calendar" if number is None else f"{number} {scalar.type}"


def plain(value: Any) -> Any:
    """A value as JSON can hold it; bytes as text, escaped where they are not UTF-8."""
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
