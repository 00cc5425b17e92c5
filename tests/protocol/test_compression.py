"""Each codec there and back, against other people's implementations, and against bombs."""

from __future__ import annotations

import contextlib
import gzip
import random
import tracemalloc
from collections.abc import Callable

import aiokafka.codec
import cramjam
import kafka.codec
import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.compression import Codec, CompressionError, TooLarge, compress, decompress

COMPRESSED = [codec for codec in Codec if codec is not Codec.NONE]
TEXT = b"".join(b"line %d of something that repeats\n" % number for number in range(5000))
NOISE = random.Random(7).randbytes(100_000)

AIOKAFKA = {
    Codec.GZIP: (aiokafka.codec.gzip_encode, aiokafka.codec.gzip_decode),
    Codec.SNAPPY: (aiokafka.codec.snappy_encode, aiokafka.codec.snappy_decode),
    Codec.LZ4: (aiokafka.codec.lz4_encode, aiokafka.codec.lz4_decode),
    Codec.ZSTD: (aiokafka.codec.zstd_encode, aiokafka.codec.zstd_decode),
}
# kafka-python's snappy needs a library of its own.
KAFKA_PYTHON = {
    Codec.GZIP: (kafka.codec.gzip_encode, kafka.codec.gzip_decode),
    Codec.LZ4: (kafka.codec.lz4_encode, kafka.codec.lz4_decode),
    Codec.ZSTD: (kafka.codec.zstd_encode, kafka.codec.zstd_decode),
}


@pytest.mark.parametrize("codec", Codec)
@given(data=st.binary(max_size=5000))
def test_what_was_compressed_comes_back(codec: Codec, data: bytes) -> None:
    assert decompress(codec, compress(codec, data), len(data)) == data


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("data", [TEXT, NOISE, b""], ids=["text", "noise", "nothing"])
def test_buffers_of_any_kind_are_taken(codec: Codec, data: bytes) -> None:
    compressed = compress(codec, memoryview(bytearray(data)))
    assert decompress(codec, memoryview(bytearray(compressed)), len(data)) == data
    assert decompress(codec, bytearray(compressed), len(data)) == data


OTHERS = [
    pytest.param(codec, *functions, id=f"{name}-{codec.name.lower()}")
    for name, library in (("aiokafka", AIOKAFKA), ("kafka-python", KAFKA_PYTHON))
    for codec, functions in library.items()
]


@pytest.mark.parametrize(("codec", "encode", "decode"), OTHERS)
@pytest.mark.parametrize("data", [TEXT, NOISE, b"x"], ids=["text", "noise", "one byte"])
def test_other_clients_understand_us_and_we_them(
    codec: Codec, encode: Callable[[bytes], bytes], decode: Callable[[bytes], bytes], data: bytes
) -> None:
    assert bytes(decode(compress(codec, data))) == data
    assert decompress(codec, bytes(encode(data)), len(data)) == data


def test_raw_snappy_is_read_as_well_as_framed() -> None:
    assert decompress(Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT)), len(TEXT)) == TEXT


def test_several_frames_in_a_row_are_one_stream() -> None:
    halves = TEXT[:1000], TEXT[1000:]
    assert decompress(Codec.GZIP, b"".join(map(gzip.compress, halves)), len(TEXT)) == TEXT
    assert decompress(Codec.LZ4, b"".join(map(lz4.frame.compress, halves)), len(TEXT)) == TEXT
    frames = b"".join(zstandard.ZstdCompressor().compress(half) for half in halves)
    assert decompress(Codec.ZSTD, frames, len(TEXT)) == TEXT


@pytest.mark.parametrize("level", [1, 3, 19, 22])
def test_zstd_of_every_level_is_read(level: int) -> None:
    # As Java does: streamed, so that the frame does not say its size and uses the level's whole window.
    stream = zstandard.ZstdCompressor(level=level).compressobj()
    data = stream.compress(TEXT) + stream.flush()
    assert decompress(Codec.ZSTD, data, len(TEXT)) == TEXT


