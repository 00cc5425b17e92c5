"""Our codec against golden bytes: what real clients sent and what Apache Kafka answered them.

Every frame is decoded to its end and encoded again to the very same bytes. The one exception, a librdkafka
that sends more than it says, is named here. That every API has vectors, these or those that Kafka's own classes
made, is seen to in ``test_against_kafka_records``.
"""

from __future__ import annotations

import struct

import pytest

from penstock.environment import Buffer, FileRange
from penstock.protocol.apis import APIS
from penstock.protocol.schema import decoder, encoder
from tests.vectors import Vector, load

VECTORS = load()

# librdkafka 2.16 asks for all topics with four bytes where one byte of null belongs: three are left over.
LEFTOVER = {("Metadata", "request"): b"\x01\x00\x00"}
LIST_TOPICS = Vector(
    api_key=3,
    name="Metadata",
    version=13,
    direction="request",
    client="confluent-kafka 2.16.1",
    frame=bytes.fromhex("0003000d00000056000f636f6e666c75656e742d6b61666b610000000000010000"),
)


def body_position(vector: Vector) -> int:
    """Where the header ends: its client id is an old string even in a flexible header."""
    api = APIS[vector.api_key]
    if vector.direction == "response":
        return 5 if api.response_header_version(vector.version) == 1 else 4
    key, version, _correlation_id, length = struct.unpack_from(">hhih", vector.frame)
    assert (key, version) == (vector.api_key, vector.version)
    position: int = 10 + max(length, 0)
    if api.request_header_version(vector.version) == 2:
        assert vector.frame[position] == 0, "no client sends tags in the header"
        position += 1
    return position


def joined(parts: list[Buffer | FileRange]) -> bytes:
    return b"".join(bytes(part) for part in parts if not isinstance(part, FileRange))


@pytest.mark.parametrize("vector", [*VECTORS, LIST_TOPICS], ids=str)
def test_a_real_frame_is_read_and_written_back_byte_for_byte(vector: Vector) -> None:
    api = APIS[vector.api_key]
    message_class = api.request if vector.direction == "request" else api.response
    start = body_position(vector)

    message, end = decoder(message_class, vector.version)(memoryview(vector.frame), start)
    written = joined(encoder(message_class, vector.version)(message))

    leftover = vector.frame[end:]
    assert leftover in (b"", LEFTOVER.get((vector.name, vector.direction))), "bytes nobody asked for"
    assert written == vector.frame[start:end]
