"""Render a record for standard output: the bare value, columns, a user's template, or JSON.

A value is bytes, not text. The bare value is written unchanged. Elsewhere bytes that are not UTF-8 are escaped;
in JSON they are base64 under another name, so that nothing is lost.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from string import Formatter
from typing import Any

from confluent_kafka import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    TIMESTAMP_NOT_AVAILABLE,
    Message,
)

FIELDS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
# A null key or value in text output; null in JSON.
NULL = b"null"
# Whose clock set the timestamp: the producer's or the broker's.
TIMESTAMP_TYPES = {TIMESTAMP_CREATE_TIME: "create", TIMESTAMP_LOG_APPEND_TIME: "log_append"}


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns before the value, separated by tabs."""

    keys: bool = False
    headers: bool = False
    timestamps: bool = False
    offsets: bool = False


def text_line(message: Message, columns: Columns) -> bytes:
    parts = []
    if columns.timestamps:
        parts.append(_time_text(message).encode())
    if columns.offsets:
        parts.append(f"{message.topic()}-{message.partition()}@{message.offset()}".encode())
    if columns.headers:
        parts.append(_headers_text(message).encode())
    if columns.keys:
        parts.append(_or_null(message.key()))
    parts.append(_or_null(message.value()))
    return b"\t".join(parts) + b"\n"


def json_line(message: Message) -> bytes:
    kind, timestamp = message.timestamp()
    record: dict[str, Any] = {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp": None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp,
        "timestamp_type": TIMESTAMP_TYPES.get(kind),
        **_json_bytes("key", message.key()),
        **_json_bytes("value", message.value()),
        "headers": [{"name": name, **_json_bytes("value", value)} for name, value in _headers(message)],
    }
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def template(text: str) -> Callable[[Message], bytes]:
    """Compile a user's template. Raises ValueError for an unknown field."""
    text = text.replace("\\t", "\t").replace("\\n", "\n")
    try:
        named = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; write {{{{ for a literal brace") from None
    if unknown := sorted(named.difference(FIELDS)):
        known = " ".join(f"{{{field}}}" for field in FIELDS)
        raise ValueError(f"unknown field {{{unknown[0]}}}; a record has {known}")

    def render(message: Message) -> bytes:
        fields = {
            "topic": message.topic(),
            "partition": message.partition(),
            "offset": message.offset(),
            "timestamp": _time_text(message),
            "key": _or_null(message.key()).decode(errors="backslashreplace"),
            "value": _or_null(message.value()).decode(errors="backslashreplace"),
            "headers": _headers_text(message),
        }
        return text.format_map(fields).encode() + b"\n"

    return render


def _or_null(data: bytes | None) -> bytes:
    return NULL if data is None else data


def _json_bytes(name: str, data: bytes | None) -> dict[str, str | None]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(data).decode()}


def _headers(message: Message) -> list[tuple[str, bytes | None]]:
    """In order, with repeats."""
    pairs: Any = message.headers() or []
    return [(str(name), value) for name, value in pairs]


def _headers_text(message: Message) -> str:
    return ",".join(
        f"{name}={_or_null(value).decode(errors='backslashreplace')}" for name, value in _headers(message)
    )


def _time_text(message: Message) -> str:
    kind, timestamp = message.timestamp()
    if kind == TIMESTAMP_NOT_AVAILABLE:
        return NULL.decode()
    try:
        when = datetime.fromtimestamp(timestamp / 1000, UTC)
    except (ValueError, OverflowError, OSError):  # a producer may have set any number
        return f"@{timestamp}"
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
