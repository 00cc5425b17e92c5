"""Idempotence: which batch is new, which is a retry, and which does not belong."""

from __future__ import annotations

import pytest

from penstock.log import producers
from penstock.log.config import LogConfig
from penstock.log.producers import LOADED_MS_MIN, TRY_AGAIN, CorruptSnapshot, Duplicate, ProducerStates
from penstock.log.refused_batches import (
    ELSEWHERE_REMEMBERED,
    NONE_REFUSED,
    PRODUCERS_REMEMBERED,
    REMEMBERED_MS,
    RefusedBatches,
    RefusedElsewhere,
)
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import SEQUENCE_MAX, BatchHeader, decode_header, encode_batch
from tests.log.making import DIRECTORY, NOW, append, made_batch, made_files, names, opened
from tests.support_files import FakeFiles

EXPIRATION_MS = 1000
DAY = 86_400_000


def made_header(sequence: int, *, count: int = 1, epoch: int = 0, producer_id: int = 7) -> BatchHeader:
    return made_batch(*[NOW] * count, producer=(producer_id, epoch, sequence))[1]


class Writer:
    """Appends what passes, as a log would."""

    def __init__(self) -> None:
        self.states = ProducerStates(EXPIRATION_MS)
        self.offset = 100
        self.wall_ms = NOW

    def write(
        self, sequence: int, *, count: int = 1, epoch: int = 0, producer_id: int = 7
    ) -> int | Duplicate | ErrorCode:
        header = made_header(sequence, count=count, epoch=epoch, producer_id=producer_id)
        verdict = self.states.check(header, self.wall_ms)
        if verdict is not None:
            return verdict
        self.states.update(header, self.offset, self.wall_ms)
        self.offset += count
        self.states.check_invariants(self.offset)
        return self.offset - count


@pytest.fixture
def writer() -> Writer:
    return Writer()


def test_batches_in_sequence_are_appended(writer: Writer) -> None:
    assert [writer.write(0, count=3), writer.write(3), writer.write(4, count=2)] == [100, 103, 104]


def test_a_retry_is_answered_with_its_first_offset(writer: Writer) -> None:
    for sequence in range(5):
        writer.write(sequence)
    for sequence in range(5):
        assert writer.write(sequence) == Duplicate(100 + sequence, NOW)
    assert writer.write(5) == 105


def test_only_the_last_five_batches_are_remembered(writer: Writer) -> None:
    for sequence in range(6):
        writer.write(sequence)
    assert writer.write(0) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert writer.write(1) == Duplicate(101, NOW)


def test_a_retry_with_other_records_is_no_retry(writer: Writer) -> None:
    writer.write(0, count=3)
    writer.write(3)
    assert writer.write(0, count=2) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert writer.write(1, count=2) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_missing_batch_is_noticed(writer: Writer) -> None:
    writer.write(0)
    assert writer.write(2) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert writer.write(1) == 101


def test_sequences_wrap(writer: Writer) -> None:
    writer.write(SEQUENCE_MAX - 1)
    assert writer.write(SEQUENCE_MAX) == 101
    assert writer.write(0) == 102
    assert writer.write(SEQUENCE_MAX) == Duplicate(101, NOW)


def test_sequences_wrap_inside_a_batch(writer: Writer) -> None:
    writer.write(SEQUENCE_MAX - 1, count=4)
    assert writer.write(SEQUENCE_MAX - 1, count=4) == Duplicate(100, NOW)
    assert writer.write(2) == 104


def test_an_older_epoch_is_fenced(writer: Writer) -> None:
    writer.write(0, epoch=3)
    assert writer.write(1, epoch=2) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert writer.write(0, epoch=2) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_a_new_epoch_begins_at_sequence_zero(writer: Writer) -> None:
    writer.write(0)
    writer.write(1)
    assert writer.write(2, epoch=1) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert writer.write(0, epoch=1) == 102
    assert writer.write(0, epoch=1) == Duplicate(102, NOW)
    assert writer.write(1, epoch=0) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_producers_do_not_see_each_other(writer: Writer) -> None:
    assert writer.write(0, producer_id=1) == 100
    assert writer.write(0, producer_id=2) == 101
    assert writer.write(1, producer_id=1) == 102


def test_an_unknown_producer_may_go_on_at_any_sequence(writer: Writer) -> None:
    assert writer.write(17) == 100


