"""Our notation against the schemas Apache Kafka publishes: kafka-python ships those that clients need as data,
Kafka's own jar has them all.

The codecs can agree on random values and still differ in what was never drawn; here every field's name,
place, versions, type, default, nullability and tag is compared.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any
from zipfile import ZipFile

import pytest
from kafka.protocol.schemas.load_json import load_json

from penstock.protocol.messages.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
)
from penstock.protocol.messages.forwarding import DefaultPrincipalData
from penstock.protocol.messages.quorum import CONTROL_TYPE
from penstock.protocol.schema import NO_UUID, OWN_TAGS, Field, Message, version_range
from tests import java
from tests.protocol.samples import EVERY_API, kafka_names

TYPES = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
    "string": "string",
    "bytes": "binary",
    "records": "records",
}

CLASSES = [cls for api in EVERY_API for cls in (api.request, api.response)]
CLASSES += [ConsumerProtocolSubscription, ConsumerProtocolAssignment, DefaultPrincipalData]
CLASSES += CONTROL_TYPE.values()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_is_as_kafka_defines_it(cls: type[Message]) -> None:
    schema = schema_of(cls.__name__)
    served = version_range(cls.VERSIONS)
    if cls not in CONTROL_TYPE.values():
        assert schema.get("apiKey", -1) == cls.KEY
    flexible = versions_of(schema["flexibleVersions"], served)
    assert [
        version for version in served if cls.FLEXIBLE and version in version_range(cls.FLEXIBLE)
    ] == flexible
    for common in schema.get("commonStructs", ()):
        put_in_place(common, schema["fields"])
    compare(cls, schema["fields"], list(served))


def schema_of(name: str) -> Any:
    try:
        return load_json(name)
    except FileNotFoundError:
        return json.loads(
            re.sub(r"^\s*//.*$", "", in_kafkas_jar(f"common/message/{name}.json"), flags=re.MULTILINE)
        )


def in_kafkas_jar(path: str) -> str:
    jars = java.classpath(
        f"org.apache.kafka:kafka_2.13:{java.KAFKA_VERSION}",
        f"org.apache.kafka:kafka-tools:{java.KAFKA_VERSION}",
    ).split(os.pathsep)
    with ZipFile(next(jar for jar in jars if "kafka-clients-" in jar)) as files:
        return files.read(path).decode()


def put_in_place(common: dict[str, Any], fields: list[dict[str, Any]]) -> None:
    """A struct that is used in several places is defined beside them."""
    for field in fields:
        if field["type"].removeprefix("[]") == common["name"]:
            field["fields"] = common["fields"]
        put_in_place(common, field.get("fields", []))


def compare(cls: type[Message], schema: list[dict[str, Any]], alive: list[int]) -> None:
    """``alive``: the versions in which this struct can occur at all; what a field says beyond is moot."""
    expected = [field for field in schema if versions_of(field["versions"], alive)]
    fields = [field for field in cls.FIELDS if field.tag is None or field.tag < OWN_TAGS]
    assert [field.name for field in fields] == [snake_case(field["name"]) for field in expected]
    for ours, theirs in zip(fields, expected):
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
        assert kind in kafka_names(ours.element), where
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
        case "d":
            return float(text or 0)
        case _:
            return int(str(text or 0), 0)


def versions_of(text: str, among: Any) -> list[int]:
    return [version for version in among if text not in ("none", "") and version in version_range(text)]


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
