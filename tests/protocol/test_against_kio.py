"""Every message of every version against kio, a codec written by others from the same schemas.

Their bytes must be our bytes, and each side must read what the other wrote as the value it was.
"""

from __future__ import annotations

import datetime
import io
import re
from dataclasses import fields, is_dataclass
from typing import Any, get_args
from uuid import UUID

import pytest
from kio.index import load_entity_schema, load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode as KioErrorCode
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

from penstock.protocol.messages.consumer_protocol import StickyAssignorUserData
from penstock.protocol.schema import OWN_TAGS, Message, decode, encode
from tests.protocol.samples import (
    API_MESSAGES,
    CONSUMER_PROTOCOL,
    CONTROL_RECORDS,
    MessageAtVersion,
    Samples,
    title,
)

SAMPLES = 12
MESSAGES = [
    pair
    for pair in API_MESSAGES + CONSUMER_PROTOCOL + CONTROL_RECORDS
    # Kafka writes it by hand and has no schema file of it, from which kio is made.
    if pair[0] is not StickyAssignorUserData
]
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@pytest.mark.parametrize("pair", MESSAGES, ids=title)
def test_bytes_and_values_agree_with_kio(pair: MessageAtVersion) -> None:
    cls, version = pair
    kio_class = kio_class_of(cls, version)
    write, read = entity_writer(kio_class), entity_reader(kio_class)
    for number in range(SAMPLES):
        message = Samples(f"{title(pair)} {number}").message(cls, version)
        theirs = to_kio(message, version, kio_class)
        their_bytes = io.BytesIO()
        write(their_bytes, theirs)
        our_bytes = encode(message, version)
        assert our_bytes == their_bytes.getvalue()
        assert decode(cls, version, our_bytes) == message
        value, size = read(our_bytes, 0)
        assert (value, size) == (theirs, len(our_bytes))


@pytest.mark.parametrize("pair", MESSAGES, ids=title)
def test_defaults_agree_with_kio(pair: MessageAtVersion) -> None:
    """A field kio calls optional has the default we give it (kio has no defaults for the others)."""
    cls, version = pair
    compare_defaults(cls, version, kio_class_of(cls, version))


def kio_class_of(cls: type[Message], version: int) -> Any:
    if cls.__name__.endswith("Request"):
        return load_request_schema(cls.KEY, version)
    if cls.__name__.endswith("Response"):
        return load_response_schema(cls.KEY, version)
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
    return load_entity_schema(name, version, EntityType.data)


def to_kio(message: Message, version: int, kio_class: Any) -> Any:
    """The same value in kio's classes. Fails if the two sides do not have the same fields."""
    values = {}
    ours = {
        field.name: field
        for field in message.FIELDS
        if field.exists(version) and (field.tag is None or field.tag < OWN_TAGS)
    }
    for field in fields(kio_class):
        name = our_name(field.name, set(ours))
        our_field = ours.pop(name)
        value = getattr(message, name)
        if value is None and our_field.kind == "struct" and our_field.tag is not None:
            # A tagged struct that we call absent, kio calls equal to its default.
            value = our_field.element()
        values[field.name] = kio_value(value, version, field)
    assert not ours, f"kio's {kio_class.__name__} v{version} lacks {ours}"
    return kio_class(**values)


def our_name(kio_name: str, ours: set[str]) -> str:
    """kio drops the unit where it has a type for the quantity, and keeps off a name of Python's."""
    name = kio_name.removesuffix("_").replace("k_raft", "kraft")
    return name if name in ours else name + "_ms"


def kio_value(value: Any, version: int, field: Any) -> Any:
    nested = nested_class(field.type)
    if nested is not None and isinstance(value, list):
        return tuple(to_kio(item, version, nested) for item in value)
    if nested is not None and value is not None:
        return to_kio(value, version, nested)
    if nested is not None:
        return None
    convert = CONVERSIONS.get(field.metadata["kafka_type"], lambda value: value)
    if isinstance(value, list):
        return tuple(convert(item) for item in value)
    return value if value is None else convert(value)


def nested_class(annotation: Any) -> Any:
    """The entity in X, X | None, tuple[X, ...] or tuple[X, ...] | None, if X is one."""
    if is_dataclass(annotation):
        return annotation
    return next((found for part in get_args(annotation) if (found := nested_class(part))), None)


def compare_defaults(cls: type[Message], version: int, kio_class: Any) -> None:
    names = {field.name: field for field in cls.FIELDS if field.exists(version)}
    message = cls()
    for field in fields(kio_class):
        ours = names[our_name(field.name, set(names))]
        if isinstance(ours.element, type):
            compare_defaults(ours.element, version, nested_class(field.type))
        elif field.default is not field.default_factory:  # Both are MISSING where kio has no default.
            assert kio_value(getattr(message, ours.name), version, field) == field.default, ours.name


CONVERSIONS: dict[str, Any] = {
    "error_code": KioErrorCode,
    "timedelta_i32": lambda value: datetime.timedelta(milliseconds=value),
    "timedelta_i64": lambda value: datetime.timedelta(milliseconds=value),
    "datetime_i64": lambda value: None if value == -1 else EPOCH + datetime.timedelta(milliseconds=value),
    "uuid": lambda value: UUID(bytes=value) if any(value) else None,
}
