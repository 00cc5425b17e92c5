"""The records of the metadata log and of ``__consumer_offsets`` against bytes that Kafka itself wrote."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from penstock.model import parse_id
from penstock.protocol.schema import Field, Message, decode, encode
from tests.protocol.samples import GROUP_RECORDS, METADATA_RECORDS

LINES = [
    line
    for line in (Path(__file__).parent / "kafka_records.txt").read_text().splitlines()
    if not line.startswith("#")
]
CLASSES = {cls.__name__: cls for cls, _ in METADATA_RECORDS + GROUP_RECORDS}


def test_every_version_of_every_record_has_a_vector() -> None:
    vectors = {tuple(line.split(" ", 2)[:2]) for line in LINES}
    assert vectors == {(cls.__name__, str(version)) for cls, version in METADATA_RECORDS + GROUP_RECORDS}


@pytest.mark.parametrize("line", LINES, ids=lambda line: "-v".join(line.split(" ", 2)[:2]))
def test_kafka_wrote_the_same_bytes_for_the_same_value(line: str) -> None:
    name, version, data, value = line.split(" ", 3)
    cls = CLASSES[name]
    expected = from_json(cls, json.loads(value), int(version))
    assert decode(cls, int(version), bytes.fromhex(data)) == expected
    assert encode(expected, int(version)).hex() == data


def from_json(cls: type[Message], values: dict[str, Any], version: int) -> Message:
    fields = {field.name: field for field in cls.FIELDS}
    named = {re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower(): value for name, value in values.items()}
    assert {field.name for field in cls.FIELDS if field.exists(version) and field.tag is None} <= named.keys()
    return cls(**{name: field_from_json(fields[name], value, version) for name, value in named.items()})


def field_from_json(field: Field, value: Any, version: int) -> Any:
    if value is None:
        return None
    if field.kind == "array" and isinstance(field.element, Field):
        return [field_from_json(field.element, item, version) for item in value]
    if field.kind == "array":
        return [from_json(field.element, item, version) for item in value]
    if field.kind == "16s":
        return parse_id(value)
    return b64decode(value) if field.kind == "binary" else value
