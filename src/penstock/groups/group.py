"""What groups of every protocol have in common: a name, committed offsets, and a say in what happens to those."""

from __future__ import annotations

from abc import ABC, abstractmethod

from penstock.groups.changes import OffsetCommitted
from penstock.groups.offsets import GroupOffsets
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import OffsetCommitRequest


class Group(ABC):
    __slots__ = ("id", "offsets")

    def __init__(self, group_id: str) -> None:
        self.id = group_id
        self.offsets = GroupOffsets()

    @abstractmethod
    def commit_error(self, request: OffsetCommitRequest) -> ErrorCode:
        """Whether the sender may commit offsets now."""

    @abstractmethod
    def offset_delete_error(self) -> ErrorCode:
        """Whether offsets may be deleted now, except those of topics that a member subscribes to."""

    @abstractmethod
    def subscribes_to(self, topic: str) -> bool:
        """Whether a member reads a topic. If that cannot be known, yes."""

    @abstractmethod
    def unused_since(self, offset: OffsetCommitted) -> int | None:
        """The wall time since when an offset has not been needed; None while it may be (KIP-211)."""
