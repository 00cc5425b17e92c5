"""What groups of every protocol have in common: a name, committed offsets, and rules for changing those."""

from __future__ import annotations

from abc import ABC, abstractmethod

from penstock.groups.changes import OffsetCommitted
from penstock.groups.offsets import GroupOffsets
from penstock.protocol.errors import ErrorCode


class Group(ABC):
    __slots__ = ("id", "offsets")

    def __init__(self, group_id: str) -> None:
        self.id = group_id
        self.offsets = GroupOffsets()

    @abstractmethod
    def commit_error(
        self, member_id: str, instance_id: str | None, generation: int, *, in_transaction: bool
    ) -> ErrorCode:
        """The error if the sender may not commit offsets now."""

    @abstractmethod
    def offset_delete_error(self) -> ErrorCode:
        """The error if offsets may not be deleted now.

        Topics that a member subscribes to are checked separately.
        """

    @abstractmethod
    def subscribes_to(self, topic: str) -> bool:
        """Whether a member subscribes to a topic. True if that is unknown."""

    @abstractmethod
    def unused_since(self, offset: OffsetCommitted) -> int | None:
        """The wall time since when an offset is unused; None while it may be in use (KIP-211)."""
