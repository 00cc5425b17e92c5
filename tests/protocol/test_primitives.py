from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import DecodeError
from penstock.protocol.primitives import (
    ARRAY_CACHE_MAX,
    UVARINT_MAX,
    ArrayStructs,
    join_tags,
    read_uvarint,
    skip_tags,
    uvarint,
)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (1, "01"),
        (127, "7f"),
        (128, "8001"),
        (300, "ac02"),
        (0x3FFF, "ff7f"),
        (0x4000, "808001"),
        (2**21, "80808001"),
        (2**28, "8080808001"),
        (2**32 - 1, "ffffffff0f"),
    ],
)
def test_a_varint_holds_seven_bits_per_byte_lowest_first(value: int, encoded: str) -> None:
    assert uvarint(value).hex() == encoded
    assert read_uvarint(bytes.fromhex(encoded), 0) == (value, len(encoded) // 2)


@given(st.integers(0, UVARINT_MAX), st.binary(max_size=3), st.binary(max_size=3))
def test_a_varint_is_read_where_it_stands(value: int, before: bytes, after: bytes) -> None:
    encoded = uvarint(value)
    position = len(before) + len(encoded)
    assert read_uvarint(memoryview(before + encoded + after), len(before)) == (value, position)


@pytest.mark.parametrize("encoded", ["ffffffff10", "808080808000", "8080808080", "ffffffffff7f"])
def test_a_varint_beyond_32_bits_is_refused(encoded: str) -> None:
    with pytest.raises(DecodeError):
        read_uvarint(bytes.fromhex(encoded), 0)


@pytest.mark.parametrize("encoded", ["", "80", "ffffff"])
def test_a_varint_that_is_cut_is_an_index_error_for_the_decoder_to_translate(encoded: str) -> None:
    with pytest.raises(IndexError):
        read_uvarint(bytes.fromhex(encoded), 0)


def test_a_number_too_large_for_a_varint_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        uvarint(2**32)


@given(st.dictionaries(st.integers(0, 2000), st.binary(max_size=200), max_size=200))
def test_a_tag_section_can_be_skipped_whatever_is_in_it(tags: dict[int, bytes]) -> None:
    section = join_tags(sorted(tags.items()))
    position, budget = skip_tags(memoryview(b"?" + section + b"?"), 1, 1000)
    assert (position, budget) == (1 + len(section), 1000 - len(tags))


def test_tags_spend_the_budget_of_elements() -> None:
    section = memoryview(join_tags([(tag, b"") for tag in range(10)]))
    assert skip_tags(section, 0, 10) == (len(section), 0)
    with pytest.raises(DecodeError):
        skip_tags(section, 0, 9)


class TestArrayStructs:
    def test_many_values_are_packed_in_one_call(self) -> None:
        assert ArrayStructs("i", "pack")[3](1, -1, 2) == bytes.fromhex("00000001ffffffff00000002")
        assert ArrayStructs("16s", "unpack_from")[2](bytes(range(34)), 2) == (
            bytes(range(2, 18)),
            bytes(range(18, 34)),
        )

    def test_only_short_arrays_are_remembered_because_a_peer_chooses_the_length(self) -> None:
        structs = ArrayStructs("i", "pack")
        for count in range(ARRAY_CACHE_MAX + 100):
            assert len(structs[count](*range(count))) == 4 * count
        assert len(structs) == ARRAY_CACHE_MAX + 1
