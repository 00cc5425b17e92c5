"""The five codecs a record batch may use, each with a limit on the decompressed size.

The broker stores batches as they arrive; it decompresses them only for an exact timestamp lookup, for compacted
topics, and for its own internal ones. Careful: a few kilobytes may decompress to gigabytes, and a library's
"maximum output size" is not always one (zstandard ignores it when the frame declares its own size). So every
decoder here produces at most one byte more than allowed and then stops.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum

import cramjam
import lz4.frame
import zstandard

from penstock.environment import Buffer

# The framing of snappy-java, which Kafka's clients use around the raw format: magic, version, oldest
# compatible version, then chunks of (size, raw snappy).
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_CHUNK_BYTES = 32 * 1024

# Level 22, the highest a Kafka client may ask for, uses a window of 128 MiB. The memory is reserved, but its
# pages are only touched by actual output, which is bounded.
_ZSTD_WINDOW_BYTES_MAX = 1 << 27


class Codec(IntEnum):
    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


class CompressionError(Exception):
    """The data is not valid for its codec."""


class TooLarge(CompressionError):
    """Decompression was stopped because the output exceeded the limit."""


def compress(codec: Codec, data: Buffer) -> bytes:
    """Compress the way Kafka's Java client does, so that every client can read it."""
    match codec:
        case Codec.NONE:
            return bytes(data)
        case Codec.GZIP:
            gzip = zlib.compressobj(wbits=31)
            return gzip.compress(data) + gzip.flush()
        case Codec.SNAPPY:
            return _compress_snappy(data)
        case Codec.LZ4:
            # Java's reader refuses linked blocks.
            compressed: bytes = lz4.frame.compress(
                data, block_size=lz4.frame.BLOCKSIZE_MAX64KB, block_linked=False, store_size=False
            )
            return compressed
        case Codec.ZSTD:
            return zstandard.ZstdCompressor().compress(data)


def decompress(codec: Codec, data: Buffer, bytes_max: int) -> bytes:
    """Decompress data from ``compress`` or from any Kafka client.

    Raises:
        TooLarge: the output would exceed ``bytes_max``; decompression stopped there.
        CompressionError: the data is damaged or of another codec.
    """
    match codec:
        case Codec.NONE:
            result = bytes(data[: bytes_max + 1])
        case Codec.GZIP:
            result = _decompress_gzip(data, bytes_max)
        case Codec.SNAPPY:
            result = _decompress_snappy(data, bytes_max)
        case Codec.LZ4:
            result = _decompress_lz4(data, bytes_max)
        case Codec.ZSTD:
            result = _decompress_zstd(data, bytes_max)
    if len(result) > bytes_max:
        raise TooLarge(f"more than {bytes_max} bytes of {codec.name.lower()} data")
    return result


def _decompress_gzip(data: Buffer, bytes_max: int) -> bytes:
    # A gzip file may have several members in a row.
    output = bytearray()
    rest: Buffer = data
    while len(rest) and len(output) <= bytes_max:
        member = zlib.decompressobj(wbits=31)
        try:
            output += member.decompress(rest, bytes_max + 1 - len(output))
        except zlib.error as error:
            raise CompressionError(f"gzip: {error}") from error
        if not member.eof:
            if len(output) > bytes_max:
                break
            raise CompressionError("gzip: cut short")
        rest = member.unused_data
    return bytes(output)


def _decompress_lz4(data: Buffer, bytes_max: int) -> bytes:
    output = bytearray()
    rest: Buffer = data
    while len(rest) and len(output) <= bytes_max:
        frame = lz4.frame.LZ4FrameDecompressor()
        # The library allocates the whole limit, so start with what records usually need.
        room = max(4 * len(rest), 1 << 16)
        while not frame.eof and len(output) <= bytes_max:
            try:
                piece: bytes = frame.decompress(rest, max_length=min(room, bytes_max + 1 - len(output)))
            except (RuntimeError, EOFError) as error:
                raise CompressionError(f"lz4: {error}") from error
            if not piece and not frame.eof:
                raise CompressionError("lz4: cut short")
            if frame.eof and not frame.unused_data and not output:
                return piece  # the usual case, without a copy
            output += piece
            rest = b""  # the library keeps the unused input
            room *= 2
        rest = frame.unused_data or b""
    return bytes(output)


def _decompress_zstd(data: Buffer, bytes_max: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX)
    try:
        with decoder.stream_reader(data, read_across_frames=True) as reader:
            # It reports no error when the input is cut short: the records then end too early. It allocates all it
            # is asked for, so ask for what records usually need first.
            room = min(bytes_max + 1, max(8 * len(data), 1 << 16))
            first = reader.read(room)
            return first if len(first) < room else first + reader.read(bytes_max + 1 - room)
    except zstandard.ZstdError as error:
        raise CompressionError(f"zstd: {error}") from error


def _compress_snappy(data: Buffer) -> bytes:
    view = memoryview(data)
    parts = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_CHUNK_BYTES):
        chunk = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_CHUNK_BYTES]))
        parts.append(len(chunk).to_bytes(4, "big"))
        parts.append(chunk)
    return b"".join(parts)


def _decompress_snappy(data: Buffer, bytes_max: int) -> bytes:
    view = memoryview(data)
    if bytes(view[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _decompress_raw_snappy(view, bytes_max)
    position = len(_XERIAL_HEADER)
    output = bytearray()
    while position < len(view):
        size = int.from_bytes(view[position : position + 4], "big")
        position += 4
        if size > len(view) - position:
            raise CompressionError("snappy: cut short")
        output += _decompress_raw_snappy(view[position : position + size], bytes_max - len(output))
        position += size
    return bytes(output)


def _decompress_raw_snappy(view: memoryview, bytes_max: int) -> bytes:
    # The format begins with the size of its output, and its decoders never write past that.
    size = shift = 0
    for byte in view[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        raise CompressionError("snappy: no size")
    if size > bytes_max:
        raise TooLarge(f"{size} bytes of snappy data, {bytes_max} allowed")
    try:
        return bytes(cramjam.snappy.decompress_raw(view))
    except cramjam.DecompressionError as error:
        raise CompressionError(f"snappy: {error}") from error
