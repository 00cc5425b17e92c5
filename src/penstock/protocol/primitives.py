"""The primitives of the wire format: variable-length numbers, tag sections, arrays of fixed-width values.

The generated codecs (``codegen.py``) inline the common cases and call these for the rest. All input comes from the
network, so each function checks before it reads and raises only ``DecodeError``, ``IndexError`` or
``struct.error``, which the generated decoder turns into ``DecodeError``.

There are two kinds of varint. Lengths, counts and tags are *unsigned* varints of up to 32 bits and are read here;
the fields inside a record are zigzag varints, see ``records.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

from penstock.protocol.errors import DecodeError

UVARINT_MAX = 2**32 - 1

# The compiled Struct is cached for arrays up to this length. Longer ones are rare, and the peer chooses the length,
# so it could grow the cache without limit.
ARRAY_CACHE_MAX = 64


def read_uvarint(buffer: bytes | bytearray | memoryview, position: int) -> tuple[int, int]:
    """Read an unsigned varint; returns (value, next position). Padding is accepted, as by Kafka."""
    byte = buffer[position]
    if byte < 128:
        return byte, position + 1
    value = byte & 127
    shift = 7
    for position_next in range(position + 1, position + 5):
        byte = buffer[position_next]
        value |= (byte & 127) << shift
        if byte < 128:
            if value > UVARINT_MAX:
                break
            return value, position_next + 1
        shift += 7
    raise DecodeError("a varint is longer than 32 bits")


def uvarint(value: int) -> bytes:
    """Write an unsigned varint."""
    if value < 128:
        return ONE_BYTE[value]
    if value < 0x4000:
        return bytes((value & 127 | 128, value >> 7))
    assert value <= UVARINT_MAX, value
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def skip_tags(buffer: memoryview, position: int, budget: int) -> tuple[int, int]:
    """Skip a tag section with only unknown tags; returns (next position, elements still allowed)."""
    count, position = read_uvarint(buffer, position)
    budget -= count
    if budget < 0:
        raise DecodeError("too many tags")
    end = len(buffer)
    last = -1
    for _ in range(count):
        tag, position = read_uvarint(buffer, position)
        size, position = read_uvarint(buffer, position)
        position += size
        if tag <= last or position > end:
            raise DecodeError("a tag is out of order or runs past the end")
        last = tag
    return position, budget


def join_tags(tags: list[tuple[int, bytes]]) -> bytes:
    """Write a tag section from (tag, encoded value) pairs in ascending order."""
    parts = [uvarint(len(tags))]
    for tag, value in tags:
        parts += (uvarint(tag), uvarint(len(value)), value)
    return b"".join(parts)


class ArrayStructs(dict[int, Callable[..., Any]]):
    """For one fixed-width type: count -> the ``pack`` or ``unpack_from`` of that many values in a row."""

    def __init__(self, code: str, method: str) -> None:
        super().__init__()
        self.code = code
        self.method = method

    def __missing__(self, count: int) -> Callable[..., Any]:
        # ">500000i" is one code to the struct module, where "16s" must be repeated.
        body = f"{count}{self.code}" if len(self.code) == 1 else self.code * count
        function: Callable[..., Any] = getattr(Struct(">" + body), self.method)
        if count <= ARRAY_CACHE_MAX:
            self[count] = function
        return function


ONE_BYTE = tuple(bytes((value,)) for value in range(128))
