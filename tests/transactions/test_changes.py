"""The records of ``__transaction_state``, against bytes that Kafka 4.3.1's own classes wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.protocol.errors import DecodeError
from penstock.transactions.changes import (
    CLASSIC,
    NOBODY,
    V2,
    Change,
    Identity,
    State,
    TransactionRemoved,
    TransactionStored,
    decode,
    encode,
)

KEY = bytes.fromhex("000000097472616e7366657273")
ONGOING = {
    0: "000000000000000003e900070000ea60010000000200066f7264657273000000020000000000000007"
    "00087061796d656e747300000001000000030000018bcfe569c80000018bcfe5687b",
    1: "000100000000000003e900070000ea600103076f7264657273030000000000000007"
    "00097061796d656e74730200000003000000018bcfe569c80000018bcfe5687b00",
}
PREPARED = (
    "000100000000000003e97fff0000ea600202076f72646572730200000000000000018bcfe569c80000018bcfe5687b"
    "03000800000000000003e9010800000000000007d202020002"
)
COMPLETE = (
    "000100000000000007d200000000ea6004010000018bcfe569c80000018bcfe5687b02000800000000000003e902020002"
)
EMPTY = "000100000000000003e900000000ea6000000000018bcfe569c8ffffffffffffffff00"

OPEN = TransactionStored(
    "transfers",
    Identity(1001, 7),
    State.ONGOING,
    60_000,
    frozenset([("orders", 7), ("payments", 3), ("orders", 0)]),
    start_timestamp=1_700_000_000_123,
    update_timestamp=1_700_000_000_456,
)


@pytest.mark.parametrize("version", [0, 1])
def test_kafkas_records_of_every_version_are_read(version: int) -> None:
    assert decode(KEY, bytes.fromhex(ONGOING[version])) == OPEN


def test_an_open_transaction_is_written_as_kafka_does() -> None:
    assert encode(OPEN) == (KEY, bytes.fromhex(ONGOING[1]))


def test_an_id_without_a_transaction_is_written_as_kafka_does() -> None:
    empty = replace(
        OPEN, producer=Identity(1001, 0), state=State.EMPTY, partitions=frozenset(), start_timestamp=-1
    )
    assert encode(empty) == (KEY, bytes.fromhex(EMPTY))
    assert decode(KEY, bytes.fromhex(EMPTY)) == empty


def test_the_previous_identity_follows_from_a_record_of_kafka() -> None:
    prepared = decode(KEY, bytes.fromhex(PREPARED))
    assert isinstance(prepared, TransactionStored)
    assert prepared.state is State.PREPARE_COMMIT
    assert (prepared.producer, prepared.next_producer_id) == (Identity(1001, 32_767), 2002)
    assert (prepared.previous, prepared.generation) == (Identity(1001, 32_766), V2)
    complete = decode(KEY, bytes.fromhex(COMPLETE))
    assert isinstance(complete, TransactionStored)
    assert (complete.producer, complete.previous) == (Identity(2002, 0), Identity(1001, 32_766))


@pytest.mark.parametrize(
    "change",
    [
        OPEN,
        TransactionRemoved("transfers"),
        replace(OPEN, state=State.PREPARE_ABORT, previous=Identity(1001, 6), next_producer_id=77),
        replace(OPEN, state=State.PREPARE_ABORT, generation=V2, previous=NOBODY),
        replace(OPEN, state=State.COMPLETE_COMMIT, partitions=frozenset(), previous=Identity(3, 0)),
        replace(OPEN, state=State.EMPTY, partitions=frozenset(), previous=Identity(0, 0), generation=CLASSIC),
    ],
)
def test_what_is_written_is_read_again(change: Change) -> None:
    assert decode(*encode(change)) == change


def test_kafka_skips_the_field_that_is_ours() -> None:
    """It is tagged, behind all of Kafka's own."""
    _, value = encode(replace(OPEN, previous=Identity(5, 4)))
    assert value is not None
    assert value.endswith(bytes.fromhex("02" + "00080000000000000005" + "904e020004"))


def test_a_record_of_an_unknown_type_is_skipped() -> None:
    assert decode(b"\x00\x05abc", b"") is None


@pytest.mark.parametrize("value", ["", "00", "0002ff", ONGOING[1][:40], ONGOING[0][:70]])
def test_a_broken_value_is_an_error(value: str) -> None:
    with pytest.raises(DecodeError):
        decode(KEY, bytes.fromhex(value))


@pytest.mark.parametrize("state", [6, 7, 8, 255])
def test_a_state_that_is_never_stored_is_an_error(state: int) -> None:
    value = bytearray.fromhex(EMPTY)
    value[16] = state
    with pytest.raises(DecodeError, match="unknown state"):
        decode(KEY, value)


@pytest.mark.parametrize("key", ["", "00", "000000"])
def test_a_broken_key_is_an_error(key: str) -> None:
    with pytest.raises(DecodeError):
        decode(bytes.fromhex(key), None)
