"""Apache Kafka's own dump tool reads our files and finds nothing to complain about."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from penstock.environment import Environment
from penstock.groups.changes import Change, OffsetCommitted, OffsetRemoved, encode
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.machine import MachineClock, MachineFiles
from penstock.protocol.compression import Codec
from penstock.protocol.records import (
    BatchHeader,
    Marker,
    check_produced,
    decode_header,
    encode_batch,
    encode_marker,
)
from tests.dump_tool import assert_no_complaint, dump

NOW = 1_700_000_000_000
BATCHES = 600
RECORDS_PER_BATCH = 3
CONFIG = LogConfig(segment_bytes=30_000, index_interval_bytes=500, segment_ms=1_000_000_000)


def environment() -> Environment:
    nowhere: object = None
    return Environment(
        clock=MachineClock(),
        files=MachineFiles(),
        network=nowhere,  # type: ignore[arg-type]
        random=random.Random(0),
        spawn=nowhere,  # type: ignore[arg-type]
        processes=nowhere,  # type: ignore[arg-type]
    )


def filled(directory: Path) -> Log:
    """Several segments, all codecs, three producers, timestamps that jump back, two epochs."""
    chance = random.Random(5)
    log = Log.open(environment(), str(directory), CONFIG, clean=True)
    for number in range(BATCHES):
        timestamp = NOW + number * 10 - chance.choice([0, 0, 0, 500])
        fields = [
            (timestamp + delta, b"key-%d" % number, b"value-%d " % delta * 4, [("h", b"x"), ("n", None)])
            for delta in range(RECORDS_PER_BATCH)
        ]
        sequence = number // 3 * RECORDS_PER_BATCH
        codec = Codec(number % len(Codec))
        batch = encode_batch(
            fields, codec=codec, producer_id=number % 3, producer_epoch=1, base_sequence=sequence
        )
        header = check_produced(memoryview(batch), max_message_bytes=1 << 20)
        assert isinstance(header, BatchHeader)
        assert log.producers.check(header, MachineClock().wall_ms()) is None
        log.append(batch, header, number // 400)
    return log


def closed(directory: Path) -> None:
    filled(directory).close()


def recovered(directory: Path) -> None:
    log = filled(directory)
    active = sorted(directory.glob("*.log"))[-1]
    with active.open("ab") as file:
        file.write(b"a batch that was torn")
    again = Log.open(environment(), str(directory), CONFIG, clean=False, recovery_point=100)
    assert again.log_end_offset == log.log_end_offset
    again.close()


def truncated(directory: Path) -> None:
    log = filled(directory)
    log.truncate_to(BATCHES * RECORDS_PER_BATCH - 200)
    log.close()


@pytest.fixture(scope="module", params=[closed, recovered, truncated], ids=lambda made: made.__name__)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param.__name__) / "topic-0"
    request.param(path)
    assert len(list(path.glob("*.log"))) > 2
    return path


def test_every_record_is_read_and_valid(directory: Path) -> None:
    segments = sorted(directory.glob("*.log"))
    output = dump(segments, "--deep-iteration", "--print-data-log")
    end = int(sorted(directory.glob("*.snapshot"))[-1].stem)
    assert [int(offset) for offset in re.findall(r"^\| offset: (\d+)", output, re.MULTILINE)] == list(
        range(end)
    )
    batches = re.findall(r"^baseOffset: .* compresscodec: (\w+) .* isvalid: (\w+)$", output, re.MULTILINE)
    assert len(batches) == end // RECORDS_PER_BATCH
    assert {codec for codec, _ in batches} == {codec.name.lower() for codec in Codec}
    assert {valid for _, valid in batches} == {"true"}
    assert "payload: value-2 value-2" in output
    # The tool calls every segment but that of offset 0 non-consecutive, because it counts from -1.
    gaps = re.findall(r"^ +(-?\d+) is followed by (\d+)$", output, re.MULTILINE)
    assert sorted(gaps) == sorted(("-1", str(int(path.stem))) for path in segments[1:])
    assert_no_complaint(output)


def test_indexes_agree_with_the_log(directory: Path) -> None:
    output = dump(sorted(directory.glob("*index")))
    assert len(re.findall(r"^offset: \d+ position: \d+$", output, re.MULTILINE)) > 20
    assert len(re.findall(r"^timestamp: \d+ offset: \d+$", output, re.MULTILINE)) > 20
    assert_no_complaint(output)
    assert_no_complaint(dump(sorted(directory.glob("*index")), "--verify-index-only"))


def test_indexes_pass_the_check_of_a_starting_broker(directory: Path) -> None:
    indexes = sorted(directory.glob("*index"))
    output = dump(indexes, "--index-sanity-check")
    assert output.count("passed sanity check") == len(indexes)
    assert_no_complaint(output)


def test_producer_snapshots_are_read(directory: Path) -> None:
    snapshots = sorted(directory.glob("*.snapshot"))
    output = dump(snapshots)
    assert output.count("Dumping") == len(snapshots)
    end = int(snapshots[-1].stem)
    newest = re.findall(
        r"^producerId: (\d) producerEpoch: 1 .*firstSequence: (\d+) lastSequence: (\d+) lastOffset: (\d+)",
        output[output.index(snapshots[-1].name) :],
        re.MULTILINE,
    )
    assert {producer_id for producer_id, *_ in newest} == {"0", "1", "2"}
    for _, first_sequence, last_sequence, last_offset in newest:
        assert int(last_sequence) - int(first_sequence) == RECORDS_PER_BATCH - 1
        assert end - 5 * 9 <= int(last_offset) < end
    # Of several entries of a producer Kafka takes the last.
    for last_offset in {producer_id: last_offset for producer_id, *_, last_offset in newest}.values():
        assert end - 9 <= int(last_offset)
    assert_no_complaint(output)


def test_committed_offsets_are_read_with_their_topic_ids(tmp_path: Path) -> None:
    log = Log.open(environment(), str(tmp_path / "__consumer_offsets-0"), CONFIG, clean=True)
    topic_id = bytes(range(16))
    changes: list[Change] = [
        OffsetCommitted("readers", "orders", 0, 77, 3, "note", NOW, topic_id=topic_id),
        OffsetCommitted("readers", "orders", 1, 78, 3, "", NOW, NOW + 1_000, topic_id),
        OffsetRemoved("readers", "orders", 1),
    ]
    batch = encode_batch([(NOW, *encode(change), ()) for change in changes])
    log.append(batch, decode_header(batch), 0)
    log.close()
    output = dump(sorted((tmp_path / "__consumer_offsets-0").glob("*.log")), "--offsets-decoder")
    assert '"offset":77,"leaderEpoch":3,"metadata":"note"' in output
    assert '"offset":78' in output
    # As Kafka prints ids: URL-safe Base64.
    assert output.count('"topicId":"AAECAwQFBgcICQoLDA0ODw"') == 2, output


def with_transactions(directory: Path) -> Log:
    """Three producers whose transactions overlap, over several segments; every third is aborted, two stay open."""
    log = Log.open(environment(), str(directory), CONFIG, clean=True)
    for number in range(1, 1198):
        producer_id, sequence = number % 3, number // 3
        if sequence % 4 == 3:
            marker = Marker(is_commit=sequence % 12 != 3, coordinator_epoch=6)
            batch = encode_marker(marker, producer_id, 2, NOW)
        else:
            batch = encode_batch(
                [(NOW, b"k", b"v" * 50, ())],
                producer_id=producer_id,
                producer_epoch=2,
                base_sequence=sequence - sequence // 4,
                transactional=True,
            )
        log.append(batch, decode_header(batch), 0)
    return log


@pytest.mark.parametrize("is_killed", [False, True])
def test_transactions_are_read(tmp_path: Path, is_killed: bool) -> None:
    directory = tmp_path / "topic-0"
    log = with_transactions(directory)
    opened = log.producers.open_transactions()
    aborted = log.aborted_transactions(0, log.log_end_offset)
    assert len(aborted) == 100 and opened
    if is_killed:
        log = Log.open(environment(), str(directory), CONFIG, clean=False)
    log.close()
    indexes = sorted(directory.glob("*.txnindex"))
    assert len(indexes) > 2
    output = dump(indexes)
    entries = re.findall(
        r"^version: 0 producerId: (\d) firstOffset: (\d+) lastOffset: (\d+) lastStableOffset: (\d+)$",
        output,
        re.MULTILINE,
    )
    assert sorted(tuple(map(int, entry)) for entry in entries) == sorted(map(tuple, aborted))
    assert_no_complaint(output)
    output = dump(sorted(directory.glob("*.snapshot"))[-1:])
    producers = re.findall(
        r"^producerId: (\d) producerEpoch: 2 coordinatorEpoch: 6 currentTxnFirstOffset: (\S+) ",
        output,
        re.MULTILINE,
    )
    assert {int(producer_id) for producer_id, _ in producers} == {0, 1, 2}, output
    assert {int(producer_id): first_offset for producer_id, first_offset in producers} == {
        0: "OptionalLong.empty",
        1: f"OptionalLong[{opened[1]}]",
        2: f"OptionalLong[{opened[2]}]",
    }
    output = dump(sorted(directory.glob("*.log")), "--deep-iteration")
    assert output.count("endTxnMarker: ABORT coordinatorEpoch: 6") == 100
    assert_no_complaint(output)
