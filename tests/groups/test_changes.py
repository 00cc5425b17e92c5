"""The records of ``__consumer_offsets``, against bytes that Kafka 4.3.1's own classes wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.groups.changes import (
    Change,
    GroupRemoved,
    GroupStored,
    OffsetCommitted,
    OffsetRemoved,
    StoredMember,
    decode,
    encode,
)
from penstock.protocol.errors import DecodeError

OFFSET_KEY = bytes.fromhex("000100077265616465727300066f726465727300000007")
GROUP_KEY = bytes.fromhex("0002000772656164657273")
OFFSET_VALUES = {
    0: "00000000001cbe991a1400036dc3a90000018bcfe5687b",
    1: "00010000001cbe991a1400036dc3a90000018bcfe5687b0000018bcfee903b",
    2: "00020000001cbe991a1400036dc3a90000018bcfe5687b",
    3: "00030000001cbe991a140000000500036dc3a90000018bcfe5687b",
    4: "00040000001cbe991a1400000005046dc3a90000018bcfe5687b00",
}
GROUP_VALUES = {
    0: "00000008636f6e73756d657200000003000572616e67650003632d31"
    "000000010003632d31000163000a2f3132372e302e302e310000afc800000003010203000000020405",
    1: "00010008636f6e73756d657200000003000572616e67650003632d31"
    "000000010003632d31000163000a2f3132372e302e302e31000493e00000afc800000003010203000000020405",
    2: "00020008636f6e73756d657200000003000572616e67650003632d310000018bcfe5687b"
    "000000010003632d31000163000a2f3132372e302e302e31000493e00000afc800000003010203000000020405",
    3: "00030008636f6e73756d657200000003000572616e67650003632d310000018bcfe5687b"
    "000000010003632d310003692d31000163000a2f3132372e302e302e31000493e00000afc800000003010203000000020405",
    4: "000409636f6e73756d6572000000030672616e676504632d310000018bcfe5687b"
    "0204632d3104692d3102630b2f3132372e302e302e31000493e00000afc8040102030304050000",
}
EMPTY_GROUP = "00030008636f6e73756d657200000004ffffffff0000018bcfe5687b00000000"

COMMITTED_AT = 1_700_000_000_123
TOPIC_ID = bytes(range(1, 17))


def committed(leader_epoch: int = -1, expire_timestamp: int = -1) -> OffsetCommitted:
    return OffsetCommitted(
        "readers", "orders", 7, 123_456_789_012, leader_epoch, "m\u00e9", COMMITTED_AT, expire_timestamp
    )


def stored(version: int) -> GroupStored:
    member = StoredMember(
        member_id="c-1",
        instance_id="i-1" if version >= 3 else None,
        client_id="c",
        client_host="/127.0.0.1",
        rebalance_timeout_ms=300_000 if version >= 1 else 45_000,
        session_timeout_ms=45_000,
        subscription=b"\x01\x02\x03",
        assignment=b"\x04\x05",
    )
    timestamp = COMMITTED_AT if version >= 2 else -1
    return GroupStored("readers", "consumer", 3, "range", "c-1", timestamp, (member,))


def test_offsets_without_a_topic_id_are_written_as_kafka_writes_them() -> None:
    assert encode(committed(5)) == (OFFSET_KEY, bytes.fromhex(OFFSET_VALUES[3]))
    assert encode(committed(expire_timestamp=COMMITTED_AT + 600_000)) == (
        OFFSET_KEY,
        bytes.fromhex(OFFSET_VALUES[1]),
    )
    assert encode(OffsetRemoved("readers", "orders", 7)) == (OFFSET_KEY, None)


def test_an_offset_has_its_topic_id_where_kafka_has_it() -> None:
    # A tagged field of the version that has no others: 1 field, tag 0, 16 bytes.
    without_id = bytes.fromhex(OFFSET_VALUES[4])
    assert without_id[-1] == 0
    _, value = encode(replace(committed(5), topic_id=TOPIC_ID))
    assert value == without_id[:-1] + b"\x01\x00\x10" + TOPIC_ID


def test_a_retention_time_beside_a_topic_id_is_in_a_field_that_others_pass_over() -> None:
    change = replace(committed(5, expire_timestamp=COMMITTED_AT + 600_000), topic_id=TOPIC_ID)
    key, value = encode(change)
    assert decode(key, value) == change
    without_expiry = encode(replace(change, expire_timestamp=-1))[1]
    assert value is not None and without_expiry is not None
    ours = b"\x90\x4e\x08" + change.expire_timestamp.to_bytes(8, "big")
    assert value == without_expiry.replace(b"\x01\x00\x10", b"\x02\x00\x10") + ours


def test_groups_are_written_as_kafka_writes_them() -> None:
    assert encode(stored(3)) == (GROUP_KEY, bytes.fromhex(GROUP_VALUES[3]))
    empty = GroupStored("readers", "consumer", 4, None, None, COMMITTED_AT, ())
    assert encode(empty) == (GROUP_KEY, bytes.fromhex(EMPTY_GROUP))
    assert encode(GroupRemoved("readers")) == (GROUP_KEY, None)


@pytest.mark.parametrize("version", range(5))
def test_every_version_of_an_offset_is_read(version: int) -> None:
    expected = committed(
        leader_epoch=5 if version >= 3 else -1,
        expire_timestamp=COMMITTED_AT + 600_000 if version == 1 else -1,
    )
    assert decode(OFFSET_KEY, bytes.fromhex(OFFSET_VALUES[version])) == expected


@pytest.mark.parametrize("version", range(5))
def test_every_version_of_a_group_is_read(version: int) -> None:
    assert decode(GROUP_KEY, bytes.fromhex(GROUP_VALUES[version])) == stored(version)


def test_the_oldest_key_is_read() -> None:
    key = bytes(2) + OFFSET_KEY[2:]
    assert decode(key, None) == OffsetRemoved("readers", "orders", 7)


@pytest.mark.parametrize(
    "change",
    [
        OffsetCommitted("", "t", 0, 0),
        OffsetCommitted("g", "t" * 249, 2**31 - 1, 2**63 - 1, 2**31 - 1, "\u65e5" * 4096, 0),
        OffsetCommitted("g", "t", 0, 1, -1, "", 5, 2**63 - 1),
        OffsetCommitted("g", "t", 0, 1, -1, "", 5, 2**63 - 1, b"the topic's  id."),
        OffsetRemoved("g", "t", 3),
        GroupStored("g", "", 0, None, None, -1, ()),
        GroupStored(
            "g", "connect", 2**31 - 1, "eager", "m", 0, (StoredMember("m", "", "", "", 0, 0, b"", b""),)
        ),
        GroupRemoved("g"),
    ],
)
def test_changes_come_back_as_they_went(change: Change) -> None:
    assert decode(*encode(change)) == change


def test_records_of_other_kinds_are_skipped() -> None:
    for kind in (3, 5, 10, 17, 32_767):
        assert decode(kind.to_bytes(2, "big") + b"\x00\x01g", b"\x00\x00whatever") is None


def test_a_value_of_a_version_from_the_future_is_not_guessed_at() -> None:
    with pytest.raises(DecodeError, match="version 5"):
        decode(OFFSET_KEY, b"\x00\x05" + bytes(40))
    with pytest.raises(DecodeError):
        decode(GROUP_KEY, b"\xff\xff")


@pytest.mark.parametrize("cut", [0, 1, 2, 5])
def test_broken_records_are_an_error_and_nothing_else(cut: int) -> None:
    with pytest.raises(DecodeError):
        decode(OFFSET_KEY, bytes.fromhex(OFFSET_VALUES[3])[:cut])
    with pytest.raises(DecodeError):
        decode(OFFSET_KEY[:cut], None)
