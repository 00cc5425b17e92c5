"""One coordinator and the partition of an internal topic that it is stored in.

This is the shell that every kind of coordinator shares. A core decides; the shell appends the decision's changes to
the partition and sends the responses once they are committed, in the order of the decisions. A decision without
changes waits behind one with changes, because its response may show what that one decided.

A decision with a ``producer`` is part of that producer's transaction and is appended as a transactional batch. The
marker that ends the transaction (``write_marker``) is a decision like the others, except that a control batch is
appended for it. A replay meets both in the order of the log.

What differs between the kinds is in a ``CoordinatorKind``: the core, and how its changes become records. The shell
knows neither requests nor the core's state.

The topics are compacted: of the records with the same key only the last is sure to be met by a replay, and of a
deleted key none. So a core's state must follow from the last change of every key (decision 0027).
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic

from penstock.broker.clocks.clock_watch import ClockWatch
from penstock.broker.coordination.coordinator_kind import CoordinatorKind, Core
from penstock.broker.logs import Logger
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.partition.produced_batch import Appended
from penstock.decision import Decision
from penstock.environment import Environment, Timer
from penstock.metadata.image import Image
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.topics import CreatableTopic
from penstock.protocol.records import (
    Marker,
    RecordFields,
    batches,
    decode_marker,
    decode_records,
    encode_batch,
    encode_marker,
)

READ_BYTES = 1024 * 1024
# Size of one decision. A larger one is refused, as if the disk had no room for it. The largest in ordinary use, the
# generation of ten thousand members, takes a tenth of this.
BATCH_BYTES_MAX = 32 * 1024 * 1024
CHANGES_PER_SLICE = 1_000
# Not lower than any: the epoch of a transaction's coordinator is not checked, only the producer's.
COORDINATOR_EPOCH_MAX = 2**31 - 1
# After the state of deleted topics could not be removed: too few in-sync replicas, or a full disk.
RECONCILE_RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class CoordinatorHost:
    """The broker, as coordinators see it."""

    environment: Environment
    clocks: ClockWatch
    logger: Logger
    partitions: Partitions
    image: Callable[[], Image]
    # Every log was recovered, and the image is current.
    are_logs_ready: Callable[[], bool]
    is_serving: Callable[[], bool]
    # The second argument gets the error code, once this broker knows of the topic.
    create_topic: Callable[[CreatableTopic, Callable[[int], None]], None]


class CoordinatorPartition(Generic[Core]):
    """One coordinator and the partition it is stored in."""

    def __init__(
        self,
        host: CoordinatorHost,
        hosted: HostedPartition,
        kind: CoordinatorKind[Core],
        *,
        on_committed: Callable[[CoordinatorPartition[Core]], None] | None = None,
    ) -> None:
        """``on_committed`` is called when it was loaded, and when a decision was committed."""
        self._host = host
        self._on_committed = on_committed
        self._kind = kind
        self._environment = host.environment
        self.hosted = hosted
        self._epoch = hosted.leader_epoch
        # Used while the log is replayed. Every change in the log was made by an earlier leader, under metadata
        # older than the one that made this broker the leader; so a topic that is not in it is gone for good.
        self._image_at_load: Image | None = host.image()
        self.core = kind.make_core(self._image)
        self._in_transactions = kind.in_transactions(self.core) if kind.in_transactions is not None else None
        # Keys that may hold state of deleted topics.
        self._unreconciled: list[str] = []
        # Decisions that are not committed, in order: the offset to wait for (0: only for the decisions before it),
        # the callback for when it is committed, and the one for when leadership is lost before.
        self._uncommitted: deque[tuple[int, Callable[[], None], Callable[[], None]]] = deque()
        self._timer: Timer | None = None
        self._timer_ms = 0
        self.has_resigned = False
        # The next offset to replay; None once the replay is done.
        self._replayed: int | None = hosted.log.log_start_offset
        # Exclusive. The end of the replay: nothing is appended while the coordinator is loading.
        self._replay_end = hosted.log.log_end_offset

    @property
    def is_loaded(self) -> bool:
        return self._replayed is None

    @property
    def leader_epoch(self) -> int:
        return self._epoch

    def load_some(self) -> bool:
        """Replay a part of the log; True when the replay is complete. Raises OSError."""
        if self._replayed is not None:
            self._replay_some()
            if self._replayed < self._replay_end:
                return False
            self._replayed = self._image_at_load = None
            self.core.loaded(self._environment.clock.now_ms(), self._host.clocks.stamp_ms())
            self._arm()
            self.topics_deleted()
            if self._on_committed is not None:
                self._on_committed(self)
        return True

    def topics_deleted(self) -> None:
        """Remove the state of deleted topics, a slice per turn, and retry until it is done."""
        is_under_way = bool(self._unreconciled)
        self._unreconciled = self.core.all_keys()
        if not is_under_way:
            self._reconcile()

    def _reconcile(self) -> None:
        if self.has_resigned or not self._unreconciled:
            return
        decision = self.core.reconcile(
            self._unreconciled,
            CHANGES_PER_SLICE,
            now_ms=self._environment.clock.now_ms(),
            wall_ms=self._host.clocks.stamp_ms(),
        )
        if decision.changes and not self._execute(decision):
            self._unreconciled = self.core.all_keys()
            self._environment.spawn.later(RECONCILE_RETRY_MS, self._reconcile)
        elif self._unreconciled:
            self._environment.spawn.soon(self._reconcile)

    def _image(self) -> Image:
        return self._image_at_load or self._host.image()

    def resign(self) -> None:
        """Another broker leads the partition, or may: send all waiting clients there."""
        self.has_resigned = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for call, response in self.core.resign().replies:
            call.answer(response)

    def handle(
        self,
        decide: Callable[[Core, int, int], Decision[Any]],
        answer: Callable[[Any], None],
        unavailable: Any,
        refused: Callable[[ErrorCode], Any] | None = None,
    ) -> None:
        """Have the core decide about a request, given the monotonic and the wall time.

        ``answer`` gets the response once it is committed, or ``unavailable`` when it cannot be. If the decision has
        no response, it comes later as another decision's reply.

        ``refused`` is needed if the decision may have a ``producer``: it makes the response for a producer that is
        fenced (``producer_error``).
        """
        if self.has_resigned:
            # The request waited for something else meanwhile. This broker may lead the partition again, with
            # another coordinator, which would not know of what this one appends.
            answer(unavailable)
            return
        now_ms, wall_ms = self._environment.clock.now_ms(), self._host.clocks.stamp_ms()
        decision = decide(self.core, now_ms, wall_ms)
        if decision.producer is not None and decision.changes:
            assert refused is not None
            error = self.producer_error(*decision.producer)
            if error is not ErrorCode.NONE:
                self._give_up(decision, answer, refused(error))
                return
        self._execute(decision, answer, unavailable)

    def producer_error(self, producer_id: int, producer_epoch: int) -> ErrorCode:
        """INVALID_PRODUCER_EPOCH if a newer producer has the id: what this one sends comes too late.

        INVALID_TXN_STATE if a transaction of an earlier epoch is open: its marker must come first.
        """
        producers = self.hosted.log.producers
        error = producers.check_marker(producer_id, producer_epoch, COORDINATOR_EPOCH_MAX)
        state = producers.get(producer_id)
        if (
            error is ErrorCode.NONE
            and state is not None
            and state.epoch != producer_epoch
            and producers.open_transaction(producer_id) is not None
        ):
            return ErrorCode.INVALID_TXN_STATE
        return error

    def write_marker(
        self,
        marker: Marker,
        producer_id: int,
        producer_epoch: int,
        answer: Callable[[ErrorCode], None],
        *,
        is_v2: bool = False,
    ) -> bool:
        """End a producer's transaction in this partition; ``is_v2`` as in ``ProducerStates.check_marker``.

        ``answer`` gets NONE once that is committed and the core knows; or TRANSACTION_COORDINATOR_FENCED or
        INVALID_PRODUCER_EPOCH if it must not be written; or an error after which the sender tries again.
        Returns whether it was appended.
        """
        if self.has_resigned or self._in_transactions is None:
            answer(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            return False
        error = self.hosted.log.producers.check_marker(
            producer_id, producer_epoch, marker.coordinator_epoch, is_v2=is_v2
        )
        if error is not ErrorCode.NONE:
            answer(error)
            return False
        if not self.hosted.has_enough_replicas:
            answer(ErrorCode.NOT_ENOUGH_REPLICAS)
            return False
        decision = self._in_transactions.end_transaction(producer_id, marker.is_commit)
        decision.response = ErrorCode.NONE
        batch = encode_marker(marker, producer_id, producer_epoch, self._host.clocks.stamp_ms())
        try:
            appended = self.hosted.append_internal(batch)
        except OSError:
            self._give_up(decision, answer, ErrorCode.KAFKA_STORAGE_ERROR)
            return False
        self._when_committed(decision, appended, answer, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        return True

    def _execute(
        self,
        decision: Decision[Any],
        answer: Callable[[Any], None] | None = None,
        unavailable: Any = None,
    ) -> bool:
        """Append a decision, and send its replies once it is committed; ``answer`` gets the response, if any.

        If the append fails, the decision is undone, ``answer`` gets ``unavailable``, and this returns False.
        """
        appended: Appended | None = None
        if decision.changes:
            try:
                appended = self._append(decision.changes, decision.producer)
            except OSError:
                self._give_up(decision, answer, unavailable)
                return False
        self._when_committed(decision, appended, answer, unavailable)
        return True

    def _when_committed(
        self,
        decision: Decision[Any],
        appended: Appended | None,
        answer: Callable[[Any], None] | None,
        unavailable: Any,
    ) -> None:
        """When a decision (if it was appended) and all before it are committed, tell the core and respond."""
        self._arm()

        def committed() -> None:
            self.core.committed(decision)
            if self._on_committed is not None:
                self._on_committed(self)
            for call, response in decision.replies:
                call.answer(response)
            if answer is not None and decision.response is not None:
                answer(decision.response)

        def lost() -> None:
            # The next leader may or may not commit it: the client has to ask there.
            _refuse_replies(decision, ErrorCode.NOT_COORDINATOR)
            if answer is not None and decision.response is not None:
                answer(unavailable)

        if appended is None and not self._uncommitted:
            committed()
            return
        offset = 0 if appended is None else appended.end_offset
        self._uncommitted.append((offset, committed, lost))
        if appended is not None:
            self.hosted.when_acknowledged(appended, lambda error: self._settled(offset, error), by_all=True)

    def _append(self, changes: Iterable[Any], producer: tuple[int, int] | None) -> Appended:
        """Raises OSError, also when there are fewer in-sync replicas than min.insync.replicas."""
        if not self.hosted.has_enough_replicas:
            raise OSError(errno.EAGAIN, "too few replicas in sync")
        records = self._encoded(changes)
        batch = encode_batch(records) if producer is None else _transactional(records, producer)
        if len(batch) > BATCH_BYTES_MAX:
            raise OSError(errno.EFBIG, "a change too large to be stored")
        return self.hosted.append_internal(batch)

    def _encoded(self, changes: Iterable[Any]) -> Iterator[RecordFields]:
        wall_ms = self._host.clocks.stamp_ms()
        for change in changes:
            key, value = self._kind.encode(change)
            yield wall_ms, key, value, ()

    def _settled(self, offset: int, error: ErrorCode) -> None:
        waiting = self._uncommitted
        while waiting and waiting[0][0] <= offset:
            _, committed, lost = waiting.popleft()
            if error:
                lost()
            else:
                committed()

    def _give_up(
        self, decision: Decision[Any], answer: Callable[[Any], None] | None, unavailable: Any
    ) -> None:
        """The append failed: undo the decision, and answer its clients with an error."""
        self.core.failed(decision, self._environment.clock.now_ms(), self._host.clocks.stamp_ms())
        _refuse_replies(decision, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        self._arm()
        if answer is not None and decision.response is not None:
            answer(unavailable)

    def _arm(self) -> None:
        deadline_ms = self.core.next_deadline_ms
        if self._timer is not None:
            if deadline_ms == self._timer_ms:
                return
            self._timer.cancel()
            self._timer = None
        if deadline_ms is not None:
            self._timer_ms = deadline_ms
            delay_ms = max(0, deadline_ms - self._environment.clock.now_ms())
            self._timer = self._environment.spawn.later(delay_ms, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self.hosted.is_deleted and not self.has_resigned:
            now_ms, expiry_ms = self._environment.clock.now_ms(), self._host.clocks.expiry_ms()
            wall_ms = self._host.clocks.stamp_ms() if expiry_ms is None else expiry_ms
            self._execute(self.core.tick(now_ms, wall_ms, may_expire=expiry_ms is not None))

    def _replay_some(self) -> None:
        offset = self._replayed
        assert offset is not None
        if offset >= self._replay_end:
            return
        # Read as clients do: damage found here is reported, and another replica becomes the leader.
        found = self.hosted.read(offset, READ_BYTES, ceiling=self._replay_end, at_least_one=True)
        assert found is not None, "the log ends before its end offset"
        data = found.file.read_at(found.position, found.size)
        in_transactions = self._in_transactions
        for position, header in batches(data):
            offset = header.next_offset
            if header.is_control:
                marker = decode_marker(data, position)
                if marker is not None and in_transactions is not None:
                    in_transactions.transaction_ended(header.producer_id, marker.is_commit)
                continue
            # Not compressed: we wrote it, so the records are never larger than the batch.
            for record in decode_records(data, position, bytes_max=header.size):
                change = self._kind.decode(record.key or b"", record.value)
                if change is None:
                    continue
                if header.is_transactional and in_transactions is not None:
                    in_transactions.apply_in_transaction(change, header.producer_id, header.producer_epoch)
                else:
                    self.core.apply(change)
        self._replayed = offset


def _refuse_replies(decision: Decision[Any], error: ErrorCode) -> None:
    for call, response in decision.replies:
        response.error_code = error
        call.answer(response)


def _transactional(records: Iterable[RecordFields], producer: tuple[int, int]) -> bytearray:
    """A batch of a producer's transaction. The sequence is that of Kafka's coordinators, and checked by nobody."""
    producer_id, producer_epoch = producer
    return encode_batch(
        records, producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=0, transactional=True
    )