def test_a_batch_that_overtook_the_first_of_a_log_is_to_come_again_behind_it(writer: Writer) -> None:
    writer.states.log_was_empty = True
    assert writer.write(17) is TRY_AGAIN
    assert writer.write(0, count=17) == 100
    writer.states.log_was_empty = False
    assert writer.write(17) == 117


def test_a_producer_that_goes_on_in_a_topic_made_again_is_taken_when_it_insists() -> None:
    states, refused_batches = ProducerStates(EXPIRATION_MS), RefusedBatches()
    states.log_was_empty = True
    for sequence in (200, 210):
        verdict = states.check(made_header(sequence), NOW, refused_batches)
        assert verdict is TRY_AGAIN
        refused_batches.add(made_header(sequence), verdict, NOW)
    assert states.check(made_header(210), NOW, refused_batches) is TRY_AGAIN, (
        "the one before it was refused too"
    )
    assert states.check(made_header(200), NOW, refused_batches) is None
    assert states.check(made_header(200, epoch=1), NOW, refused_batches) is TRY_AGAIN, (
        "another epoch is another matter"
    )
    assert states.check(made_header(200), NOW + 3_600_000, refused_batches) is TRY_AGAIN, (
        "not the same attempt"
    )


def test_a_producer_expires_by_the_clock(writer: Writer) -> None:
    writer.write(0)
    writer.wall_ms += EXPIRATION_MS
    assert writer.write(5) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert writer.states.expire(writer.wall_ms) == 0
    writer.wall_ms += 1
    assert writer.write(5) == 101, "expired, though nobody has swept yet"
    writer.write(0, producer_id=8)
    writer.wall_ms += EXPIRATION_MS + 1
    assert writer.states.expire(writer.wall_ms) == 2
    assert len(writer.states) == 0


def test_a_batch_without_a_sequence_leaves_the_state_alone(writer: Writer) -> None:
    writer.write(0)
    marker = made_header(0)._replace(base_sequence=-1)
    writer.states.update(marker, writer.offset, NOW)
    assert writer.write(1) == 101


def test_a_new_state_after_expiry_replaces_the_old_one(writer: Writer) -> None:
    writer.write(0, epoch=2)
    writer.wall_ms += EXPIRATION_MS + 1
    assert writer.write(9, epoch=2) == 101
    assert writer.write(0, epoch=2) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert writer.write(10, epoch=2) == 102


# Snapshots


def loaded(snapshot: bytes, wall_ms: int = NOW) -> ProducerStates:
    states = ProducerStates(EXPIRATION_MS)
    states.load(snapshot, wall_ms)
    return states


def test_a_snapshot_remembers_the_batches_of_each_producer(writer: Writer) -> None:
    writer.write(0, count=2)
    writer.write(2, count=3)
    writer.write(SEQUENCE_MAX, count=2, producer_id=8, epoch=4)
    again = loaded(writer.states.encode())
    assert len(again) == 2
    assert again.check(made_header(0, count=2), NOW) == Duplicate(100, NOW)
    assert again.check(made_header(2, count=3), NOW) == Duplicate(102, NOW)
    assert again.check(made_header(5), NOW) is None
    assert again.check(made_header(SEQUENCE_MAX, count=2, producer_id=8, epoch=4), NOW) == Duplicate(105, NOW)
    assert again.check(made_header(1, producer_id=8, epoch=4), NOW) is None


def test_no_producer_is_forgotten_by_the_clock_of_a_start(writer: Writer) -> None:
    writer.write(0)
    for wall_ms in (NOW - 10 * DAY, NOW, NOW + EXPIRATION_MS + 1, NOW + 10 * DAY):
        states = loaded(writer.states.encode(), wall_ms)
        assert states.check(made_header(0), wall_ms) == Duplicate(100, NOW)
        assert states.expire(wall_ms + EXPIRATION_MS + 1) == 1, "neither is it remembered for ever"


def test_a_producer_that_seems_to_have_expired_is_remembered_for_an_hour_after_a_start(
    writer: Writer,
) -> None:
    writer.write(0)
    states = ProducerStates(DAY)
    states.load(writer.states.encode(), NOW + 10 * DAY)
    assert states.expire(NOW + 10 * DAY + LOADED_MS_MIN) == 0
    assert states.expire(NOW + 10 * DAY + LOADED_MS_MIN + 1) == 1


def test_every_damaged_byte_of_a_snapshot_is_noticed(writer: Writer) -> None:
    writer.write(0)
    snapshot = bytearray(writer.states.encode())
    for position in range(len(snapshot)):
        snapshot[position] ^= 0x10
        with pytest.raises(CorruptSnapshot):
            loaded(bytes(snapshot))
        snapshot[position] ^= 0x10
    for size in range(len(snapshot)):
        with pytest.raises(CorruptSnapshot):
            loaded(bytes(snapshot[:size]))


