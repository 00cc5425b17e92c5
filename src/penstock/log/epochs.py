"""Where each leader epoch began in this log: what replicas and consumers ask to find out where they diverge.

The entries are (epoch, start offset), both strictly ascending. They are kept in ``leader-epoch-checkpoint``,
in Kafka's text form, and read from there only when first asked; where that cannot be read, the batches tell.
The file is not made durable here but by the log's next flush: what a crash may lose is in the batches above
the recovery point, and is found there again. A full disk keeps an epoch from beginning, but never one from
being forgotten: that is what makes room.

What a newcomer gets wrong: the last entry may begin at the log's end. It is of a leader that was elected and
has written nothing yet (``begin``), and a truncation to that very place forgets it.
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
        """``from_batches`` reads the whole log for what the file should have said."""
        self._files = files
        self._from_batches = from_batches
        self.path = f"{directory}/{EPOCHS}"
        # None until first asked for.
        self._entries: list[tuple[int, int]] | None = None
        # How often the file was written, so that the log knows whether it must be made durable.
        self.writes = 0
        # The file does not say what ``entries`` does: it could not be written, or need not be yet.
        self.is_stale = False
        # Without it nothing is read or written: the log is an empty one.
        self.has_directory = True
        # The epoch of the last record before the log's start, where somebody who has it all in a snapshot said so.
        self.before_start = NO_EPOCH

    @property
    def entries(self) -> list[tuple[int, int]]:
        if self._entries is None:
            entries = self.stored()
            if entries is None:
                # None at all would mean to a leader that we have nothing which could differ from its own.
                entries = self._from_batches() if self.has_directory else []
                self.is_stale = True
            self._entries = entries
        return self._entries

    @property
    def latest(self) -> int:
        entries = self.entries
        return entries[-1][0] if entries else self.before_start

    def begin(self, epoch: int, log_end_offset: int) -> None:
        """A leader was elected: its epoch begins at the end of the log (KIP-279). The file is not touched.

        It is written with the epoch's first batch. Until then a crash may take the entry, and takes nothing
        with it: no record of the epoch exists that anybody could ask about, and whoever leads next, be it this
        node, does so in a later epoch. So an election costs no write, however many partitions it is about.
        """
        entries = self.entries
        if epoch > self.latest:
            self._entries = [*_compatible(entries, epoch, log_end_offset), (epoch, log_end_offset)]
            self.is_stale = True

    def assign(self, epoch: int, start_offset: int) -> None:
        """The first batch of an epoch is about to be appended here.

        Raises:
            OSError: it could not be written down, and has not begun.
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
        """(the largest epoch at most ``epoch``, the offset where it ends); (-1, -1) when not known.

        The rules are those of OffsetForLeaderEpoch (KIP-101, KIP-279): an epoch beyond ours is not known; one
        before our first ends where our first begins.
        """
        entries = self.entries
        if epoch == NO_EPOCH:
            return NO_EPOCH, NO_OFFSET
        if not entries:
            # All that is known is what the log goes on from.
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
        """The log is cut here: forget the epochs that began at or behind it.

        Also one that began exactly here: if the leader does not know it, to keep it is to be told for ever
        that we diverge.
        """
        kept = [entry for entry in self.entries if entry[1] < end_offset]
        if len(kept) != len(self.entries):
            self._shorten(kept)

    def truncate_from_start(self, start_offset: int) -> None:
        """The log now begins here: forget the epochs that ended before it; the one it lies in begins here."""
        entries = self.entries
        place = bisect_right(entries, start_offset, key=lambda entry: entry[1])
        if place and entries[place - 1][1] < start_offset:
            self._shorten([(entries[place - 1][0], start_offset), *entries[place:]])
        elif place > 1:
            self._shorten(entries[place - 1 :])

    def start_over(self, offset: int, before_start: int) -> None:
        """The log is empty and begins here, behind a record of epoch ``before_start`` if that is known."""
        self.before_start = before_start
        self._shorten([] if before_start == NO_EPOCH else [(before_start, offset)])

    def found_directory(self) -> None:
        """The log is about to have files. What waited for it is written with the next batch."""
        _ = self.entries
        self.has_directory = True

    def remove(self) -> None:
        """Take the file away, as if it had never been written."""
        self._files.remove(self.path)
        self._entries = []

    def replace(self, entries: list[tuple[int, int]]) -> None:
        """What recovery found in the batches themselves."""
        if entries != self.stored():
            self._shorten(entries)
        self._entries = entries

    def stored(self) -> list[tuple[int, int]] | None:
        """What the file says; None when it is missing or unreadable."""
        if not (self.has_directory and self._files.exists(self.path)):
            return None
        try:
            version, count, *lines = self._files.read(self.path).decode().splitlines()
            entries = [
                (int(epoch), int(start)) for epoch, start in (line.split(" ") for line in lines if line)
            ]
        except ValueError:
            return None
        ascending = all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(entries))
        return entries if version == _VERSION and count == str(len(entries)) and ascending else None

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
    """Without what contradicts a newcomer: that was never committed, or is an epoch that wrote nothing."""
    return [entry for entry in entries if entry[0] < epoch and entry[1] < start_offset]
