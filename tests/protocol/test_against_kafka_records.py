"""What no client sends against bytes that Kafka itself wrote: the records of its internal topics, and what nodes
say to each other. ``tests.vectors.write`` made the latter.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from penstock.model import parse_id
from penstock.protocol.schema import Field, Message, decode, encode
from tests import vectors
from tests.protocol.samples import (
    API_MESSAGES,
    CONTROL_RECORDS,
    EVERY_API,
    GROUP_RECORDS,
    METADATA_RECORDS,
)

LINES = [
    line
    for name in ("kafka_records.txt", "kafka_messages.txt")
    for line in (Path(__file__).parent / name).read_text().splitlines()
    if not line.startswith("#")
]
RECORDS = METADATA_RECORDS + GROUP_RECORDS + CONTROL_RECORDS
CLASSES = {cls.__name__: cls for cls, _ in RECORDS + API_MESSAGES}


def test_every_version_of_every_record_has_a_vector() -> None:
    have = {tuple(line.split(" ", 2)[:2]) for line in LINES}
    assert {(cls.__name__, str(version)) for cls, version in RECORDS} <= have


def test_every_version_of_what_clients_were_not_recorded_sending_has_a_vector() -> None:
    recorded = {vector.name for vector in vectors.load()}
    have = {tuple(line.split(" ", 2)[:2]) for line in LINES}
    for api in EVERY_API:
        if api.name not in recorded:
            for version in range(api.version_min, api.version_max + 1):
                for way in ("Request", "Response"):
                    assert (api.name + way, str(version)) in have


@pytest.mark.parametrize("line", LINES, ids=lambda line: "-v".join(line.split(" ", 2)[:2]))
def test_kafka_wrote_the_same_bytes_for_the_same_value(line: str) -> None:
    name, version, data, value = line.split(" ", 3)
    cls = CLASSES[name]
    expected = from_json(cls, json.loads(value), int(version))
    assert decode(cls, int(version), bytes.fromhex(data)) == expected
    assert encode(expected, int(version)).hex() == data


def from_json(cls: type[Message], values: dict[str, Any], version: int) -> Message:
    fields = {field.name: field for field in cls.FIELDS}
    named = {snake_case(name): value for name, value in values.items()}
    assert {field.name for field in cls.FIELDS if field.exists(version) and field.tag is None} <= named.keys()
    return cls(**{name: field_from_json(fields[name], value, version) for name, value in named.items()})


def snake_case(name: str) -> str:
    return re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("k_raft", "kraft")


def field_from_json(field: Field, value: Any, version: int) -> Any:
    if value is None:
        return None
    if field.kind == "array" and isinstance(field.element, Field):
        return [field_from_json(field.element, item, version) for item in value]
    if field.kind == "array":
        return [from_json(field.element, item, version) for item in value]
    if field.kind == "struct":
        return from_json(field.element, value, version)
    if field.kind == "16s":
        return parse_id(value)
    return b64decode(value) if field.kind in ("binary", "records") else value