def test_an_empty_snapshot_is_a_snapshot() -> None:
    assert len(loaded(ProducerStates(EXPIRATION_MS).encode())) == 0


# Together with the log


@pytest.fixture
def files() -> FakeFiles:
    return made_files()


def retried(files: FakeFiles, sequence: int, *, clean: bool) -> Duplicate | ErrorCode | None:
    return opened(files, clean=clean).producers.check(made_header(sequence), files.clock.wall)


@pytest.mark.parametrize("clean", [True, False])
def test_all_five_batches_survive_a_restart(files: FakeFiles, clean: bool) -> None:
    log = opened(files)
    for sequence in range(8):
        append(log, producer=(7, 0, sequence))
        append(log)
    if clean:
        log.close()
    for sequence in range(3, 8):
        assert retried(files, sequence, clean=clean) == Duplicate(sequence * 2, NOW)
    assert retried(files, 8, clean=clean) is None
    assert retried(files, 2, clean=clean) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_all_five_batches_survive_a_clean_restart_however_large_they_are(files: FakeFiles) -> None:
    log = opened(files)
    for sequence in range(5):
        append(log, size=300_000, producer=(7, 0, sequence))
        append(log, size=900_000)
    log.close()
    for sequence in range(5):
        batch = made_batch(size=300_000, producer=(7, 0, sequence))[1]
        verdict = opened(files).producers.check(batch, files.clock.wall)
        assert isinstance(verdict, Duplicate) and verdict.base_offset == 2 * sequence


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_without_its_snapshots_the_state_is_made_from_the_batches(files: FakeFiles, damage: str) -> None:
    log = opened(files, LogConfig(segment_bytes=200))
    for sequence in range(20):
        append(log, producer=(7, 0, sequence))
    log.close()
    for name in names(files, ".snapshot"):
        path = f"{DIRECTORY}/{name}"
        if damage == "gone":
            files.remove(path)
        else:
            files.replace(path, files.read(path)[:-1])
    assert retried(files, 16, clean=True) == Duplicate(16, NOW)
    assert retried(files, 20, clean=True) is None
    assert retried(files, 21, clean=True) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


@pytest.mark.parametrize("step_ms", [10 * DAY, -10 * DAY])
@pytest.mark.parametrize("restart", ["none", "clean", "killed"])
def test_a_retry_is_known_whatever_the_clock_is_set_to(files: FakeFiles, step_ms: int, restart: str) -> None:
    log = opened(files)
    append(log, producer=(7, 0, 0))
    files.clock.wall += step_ms
    if restart != "none":
        if restart == "clean":
            log.close()
        log = opened(files, clean=restart == "clean")
    log.expire(files.clock.wall, 0)
    assert log.producers.check(made_header(0), log.steady_ms()) == Duplicate(0, NOW)


def test_snapshots_are_written_at_each_roll_and_few_are_kept(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_bytes=200))
    for sequence in range(20):
        append(log, producer=(7, 0, sequence))
    bases = [name.removesuffix(".log") for name in names(files, ".log")]
    assert [name.removesuffix(".snapshot") for name in names(files, ".snapshot")] == bases[-3:]
    log.close()
    assert names(files, ".snapshot")[-1] == f"{20:020d}.snapshot"
    assert len(names(files, ".snapshot")) == 3


def test_a_producer_outlives_its_deleted_records(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_bytes=200))
    for sequence in range(6):
        append(log, producer=(7, 0, sequence))
    append(log)
    append(log)
    log.delete_before(7)
    assert log.producers.check(made_header(6), files.clock.wall) is None
    assert log.producers.check(made_header(9), files.clock.wall) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    log.close()
    assert retried(files, 5, clean=True) == Duplicate(5, NOW)


def test_a_log_emptied_by_deletion_is_not_one_that_was_never_written(files: FakeFiles) -> None:
    log = opened(files)
    assert log.producers.check(made_header(3), NOW) is TRY_AGAIN
    append(log)
    log.delete_before(1)
    assert log.producers.check(made_header(3), NOW) is None
    log.close()
    assert retried(files, 3, clean=True) is None


