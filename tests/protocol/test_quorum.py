"""What the quorum's messages have beyond their fields."""

from __future__ import annotations

from typing import cast

from penstock.environment import File, FileRange
from penstock.protocol.messages.quorum import (
    CONTROL_TYPE,
    ControlRecordKey,
    FetchSnapshotResponse,
    FetchSnapshotResponsePartition,
    FetchSnapshotResponseTopic,
    KRaftVersionRecord,
    LeaderChangeMessage,
    LeaderIdAndEpoch,
    SnapshotFooterRecord,
    SnapshotHeaderRecord,
    SnapshotId,
    VotersRecord,
)
from penstock.protocol.schema import decode, encode, encoder


def test_the_types_of_control_records_are_kafkas() -> None:
    assert list(CONTROL_TYPE.items()) == [
        (2, LeaderChangeMessage),
        (3, SnapshotHeaderRecord),
        (4, SnapshotFooterRecord),
        (5, KRaftVersionRecord),
        (6, VotersRecord),
    ]


def test_the_key_of_a_control_record_is_its_version_and_its_type() -> None:
    assert encode(ControlRecordKey(type=VotersRecord.KEY), 0) == b"\0\0\0\6"


def test_a_piece_of_a_snapshot_is_sent_from_its_file() -> None:
    piece = FileRange(cast(File, object()), 300, 5000)
    partition = FetchSnapshotResponsePartition(
        snapshot_id=SnapshotId(end_offset=90, epoch=2), size=9000, position=300, unaligned_records=piece
    )
    topic = FetchSnapshotResponseTopic(name="__cluster_metadata", partitions=[partition])
    parts = encoder(FetchSnapshotResponse, 1)(FetchSnapshotResponse(topics=[topic]))
    assert [part for part in parts if part is piece] == [piece]
    joined = b"".join(bytes(part.size) if isinstance(part, FileRange) else part for part in parts)
    (read,) = decode(FetchSnapshotResponse, 1, joined).topics[0].partitions
    assert (read.snapshot_id, read.position) == (partition.snapshot_id, 300)
    assert len(cast(bytes, read.unaligned_records)) == 5000


def test_leader_zero_in_epoch_zero_reads_as_absent_in_a_snapshots_answer() -> None:
    partition = FetchSnapshotResponsePartition(current_leader=LeaderIdAndEpoch(), unaligned_records=b"")
    response = FetchSnapshotResponse(topics=[FetchSnapshotResponseTopic(partitions=[partition])])
    assert (
        decode(FetchSnapshotResponse, 1, encode(response, 1)).topics[0].partitions[0].current_leader is None
    )
