"""The node, as a hosted partition sees it: what it asks the node, and the events it reports.

On a real node the host is ``NodePartitionHost``, which passes events on to the ISR proposals, the fetchers, the
coordinators and the directory reports. A partition knows none of these, only this protocol.

The node is called in the middle of a partition's work. ``appended`` is called within every append that followers
have to copy, so it must do very little; ``damaged`` is called within a read, or while the log opens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.model import BrokerId

if TYPE_CHECKING:
    from penstock.broker.partition.hosted_partition import HostedPartition


class PartitionHost(Protocol):
    me: BrokerId
    lag_max_ms: int

    def live(self, broker: int) -> int | None:
        """The broker epoch of a broker that may be in sync; None for any other broker."""
        ...

    def is_silent(self, broker: int, since_ms: int, now_ms: int) -> bool:
        """Whether a broker, expected to fetch from ``since_ms`` on, has not fetched for too long."""
        ...

    def time_range_ms(self) -> tuple[int, int]:
        """The earliest and the latest time that it may be now: clocks can be wrong."""
        ...

    def stamp_ms(self) -> int:
        """The wall time to write on a record."""
        ...

    def wants_proposal(self, hosted: HostedPartition) -> None:
        """The ISR may have to change."""
        ...

    def appended(self, hosted: HostedPartition) -> None:
        """Records were appended that the followers do not have yet."""
        ...

    def role_changed(self, hosted: HostedPartition) -> None:
        """Its leader or leader epoch changed, or it is no longer here."""
        ...

    def reassigned(self, hosted: HostedPartition) -> None:
        """Its metadata changed, perhaps only the ISR."""
        ...

    def start_raised(self, hosted: HostedPartition, then: Callable[[], None]) -> None:
        """Its log start offset moved into the middle of a segment; call ``then`` once that is checkpointed."""
        ...

    def placed(self, hosted: HostedPartition) -> None:
        """It got a data directory, or one was chosen for it."""
        ...

    def established(self, hosted: HostedPartition) -> None:
        """This broker leads it and knows the high watermark."""
        ...

    def may_cut(self, hosted: HostedPartition) -> bool:
        """Whether opening the log may truncate damage, because there is no other copy.

        Otherwise the damage is reported first.
        """
        ...

    def damaged(self, hosted: HostedPartition, offset: int) -> None:
        """The log on disk is damaged from this offset on."""
        ...
