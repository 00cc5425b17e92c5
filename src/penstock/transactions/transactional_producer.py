"""What a coordinator knows of one transactional id: committed, decided, and the markers still to be written."""

from __future__ import annotations

from penstock.transactions.changes import Change, Partition, State, TransactionRemoved, TransactionStored


class TransactionalProducer:
    __slots__ = ("confirmed", "deadline_ms", "end_number", "id", "uncommitted", "unwritten")

    def __init__(self, transactional_id: str) -> None:
        self.id = transactional_id
        # The committed state. None before InitProducerId is committed for the first time.
        self.confirmed: TransactionStored | None = None
        # Decided and not committed, in order. Several at a time only while partitions are added: nothing follows a
        # prepared state or a removal before they are committed.
        self.uncommitted: list[Change] = []
        # Partitions whose marker is still to be written, in order. None unless a prepared state is committed.
        self.unwritten: dict[Partition, None] | None = None
        # Of the end that the markers belong to.
        self.end_number = 0
        # Monotonic time when the open transaction is aborted. Only valid while the decided state is Ongoing.
        self.deadline_ms = 0

    @property
    def decided(self) -> TransactionStored | None:
        """The state including what is not committed. None when the id is being removed."""
        if not self.uncommitted:
            return self.confirmed
        last = self.uncommitted[-1]
        return None if isinstance(last, TransactionRemoved) else last

    @property
    def visible(self) -> TransactionStored | None:
        """The committed state, as operators see it. None when the id is being removed."""
        return None if self.decided is None else self.confirmed

    @property
    def is_blank(self) -> bool:
        return self.confirmed is None and not self.uncommitted

    @property
    def is_written(self) -> bool:
        """All markers are written, and the end of the transaction was not decided yet."""
        return self.unwritten is not None and not self.unwritten and not self.uncommitted

    def confirm(self, change: Change) -> None:
        assert self.uncommitted[0] is change, "decisions are committed in order"
        del self.uncommitted[0]
        self.restore(change)

    def restore(self, change: Change) -> None:
        self.confirmed = change if isinstance(change, TransactionStored) else None
        self.unwritten = None
        if self.confirmed is not None and self.confirmed.state.is_prepared:
            self.unwritten = dict.fromkeys(sorted(self.confirmed.partitions))

    def revert(self, change: Change) -> None:
        assert self.uncommitted[-1] is change, "a decision fails before the next one"
        del self.uncommitted[-1]

    def check(self) -> None:
        assert not self.is_blank
        confirmed = self.confirmed
        assert (self.unwritten is not None) == (confirmed is not None and confirmed.state.is_prepared)
        if confirmed is not None:
            _check_stored(confirmed)
            assert confirmed.transactional_id == self.id
            assert set(self.unwritten or ()) <= confirmed.partitions
        before: Change | None = confirmed
        for change in self.uncommitted:
            assert change.transactional_id == self.id
            if isinstance(change, TransactionStored):
                _check_stored(change)
                _check_step(before, change)
            else:
                assert isinstance(before, TransactionStored) and before.state.is_idle
            before = change
        if len(self.uncommitted) > 1:
            # The first may be the end of the transaction before.
            assert all(
                isinstance(change, TransactionStored) and change.state is State.ONGOING
                for change in self.uncommitted[1:]
            )


def _check_stored(stored: TransactionStored) -> None:
    state = stored.state
    assert state is not State.DEAD and state is not State.PREPARE_EPOCH_FENCE
    assert stored.producer.id >= 0 and stored.producer.epoch >= 0
    assert state.is_idle <= (not stored.partitions), "partitions without a transaction"
    assert (stored.next_producer_id >= 0) <= state.is_prepared
    assert state is not State.ONGOING or stored.previous.id < 0


def _check_step(before: Change | None, after: TransactionStored) -> None:
    if before is None:
        assert after.state is State.EMPTY
        return
    assert isinstance(before, TransactionStored)
    old, new = before.producer, after.producer
    is_next = new.id == old.id and new.epoch in (old.epoch, old.epoch + 1)
    assert is_next or (new.id != old.id and new.epoch == 0), f"{new} cannot follow {old}"
    match after.state:
        case State.ONGOING:
            assert not before.state.is_prepared and new == old
            assert before.partitions <= after.partitions
        case State.PREPARE_COMMIT | State.PREPARE_ABORT:
            assert before.state is State.ONGOING and after.partitions == before.partitions
        case State.COMPLETE_COMMIT:
            assert before.state in (State.PREPARE_COMMIT, State.ONGOING)
        case State.COMPLETE_ABORT:
            assert before.state is not State.PREPARE_COMMIT
        case _:
            assert before.state.is_idle
