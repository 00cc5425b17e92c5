"""What a hosted partition needs to know of the node it is on, and what it tells that node.

On a real node the host is ``NodePartitionHost``, and passes on what it is told: to the ISR proposals, the
fetchers, the coordinators, the reports about directories. A partition knows none of these, only this page.

The node is called in the middle of what a partition does. ``appended`` comes from within every append
that followers have to copy, so it does next to nothing; ``damaged`` from within a read, or while the log opens.
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
        """The epoch of a broker that may be in sync; None for all others."""
        ...

    def is_silent(self, broker: int, since_ms: int, now_ms: int) -> bool:
        """Whether a broker has fetched nothing from this one, since then at the latest, for too long."""
        ...

    def time_range_ms(self) -> tuple[int, int]:
        """The earliest and the latest that it may be: clocks can be wrong."""
        ...

    def stamp_ms(self) -> int:
        """The wall time to write on a record."""
        ...

    def wants_proposal(self, hosted: HostedPartition) -> None:
        """The replicas in sync may have to change."""
        ...

    def appended(self, hosted: HostedPartition) -> None:
        """There is something that its followers do not have."""
        ...

    def role_changed(self, hosted: HostedPartition) -> None:
        """It is led by another replica, or in another epoch, or no longer here."""
        ...

    def reassigned(self, hosted: HostedPartition) -> None:
        """Its metadata changed, perhaps only the in-sync replicas."""
        ...

    def start_raised(self, hosted: HostedPartition, then: Callable[[], None]) -> None:
        """It begins later, inside a segment; ``then`` when that is written down."""
        ...

    def placed(self, hosted: HostedPartition) -> None:
        """It has a data directory now, or one was chosen for it."""
        ...

    def established(self, hosted: HostedPartition) -> None:
        """This broker leads it and knows what is committed."""
        ...

    def may_cut(self, hosted: HostedPartition) -> bool:
        """Whether damage may be cut off as the log is opened, because there is no other copy.

        Else it is reported first.
        """
        ...

    def damaged(self, hosted: HostedPartition, offset: int) -> None:
        """From here on, the bytes on the disk are not what was written."""
        ...