def test_made_up_producers_do_not_pile_up_and_the_busy_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 100)
    states = ProducerStates(10**9)

    def write(producer_id: int, sequence: int, at_ms: int) -> None:
        batch = encode_batch(
            [(at_ms, None, b"v", ())], producer_id=producer_id, producer_epoch=0, base_sequence=sequence
        )
        header = decode_header(batch)
        assert states.check(header, at_ms) is None
        states.update(header, at_ms, at_ms)

    for number in range(1_000):
        write(7, number, 2 * number)
        write(1_000 + number, 0, 2 * number + 1)
    assert len(states) <= 100
    assert states.get(7) is not None
    assert states.get(1_999) is not None


# Epochs outlive their producers


def test_an_epoch_that_was_replaced_stays_so_when_its_producer_has_expired(writer: Writer) -> None:
    writer.write(0, epoch=0)
    writer.write(0, epoch=1)
    writer.wall_ms += EXPIRATION_MS + 1
    assert writer.write(1, epoch=0) is ErrorCode.INVALID_PRODUCER_EPOCH, "nobody has swept yet"
    assert writer.states.expire(writer.wall_ms) == 1
    for states in (writer.states, loaded(writer.states.encode())):
        assert len(states) == 0
        for sequence in (0, 1):
            verdict = states.check(made_header(sequence, epoch=0), writer.wall_ms)
            assert verdict is ErrorCode.INVALID_PRODUCER_EPOCH
        assert states.check(made_header(5, epoch=1), writer.wall_ms) is None, "its producer may go on"
        assert states.check(made_header(0, epoch=2), writer.wall_ms) is None
    assert writer.write(5, epoch=1) == 102
    assert writer.write(0, epoch=0) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_an_epoch_that_was_replaced_stays_so_when_its_producer_made_room(
    monkeypatch: pytest.MonkeyPatch, writer: Writer
) -> None:
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 10)
    writer.write(0, epoch=1)
    for producer_id in range(100, 150):
        writer.wall_ms += 1
        writer.write(0, producer_id=producer_id)
    assert writer.states.get(7) is None
    assert writer.write(1, epoch=0) is ErrorCode.INVALID_PRODUCER_EPOCH
    # Those of the first epoch leave nothing: there is none before it.
    assert len(writer.states.encode()) == len(ProducerStates(1).encode()) + 46 * (1 + len(writer.states))


def test_epochs_of_forgotten_producers_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch, writer: Writer
) -> None:
    monkeypatch.setattr(producers, "FENCES_MAX", 3)
    for producer_id in range(100, 105):
        writer.write(0, producer_id=producer_id, epoch=1)
    writer.wall_ms += EXPIRATION_MS + 1
    assert writer.states.expire(writer.wall_ms) == 5
    remembered = [
        producer_id
        for producer_id in range(100, 105)
        if writer.states.check(made_header(0, producer_id=producer_id), writer.wall_ms) is not None
    ]
    assert remembered == [102, 103, 104]


def test_what_was_sent_behind_a_refused_batch_is_refused_with_the_same_error() -> None:
    """Not as out of order, after which librdkafka begins a new sequence and stores twice what it had stored."""
    states, refused_batches = ProducerStates(EXPIRATION_MS), RefusedBatches()
    for sequence in range(3):
        states.update(made_header(sequence), sequence, NOW)
    refused_batches.add(made_header(3), ErrorCode.KAFKA_STORAGE_ERROR, NOW)
    assert states.check(made_header(5), NOW, refused_batches) == ErrorCode.KAFKA_STORAGE_ERROR
    assert states.check(made_header(3), NOW, refused_batches) is None
    states.update(made_header(3), 3, NOW)
    assert states.check(made_header(5), NOW, refused_batches) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert states.check(made_header(4), NOW, refused_batches) is None


def test_a_first_batch_that_was_refused_is_not_overtaken() -> None:
    states, refused_batches = ProducerStates(EXPIRATION_MS), RefusedBatches()
    refused_batches.add(made_header(0), ErrorCode.NOT_ENOUGH_REPLICAS, NOW)
    assert states.check(made_header(1), NOW, refused_batches) == ErrorCode.NOT_ENOUGH_REPLICAS
    assert states.check(made_header(0), NOW, refused_batches) is None
    assert states.check(made_header(0, epoch=1), NOW, refused_batches) is None


def test_a_refused_batch_that_another_leader_has_stored_stands_in_nobodys_way() -> None:
    states, refused_batches = ProducerStates(EXPIRATION_MS), RefusedBatches()
    refused_batches.add(made_header(3), ErrorCode.NOT_LEADER_OR_FOLLOWER, NOW)
    for sequence in range(6):
        states.update(made_header(sequence), sequence, NOW)
    assert states.check(made_header(6), NOW, refused_batches) is None
    assert states.check(made_header(7), NOW, refused_batches) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    refused_batches.add(made_header(6), ErrorCode.KAFKA_STORAGE_ERROR, NOW)
    assert states.check(made_header(7), NOW, refused_batches) == ErrorCode.KAFKA_STORAGE_ERROR


