"""Transactions under any order of requests, late and repeated ones included, and a coordinator that dies.

The machine is the shell of one coordinator. Decisions go into a queue and are committed, or lost with the
coordinator, later. Requests name any identity that was ever given out, and some that never were. Checked all along,
and independently of the coordinator's own ``check()``:

- another coordinator that replays the log, in its bytes, agrees with this one, also when the log was compacted;
- a failed decision leaves no trace;
- identities only grow, and each is given to one InitProducerId only, its repetitions aside;
- what was answered to EndTxn is what the markers say, and markers are only due for what is committed;
- a partition is verified only while its transaction is open in the log, and no end of it is decided.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.decision import Decision
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.protocol.messages.transactions import EndTxnRequest
from penstock.transactions.changes import (
    NOBODY,
    USABLE_EPOCH_MAX,
    Change,
    Identity,
    State,
    TransactionRemoved,
    TransactionStored,
    decode,
    encode,
)
from penstock.transactions.coordinator import MarkersDue, TransactionCoordinator
from penstock.transactions.settings import TransactionSettings
from tests.transactions.conversation import decided

IDS = ("a", "b")
PARTITIONS = (("t", 0), ("t", 1), ("u", 0))
SETTINGS = TransactionSettings(
    timeout_ms_max=60_000, id_expiration_ms=200_000, remove_expired_interval_ms=50_000
)
ids = st.sampled_from(IDS)
some = st.lists(st.sampled_from(PARTITIONS), min_size=0, max_size=3)
# Which of the identities that were ever given out: mostly the last ones.
places = st.sampled_from([-1, -1, -1, -2, -2, -3, 0])


class Transactions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1_000
        self.new_id = 100
        self.log: list[Change] = []
        self.committed_count = 0
        self.waiting: list[tuple[int, Decision[Change], Any]] = []
        self.given: dict[str, list[Identity]] = {id: [] for id in IDS}
        self.markers: list[MarkersDue] = []
        # Producer ids that are nearly used up.
        for number, id in enumerate(IDS[1:]):
            producer = Identity(number, USABLE_EPOCH_MAX - 2)
            self.log.append(TransactionStored(id, producer, State.EMPTY, 1_000, update_timestamp=1_000))
            self.given[id].append(producer)
        self.committed_count = len(self.log)
        self.core = self._load(self.log)

    # Requests

    @rule(id=ids, place=places, is_new=st.booleans(), has_id=st.booleans(), is_full=st.booleans())
    def init(self, id: str, place: int, is_new: bool, has_id: bool, is_full: bool) -> None:
        expected = NOBODY if is_new else self._identity(id, place)
        request = InitProducerIdRequest(
            transactional_id=id,
            transaction_timeout_ms=20_000,
            producer_id=expected.id,
            producer_epoch=expected.epoch,
        )
        before = decided(self.core, id)
        decision = self.core.init_producer_id(request, new_producer_id=self._new_id(has_id), **self.times)
        response = decision.response
        if response.error_code == ErrorCode.NONE:
            producer = Identity(response.producer_id, response.producer_epoch)
            assert producer.epoch <= USABLE_EPOCH_MAX
            if is_new and not is_full:
                assert producer not in self.given[id], "a new producer shares an identity"
            self._execute(id, before, decision, is_full, lambda: self._give(id, producer))
        else:
            self._execute(id, before, decision, is_full)

    @rule(id=ids, place=places, partitions=some, is_v2=st.booleans(), is_full=st.booleans())
    def add(self, id: str, place: int, partitions: list[tuple[str, int]], is_v2: bool, is_full: bool) -> None:
        producer = self._identity(id, place)
        before = decided(self.core, id)
        decision = self.core.add_partitions(id, *producer, partitions, is_v2=is_v2, **self.times)
        if decision.response is ErrorCode.NONE:
            assert before is not None and before.producer == producer
        self._execute(id, before, decision, is_full)

    @rule(
        id=ids,
        place=places,
        commit=st.booleans(),
        version=st.sampled_from([1, 3, 5, 5]),
        has_id=st.booleans(),
        is_full=st.booleans(),
    )
    def end(self, id: str, place: int, commit: bool, version: int, has_id: bool, is_full: bool) -> None:
        producer = self._identity(id, place)
        request = EndTxnRequest(
            transactional_id=id, producer_id=producer.id, producer_epoch=producer.epoch, committed=commit
        )
        before = decided(self.core, id)
        decision = self.core.end(request, version, new_producer_id=self._new_id(has_id), **self.times)
        response = decision.response
        if response.error_code != ErrorCode.NONE:
            assert not decision.changes
            self._execute(id, before, decision, is_full)
            return
        stored = before
        assert stored is not None
        if not decision.changes:
            # The answer is repeated: it must be what happened.
            assert stored.state is (State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT)
        if version < 5:
            self._execute(id, before, decision, is_full)
            return
        following = Identity(response.producer_id, response.producer_epoch)
        assert following != producer and following.epoch <= USABLE_EPOCH_MAX
        self._execute(id, before, decision, is_full, lambda: self._give(id, following))

    @rule(id=ids, place=places, partitions=some)
    def verify(self, id: str, place: int, partitions: list[tuple[str, int]]) -> None:
        producer = self._identity(id, place)
        verified = self.core.verify_partitions(id, *producer, partitions)
        if isinstance(verified, ErrorCode):
            assert verified is not ErrorCode.NONE
            return
        changes = [change for change in self.log[: self.committed_count] if change.transactional_id == id]
        committed = changes[-1] if changes else None
        for partition, error in verified.items():
            if error is ErrorCode.NONE:
                assert isinstance(committed, TransactionStored) and committed.state is State.ONGOING
                assert partition in committed.partitions and committed.producer == producer
                stored = decided(self.core, id)
                assert stored is not None and stored.state is State.ONGOING

    # Markers

    @precondition(lambda self: self.markers)
    @rule(place=st.integers(0, 5), partitions=some, forgets=st.booleans())
    def write(self, place: int, partitions: list[tuple[str, int]], forgets: bool) -> None:
        """In any order, in part, and more than once."""
        due = self.markers[place % len(self.markers)]
        wanted = partitions or due.partitions
        if forgets:
            self.markers.remove(due)
        before = decided(self.core, due.transactional_id)
        decision = self.core.markers_written(due, wanted, **self.times)
        self._execute(due.transactional_id, before, decision, False)

    # Time, the log, failovers

    @rule(delay_ms=st.sampled_from([10, 5_000, 25_000, 250_000]), may_expire=st.booleans())
    def sleep(self, delay_ms: int, may_expire: bool) -> None:
        self.now_ms += delay_ms
        for _ in range(3):
            deadline_ms = self.core.next_deadline_ms
            if deadline_ms is None or deadline_ms > self.now_ms:
                break
            decision = self.core.tick(self.now_ms, self.now_ms, may_expire=may_expire)
            self._execute(None, None, decision, False)

    @rule(count=st.integers(1, 3))
    def commit(self, count: int) -> None:
        for _ in range(count):
            if self.waiting:
                end, decision, then = self.waiting.pop(0)
                self.committed_count = max(self.committed_count, end)
                self._settle(decision, then)

    @rule(share=st.integers(0, 3))
    def fail_over(self, share: int) -> None:
        kept = self.committed_count + (len(self.log) - self.committed_count) * share // 3
        # Decisions are atomic.
        ends = [self.committed_count, *(end for end, _, _ in self.waiting)]
        kept = max(end for end in ends if end <= max(kept, self.committed_count))
        del self.log[kept:]
        self.committed_count = kept
        self.waiting = []
        self.core = self._load(self.log)
        self.markers = []
        self._take_markers()

    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        """Of each id the last change below some place stays, unless it is a tombstone that was kept for long."""
        full = self._load(self.log)
        end = data.draw(st.integers(0, self.committed_count))
        last = {change.transactional_id: place for place, change in enumerate(self.log[:end])}
        kept = [
            change
            for place, change in enumerate(self.log[:end])
            if last[change.transactional_id] == place
            and not (isinstance(change, TransactionRemoved) and data.draw(st.booleans()))
        ]
        removed = end - len(kept)
        self.log[:end] = kept
        self.committed_count -= removed
        self.waiting = [(place - removed, decision, then) for place, decision, then in self.waiting]
        compacted = self._load(self.log)
        assert {id: decided(compacted, id) for id in IDS} == {id: decided(full, id) for id in IDS}
        assert sorted(compacted.all_keys()) == sorted(full.all_keys())

    @invariant()
    def is_sound(self) -> None:
        self.core.check()

    @invariant()
    def agrees_with_a_replay(self) -> None:
        replayed = self._load(self.log)
        for id in IDS:
            assert decided(replayed, id) == decided(self.core, id)
        committed = self._load(self.log[: self.committed_count])
        for id in IDS:
            assert committed.describe(id) == self.core.describe(id) or self._is_being_removed(id)

    # The shell

    @property
    def times(self) -> dict[str, int]:
        return {"now_ms": self.now_ms, "wall_ms": self.now_ms}

    def _is_being_removed(self, id: str) -> bool:
        return self.core.describe(id).error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND and any(
            change.transactional_id == id for change in self.log[self.committed_count :]
        )

    def _load(self, log: list[Change]) -> TransactionCoordinator:
        core = TransactionCoordinator(SETTINGS, lambda topic, index: True)
        for change in log:
            copied = decode(*encode(change))
            assert copied == change
            core.apply(copied)
        core.loaded(self.now_ms, self.now_ms)
        core.check()
        return core

    def _identity(self, id: str, place: int) -> Identity:
        given = self.given[id]
        return given[max(place, -len(given))] if given else Identity(5, 5)

    def _give(self, id: str, producer: Identity) -> None:
        given = self.given[id]
        if producer not in given:
            assert all(other.id != producer.id or other.epoch < producer.epoch for other in given)
            given.append(producer)

    def _new_id(self, has_id: bool) -> int | None:
        self.new_id += 1
        return self.new_id if has_id else None

    def _execute(
        self,
        id: str | None,
        before: TransactionStored | None,
        decision: Decision[Change],
        is_full: bool,
        then: Any = None,
    ) -> None:
        if is_full and decision.changes:
            self.core.failed(decision, self.now_ms, self.now_ms)
            assert id is None or decided(self.core, id) == before
            return
        self.log += decision.changes
        if decision.changes or self.waiting:
            self.waiting.append((len(self.log), decision, then))
        else:
            self._settle(decision, then)

    def _settle(self, decision: Decision[Change], then: Any) -> None:
        self.core.committed(decision)
        self._take_markers()
        if then is not None:
            then()

    def _take_markers(self) -> None:
        for due in self.core.take_markers():
            stored = [
                change for change in self.log[: self.committed_count] if change.transactional_id == due[1]
            ]
            last = stored[-1]
            assert isinstance(last, TransactionStored) and last.state.is_prepared
            assert last.producer == (due.producer_id, due.producer_epoch)
            assert last.state.is_commit == due.is_commit and last.partitions == set(due.partitions)
            self.markers.append(due)


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
