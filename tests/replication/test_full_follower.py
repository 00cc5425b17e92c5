"""What a follower without room asks its leader, and what it makes of the answers."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchRequest, PartitionData
from penstock.protocol.schema import decode, encode
from penstock.replication.events import Append, Effect, StartOver, Truncate
from penstock.replication.full_follower import Position, effects, question
from tests.replication.making import data, key, named, response

# Ends at 100, of which 90 are known to be committed.
POSITION = Position(5, 100, 4, 90)


def told(*partitions: PartitionData) -> list[Effect]:
    return list(effects({key(0): POSITION}, response(0, *partitions)))


def test_it_asks_as_a_consumer_that_has_no_session_and_wants_no_records() -> None:
    """What a follower asks for, it is taken to have, and would be let in again."""
    asked = question({key(0): POSITION, key(3): POSITION})
    request = decode(FetchRequest, 17, encode(asked, 17))
    assert named(request) == [0, 3]
    assert request.replica_state is None and request.replica_id == -1
    assert (request.session_id, request.session_epoch) == (0, -1)
    assert (request.max_bytes, request.max_wait_ms, request.rack_id) == (0, 0, "")
    (topic,) = request.topics
    assert topic.topic_id == key(0)[0]
    partition = topic.partitions[0]
    assert partition.current_leader_epoch == 5
    assert (partition.fetch_offset, partition.last_fetched_epoch) == (100, 4)


def test_it_deletes_what_the_leader_has_deleted_and_takes_no_records() -> None:
    assert told(data(0, b"first batch", high_watermark=200, log_start_offset=60)) == [
        Append(key(0), b"", 200, 60)
    ]


def test_it_cuts_what_the_leader_does_not_have() -> None:
    assert told(data(0, diverging=(3, 70), log_start_offset=60)) == [Truncate(key(0), 3, 70)]


@pytest.mark.parametrize("error", [ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE])
def test_it_starts_over_where_the_leader_begins_behind_its_end(error: ErrorCode) -> None:
    assert told(data(0, error=error, log_start_offset=101)) == [StartOver(key(0), 101)]


@pytest.mark.parametrize(("start", "deleted"), [(60, 60), (95, 90)])
def test_behind_the_high_watermark_it_deletes_only_what_it_knows_to_be_committed(
    start: int, deleted: int
) -> None:
    """A consumer there is told that it is out of range, whether or not the logs agree."""
    answer = data(0, error=ErrorCode.OFFSET_OUT_OF_RANGE, high_watermark=96, log_start_offset=start)
    assert told(answer) == [Append(key(0), b"", 90, deleted)]


@pytest.mark.parametrize(
    "error",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.KAFKA_STORAGE_ERROR,
    ],
)
def test_who_cannot_answer_says_nothing_about_the_start(error: ErrorCode) -> None:
    assert told(data(0, error=error, log_start_offset=60)) == []


def test_an_answer_without_a_start_or_about_another_partition_means_nothing() -> None:
    assert told(data(0, log_start_offset=-1), data(1, log_start_offset=60)) == []
