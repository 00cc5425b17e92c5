"""Which partitions belong to a producer's open transaction, and which of them may be written to yet.

In the classic generation a partition may be written to only after the coordinator has been told of it, or the
transaction would end without a marker there. So the producer holds its batches back until ``may_send``. In
transactions v2 the Produce itself adds the partition, and nothing is held back.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.model import TopicPartition
from penstock.wire.core import Core, Task
from penstock.wire.errors import WireError
from penstock.wire.sequences import Identity
from penstock.wire.transactions import add_partitions


class Enlistment:
    """Used by the producer's every step, like a part of it."""

    def __init__(self, core: Core, transactional_id: str) -> None:
        self._core = core
        self.transactional_id = transactional_id

        # Of the open transaction.
        self.is_v2 = False
        # The coordinator may know of the transaction, so it has to be ended there.
        self.is_begun = False
        # Classic: the coordinator has been told of a group.
        self.has_group = False
        self._identity: Identity | None = None
        self._partitions: set[TopicPartition] = set()
        # Classic: the partitions that the coordinator is being told of.
        self._asked: list[TopicPartition] = []
        self._asking: Task[None] | None = None

    @property
    def is_certain(self) -> bool:
        """Whether the coordinator knows of the transaction for sure, or (v2) ends one that it does not know."""
        return self.is_begun and (self.is_v2 or self.has_group or bool(self._partitions))

    def start(self, identity: Identity, *, is_v2: bool) -> None:
        """A new transaction, without partitions."""
        assert self._asking is None and not self.is_begun and not self._partitions
        self._identity, self.is_v2 = identity, is_v2

    def stop(self) -> None:
        """The transaction is ending: nothing is added any more.

        The answer to a request in flight is not needed. The request for the end goes to the same coordinator on
        the same connection, so it comes after it.
        """
        if self._asking is not None:
            self._core.cancel(self._asking)
            self._asking, self._asked = None, []

    def ended(self) -> None:
        assert self._asking is None
        self.is_begun = self.has_group = False
        self._partitions.clear()

    def may_send(self, at: TopicPartition) -> bool:
        return self.is_v2 or at in self._partitions

    def sent(self, at: TopicPartition) -> None:
        """A batch is about to be sent, which adds its partition (v2)."""
        self.is_begun = True
        self._partitions.add(at)

    def step(self, wanted: Iterable[TopicPartition]) -> WireError | None:
        """Tell the coordinator of new partitions among those with batches. Returns its final refusal."""
        task = self._asking
        if task is not None and task.is_done:
            asked, self._asked, self._asking = self._asked, [], None
            if task.error is not None:
                return task.error
            self._partitions.update(asked)
        if self._asking is None and not self.is_v2:
            missing = [at for at in wanted if at not in self._partitions]
            if missing:
                self._ask(missing)
        return None

    def check(self) -> None:
        """Assert the invariants that hold between two events."""
        assert (self._asking is not None) == bool(self._asked)
        assert not self._asked or not self.is_v2, "v2 adds partitions by writing to them"
        assert self._partitions.isdisjoint(self._asked)
        assert self.is_begun or not (self._partitions or self._asked)

    def _ask(self, missing: list[TopicPartition]) -> None:
        identity = self._identity
        assert identity is not None
        self.is_begun = True
        self._asked = missing
        self._asking = self._core.begin(
            f"adding {missing[0]} to the transaction of {self.transactional_id}",
            lambda core, task: add_partitions(core, task, self.transactional_id, identity, missing),
        )
