"""A transaction coordinator with producers, partitions and every fault, in virtual time.

The core is real. Around it is the smallest shell: a log that may lose what is not committed when the coordinator
moves, markers that are sent and retried, producers of both generations, and partitions that verify and append.
Messages are lost, late, repeated; coordinators are replaced at any moment and their last markers arrive late; the
log refuses writes; processes die, or stall past their time-out and wake up as zombies. Checked:

- a transaction is committed in all its partitions or in none, and never mixed with another one;
- what a client was told is what happened, and a commit that was refused did not happen;
- a marker is only written when its transaction's end is committed;
- an identity belongs to one process; with no rival and in time, nobody is fenced;
- identities only grow in the log, and a replay of it gives the committed state;
- in the end no transaction is open, and every id can commit once more.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from penstock.decision import Decision
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.protocol.messages.transactions import EndTxnRequest
from penstock.sim.cores.transactions_clients import RETRIABLE, TIMEOUT_MS, Process, Resume, Steps, Wait
from penstock.sim.cores.transactions_partition import SimPartition, Transaction
from penstock.sim.report import Report, Violation
from penstock.transactions.changes import (
    NO_ID,
    USABLE_EPOCH_MAX,
    Change,
    Identity,
    Partition,
    State,
    TransactionRemoved,
    TransactionStored,
    decode,
    encode,
)
from penstock.transactions.coordinator import MarkersDue, TransactionCoordinator
from penstock.transactions.settings import TransactionSettings

FAULTY_MS = 20_000
HEALING_MS = 50_000
CALL_TIMEOUT_MS = 400
MARKER_RETRY_MS = 100
SETTINGS = TransactionSettings(abort_timed_out_interval_ms=300)
# InitProducerId, EndTxn: versions of a client of each generation.
CLASSIC_END, V2_END = 3, 5


class World:
    core_type: type[TransactionCoordinator] = TransactionCoordinator
    partition_type: type[SimPartition] = SimPartition

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = draw = random.Random(seed)
        self.now_ms = 0
        self.counts: Counter[str] = Counter()
        self.events = 0
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        # The mixture of faults of this seed.
        self.stall = draw.choice((0.0, 0.05, 0.2))
        self.deaths = draw.choice((0.0, 0.02, 0.1))
        self._loss = draw.choice((0.0, 0.03, 0.1))
        self._repeat = draw.choice((0.0, 0.05, 0.2))
        self._late = draw.choice((0.0, 0.05, 0.2))
        self._full = draw.choice((0.0, 0.0, 0.1))
        self._commit_ms = draw.choice((2, 10, 60))
        self._calm_ms = draw.choice((300, 1_000, 4_000))
        self._is_healed = False
        # The log of the coordinator's partition, and the number of changes that are committed.
        self._log: list[Change] = []
        self._committed = 0
        self._epoch = 0
        # Decisions that are not committed, with the length of the log that they wait for.
        self._waiting: deque[tuple[int, Decision[Change], Resume | None]] = deque()
        self.partitions = {
            name: self.partition_type(name)
            for name in [("money", index) for index in range(draw.choice((1, 2, 3)))]
        }
        self.transactions: list[Transaction] = []
        # By transactional id: requests for a new producer, and aborts by the coordinator on its own.
        self.rivals: Counter[str] = Counter()
        self.timed_out: Counter[str] = Counter()
        # Every end that is committed: transactional id, producer, commit or abort.
        self._ends: set[tuple[str, Identity, bool]] = set()
        self._owners: dict[tuple[str, Identity], Process] = {}
        self._new_id = 0
        self._ids = {f"id-{number}": draw.random() < 0.6 for number in range(draw.choice((1, 2, 3)))}
        if draw.random() < 0.3:
            # Epochs run out soon.
            for number, id in enumerate(self._ids):
                producer = Identity(9_000 + number, USABLE_EPOCH_MAX - draw.randrange(6))
                self._log.append(TransactionStored(id, producer, State.EMPTY, TIMEOUT_MS))
            self._committed = len(self._log)
        self.core = self._load()

    # One run

    def live(self) -> Report:
        for id in self._ids:
            self.later(self.draw.randrange(500), self._start, id)
        self.later(self.draw.randrange(self._calm_ms), self._replace)
        self._run_until(FAULTY_MS)
        self._is_healed = True
        self.stall = self.deaths = 0.0
        done: list[bool] = []
        # Whatever is late or stalls has come by then, and every open transaction has timed out.
        self._run_until(FAULTY_MS + HEALING_MS // 2)
        self._check_open()
        for id in self._ids:
            self._run(self._process(id).life(2), done.append)
        self._run_until(FAULTY_MS + HEALING_MS)
        if done != [True] * len(self._ids):
            raise self._violation(f"after all faults, {len(self._ids) - sum(done)} ids cannot commit")
        self._check_end()
        self.counts["transactions"] = len(self.transactions)
        written = b"".join([encode(change)[1] or b"" for change in self._log])
        return Report(
            "transactions",
            self.seed,
            virtual_ms=self.now_ms,
            events=self.events,
            trace_hash=f"{zlib.crc32(written):08x}{self.events:08x}",
            counts=self.counts,
        )

    def _check_end(self) -> None:
        for transaction in self.transactions:
            outcomes = set(transaction.outcomes.values())
            number = transaction.number
            if transaction.told is not None and outcomes - {transaction.told}:
                raise self._violation(f"the client of {number} was told {transaction.told}, but {outcomes}")
            missing = [name for name in transaction.acknowledged if name not in transaction.outcomes]
            if missing:
                raise self._violation(f"transaction {number} has no end in {missing}")
            if transaction.is_refused and True in outcomes:
                raise self._violation(f"the commit of {number} was refused and happened")
        self._check_open()

    def _check_open(self) -> None:
        for name, partition in self.partitions.items():
            for producer in partition.producers.values():
                if producer.open:
                    raise self._violation(f"transaction {producer.open[0].number} stays open in {name}")

    def _violation(self, message: str) -> Violation:
        return Violation(f"{message} (seed {self.seed}, at {self.now_ms} ms)")

    # Producers

    def _start(self, id: str) -> None:
        """Start a process; the one before may still run, or wake up later."""
        if not self._is_healed:
            self.counts["processes"] += 1
            self._run(self._process(id).life(self.draw.randrange(1, 12)), lambda _: None)
            self.later(self.draw.randrange(500, 6_000), self._start, id)

    def _process(self, id: str) -> Process:
        return Process(self, id, is_v2=self._ids[id])

    def _run(self, steps: Steps, done: Callable[[Any], None]) -> None:
        def resume(answer: Any) -> None:
            try:
                wait = steps.send(answer)
            except StopIteration as end:
                done(bool(end.value))
                return
            wait(resume)

        resume(None)

    def begin(self, id: str, producer: Identity) -> Transaction:
        transaction = Transaction(len(self.transactions), id, producer)
        self.transactions.append(transaction)
        return transaction

    def gave(self, process: Process, producer: Identity) -> None:
        """A process has learned its identity."""
        if self._owners.setdefault((process.id, producer), process) is not process:
            raise self._violation(f"two processes of {process.id} are {producer}")

    # Requests, as functions that are given the callback for the answer

    def init(self, request: InitProducerIdRequest, process: Process) -> Wait:
        def arrive(answer: Resume) -> None:
            if request.producer_id == NO_ID:
                self.rivals[process.id] += 1
                process.rivals = self.rivals[process.id]
            new_id = self._producer_id(request.transactional_id or "", is_init=True)
            decision = self.core.init_producer_id(request, new_producer_id=new_id, **self._times)
            self._execute(decision, answer)

        return arrive

    def add(self, transaction: Transaction, name: Partition, *, is_v2: bool) -> Wait:
        def arrive(answer: Resume) -> None:
            decision = self.core.add_partitions(
                transaction.transactional_id, *transaction.producer, [name], is_v2=is_v2, **self._times
            )
            self._execute(decision, answer)

        return arrive

    def end(self, transaction: Transaction, request: EndTxnRequest, *, is_v2: bool) -> Wait:
        """What a refusal means is noted here, not by the client: it cannot know how often its request arrived."""

        def arrive(answer: Resume) -> None:
            new_id = self._producer_id(request.transactional_id, is_init=False)
            version = V2_END if is_v2 else CLASSIC_END
            decision = self.core.end(request, version, new_producer_id=new_id, **self._times)
            error = ErrorCode(decision.response.error_code)
            if request.committed and error is ErrorCode.NONE:
                transaction.is_granted = True

            def answered(response: Any) -> None:
                # Not when it is decided: what it is decided from may be lost, and then the client may try again.
                if request.committed and error not in (ErrorCode.NONE, *RETRIABLE):
                    transaction.is_refused |= not transaction.is_granted
                answer(response)

            self._execute(decision, answered)

        return arrive

    def produce(self, transaction: Transaction, name: Partition, sequence: int, *, is_v2: bool) -> Wait:
        """A batch arrives at the leader of a partition, which first asks the coordinator if it has to."""
        partition = self.partitions[name]

        def verify(answer: Resume) -> None:
            verified = self.core.verify_partitions(
                transaction.transactional_id, *transaction.producer, [name]
            )
            answer(verified if isinstance(verified, ErrorCode) else verified[name])

        def arrive(answer: Resume) -> None:
            guard = partition.guard(transaction.producer)

            def verified(error: ErrorCode | None) -> None:
                if error is ErrorCode.NONE:
                    error = partition.append(transaction, sequence, guard)
                answer(error)

            if guard is None:
                verified(ErrorCode.NONE)
            else:
                ask = self.add(transaction, name, is_v2=True) if is_v2 else verify
                self.call(ask, may_repeat=True)(verified)

        return arrive

    # The network

    def call(self, send: Wait, *, may_repeat: bool) -> Wait:
        """A request and its answer, either of which may be lost; None is the answer after a timeout.

        ``may_repeat``: the request may also arrive twice, and after its timeout.
        """

        def called(resume: Resume) -> None:
            is_over = False

            def answered(answer: Any) -> None:
                nonlocal is_over
                if not is_over:
                    is_over = True
                    resume(answer)

            def arrive() -> None:
                if may_repeat or not is_over:
                    send(lambda answer: self._deliver(answered, answer))

            self._transmit(arrive)
            if may_repeat and not self._is_healed and self.draw.random() < self._repeat:
                self.later(self.draw.randrange(2_000), arrive)
            self.later(CALL_TIMEOUT_MS, answered, None)

        return called

    def _deliver(self, answered: Resume, answer: Any) -> None:
        if answer is not None:
            self._transmit(lambda: answered(answer))

    def _transmit(self, arrive: Callable[[], None]) -> None:
        draw = self.draw
        if self._is_healed:
            self.later(1, arrive)
        elif draw.random() >= self._loss:
            is_late = draw.random() < self._late
            self.later(draw.randrange(3_000) if is_late else draw.randrange(1, 10), arrive)
        else:
            self.counts["lost messages"] += 1

    # The coordinator

    @property
    def _times(self) -> dict[str, int]:
        return {"now_ms": self.now_ms, "wall_ms": self.now_ms}

    def _producer_id(self, id: str, *, is_init: bool) -> int | None:
        if not self.core.needs_producer_id(id, is_init=is_init):
            return None
        self._new_id += 1
        return self._new_id

    def _execute(self, decision: Decision[Change], answer: Resume | None) -> None:
        self.core.check()
        if decision.changes:
            if not self._is_healed and self.draw.random() < self._full:
                self.counts["refused writes"] += 1
                self.core.failed(decision, self.now_ms, self.now_ms)
                self.core.check()
                self._arm()
                return
            self._log += decision.changes
            delay_ms = self.draw.randrange(1, self._commit_ms + 1)
            self.later(delay_ms, self._commit, self._epoch, len(self._log))
        self._waiting.append((len(self._log), decision, answer))
        self._arm()
        self._settle()

    def _commit(self, epoch: int, end: int) -> None:
        if epoch == self._epoch and end > self._committed:
            self._note_committed(end)
            self._settle()

    def _settle(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._committed:
            _, decision, answer = self._waiting.popleft()
            self.core.committed(decision)
            self.core.check()
            self._send_markers()
            if answer is not None:
                answer(decision.response)
        self._arm()

    def _note_committed(self, end: int) -> None:
        for change in self._log[self._committed : end]:
            if isinstance(change, TransactionStored) and change.state.is_prepared:
                self._ends.add((change.transactional_id, change.producer, change.state.is_commit))
        self._committed = end

    def _replace(self) -> None:
        """Another coordinator: it has a part of what is not committed, and commits that."""
        if self._is_healed:
            return
        self.counts["fail-overs"] += 1
        self.later(self.draw.randrange(1, self._calm_ms), self._replace)
        kept = self.draw.randint(self._committed, len(self._log))
        del self._log[kept:]
        self._note_committed(kept)
        self._epoch += 1
        self._waiting.clear()
        self.core = self._load()
        self._send_markers()
        self._arm()

    def _load(self) -> TransactionCoordinator:
        core = self.core_type(SETTINGS, lambda topic, index: True)
        known: dict[str, Change] = {}
        producers: dict[str, list[Identity]] = {}
        for change in self._log:
            known[change.transactional_id] = change
            if isinstance(change, TransactionStored):
                self._check_growth(producers.setdefault(change.transactional_id, []), change)
        for change in known.values():
            copied = decode(*encode(change))
            assert copied is not None
            core.apply(copied)
        core.loaded(self.now_ms, self.now_ms)
        core.check()
        return core

    def _check_growth(self, before: list[Identity], change: TransactionStored) -> None:
        producer = change.producer
        if before and producer != before[-1]:
            is_next = producer == (before[-1].id, before[-1].epoch + 1)
            is_new = producer.epoch == 0 and all(producer.id != other.id for other in before)
            if not is_next and not is_new:
                raise self._violation(f"{producer} follows {before[-1]} in the log")
        before.append(producer)

    def _arm(self) -> None:
        deadline_ms = self.core.next_deadline_ms
        if deadline_ms is not None and deadline_ms < FAULTY_MS + HEALING_MS:
            self.later(max(deadline_ms - self.now_ms, 1), self._tick, self._epoch, deadline_ms)

    def _tick(self, epoch: int, deadline_ms: int) -> None:
        if epoch == self._epoch and self.core.next_deadline_ms == deadline_ms:
            decision = self.core.tick(self.now_ms, self.now_ms)
            for change in decision.changes:
                if isinstance(change, TransactionStored) and change.state is State.PREPARE_ABORT:
                    self.timed_out[change.transactional_id] += 1
                    self.counts["timeouts"] += 1
                elif isinstance(change, TransactionRemoved):
                    self.counts["removed"] += 1
            self._execute(decision, None)

    # Markers

    def _send_markers(self) -> None:
        for due in self.core.take_markers():
            for name in due.partitions:
                self._send_marker(due, name, self._epoch)

    def _send_marker(self, due: MarkersDue, name: Partition, epoch: int) -> None:
        def arrive(answer: Resume) -> None:
            self.counts["markers"] += 1
            producer = Identity(due.producer_id, due.producer_epoch)
            if (due.transactional_id, producer, due.is_commit) not in self._ends:
                raise self._violation(f"a marker of {due.transactional_id} comes before the log")
            answer(self.partitions[name].write_marker(due, epoch))

        def answered(error: ErrorCode | None) -> None:
            if epoch != self._epoch:
                return
            if error is ErrorCode.NONE:
                self._execute(self.core.markers_written(due, [name], **self._times), None)
            elif error is None:
                self.later(MARKER_RETRY_MS, self._send_marker, due, name, epoch)
            else:
                raise self._violation(f"a marker of the present coordinator got {error!r}")

        # One of a classic transaction is sent again only when the first cannot arrive any more.
        self.call(arrive, may_repeat=due.is_v2)(answered)

    # Time

    def later(self, delay_ms: int, callback: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now_ms + delay_ms, self._sequence, callback, arguments))

    def _run_until(self, end_ms: int) -> None:
        while self._queue and self._queue[0][0] <= end_ms:
            self.now_ms, _, callback, arguments = heapq.heappop(self._queue)
            self.events += 1
            callback(*arguments)
        self.now_ms = end_ms


def run(seed: int, world_type: type[World] = World) -> Report:
    """Run one seed. Raises Violation, which names the seed."""
    return world_type(seed).live()
