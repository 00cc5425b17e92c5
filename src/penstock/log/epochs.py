"""Where each leader epoch begins in this log. Replicas and consumers use it to find where they diverge.

The entries are (epoch, start offset), both strictly ascending. They are kept in ``leader-epoch-checkpoint``,
in Kafka's text format, and loaded on first use; if the file is unreadable, they are rebuilt from the batches.
The log's next flush makes the file durable: entries lost in a crash are in the batches above the recovery
point, and recovery finds them there. On a full disk an epoch cannot begin, but entries can always be dropped:
dropping them is part of freeing space.

Careful: the last entry may begin at the log's end. Then its leader was elected and has written nothing yet
(``begin``), and a truncation to that same offset drops it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

from penstock.environment import Files
from penstock.log.names import EPOCHS

NO_EPOCH = -1
NO_OFFSET = -1

_VERSION = "0"


class LeaderEpochs:
    __slots__ = (
        "_entries",
        "_files",
        "_from_batches",
        "before_start",
        "has_directory",
        "is_stale",
        "path",
        "writes",
    )

    def __init__(
        self, files: Files, directory: str, from_batches: Callable[[], list[tuple[int, int]]] = list
    ) -> None:
        """``from_batches`` rebuilds the entries by reading the whole log."""
        self._files = files
        self._from_batches = from_batches
        self.path = f"{directory}/{EPOCHS}"
        # None until first used.
        self._entries: list[tuple[int, int]] | None = None
        # How often the file was written: tells ``Durability`` whether it needs a sync.
        self.writes = 0
        # The file differs from ``entries``: writing it failed, or is deferred.
        self.is_stale = False
        # False for an empty log: then nothing is read or written.
        self.has_directory = True
        # The epoch of the last record before the log's start, if known from a snapshot.
        self.before_start = NO_EPOCH

    @property
    def entries(self) -> list[tuple[int, int]]:
        if self._entries is None:
            entries = self.stored()
            if entries is None:
                # Do not fall back to an empty list: the leader would conclude that no record here can diverge.
                entries = self._from_batches() if self.has_directory else []
                self.is_stale = True
            self._entries = entries
        return self._entries

    @property
    def latest(self) -> int:
        entries = self.entries
        return entries[-1][0] if entries else self.before_start

    def begin(self, epoch: int, log_end_offset: int) -> None:
        """A leader was elected: its epoch begins at the end of the log (KIP-279). The file is not written yet.

        It is written with the epoch's first batch. A crash before that may lose the entry, which does no harm:
        no record of the epoch exists, and the next leader, even if it is this node, has a later epoch. So an
        election costs no writes, however many partitions it covers.
        """
        entries = self.entries
        if epoch > self.latest:
            self._entries = [*_compatible(entries, epoch, log_end_offset), (epoch, log_end_offset)]
            self.is_stale = True

    def assign(self, epoch: int, start_offset: int) -> None:
        """The first batch of an epoch is about to be appended here.

        Raises:
            OSError: the file could not be written, and the epoch has not begun.
        """
        entries = self.entries
        if not entries or entries[-1][0] != epoch:
            self._entries = [*_compatible(entries, epoch, start_offset), (epoch, start_offset)]
        elif not self.is_stale:
            return
        try:
            self.write()
        except OSError:
            self._entries = entries
            raise

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """Return (the largest epoch at most ``epoch``, the offset where it ends), or (-1, -1) when unknown.

        The rules are those of OffsetForLeaderEpoch (KIP-101, KIP-279): an epoch above our latest is unknown; one
        before our first ends where our first begins.
        """
        entries = self.entries
        if epoch == NO_EPOCH:
            return NO_EPOCH, NO_OFFSET
        if not entries:
            # The only epoch known is that of the snapshot the log continues from.
            return (epoch, log_end_offset) if epoch == self.before_start else (NO_EPOCH, NO_OFFSET)
        latest = entries[-1][0]
        if epoch >= latest:
            return (epoch, log_end_offset) if epoch == latest else (NO_EPOCH, NO_OFFSET)
        place = bisect_right(entries, epoch, key=lambda entry: entry[0])
        end_offset = entries[place][1]
        if place:
            return entries[place - 1][0], end_offset
        return (self.before_start if NO_EPOCH < self.before_start < epoch else epoch), end_offset

    def epoch_at(self, offset: int) -> int:
        """The epoch in which the record at ``offset`` was written."""
        place = bisect_right(self.entries, offset, key=lambda entry: entry[1])
        return self.entries[place - 1][0] if place else self.before_start

    def truncate_from_end(self, end_offset: int) -> None:
        """The log was truncated to ``end_offset``: drop the epochs that began at or after it.

        An epoch that began exactly there goes too: if the leader does not know it and we kept it, the leader
        would report a divergence on every fetch.
        """
        kept = [entry for entry in self.entries if entry[1] < end_offset]
        if len(kept) != len(self.entries):
            self._shorten(kept)

    def truncate_from_start(self, start_offset: int) -> None:
        """The log now begins here: drop the epochs that ended before it. The one it lies in now begins here."""
        entries = self.entries
        place = bisect_right(entries, start_offset, key=lambda entry: entry[1])
        if place and entries[place - 1][1] < start_offset:
            self._shorten([(entries[place - 1][0], start_offset), *entries[place:]])
        elif place > 1:
            self._shorten(entries[place - 1 :])

    def start_over(self, offset: int, before_start: int) -> None:
        """The log is empty and begins here, after a record of epoch ``before_start`` if that is known."""
        self.before_start = before_start
        self._shorten([] if before_start == NO_EPOCH else [(before_start, offset)])

    def found_directory(self) -> None:
        """The log is about to get files. Entries not written so far are written with the next batch."""
        _ = self.entries
        self.has_directory = True

    def remove(self) -> None:
        """Remove the file and all entries."""
        self._files.remove(self.path)
        self._entries = []

    def replace(self, entries: list[tuple[int, int]]) -> None:
        """Replace the entries by those read from the batches."""
        if entries != self.stored():
            self._shorten(entries)
        self._entries = entries

    def stored(self) -> list[tuple[int, int]] | None:
        """The entries in the file; None when it is missing or unreadable."""
        if not (self.has_directory and self._files.exists(self.path)):
            return None
        try:
            text = self._files.read(self.path).decode()
            version, count, *lines = text.splitlines()
            entries = [
                (int(epoch), int(start)) for epoch, start in (line.split(" ") for line in lines if line)
            ]
        except ValueError:
            return None
        ascending = all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(entries))
        # A power failure may leave only the beginning of the file, even of its last number.
        is_whole = text.endswith("\n") and count == str(len(entries))
        return entries if version == _VERSION and is_whole and ascending else None

    def check(self, log_start_offset: int, log_end_offset: int) -> None:
        entries = self.entries
        for (epoch, start), (next_epoch, next_start) in pairwise(entries):
            assert epoch < next_epoch and start < next_start, entries
        if entries:
            assert entries[-1][1] <= log_end_offset, (entries, log_end_offset)
        if len(entries) > 1:
            assert entries[1][1] > log_start_offset, (entries, log_start_offset)

    def write(self) -> None:
        entries = self.entries
        lines = [_VERSION, str(len(entries)), *(f"{epoch} {start}" for epoch, start in entries)]
        self._files.replace(self.path, ("\n".join(lines) + "\n").encode(), durable=False)
        self.is_stale = False
        self.writes += 1

    def _shorten(self, entries: list[tuple[int, int]]) -> None:
        self._entries = entries
        self.is_stale = True
        if self.has_directory:
            with suppress(OSError):
                self.write()


def _compatible(entries: list[tuple[int, int]], epoch: int, start_offset: int) -> list[tuple[int, int]]:
    """Drop entries that contradict a new one: they were never committed, or their epoch wrote nothing."""
    return [entry for entry in entries if entry[0] < epoch and entry[1] < start_offset]
