"""A partition as the storage sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.broker.config import TopicConfig
from penstock.log.log import Log
from penstock.model import TopicId

if TYPE_CHECKING:
    from penstock.broker.storage.flushing import Flushing


class StoredPartition(Protocol):
    @property
    def topic(self) -> str: ...

    @property
    def topic_id(self) -> TopicId: ...

    @property
    def index(self) -> int: ...

    @property
    def config(self) -> TopicConfig: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def log(self) -> Log:
        """Raises OSError when it cannot be opened."""
        ...

    @property
    def high_watermark(self) -> int: ...

    @property
    def is_deleted(self) -> bool: ...

    @property
    def is_offline(self) -> bool: ...

    @property
    def flushing(self) -> Flushing: ...

    def flush(self) -> None:
        """Make everything appended so far durable, in a thread."""
        ...

    def flushed(self, log: Log) -> None:
        """More of this log is durable."""
        ...