@pytest.mark.parametrize("codec", Codec)
def test_output_one_byte_too_large_is_refused(codec: Codec) -> None:
    compressed = compress(codec, TEXT)
    assert decompress(codec, compressed, len(TEXT)) == TEXT
    with pytest.raises(TooLarge):
        decompress(codec, compressed, len(TEXT) - 1)


BOMB_BYTES = 256 << 20
ALLOWED_BYTES = 1 << 20


def _gzip_members() -> bytes:
    return gzip.compress(bytes(1 << 20)) * (BOMB_BYTES >> 20)


def _snappy_chunks() -> bytes:
    chunk = bytes(cramjam.snappy.compress_raw(bytes(1 << 20)))
    return compress(Codec.SNAPPY, b"") + (len(chunk).to_bytes(4, "big") + chunk) * (BOMB_BYTES >> 20)


def _zstd_without_its_size() -> bytes:
    stream = zstandard.ZstdCompressor(level=19).compressobj()
    block = bytes(1 << 20)
    return b"".join(stream.compress(block) for _ in range(BOMB_BYTES >> 20)) + stream.flush()


BOMBS: dict[str, tuple[Codec, Callable[[], bytes]]] = {
    "gzip": (Codec.GZIP, lambda: gzip.compress(bytes(BOMB_BYTES // 4))),
    "gzip members": (Codec.GZIP, _gzip_members),
    "snappy chunks": (Codec.SNAPPY, _snappy_chunks),
    "raw snappy": (Codec.SNAPPY, lambda: bytes(cramjam.snappy.compress_raw(bytes(BOMB_BYTES // 4)))),
    "snappy that lies about its size": (Codec.SNAPPY, lambda: b"\xff\xff\xff\xff\x0f" + bytes(100)),
    "lz4": (Codec.LZ4, lambda: lz4.frame.compress(bytes(BOMB_BYTES // 4))),
    "lz4 without its size": (Codec.LZ4, lambda: lz4.frame.compress(bytes(BOMB_BYTES // 4), store_size=False)),
    "zstd": (Codec.ZSTD, lambda: zstandard.ZstdCompressor(level=19).compress(bytes(BOMB_BYTES))),
    "zstd without its size": (Codec.ZSTD, _zstd_without_its_size),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_stopped_while_it_unfolds(name: str) -> None:
    codec, make = BOMBS[name]
    bomb = make()
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decompress(codec, bomb, ALLOWED_BYTES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * ALLOWED_BYTES


def test_a_zstd_window_larger_than_any_client_uses_is_refused() -> None:
    # A frame header that asks for a window of 2 GiB, then one block of a repeated byte.
    frame = bytes.fromhex("28b52ffd") + bytes([0x00, 21 << 3]) + bytes([0x03 | 0x50, 0x00, 0x00]) + b"x"
    with pytest.raises(CompressionError):
        decompress(Codec.ZSTD, frame, ALLOWED_BYTES)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4])
def test_data_cut_short_is_refused(codec: Codec) -> None:
    compressed = compress(codec, TEXT)
    with pytest.raises(CompressionError):
        decompress(codec, compressed[: len(compressed) // 2], len(TEXT))


@pytest.mark.parametrize("codec", COMPRESSED)
@given(data=st.binary(min_size=1, max_size=200))
def test_rubbish_raises_nothing_but_a_compression_error(codec: Codec, data: bytes) -> None:
    with contextlib.suppress(CompressionError):
        decompress(codec, data, 10_000)


@pytest.mark.parametrize("codec", COMPRESSED)
@given(data=st.data())
def test_damaged_data_raises_nothing_but_a_compression_error(codec: Codec, data: st.DataObject) -> None:
    compressed = bytearray(compress(codec, TEXT[:2000]))
    for _ in range(data.draw(st.integers(1, 4))):
        compressed[data.draw(st.integers(0, len(compressed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CompressionError):
        decompress(codec, compressed, 100_000)
