from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, TIMESTAMP_NOT_AVAILABLE, Message

from penstock.cli.rendering import Columns, json_line, template, text_line

NOON = (TIMESTAMP_CREATE_TIME, 1_700_000_000_123)


def record(**fields: Any) -> Message:
    given = {"topic": "orders", "partition": 2, "offset": 7, "value": b"v", "timestamp": NOON, **fields}
    return Message(**given)


def test_the_bare_value_is_written_byte_for_byte() -> None:
    assert text_line(record(value=b"\xff\x00\r"), Columns()) == b"\xff\x00\r\n"


def test_columns_stand_before_the_value() -> None:
    line = text_line(
        record(key=b"k", headers=[("a", b"1"), ("a", None)]),
        Columns(keys=True, headers=True, timestamps=True, offsets=True),
    )
    assert line == b"2023-11-14T22:13:20.123Z\torders-2@7\ta=1,a=null\tk\tv\n"


def test_null_is_told_from_empty() -> None:
    columns = Columns(keys=True)
    assert text_line(record(key=None, value=None), columns) == b"null\tnull\n"
    assert text_line(record(key=b"", value=b""), columns) == b"\t\n"


def test_json_has_every_field() -> None:
    line = json_line(record(key="ключ".encode(), headers=[("h", b"1")]))
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert json.loads(line) == {
        "topic": "orders",
        "partition": 2,
        "offset": 7,
        "timestamp": 1_700_000_000_123,
        "timestamp_type": "create",
        "key": "ключ",
        "value": "v",
        "headers": [{"name": "h", "value": "1"}],
    }


def test_bytes_that_are_no_text_are_base64_in_json() -> None:
    fields = json.loads(json_line(record(key=b"\xff", value=b"\xfe\xff", headers=[("h", b"\x80")])))
    assert fields["key_base64"] == "/w=="
    assert fields["value_base64"] == "/v8="
    assert fields["headers"] == [{"name": "h", "value_base64": "gA=="}]
    assert "value" not in fields


@pytest.mark.parametrize(
    ("timestamp", "shown", "kind"),
    [
        ((TIMESTAMP_LOG_APPEND_TIME, 5), 5, "log_append"),
        ((TIMESTAMP_NOT_AVAILABLE, 0), None, None),
    ],
)
def test_json_says_whose_clock_it_was(
    timestamp: tuple[int, int], shown: int | None, kind: str | None
) -> None:
    fields = json.loads(json_line(record(timestamp=timestamp)))
    assert (fields["timestamp"], fields["timestamp_type"]) == (shown, kind)


def test_a_template_takes_the_fields_by_name() -> None:
    render = template("{topic}/{partition}@{offset}\\t{key}={value} {headers} {{}} {timestamp}")
    line = render(record(key=b"\xff", headers=[("a", b"1")]))
    assert line == b"orders/2@7\t\\xff=v a=1 {} 2023-11-14T22:13:20.123Z\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{size}", r"unknown field \{size\}"), ("{", "brace"), ("{value.real}", "unknown field")],
)
def test_a_template_that_cannot_work_is_refused_at_once(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        template(text)


def test_a_time_outside_the_calendar_is_shown_as_it_is() -> None:
    line = text_line(record(timestamp=(TIMESTAMP_CREATE_TIME, 2**62)), Columns(timestamps=True))
    assert line == f"@{2**62}\tv\n".encode()