def test_a_refusal_is_forgotten_when_nothing_of_then_can_be_under_way() -> None:
    """Or a producer that is forgotten too, and never sends that batch again, could not go on."""
    states, refused_batches = ProducerStates(EXPIRATION_MS), RefusedBatches()
    refused_batches.add(made_header(3), ErrorCode.NOT_LEADER_OR_FOLLOWER, NOW)
    later = NOW + REMEMBERED_MS
    assert states.check(made_header(9), later, refused_batches) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert states.check(made_header(9), later + 1, refused_batches) is None


def test_a_refusal_is_forgotten_though_the_clock_was_set_back() -> None:
    states, refused_batches = ProducerStates(EXPIRATION_MS), RefusedBatches()
    refused_batches.add(made_header(3), ErrorCode.NOT_LEADER_OR_FOLLOWER, NOW)
    assert states.check(made_header(9), NOW - 1, refused_batches) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert states.check(made_header(9), NOW - 3_600_000, refused_batches) is None


@pytest.mark.parametrize("refused", [SEQUENCE_MAX - 1, SEQUENCE_MAX, 0, 1])
def test_a_refused_batch_is_not_overtaken_where_sequences_begin_again(refused: int) -> None:
    states, refused_batches = ProducerStates(EXPIRATION_MS), RefusedBatches()
    states.update(made_header((refused - 1) & SEQUENCE_MAX), 0, NOW)
    refused_batches.add(made_header(refused), ErrorCode.NOT_ENOUGH_REPLICAS, NOW)
    for ahead in (1, 2, 3):
        behind_it = made_header((refused + ahead) & SEQUENCE_MAX)
        assert states.check(behind_it, NOW, refused_batches) == ErrorCode.NOT_ENOUGH_REPLICAS
    before_it = made_header((refused - 9) & SEQUENCE_MAX)
    assert states.check(before_it, NOW, refused_batches) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    states.update(made_header(refused), 1, NOW)
    assert states.check(behind_it, NOW, refused_batches) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_producers_that_were_refused_are_remembered_up_to_a_limit() -> None:
    states, refused_batches = ProducerStates(EXPIRATION_MS), RefusedBatches()
    for producer_id in range(PRODUCERS_REMEMBERED + 1):
        refused_batches.add(made_header(0, producer_id=producer_id), ErrorCode.NOT_ENOUGH_REPLICAS, NOW)
    assert states.check(made_header(1, producer_id=0), NOW, refused_batches) is None
    assert states.check(made_header(1, producer_id=1), NOW, refused_batches) == ErrorCode.NOT_ENOUGH_REPLICAS


def test_what_was_refused_before_a_partition_was_here_is_not_overtaken_in_it() -> None:
    """Clients name a topic by its name or its id."""
    topic_id, elsewhere = bytes(15) + b"t", RefusedElsewhere()
    elsewhere.add("t", 0, made_header(0), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, NOW)
    elsewhere.add(topic_id, 1, made_header(0), ErrorCode.UNKNOWN_TOPIC_ID, NOW)
    states = ProducerStates(EXPIRATION_MS)
    by_name, by_id = elsewhere.of("t", topic_id, 0), elsewhere.of("t", topic_id, 1)
    assert states.check(made_header(1), NOW, by_name) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert states.check(made_header(1), NOW, by_id) == ErrorCode.UNKNOWN_TOPIC_ID
    assert states.check(made_header(0), NOW, by_id) is None
    assert states.check(made_header(1), NOW + REMEMBERED_MS + 1, by_id) is None
    assert elsewhere.of("t", topic_id, 2) is NONE_REFUSED
    assert elsewhere.of("u", bytes(15) + b"u", 0) is NONE_REFUSED


def test_only_so_much_is_remembered_of_what_was_refused_elsewhere() -> None:
    elsewhere = RefusedElsewhere()
    for number in range(ELSEWHERE_REMEMBERED + 1):
        elsewhere.add(f"t{number}", 0, made_header(0), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, NOW)
    assert elsewhere.of("t0", bytes(16), 0) is NONE_REFUSED
    assert elsewhere.of("t1", bytes(16), 0) is not NONE_REFUSED
