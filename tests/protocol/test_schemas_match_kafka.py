"""Our notation against the schemas Apache Kafka publishes, which kafka-python ships as data.

The codecs can agree on random values and still differ in what was never drawn; here every field's name,
place, versions, type, default, nullability and tag is compared.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from kafka.protocol.schemas.load_json import load_json

from penstock.protocol.apis import APIS
from penstock.protocol.messages.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
)
from penstock.protocol.schema import NO_UUID, Field, Message, version_range

TYPES = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "int64": "q",
    "uuid": "16s",
    "string": "string",
    "bytes": "binary",
    "records": "records",
}

# Two structs of one module that have one name in Kafka.
RENAMED = {
    "IncrementalAlterableConfig": "AlterableConfig",
    "IncrementalAlterConfigsResource": "AlterConfigsResource",
}

CLASSES = [cls for api in APIS.values() for cls in (api.request, api.response)]
CLASSES += [ConsumerProtocolSubscription, ConsumerProtocolAssignment]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_is_as_kafka_defines_it(cls: type[Message]) -> None:
    schema = load_json(cls.__name__)
    served = version_range(cls.VERSIONS)
    assert schema.get("apiKey", -1) == cls.KEY
    flexible = versions_of(schema["flexibleVersions"], served)
    assert [
        version for version in served if cls.FLEXIBLE and version in version_range(cls.FLEXIBLE)
    ] == flexible
    compare(cls, schema["fields"], list(served))


def compare(cls: type[Message], schema: list[dict[str, Any]], alive: list[int]) -> None:
    """``alive``: the versions in which this struct can occur at all; what a field says beyond is moot."""
    expected = [field for field in schema if versions_of(field["versions"], alive)]
    assert [field.name for field in cls.FIELDS] == [snake_case(field["name"]) for field in expected]
    for ours, theirs in zip(cls.FIELDS, expected):
        where = f"{cls.__name__}.{ours.name}"
        versions = [version for version in alive if ours.exists(version)]
        assert versions == versions_of(theirs["versions"], alive), where
        nullable = [version for version in versions if ours.is_nullable(version)]
        if ours.kind != "records":
            assert nullable == versions_of(theirs.get("nullableVersions", "none"), versions), where
        tag = theirs.get("tag")
        assert ours.tag == (None if tag is None else int(tag)), where
        if tag is not None:
            assert versions_of(theirs["taggedVersions"], versions) == versions, where
        compare_type(ours, theirs, versions, where)


def compare_type(ours: Field, theirs: dict[str, Any], versions: list[int], where: str) -> None:
    kind = theirs["type"].removeprefix("[]")
    is_array = kind != theirs["type"]
    assert (ours.kind == "array") == is_array, where
    if kind not in TYPES:
        assert RENAMED.get(ours.element.__name__, ours.element.__name__) == kind, where
        compare(ours.element, theirs["fields"], versions)
    else:
        assert (ours.element.kind if is_array else ours.kind) == TYPES[kind], where
    default = theirs.get("default")
    if default == "null":
        assert ours.default is None, where
    elif is_array:
        assert ours.default == (), where
    elif kind in TYPES:
        assert ours.default == default_of(TYPES[kind], default), where


def default_of(kind: str, text: Any) -> Any:
    match kind:
        case "string":
            return text or ""
        case "binary":
            return b""
        case "records":
            return None
        case "16s":
            return NO_UUID
        case "?":
            return str(text).lower() == "true"
        case _:
            return int(str(text or 0), 0)


def versions_of(text: str, among: Any) -> list[int]:
    return [version for version in among if text not in ("none", "") and version in version_range(text)]


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
