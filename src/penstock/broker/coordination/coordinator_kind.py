"""A kind of coordinator: what it provides to run in the shell of ``coordinator_partition.py``.

A kind is registered under its internal topic (``coordinators.py``). Each partition of that topic has a core of its
own, which is a sans-IO state machine: see ``CoordinatorCore``. ``group_coordinators.py`` is an example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from penstock.decision import Decision
from penstock.environment import Buffer
from penstock.metadata.image import Image
from penstock.protocol.messages.topics import CreatableTopic

Change = TypeVar("Change")
Change_contra = TypeVar("Change_contra", contravariant=True)


class CoordinatorCore(Protocol[Change]):
    """Decides for the keys (groups, for example) of one partition. Each kind has its own request methods.

    The shell first replays the partition with ``apply`` and calls ``loaded``. After that every decision is either
    ``committed`` or ``failed``, in the order in which the decisions were made.
    """

    def apply(self, change: Change, /) -> None:
        """Replay a committed change."""
        ...

    def loaded(self, now_ms: int, wall_ms: int, /) -> None:
        """Everything was replayed."""
        ...

    def committed(self, decision: Decision[Change], /) -> None: ...

    def failed(self, decision: Decision[Change], now_ms: int, wall_ms: int, /) -> None:
        """The changes of a decision could not be appended, and never will be: undo them."""
        ...

    def reconcile(
        self, keys: list[str], changes_max: int, /, *, now_ms: int, wall_ms: int
    ) -> Decision[Change]:
        """Drop what belongs to topics that no longer exist.

        Takes the keys that are done off the end of the list, and decides about as many changes as allowed.
        """
        ...

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call ``tick`` next. The shell asks again after every decision."""
        ...

    def tick(self, now_ms: int, wall_ms: int, /, *, may_expire: bool) -> Decision[Change]:
        """``may_expire``: whether the wall time is reliable enough to remove something by age."""
        ...

    def all_keys(self) -> list[str]:
        """For ``reconcile``."""
        ...

    def resign(self) -> Decision[Change]:
        """Another broker leads the partition. The replies send all waiting clients to it."""
        ...


class TransactionalCore(Protocol[Change_contra]):
    """What a core adds that takes part in the transactions of producers.

    A decision with a ``producer`` is stored as a transactional batch. It takes effect when a marker says that the
    transaction committed, and never if it was aborted.
    """

    def apply_in_transaction(self, change: Change_contra, producer_id: int, producer_epoch: int, /) -> None:
        """Replay a committed change of a transactional batch."""
        ...

    def transaction_ended(self, producer_id: int, is_commit: bool, /) -> None:
        """Replay a committed marker."""
        ...

    def end_transaction(self, producer_id: int, is_commit: bool, /) -> Decision[Any]:
        """The effect of a marker, which the shell appends in place of the decision's changes."""
        ...


Core = TypeVar("Core", bound=CoordinatorCore[Any])


@dataclass(frozen=True, slots=True)
class CoordinatorKind(Generic[Core]):
    topic: str
    # How the topic is created when a client first asks for one of its coordinators.
    new_topic: Callable[[], CreatableTopic]
    # Makes the core of one partition. The callable it gets returns the image from the start of the replay while the
    # partition is replayed, and the newest image afterwards.
    make_core: Callable[[Callable[[], Image]], Core]
    # A change as key and value of a record. A value of None is a tombstone.
    encode: Callable[[Any], tuple[bytes, bytes | None]]
    # None: a record that this version does not know.
    decode: Callable[[Buffer, Buffer | None], Any | None]
    # The core as one that takes part in transactions. None: this kind does not.
    in_transactions: Callable[[Core], TransactionalCore[Any]] | None = None
