"""Every request and response against kafka-python, a second codec written by others.

Their bytes must be our bytes, and they must read our bytes as the value we wrote. Permissions are left out:
kafka-python renames those fields and turns them into sets; kio checks them.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any
from uuid import UUID

import kafka.protocol.admin
import kafka.protocol.consumer
import kafka.protocol.metadata
import kafka.protocol.producer
import kafka.protocol.sasl
import pytest

from penstock.protocol.apis import CLIENT
from penstock.protocol.messages import OPERATIONS_OMITTED
from penstock.protocol.messages.cluster import ApiVersionsResponse
from penstock.protocol.schema import NO_UUID, Field, Message, decode, encode
from tests.protocol.samples import EVERY_API, MessageAtVersion, Samples, kafka_names, title, versions

SAMPLES = 6
PACKAGES: list[ModuleType] = [
    kafka.protocol.admin,
    kafka.protocol.consumer,
    kafka.protocol.metadata,
    kafka.protocol.producer,
    kafka.protocol.sasl,
]


class SamplesForKafkaPython(Samples):
    def integer(self, field: Field) -> int:
        return OPERATIONS_OMITTED if is_permissions(field) else super().integer(field)

    def message(self, cls: type[Message], version: int) -> Message:
        message = super().message(cls, version)
        if isinstance(message, ApiVersionsResponse):
            message.error_code = 0  # With any other, kafka-python reads version 0.
        return message


# kafka-python is a client: it does not know what nodes say to each other, nor these.
UNKNOWN = ("UnregisterBroker", "ConsumerGroupHeartbeat", "AddRaftVoter", "RemoveRaftVoter")
KNOWN_APIS = [api for api in EVERY_API if CLIENT in api.listeners and api.name not in UNKNOWN]
KNOWN = [pair for api in KNOWN_APIS for cls in (api.request, api.response) for pair in versions(cls)]


@pytest.mark.parametrize("pair", KNOWN, ids=title)
def test_bytes_and_values_agree_with_kafka_python(pair: MessageAtVersion) -> None:
    cls, version = pair
    their_class = class_named(cls.__name__)
    for number in range(SAMPLES):
        message = SamplesForKafkaPython(f"{title(pair)} {number}").message(cls, version)
        our_bytes = encode(message, version)
        their_bytes = bytes(to_kafka_python(message, version, their_class).encode(version=version))
        assert our_bytes == their_bytes
        assert decode(cls, version, their_bytes) == message
        compare(message, version, their_class.decode(our_bytes, version=version))


@cache
def class_named(name: str) -> Any:
    return next(getattr(package, name) for package in PACKAGES if hasattr(package, name))


def is_permissions(field: Field) -> bool:
    return field.kind == "i" and field.name.endswith("authorized_operations")


def is_default(field: Field, value: Any) -> bool:
    return bool(value == ([] if field.default == () else field.default))


def to_kafka_python(message: Message, version: int, their_class: Any) -> Any:
    values = {}
    for field in message.FIELDS:
        value = getattr(message, field.name)
        if not field.exists(version) or is_permissions(field):
            continue
        if field.tag is not None and is_default(field, value):
            continue  # kafka-python sends every tagged field it is given.
        if isinstance(field.element, type):
            nested = their_struct(their_class, kafka_names(field.element))
            if isinstance(value, list):
                value = [to_kafka_python(item, version, nested) for item in value]
            elif value is not None:
                value = to_kafka_python(value, version, nested)
        elif field.kind == "16s":
            value = UUID(bytes=value)
        values[field.name] = value
    return their_class(version=version, **values)


def their_struct(owner: Any, names: list[str]) -> Any:
    found = [getattr(owner, name, None) or getattr(owner, "[]" + name, None) for name in names]
    return next(struct for struct in found if struct is not None)


def compare(message: Message, version: int, theirs: Any) -> None:
    for field in message.FIELDS:
        if not field.exists(version) or is_permissions(field):
            continue
        ours = getattr(message, field.name)
        if field.tag is not None and is_default(field, ours):
            continue  # Absent: kafka-python fills in defaults of its own making.
        other = getattr(theirs, field.name)
        if isinstance(ours, Message):
            compare(ours, version, other)
        elif isinstance(ours, list) and isinstance(field.element, type):
            assert len(ours) == len(other)
            for our_item, their_item in zip(ours, other):
                compare(our_item, version, their_item)
        elif field.kind == "16s":
            assert (other.bytes if other else NO_UUID) == ours, field.name
        else:
            assert other == ours, field.name
