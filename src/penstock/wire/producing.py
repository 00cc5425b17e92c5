"""The idempotent producer without sockets: when a batch is sent, with which sequence, and what its response means.

After every event it sends what it can: to each broker, requests with one batch from every partition that has one
ready, as long as another request is allowed. Each partition's queue (``sequences.py``) decides which batch is
next. A batch that the broker already has (DUPLICATE_SEQUENCE_NUMBER) counts as acknowledged.

Careful with OUT_OF_ORDER_SEQUENCE_NUMBER. For a batch after a refused one it means nothing: the batch is sent
again with the others. For the first of the queue it means that the broker has lost acknowledged records; then no
retry is right, and the producer fails, as it does whenever records might silently be lost, repeated or reordered.

A producer for many callers (``fails_alone``) does not fail because one of them does. A batch that is refused, or
whose time is over, is reported with whether it may be in the log, and what follows it in its partition goes on as
another producer: a sequence that is missing would stop the partition. Batches in doubt never get another identity,
because that might repeat them; they fail.

With an ``Enlistment`` the batches are those of transactions. Then the identity comes from ``transacting.py``, and
a failure ends only the transaction: after its abort ``restart`` lets the producer go on.
"""

from __future__ import annotations

from typing import Any

from penstock.model import NO_TOPIC_ID, TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import (
    InitProducerIdRequest,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from penstock.protocol.messages.transactions import PRODUCE_V2
from penstock.protocol.records import decode_header
from penstock.protocol.schema import VERSION_MAX
from penstock.wire.core import Core, Steps, Task
from penstock.wire.enlistment import Enlistment
from penstock.wire.errors import (
    BUSY,
    COORDINATOR_MOVED,
    LEADER_MOVED,
    BatchTooLarge,
    BrokerRefused,
    OutOfSequence,
    TimedOut,
    TopicReplaced,
    UnknownTopic,
    UnsupportedBroker,
    WireError,
    words_of,
)
from penstock.wire.links import Address, Answer, Ask, Channel, Failed
from penstock.wire.operations import UNKNOWN_TOPIC_MS, ask_anybody, back_off, no_such, refresh
from penstock.wire.sequences import Batch, Identity, OnAck, OnFailure, Queue
from penstock.wire.transactions import refusal

PRODUCE, INIT_PRODUCER_ID = 0, 22
# From this version on Produce identifies topics by id.
PRODUCE_BY_ID = 13
# Total size of the batches in one request; a single batch may be larger.
REQUEST_BYTES = 4 * 1024 * 1024
# A batch may be damaged in transit once. If it happens repeatedly, something else is wrong.
CORRUPT_TRIES = 3
# The field must be positive, and has no meaning without a transactional id.
NO_TRANSACTIONS_MS = 60_000

RETRIED = frozenset(
    (
        *LEADER_MOVED,
        *BUSY,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    )
)
# In transactions these too are retried, at the same leader: it could not ask the coordinator, or the coordinator
# is still ending the previous transaction.
RETRIED_IN_TRANSACTIONS = frozenset((*COORDINATOR_MOVED, ErrorCode.CONCURRENT_TRANSACTIONS))
# After these errors the batch may be in the log nevertheless.
PERHAPS_WRITTEN = frozenset(
    (
        ErrorCode.UNKNOWN_SERVER_ERROR,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    )
)
TOO_LARGE = (ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE)
LOST_SEQUENCE = (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID)
# With these a batch was surely not written. A producer for many callers sends it again with another identity.
RENEWED = (*LOST_SEQUENCE, ErrorCode.INVALID_PRODUCER_EPOCH)


class Producing:
    """A ``Participant`` of the core: after every event it sends what it can."""

    def __init__(
        self,
        core: Core,
        *,
        acks: int,
        in_flight: int,
        enlistment: Enlistment | None = None,
        fails_alone: bool = False,
        deadline_ms: int | None = None,
    ) -> None:
        assert not fails_alone or enlistment is None
        self._core = core
        self._fails_alone = fails_alone
        self._enlistment = enlistment
        # For the acknowledgement of a batch.
        self.deadline_ms = core.deadline_ms if deadline_ms is None else deadline_ms
        self._acks = acks
        self._in_flight_max = in_flight
        # The identity for new partitions.
        self.identity: Identity | None = None
        # Every partition written to, for its sequences; and those with batches now.
        self._queues: dict[TopicPartition, Queue] = {}
        self._busy: dict[TopicPartition, Queue] = {}
        # The id of each topic that has, or may have, records of ours.
        self._written: dict[str, bytes] = {}
        # Since when such a topic's name has another id.
        self._other_since_ms: dict[str, int] = {}
        # Requests in flight, by broker.
        self._requests: dict[Address, int] = {}
        self._identifying: Task[Identity] | None = None
        # Returns the topics that brokers refuse to describe.
        self._locating: Task[dict[str, WireError]] | None = None
        # Topics whose leaders must be looked up, and those being looked up.
        self._stale: dict[str, None] = {}
        self._asked: dict[str, None] = {}
        self.unacknowledged = 0
        self.unacknowledged_bytes = 0
        # Pending callbacks with their offsets: the shell runs them between two events.
        self.acked: list[tuple[OnAck, int]] = []
        # The same for batches that failed alone: with the error, and whether they may be written.
        self.failed: list[tuple[OnFailure, WireError, bool]] = []
        # The first final error. Nothing is sent after it.
        self.error: WireError | None = None
        core.participants.append(self)

    # For callers

    def add(self, at: TopicPartition, data: bytearray, on_ack: OnAck | None, now_ms: int) -> None:
        """Queue a batch, which the producer owns from now on. Raises CorruptBatch or ValueError."""
        if not isinstance(data, bytearray):
            raise TypeError(f"a batch is a bytearray, because its header is filled in; this is {type(data)}")
        header = decode_header(data)
        if header.size != len(data) or header.count != header.last_offset_delta + 1 or header.count < 1:
            raise ValueError(f"{len(data)} bytes for {at} are not exactly one record batch")
        self.add_batch(Batch(at, data, header.count, now_ms + self.deadline_ms, on_ack))

    def add_batch(self, batch: Batch) -> None:
        """Queue a batch that is known to be sound. Its deadline is not before that of the last one."""
        at = batch.at
        queue = self._queues.get(at)
        if queue is None:
            is_transactional = self._enlistment is not None
            queue = self._queues[at] = Queue(at, self.identity, is_transactional=is_transactional)
        self._busy[at] = queue
        queue.batches.append(batch)
        self.unacknowledged += 1
        self.unacknowledged_bytes += len(batch.data)

    def could_send(self, at: TopicPartition) -> bool:
        """Whether another batch would leave at once, as far as is known: there is no use in making it before."""
        queue = self._queues.get(at)
        if queue is not None and len(queue.batches) > queue.in_flight:
            return False
        place = self._core.cluster.leader(at)
        # Without a leader a batch makes the producer look for one.
        return place is None or self._requests.get(place[0], 0) < self._in_flight_max

    @property
    def has_requests(self) -> bool:
        """Whether requests are in flight, perhaps for batches that were given up."""
        return bool(self._requests)

    def restart(self, identity: Identity) -> None:
        """Go on with the next transaction. With another identity the sequences begin again."""
        assert self._enlistment is not None and not self.unacknowledged and not self._requests
        assert self.error is None or identity != self.identity, "after a failure the sequences are unknown"
        self.error = None
        self.acked.clear()
        if identity != self.identity:
            self.identity = identity
            self._queues.clear()
            self._written.clear()
            self._other_since_ms.clear()

    def close(self) -> None:
        """Give up unacknowledged batches; they may or may not be written."""
        if self.error is None:
            self.fail(WireError("this producer is closed"))
        if self in self._core.participants:
            self._core.participants.remove(self)

    # Participant

    def step(self) -> None:
        if self.error is not None or not self.unacknowledged:
            return
        self._end_tasks()
        if self._enlistment is not None and self.error is None:
            refused = self._enlistment.step(self._busy)
            if refused is not None:
                self.fail(refused)
        self._expire()
        if self.error is None:
            self._drain()
        if self.error is not None:
            return
        unidentified = any(queue.identity is None and not queue.in_flight for queue in self._busy.values())
        if self._identifying is None and unidentified:
            self._identifying = self._core.begin("getting a producer id", _identify)
        if self._locating is None and self._stale:
            self._asked, self._stale = self._stale, {}
            names = list(self._asked)
            self._locating = self._core.begin(
                "finding the leaders to write to", lambda core, task: _locate(core, task, names)
            )

    def due_ms(self) -> int | None:
        if self.error is not None:
            return None
        times = []
        for queue in self._busy.values():
            times += [batch.due_ms for batch in queue.batches if not batch.is_given_up][:1]
            if queue.not_before_ms > self._core.now_ms and queue.next_to_send() is not None:
                times.append(queue.not_before_ms)
        return min(times, default=None)

    def slept(self, ms: int) -> None:
        for queue in self._busy.values():
            for batch in queue.batches:
                batch.due_ms += ms

    def check(self) -> None:
        """Assert the invariants that hold between two events."""
        assert all(0 < count <= self._in_flight_max for count in self._requests.values())
        for at, queue in self._queues.items():
            queue.check()
            assert (at in self._busy) == bool(queue.batches)
        assert self.unacknowledged == sum(len(queue.batches) for queue in self._queues.values())
        if self._enlistment is not None:
            self._enlistment.check()

    # Private: before sending

    def _end_tasks(self) -> None:
        task = self._identifying
        if task is not None and task.is_done:
            self._identifying = None
            if task.error is not None:
                unidentified = [queue for queue in self._busy.values() if queue.identity is None]
                self._give_up([batch for queue in unidentified for batch in queue.batches], task.error)
                return
            self.identity = task.outcome()
            for queue in list(self._queues.values()):
                if queue.identity is None and not queue.in_flight and self.error is None:
                    self._identify(queue, self.identity)
        locating = self._locating
        if locating is not None and locating.is_done:
            self._locating = None
            names, self._asked = self._asked, {}
            refused = dict.fromkeys(names, locating.error) if locating.error else locating.outcome()
            if self._fails_alone and isinstance(locating.error, TimedOut):
                # It may be older than the batches, which have their own deadlines.
                self._stale.update(names)
                return
            for queue in list(self._busy.values()):
                error = refused.get(queue.at.topic)
                if queue.at.topic not in names or self.error is not None:
                    continue
                if error is not None:
                    self._give_up(list(queue.batches), error)
                else:
                    self._located(queue)

    def _identify(self, queue: Queue, identity: Identity) -> None:
        if self._fails_alone:
            doubtful = [batch for batch in queue.batches if batch.is_doubtful]
            self._give_up(doubtful, queue.forgotten())
        try:
            queue.identify(identity)
        except OutOfSequence as error:
            self.fail(error)

    def _located(self, queue: Queue) -> None:
        """The topic's metadata is current; the topic may be missing or without a leader."""
        if self._core.cluster.leader(queue.at) is not None:
            queue.unknown_since_ms = None
            return
        now_ms = self._core.now_ms
        queue.failures += 1
        queue.not_before_ms = now_ms + self._core.back_off_ms(queue.failures + 1)
        topic = self._core.cluster.topics.get(queue.at.topic)
        if topic is not None and queue.at.partition in topic.partitions:
            queue.trouble = f"{queue.at} has no leader"
            queue.unknown_since_ms = None
            return
        queue.trouble = no_such(self._core, queue.at)
        if queue.unknown_since_ms is None:
            queue.unknown_since_ms = now_ms
        elif now_ms - queue.unknown_since_ms >= UNKNOWN_TOPIC_MS:
            queue.unknown_since_ms = None
            self._give_up(list(queue.batches), UnknownTopic(queue.trouble))

    def _expire(self) -> None:
        now_ms = self._core.now_ms
        for queue in list(self._busy.values()):
            late = [batch for batch in queue.batches if batch.due_ms <= now_ms and not batch.is_given_up]
            if late:
                self._give_up(late, self._overdue(queue))
                if self.error is not None:
                    return

    def _overdue(self, queue: Queue) -> WireError:
        for task in (self._locating, self._identifying):
            if task is not None and task.is_cut_off:
                return self._core.unreachable(task.trouble)
        why = queue.trouble or "no answer"
        seconds = self.deadline_ms / 1000
        return TimedOut(f"a batch for {queue.at} was not acknowledged within {seconds:g} s: {why}")

    # Private: sending

    def _drain(self) -> None:
        """Send requests, each with one batch from every ready partition of a broker, within the limits."""
        waiting: dict[Address, list[Queue]] = {}
        for queue in self._busy.values():
            if not self._may_send(queue):
                continue
            place = self._core.cluster.leader(queue.at)
            if place is None:
                self._stale[queue.at.topic] = None
                continue
            topic_id = place[1].topic_id
            if self._written.get(queue.at.topic, topic_id) != topic_id and not self._may_follow(queue):
                if self.error is not None:
                    return
                continue
            self._other_since_ms.pop(queue.at.topic, None)
            if queue.topic_id not in (None, topic_id):
                queue.forget_order()
            queue.topic_id = topic_id
            waiting.setdefault(place[0], []).append(queue)
        for address, queues in waiting.items():
            while self._requests.get(address, 0) < self._in_flight_max:
                batches = self._gather(queues)
                if not batches:
                    break
                self._send(address, batches)
                if self.error is not None:
                    return

    def _may_follow(self, queue: Queue) -> bool:
        """The topic's id is not the one written to, unless the broker that reported it is behind."""
        topic, now_ms = queue.at.topic, self._core.now_ms
        queue.trouble = f"topic {topic} was deleted and recreated while it was written to"
        if self._fails_alone and not any(batch.is_doubtful for batch in queue.batches):
            # Nothing of these callers was written to the old one.
            del self._written[topic]
            return True
        if now_ms - self._other_since_ms.setdefault(topic, now_ms) >= UNKNOWN_TOPIC_MS:
            self._give_up(list(queue.batches), TopicReplaced(queue.trouble))
            self._written.pop(topic, None)
            return False
        queue.failures += 1
        queue.not_before_ms = now_ms + self._core.back_off_ms(queue.failures)
        self._stale[topic] = None
        return False

    def _may_send(self, queue: Queue) -> bool:
        return (
            queue.next_to_send() is not None
            and queue.not_before_ms <= self._core.now_ms
            and queue.at.topic not in self._stale
            and queue.at.topic not in self._asked
            and (self._enlistment is None or self._enlistment.may_send(queue.at))
        )

    def _gather(self, queues: list[Queue]) -> list[Batch]:
        batches: list[Batch] = []
        size = 0
        for queue in queues:
            batch = queue.next_to_send() if self._may_send(queue) else None
            if batch is None or (batches and size + len(batch.data) > REQUEST_BYTES):
                continue
            size += len(batch.data)
            batches.append(batch)
            queue.sent(batch)
            if self._enlistment is not None:
                self._enlistment.sent(queue.at)
            # To the end of the line: other partitions may not have fit.
            self._busy[queue.at] = self._busy.pop(queue.at)
        return batches

    def _send(self, address: Address, batches: list[Batch]) -> None:
        ids = {batch.at.topic: self._core.cluster.topics[batch.at.topic].topic_id for batch in batches}
        by_topic: dict[str, list[PartitionProduceData]] = {}
        for batch in batches:
            by_topic.setdefault(batch.at.topic, []).append(
                PartitionProduceData(index=batch.at.partition, records=memoryview(batch.data))
            )
        enlistment = self._enlistment
        message = ProduceRequest(
            transactional_id=enlistment.transactional_id if enlistment is not None else None,
            acks=self._acks,
            timeout_ms=self._core.request_timeout_ms,
            topic_data=[
                TopicProduceData(name=name, topic_id=ids[name], partition_data=data)
                for name, data in by_topic.items()
            ],
        )
        version_max = PRODUCE_BY_ID - 1 if NO_TOPIC_ID in ids.values() else VERSION_MAX
        version_min = 0
        if enlistment is not None and enlistment.is_v2:
            version_min = PRODUCE_V2
        elif enlistment is not None:
            # A newer version would add the partitions to the transaction by itself.
            version_max = PRODUCE_V2 - 1
        # The broker may wait for followers for the request's timeout, and answer after that.
        patience_ms = self._core.request_timeout_ms
        ask = Ask(PRODUCE, lambda _: message, version_max, version_min, patience_ms)
        names = {topic_id: name for name, topic_id in ids.items()}
        sent = {batch.at: batch for batch in batches}
        self._requests[address] = self._requests.get(address, 0) + 1
        self._core.links.ask(
            address,
            Channel.PRODUCE,
            ask,
            self._core.now_ms,
            lambda answer: self._answered(address, sent, names, answer),
        )

    # Private: answers

    def _answered(
        self, address: Address, sent: dict[TopicPartition, Batch], names: dict[bytes, str], answer: Answer
    ) -> None:
        self._requests[address] -= 1
        if not self._requests[address]:
            del self._requests[address]
        if self.error is not None:
            return
        why = f"{address} did not report the result of a batch"
        may_be_done = True
        left = dict(sent)
        if isinstance(answer, Failed):
            if answer.is_unsupported:
                for each in sent.values():
                    self._queues[each.at].refused(each, maybe_written=False)
                self._give_up(list(sent.values()), UnsupportedBroker(answer.why))
                return
            why, may_be_done = answer.why, answer.may_be_done
        else:
            for topic in answer.message.responses:
                name = names.get(topic.topic_id) if answer.version >= PRODUCE_BY_ID else topic.name
                for result in topic.partition_responses:
                    batch = left.pop(TopicPartition(name or "", result.index), None)
                    if batch is not None:
                        self._judge(batch, result, answer.message.node_endpoints)
                        if self.error is not None:
                            return
        for batch in left.values():
            self._again(batch, why, maybe_written=may_be_done)

    def _judge(self, batch: Batch, result: Any, endpoints: Any) -> None:
        at, code = batch.at, result.error_code
        queue = self._queues[at]
        if code in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
            self._acknowledge(queue, batch, result.base_offset if code == ErrorCode.NONE else -1)
        elif code in RETRIED or (code == ErrorCode.CORRUPT_MESSAGE and batch.corrupt_tries < CORRUPT_TRIES):
            batch.corrupt_tries += code == ErrorCode.CORRUPT_MESSAGE
            is_told = self._core.cluster.hint(at, result.current_leader, endpoints)
            why = f"{at}: {words_of(code, result.error_message)}"
            self._again(batch, why, maybe_written=code in PERHAPS_WRITTEN, is_stale=not is_told)
        elif self._enlistment is not None and code in RETRIED_IN_TRANSACTIONS:
            why = f"{at}: {words_of(code, result.error_message)}"
            self._again(batch, why, maybe_written=False, is_stale=False)
        elif code in LOST_SEQUENCE and batch is not queue.batches[0]:
            # Refused only because an earlier batch was refused.
            self._again(batch, f"{at}: {words_of(code)}", maybe_written=False)
        elif (code == ErrorCode.UNKNOWN_PRODUCER_ID and self._enlistment is None) or (
            self._fails_alone and code in RENEWED
        ):
            # Retention deleted all our records, and the broker's state of this producer with them: get a new
            # identity.
            queue.identity = None
            self._again(batch, f"{at}: {words_of(code)}", maybe_written=False)
        else:
            queue.refused(batch, maybe_written=False)
            if batch.is_given_up:
                # Nothing of it was written this time.
                self._drop(queue, batch)
                self._sweep(queue)
            elif code in TOO_LARGE and batch.divide is not None and not batch.is_doubtful:
                self._divide(queue, batch, batch.divide())
            else:
                self._give_up([batch], _final(batch, code, result.error_message, self._enlistment))

    def _acknowledge(self, queue: Queue, batch: Batch, base_offset: int) -> None:
        try:
            queue.acknowledged(batch, base_offset)
        except OutOfSequence as error:
            if not self._fails_alone:
                self.fail(error)
                return
            # The log has lost its end. That is not for this caller, whose batch is where the broker says.
            queue.forget_order()
            queue.acknowledged(batch, base_offset)
        assert queue.topic_id is not None
        self._written.setdefault(queue.at.topic, queue.topic_id)
        self._gone(queue, batch)
        if batch.on_ack is not None and not batch.is_given_up:
            self.acked.append((batch.on_ack, base_offset))
        self._sweep(queue)

    def _gone(self, queue: Queue, batch: Batch) -> None:
        if not queue.batches:
            self._busy.pop(queue.at, None)
        self.unacknowledged -= 1
        self.unacknowledged_bytes -= len(batch.data)

    def _divide(self, queue: Queue, batch: Batch, smaller: list[Batch]) -> None:
        queue.replace(batch, smaller)
        self.unacknowledged += len(smaller) - 1
        self.unacknowledged_bytes += sum(len(each.data) for each in smaller) - len(batch.data)

    def _again(self, batch: Batch, why: str, *, maybe_written: bool, is_stale: bool = True) -> None:
        """Send the batch again, after the later ones have come back."""
        queue = self._queues[batch.at]
        if maybe_written and not batch.is_given_up:
            assert queue.topic_id is not None
            self._written.setdefault(batch.at.topic, queue.topic_id)
        if queue.refused(batch, maybe_written=maybe_written):
            queue.failures += 1
            queue.not_before_ms = self._core.now_ms + self._core.back_off_ms(queue.failures)
            queue.trouble = why
        if is_stale:
            self._stale[batch.at.topic] = None
        self._sweep(queue)

    def _give_up(self, batches: list[Batch], error: WireError) -> None:
        """These batches have failed: fail the producer, or them alone."""
        if not self._fails_alone:
            self.fail(error)
            return
        for batch in batches:
            if not batch.is_given_up:
                batch.is_given_up = True
                if batch.on_failure is not None:
                    self.failed.append((batch.on_failure, error, batch.is_doubtful))
            if not batch.is_doubtful:
                self._drop(self._queues[batch.at], batch)
        for queue in {batch.at: self._queues[batch.at] for batch in batches}.values():
            self._sweep(queue)

    def _sweep(self, queue: Queue) -> None:
        """Drop batches that were given up, unless others in doubt depend on their sequences.

        Those can only be made certain by sending all again from the first.
        """
        if queue.in_flight or any(each.is_doubtful and not each.is_given_up for each in queue.batches):
            return
        for batch in [each for each in queue.batches if each.is_given_up]:
            self._drop(queue, batch)

    def _drop(self, queue: Queue, batch: Batch) -> None:
        queue.drop(batch)
        self._gone(queue, batch)

    def fail(self, error: WireError) -> None:
        """Fail the producer for good, or its transaction. Only the first error counts."""
        if self.error is not None:
            return
        self.error = error
        for queue in self._busy.values():
            self.failed += [
                (batch.on_failure, error, batch.is_doubtful)
                for batch in queue.batches
                if batch.on_failure is not None and not batch.is_given_up
            ]
        if self._enlistment is not None:
            self._enlistment.stop()
        for task in (self._identifying, self._locating):
            if task is not None:
                self._core.cancel(task)
        self._identifying = self._locating = None
        self._stale, self._asked = {}, {}
        self._queues.clear()
        self._busy.clear()
        self.unacknowledged = self.unacknowledged_bytes = 0


def _final(batch: Batch, code: int, message: str | None, enlistment: Enlistment | None) -> WireError:
    """The error for a refusal that no retry changes."""
    at = batch.at
    if code == ErrorCode.PRODUCER_FENCED and enlistment is not None:
        return refusal(f"writing to {at}", code, message)
    if code in LOST_SEQUENCE:
        return OutOfSequence(
            f"the leader of {at} has lost records that were acknowledged ({words_of(code)} at sequence "
            f"{batch.sequence}); send everything again with a new producer",
            code,
        )
    if code in TOO_LARGE:
        return BatchTooLarge(
            f"a batch of {len(batch.data)} bytes is larger than topic {at.topic} allows; send smaller batches, "
            "or raise the topic's max.message.bytes",
            code,
        )
    return BrokerRefused(f"the leader of {at} refuses a batch: {words_of(code, message)}", code)


def _identify(core: Core, task: Task[Any]) -> Steps[Identity]:
    message = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=NO_TRANSACTIONS_MS)
    while True:
        answer = yield from ask_anybody(core, task, Ask(INIT_PRODUCER_ID, lambda _: message))
        response = answer.message
        if response.error_code == ErrorCode.NONE:
            return Identity(response.producer_id, response.producer_epoch)
        task.trouble = words_of(response.error_code)
        if response.error_code not in COORDINATOR_MOVED and response.error_code not in BUSY:
            raise BrokerRefused(f"could not get a producer id: {task.trouble}", response.error_code)
        yield from back_off(core, task)


def _locate(core: Core, task: Task[Any], names: list[str]) -> Steps[dict[str, WireError]]:
    refused: dict[str, WireError] = {}
    yield from refresh(core, task, names, refused=refused)
    return refused
