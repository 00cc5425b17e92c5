"""Encoding of metadata changes: Kafka's records in Kafka's frame, so that its dump tool reads our log.

A change is the value of one record in ``__cluster_metadata``: three unsigned varints (the version of the frame,
the type of the record, its version), then the record itself. The newest version of each schema is written, so the
schemas must not be newer than METADATA_VERSION_LEVEL, which promises readers that nothing newer is in the log.
"""

from __future__ import annotations

from penstock.environment import Buffer
from penstock.protocol import schema
from penstock.protocol.errors import DecodeError
from penstock.protocol.messages import metadata_records
from penstock.protocol.primitives import read_uvarint, uvarint
from penstock.protocol.schema import Message

# The feature whose level says which records, in which versions, may be in the log.
METADATA_VERSION = "metadata.version"
# Kafka's 4.0-IV3: directories (KIP-858) and eligible leader replicas (KIP-966) are in the records.
METADATA_VERSION_LEVEL = 25

_FRAME_VERSION = 1

_TYPES: dict[int, type[Message]] = {
    record.KEY: record
    for record in vars(metadata_records).values()
    if isinstance(record, type) and issubclass(record, Message) and record.KEY >= 0
}
# The bytes before each type of record, and the version it is written in.
_HEADS: dict[type[Message], tuple[bytes, int]] = {}
for _type, _record in _TYPES.items():
    _version = schema.version_range(_record.VERSIONS)[-1]
    _HEADS[_record] = uvarint(_FRAME_VERSION) + uvarint(_type) + uvarint(_version), _version


def encode(change: Message) -> bytes:
    head, version = _HEADS[type(change)]
    return head + schema.encode(change, version)


def decode(buffer: Buffer) -> Message:
    """Read a change. Raises DecodeError, also for a type or version that this release does not know."""
    try:
        frame_version, position = read_uvarint(buffer, 0)
        type, position = read_uvarint(buffer, position)
        version, position = read_uvarint(buffer, position)
    except IndexError:
        raise DecodeError("a metadata change is shorter than its frame") from None
    if frame_version != _FRAME_VERSION:
        raise DecodeError(f"a metadata change has frame version {frame_version}")
    record = _TYPES.get(type)
    if record is None or version not in schema.version_range(record.VERSIONS):
        raise DecodeError(f"a metadata change has type {type} in version {version}, which is not known")
    # A copy, because a decoded message may keep views of its buffer and a change outlives the read.
    change, position = schema.decoder(record, version)(memoryview(bytes(buffer)), position)
    if position != len(buffer):
        raise DecodeError(f"a metadata change of type {type} has {len(buffer) - position} bytes left over")
    return change
