"""The committed metadata image of this node, and the proposals that wait to be committed.

``commit`` applies what the core says is committed. The active controller's proposals wait here until they are, or
until this node loses leadership. An image replaces the log before it, so snapshots are made here too, and a
snapshot fetched from the leader replaces the image here.

Careful: the image may be behind the high watermark for a while. Batches that are committed together are applied
together, because a new image per batch would copy every topic each time; but only as many as one turn of the loop
has time for. The rest is applied in later turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from penstock.broker.logs import Logger
from penstock.broker.quorum.addresses import AddressBook
from penstock.broker.quorum.metadata_log import MetadataLog
from penstock.broker.quorum.snapshots import Loaded, Snapshots, difference
from penstock.metadata.image import Delta, Image
from penstock.protocol.errors import DecodeError
from penstock.protocol.records import CorruptBatch
from penstock.protocol.schema import Message
from penstock.raft.events import WriteSnapshot
from penstock.raft.quorum import voter_with
from penstock.raft.storage import SnapshotId

# Applied in one turn of the loop, unless a single batch has more: about 50 ms, with the broker's work for them.
CHANGES_PER_TURN = 1_000


class _Waiting(NamedTuple):
    """A proposal that waits to be committed."""

    # Exclusive. Answered when everything below is committed and applied.
    offset: int
    answer: Callable[[], None]
    lost: Callable[[], None]


class Committed:
    def __init__(
        self,
        image: Image,
        log: MetadataLog,
        snapshots: Snapshots,
        addresses: AddressBook,
        logger: Logger,
        *,
        on_committed: Callable[[Image, Delta], None],
        on_active: Callable[[bool], None],
        later: Callable[[Callable[[], None]], None],
        snapshot_bytes: int,
        snapshot_records: int,
    ) -> None:
        """``later(work)`` runs it in another turn of the loop, when no other event of the quorum is under way."""
        # The committed image, which clients may see.
        self.image = image
        # This node leads, and has committed and applied a record of its epoch. Only then may it act as controller.
        self.is_active = False
        self._waiting: deque[_Waiting] = deque()
        # Exclusive: how far to apply. And the epoch that this node leads, once a record of it is committed.
        self._offset = 0
        self._established: int | None = None
        self._is_going_on = False
        self._log = log
        self._snapshots = snapshots
        self._logger = logger
        self._addresses = addresses
        self._on_committed = on_committed
        self._on_active = on_active
        self._later = later
        # A snapshot is due after this many committed bytes or records.
        self._snapshot_bytes = snapshot_bytes
        self.snapshot_records = snapshot_records
        self._bytes_since_snapshot = 0
        self._records_since_snapshot = 0

    def decided_image(self) -> Image:
        """The decided state, including changes that are not committed yet."""
        changes = [change for batch in self._log.unapplied for change in batch.changes]
        return self.image.apply(changes)[0] if changes else self.image

    # Proposals

    @property
    def is_awaited(self) -> bool:
        return bool(self._waiting)

    def wait(self, answer: Callable[[], None], lost: Callable[[], None]) -> None:
        """Call ``answer()`` once everything now in the log is applied, or ``lost()`` if leadership is lost."""
        self._waiting.append(_Waiting(self._log.end_offset, answer, lost))

    # Committing

    def commit(self, offset: int, epoch: int, is_established: bool) -> None:
        """Apply all batches below this offset, now or over several turns. ``is_established``: this node leads that
        epoch and has committed a record of it.
        """
        self._offset = offset
        self._established = epoch if is_established else None
        if not self._is_going_on:
            self._go_on()

    def _go_on(self) -> None:
        self._is_going_on = False
        is_done = self._apply_some()
        if is_done and self._established is not None and not self.is_active:
            self.is_active = True
            self._logger.info("this node is the active controller", epoch=self._established)
            self._on_active(True)
        applied = self._offset if is_done else self.image.offset + 1
        while self._waiting and self._waiting[0].offset <= applied:
            self._waiting.popleft().answer()
        if is_done:
            self._make_snapshot_when_due()
        else:
            self._is_going_on = True
            self._later(self._go_on)

    def _apply_some(self) -> bool:
        """Apply as much as one turn has time for; False when there is more."""
        unapplied = self._log.unapplied
        changes: list[Message] = []
        end_offset, last_epoch = self.image.offset + 1, self.image.epoch
        while unapplied and unapplied[0].end_offset <= self._offset:
            if changes and len(changes) + len(unapplied[0].changes) > CHANGES_PER_TURN:
                break
            batch = unapplied.popleft()
            changes += batch.changes
            self._records_since_snapshot += batch.end_offset - end_offset
            self._bytes_since_snapshot += batch.size_bytes
            end_offset, last_epoch = batch.end_offset, batch.epoch
        if end_offset > self.image.offset + 1:
            self.image, delta = self.image.apply(changes, offset=end_offset - 1, epoch=last_epoch)
            self._on_committed(self.image, delta)
        return not unapplied or unapplied[0].end_offset > self._offset

    def lead_no_more(self, epoch: int) -> None:
        self._established = None
        if self.is_active:
            self.is_active = False
            self._logger.info("this node is no longer the active controller", epoch=epoch)
            self._on_active(False)
        waiting, self._waiting = self._waiting, deque()
        for proposal in waiting:
            proposal.lost()

    # Snapshots

    def write_piece(self, effect: WriteSnapshot) -> None:
        """Raises OSError; the download is dropped then."""
        self._snapshots.write_piece(effect.snapshot_id, effect.position, effect.data)

    def load(self, snapshot_id: SnapshotId) -> Loaded | None:
        """Restart the log behind a snapshot of the leader, whose log begins after ours ends. None when the snapshot
        is unusable. Raises OSError.
        """
        try:
            loaded = self._snapshots.finish_download(snapshot_id)
            if loaded is None:
                return None
            self._log.start_over(snapshot_id, loaded.voters, loaded.removed)
        except (CorruptBatch, DecodeError) as error:
            self._logger.error("a snapshot of the metadata could not be used", error=str(error))
            return None
        self._log.remove_deleted_files()
        return loaded

    def adopt(self, loaded: Loaded) -> None:
        """Replace the committed image by the snapshot's."""
        self._log.addresses.update(loaded.addresses)
        self._addresses.announce()
        self._bytes_since_snapshot = self._records_since_snapshot = 0
        delta = difference(self.image, loaded.image)
        self.image = loaded.image
        self._on_committed(self.image, delta)

    def _make_snapshot_when_due(self) -> None:
        if self._snapshots.is_writing or (
            self._bytes_since_snapshot < self._snapshot_bytes
            and self._records_since_snapshot < self.snapshot_records
        ):
            return
        end_offset = self.image.offset + 1
        former, voters = ((), (), *(voters for at, voters in self._log.voters if at < end_offset))[-2:]
        self._bytes_since_snapshot = self._records_since_snapshot = 0
        self._snapshots.write(
            SnapshotId(end_offset, self._log.epoch_before(end_offset)),
            self.image,
            voters,
            # A removed voter whose disk was wiped must still be recognised, to be admitted again.
            tuple(voter for voter in former if voter_with(voters, voter.id) is None),
            self._addresses.all(),
            self._snapshot_ended,
        )

    def _snapshot_ended(self, error: Exception | None) -> None:
        if error is not None:
            self._logger.error("a snapshot of the metadata could not be written", error=str(error))
            return
        self._log.snapshot_made(self._snapshots.ids)
        self._log.remove_deleted_files()
        # Enough may have been committed meanwhile for the next one.
        self._make_snapshot_when_due()
