"""Which transactions of a partition are undecided, and so how far a read-committed reader may read.

A transaction begins with its producer's first transactional batch and ends with a marker. Its records are stable
once the marker is committed: until then a new leader may not have it. So the last stable offset is the first of

    the high watermark
    the first offset of a transaction without a marker
    the first offset of a transaction whose marker is not below the high watermark

The log is the only source. Truncation, recovery and loading replay its batches through ``began`` and ``ended``.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import pairwise


class OpenTransactions:
    __slots__ = ("_ended", "_first", "_open", "known_from")

    def __init__(self) -> None:
        # Producer id -> first offset, ascending by offset.
        self._open: dict[int, int] = {}
        # The first of these offsets; None when no transaction is open.
        self._first: int | None = None
        # (first offset, marker's offset) of transactions whose marker was not committed when last asked: a heap.
        self._ended: list[tuple[int, int]] = []
        # All transactions with a marker at this offset or after it are in ``_ended``. A snapshot does not store
        # those that had ended below it, and they are dropped here once their markers are committed.
        self.known_from = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, producer_id: int) -> bool:
        return producer_id in self._open

    @property
    def has_ended(self) -> bool:
        """Whether there are transactions whose markers were not committed when last asked."""
        return bool(self._ended)

    @property
    def first_offsets(self) -> Mapping[int, int]:
        """Producer id -> first offset of its open transaction, oldest first."""
        return self._open

    def load(self, first_offsets: Mapping[int, int], known_from: int) -> None:
        self._open = dict(sorted(first_offsets.items(), key=lambda entry: entry[1]))
        self._first = next(iter(self._open.values()), None)
        self._ended = []
        self.known_from = known_from

    def began(self, producer_id: int, offset: int) -> None:
        """A transactional batch was appended. It begins a transaction unless one is open."""
        if producer_id not in self._open:
            self._open[producer_id] = offset
            if self._first is None:
                self._first = offset

    def ended(self, producer_id: int, marker_offset: int) -> int | None:
        """A marker was appended. Return the transaction's first offset; None when none was open."""
        first_offset = self._open.pop(producer_id, None)
        if first_offset is not None:
            heappush(self._ended, (first_offset, marker_offset))
            if first_offset == self._first:
                self._first = next(iter(self._open.values()), None)
        return first_offset

    def first_undecided(self, log_end_offset: int) -> int:
        """The first offset of the transactions without a marker, or the log's end."""
        return log_end_offset if self._first is None else self._first

    def last_stable_offset(self, high_watermark: int) -> int:
        """Exact only if the high watermark is not below ``known_from``."""
        ended = self._ended
        if ended:
            while ended and ended[0][1] < high_watermark:
                self.known_from = max(self.known_from, heappop(ended)[1] + 1)
            if ended and ended[0][0] < high_watermark:
                high_watermark = ended[0][0]
        if self._first is not None and self._first < high_watermark:
            return self._first
        return high_watermark

    def take_ended_from(self, other: OpenTransactions) -> None:
        """Use the ended transactions of another state of the same log, which was replayed from further back."""
        self._ended = other._ended
        self.known_from = other.known_from

    def check(self, log_end_offset: int) -> None:
        first_offsets = list(self._open.values())
        assert all(a < b for a, b in pairwise(first_offsets)), first_offsets
        assert self._first == (first_offsets[0] if first_offsets else None), (self._first, first_offsets)
        assert all(offset < log_end_offset for offset in first_offsets), (first_offsets, log_end_offset)
        for first_offset, marker_offset in self._ended:
            assert first_offset < marker_offset < log_end_offset, (self._ended, log_end_offset)
        assert self.known_from <= log_end_offset, (self.known_from, log_end_offset)
