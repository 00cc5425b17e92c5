"""The metadata log of a node that is a whole cluster by itself: to commit is to append and fsync.

The controller decides against its own image of all that was decided; ``propose`` appends a decision's
changes and answers when they are durable, and only then does the committed image move and the broker act on
it. So two requests in flight see each other's topics, and nobody is told of a topic that a crash could take
back. A quorum of several nodes will change what commitment means here, and nothing else.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.broker.options import ServeError
from penstock.decision import Decision
from penstock.environment import Environment, Files
from penstock.log.log import Log, LogConfig
from penstock.log.names import LOG, offset_of, write_partition_metadata
from penstock.log.recovery import good_batches
from penstock.metadata import changes as metadata_changes
from penstock.metadata.image import Delta, Image
from penstock.metadata.topics import CLUSTER_METADATA_ID
from penstock.protocol.errors import DecodeError
from penstock.protocol.records import (
    HEADER_SIZE,
    CorruptBatch,
    batches,
    decode_header,
    decode_records,
    encode_batch,
)
from penstock.protocol.schema import Message

# One node elects itself once, for ever.
QUORUM_EPOCH = 1
READ_BYTES = 1024 * 1024
SYNC_RETRY_MS = 100
METADATA_LOG_CONFIG = LogConfig(
    segment_bytes=1024 * 1024 * 1024, segment_ms=7 * 24 * 3600 * 1000, retention_ms=-1, retention_bytes=-1
)


class Consensus:
    def __init__(
        self,
        environment: Environment,
        directory: str,
        *,
        lost_page_cache: bool,
        on_committed: Callable[[Image, Delta], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._environment = environment
        self._on_committed = on_committed
        self._on_failure = on_failure
        if not lost_page_cache:
            _refuse_damage(environment.files, directory)
        # Not "clean" on purpose: this log is small, and everything else rests on it.
        self._log = Log.open(environment, directory, METADATA_LOG_CONFIG, clean=False)
        if not environment.files.exists(directory):
            environment.files.make_directory(directory)
            write_partition_metadata(environment.files, directory, CLUSTER_METADATA_ID)
        # What is durable, and so what clients may be told.
        self.image = self._replay(os.path.basename(directory))
        # Appended and not yet durable: the end offset, the changes, and what to do then.
        self._uncommitted: deque[tuple[int, list[Message], Callable[[], None]]] = deque()
        self._is_syncing = False

    def propose(self, decision: Decision[Message], answer: Callable[[Any], None]) -> bool:
        """Append a decision of the controller; ``answer(response)`` once it is committed.

        False when the disk is full: the decision is void, and the controller that made it must be replaced.
        """
        if not decision.changes and not self._uncommitted:
            answer(decision.response)
            return True
        if decision.changes and not self._append(decision.changes):
            return False
        # A decision without changes may rest on one that is not committed yet: it waits its turn too.
        self._uncommitted.append(
            (self._log.log_end_offset, decision.changes, lambda: answer(decision.response))
        )
        self._sync()
        return True

    def decided_image(self) -> Image:
        """All that was appended, be it committed or not."""
        image = self.image
        for _, changes, _ in self._uncommitted:
            image, _ = image.apply(changes)
        return image

    def propose_now(self, decision: Decision[Message]) -> Any:
        """Append and fsync before returning: for the start, when nobody waits."""
        if decision.changes:
            if not self._append(decision.changes):
                raise ServeError("there is no room on the disk to write down that this node has started")
            offset, work = self._log.prepare_flush()
            work()
            self._log.flushed(offset)
            self._commit(decision.changes)
        return decision.response

    def close(self) -> None:
        self._log.close()

    def _append(self, changes: list[Message]) -> bool:
        """False when the disk is full."""
        wall_ms = self._environment.clock.wall_ms()
        batch = encode_batch(
            [(wall_ms, None, metadata_changes.encode(change), []) for change in changes],
            leader_epoch=QUORUM_EPOCH,
        )
        try:
            self._log.append(batch, decode_header(batch), QUORUM_EPOCH)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False
            self._on_failure(f"cannot write the metadata log: {error}")
            raise
        return True

    def _commit(self, changes: list[Message]) -> None:
        self.image, delta = self.image.apply(changes)
        self._on_committed(self.image, delta)

    def _sync(self) -> None:
        if self._is_syncing or not self._uncommitted:
            return
        try:
            offset, work = self._log.prepare_flush()
        except OSError:
            # Too many open files, most likely. Nothing was tried, so nothing is lost: again in a moment.
            self._environment.spawn.later(SYNC_RETRY_MS, self._sync)
            return
        self._is_syncing = True

        def done(_: None, error: Exception | None) -> None:
            self._is_syncing = False
            if error is not None:
                self._on_failure(f"fsync of the metadata log failed: {error}")
                return
            self._log.flushed(offset)
            while self._uncommitted and self._uncommitted[0][0] <= offset:
                changes, answer = self._uncommitted.popleft()[1:]
                if changes:
                    self._commit(changes)
                answer()
            self._sync()

        self._environment.spawn.in_thread(work, done, lane="metadata")

    def _replay(self, name: str) -> Image:
        """Rebuild the image from the log, batch by batch."""
        image = Image()
        offset = self._log.log_start_offset
        try:
            while offset < self._log.log_end_offset:
                found = self._log.read(offset, READ_BYTES, self._log.log_end_offset, at_least_one=True)
                assert found is not None, "the log ends before its end offset"
                data = found.file.read_at(found.position, found.size)
                # Applied a read at a time: an image per batch would copy every topic for every topic.
                decoded: list[Message] = []
                for position, header in batches(data):
                    if not header.is_control:
                        # Not compressed: its size is the most there can be, however large we wrote it.
                        records = decode_records(data, position, bytes_max=header.size)
                        decoded += [metadata_changes.decode(record.value or b"") for record in records]
                    offset = header.next_offset
                image, _ = image.apply(decoded, offset=offset - 1)
        except (CorruptBatch, DecodeError) as error:
            raise ServeError(f"the metadata log {name} cannot be read at offset {offset}: {error}") from error
        return image


def _refuse_damage(files: Files, directory: str) -> None:
    """Refuse a log that recovery would cut to the first bad batch: the topics behind it would be gone.

    As long as the machine stayed up, all that a killed process can leave is a last batch that is cut short.
    Raises ServeError.
    """
    names = [name for name in files.list(directory) if offset_of(name, LOG) is not None]
    for name in names:
        path = f"{directory}/{name}"
        file = files.open(path)
        size = file.size
        end = 0
        for position, header in good_batches(file, size, offset_of(name, LOG) or 0, QUORUM_EPOCH):
            end = position + header.size
        rest = file.read_at(end, HEADER_SIZE)
        file.close()
        if rest and not (name == names[-1] and _is_cut_short(rest, size - end)):
            raise ServeError(f"the metadata log is damaged: {path} at byte {end}; restore it from a copy")


def _is_cut_short(rest: bytes, size: int) -> bool:
    """Whether the last bytes of a file are the beginning of a batch and no more."""
    try:
        return len(rest) < HEADER_SIZE or decode_header(rest).size > size
    except CorruptBatch:
        return False
