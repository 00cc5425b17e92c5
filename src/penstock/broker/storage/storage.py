"""The data directories of a node: which partition is in which, and what happens when a disk fails or fills.

The first directory holds the metadata log and the broker's registration (``registration.py``); the partitions are
spread over all directories (JBOD). When a disk fails, its directory and the partitions in it go offline. The node
continues with the other directories, unless the failed one is the first or the last one online.

A full disk has not failed. Its directory ``is_full`` from the first record that finds no room until there is
enough room again. Meanwhile no records are written to it, heartbeats tell the controller, which moves leadership
and the ISR to other brokers, and metadata and checkpoints are written from the ``Reserve``.

A partition without a directory is empty (the first append creates the directory), unless a checkpoint says that it
held data. Then the disk lost it, and the partition refuses to start empty.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from penstock.broker.logs import Logger
from penstock.broker.options import ServeError
from penstock.broker.storage.checkpoint import Remembered
from penstock.broker.storage.data_directory import (
    FLUSHED_NOTE,
    NO_ID,
    Directory,
    Identity,
    identify,
    is_reserved,
)
from penstock.broker.storage.flushed_note import FlushedNote
from penstock.broker.storage.flushing import FlushQueue
from penstock.broker.storage.stored_partition import StoredPartition
from penstock.environment import NO_ROOM, Environment
from penstock.log.log import CorruptLog, Log
from penstock.log.names import read_partition_metadata, write_partition_metadata
from penstock.metadata.image import Image
from penstock.metadata.values import UNASSIGNED_DIRECTORY
from penstock.model import TopicId, TopicPartition, format_id

# Errors of a write that do not mean a broken disk: it is full, or a limit is reached. Its data can be trusted.
_HARMLESS = (*NO_ROOM, errno.ENOENT, errno.EMFILE, errno.ENFILE)
# Errors of an open or a read that mean a broken disk. Any other error concerns one log only.
_BROKEN = (errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.ESTALE)


class Storage:
    def __init__(
        self,
        environment: Environment,
        data_dirs: Sequence[str],
        node_id: int,
        logger: Logger,
        on_failure: Callable[[str], None],
        on_directory_failed: Callable[[Directory, str], None] = lambda directory, reason: None,
        on_room_changed: Callable[[Directory], None] = lambda directory: None,
        *,
        is_alone: bool = True,
    ) -> None:
        self.environment = environment
        self._node_id = node_id
        self._logger = logger
        # Called with a reason when the node has to stop because a disk failed.
        self._on_failure = on_failure
        # Called when the node can continue without the disk: the partitions in that directory are gone.
        self._on_directory_failed = on_directory_failed
        # Called when a directory becomes full or has room again.
        self._on_room_changed = on_room_changed
        # Whether any directory is full. Checked at every append.
        self.is_any_full = False
        self.flush_queue = FlushQueue(environment, logger)
        # The directory of each partition, when there is more than one. Filled on demand: see ``_home``.
        self._homes: dict[tuple[TopicId, int], Directory] = {}
        # Partitions deleted while the metadata may still be old; None once it is current.
        self._deleted_before: set[tuple[TopicId, int]] | None = set()

        self.directories = [Directory(environment, path, logger) for path in data_dirs]
        self._claim()
        # None until another node has told this one.
        self.cluster_id = identify(
            self.directories, node_id, environment.random, is_alone=is_alone, attempt=self._attempt
        )
        for directory in self._online():
            self._attempt(directory, partial(self._recall, directory))
            self._attempt(directory, partial(self._write_cluster_id, directory))
        self.is_any_full = any(directory.is_full for directory in self.directories)
        self.flushed_note = FlushedNote(environment, os.path.join(self.path, FLUSHED_NOTE), logger)
        self._attempt(self.directories[0], self.flushed_note.load)

    # Start

    def _claim(self) -> None:
        paths = [directory.path for directory in self.directories]
        for directory in self.directories:
            if paths.count(directory.path) > 1:
                raise ServeError(
                    f"{directory.path} is given twice; every --data-dir must be another directory"
                )
            self._attempt(directory, directory.claim)

    def _attempt(self, directory: Directory, step: Callable[[], None]) -> None:
        """Run a step of the start. The node starts without a directory that fails, but not without the first."""
        try:
            step()
        except OSError as error:
            if directory is self.directories[0]:
                raise ServeError(
                    f"cannot use the data directory {directory.path}: {error.strerror}"
                ) from error
            directory.is_online = False
            directory.is_blank = error.errno in NO_ROOM and directory.holds_nothing()
            self._logger.error("started without a directory", path=directory.path, error=str(error))

    def _recall(self, directory: Directory) -> None:
        directory.recall()
        if len(self.directories) > 1:
            directory.partition_count = sum(1 for _ in directory.partitions())

    def adopt_cluster_id(self, cluster_id: str) -> None:
        """The controllers have told the cluster id. Raises ServeError when this node belongs to another cluster."""
        if self.cluster_id is None:
            self.cluster_id = cluster_id
            self._write_cluster_ids(self._online())
        elif self.cluster_id != cluster_id:
            raise ServeError(
                f"{self.path} belongs to the cluster {self.cluster_id}, but the controllers belong to "
                f"{cluster_id}; choose another --data-dir"
            )

    def _write_cluster_ids(self, directories: list[Directory]) -> None:
        for directory in directories:
            try:
                self._write_cluster_id(directory)
            except OSError as error:
                self.check_disk(directory, error)

    def _write_cluster_id(self, directory: Directory) -> None:
        """Write the cluster id if the directory does not have it. Raises OSError, but not for a full disk.

        If not even the reserve has room, it is written later. A process that starts before then learns the id
        from the controllers again.
        """
        if directory.cluster_id == self.cluster_id or not directory.is_online:
            return
        try:
            directory.identify(Identity(self.cluster_id, self._node_id, directory.id))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise

    # The directories

    @property
    def path(self) -> str:
        """The path of the first directory, which holds the metadata."""
        return self.directories[0].path

    @property
    def directory_ids(self) -> list[bytes]:
        """The ids of the online directories."""
        return [directory.id for directory in self._online()]

    @property
    def offline_directory_ids(self) -> list[bytes]:
        return [
            directory.id
            for directory in self.directories
            if not directory.is_online and directory.id != NO_ID
        ]

    @property
    def full_directory_ids(self) -> list[bytes]:
        return [directory.id for directory in self._online() if directory.is_full]

    @property
    def lost_page_cache(self) -> bool:
        return any(directory.lost_page_cache for directory in self.directories)

    def may_have_lost(self, key: tuple[TopicId, int]) -> bool:
        """Whether a replica may lack records since a power failure; never true again once it has caught up."""
        if any(directory.lost_before for directory in self.directories):
            # It may have been added to the note since.
            return True
        return self.lost_page_cache and not self.flushed_note.holds(key)

    def has_lost(self, directory_id: bytes) -> bool:
        """Whether the metadata names a directory that this node no longer has: a wiped or replaced disk.

        A directory of this node that cannot be read may be the one in question, so nothing counts as lost then.
        """
        if is_reserved(directory_id):
            return False
        return all(
            directory.is_blank or directory.id not in (directory_id, NO_ID) for directory in self.directories
        )

    def _online(self) -> list[Directory]:
        return [directory for directory in self.directories if directory.is_online]

    # Partitions

    def quarantine_strays(self, image: Image) -> None:
        """Compare the directories with committed metadata, which must be current.

        A log that is not in the metadata is set aside, never removed. A replica that was moved to another broker
        is removed, and so is one of a deleted topic. If a partition is in two directories, the copy in the
        directory that the metadata names stays.
        """
        deleted, self._deleted_before = self._deleted_before, None
        seen: dict[TopicPartition, Directory] = {}
        for directory in self._online():
            for name in list(directory.partitions()):
                topic = image.topics.get(name.topic)
                found_id = directory.topic_id_of(*name) if deleted else None
                if (
                    deleted
                    and found_id is not None
                    and (found_id, name.partition) in deleted
                    and found_id not in image.topics_by_id
                ):
                    self._remove(directory, name, found_id, "removing a replica of a topic that was deleted")
                elif topic is None or name.partition >= len(topic.partitions):
                    _set_aside(directory, name, "no topic in the metadata has this partition")
                elif self._node_id not in topic.partitions[name.partition].replicas:
                    self._remove_moved(directory, name, topic.id)
                else:
                    home = directory
                    if name in seen:
                        named = topic.partitions[name.partition].directory(self._node_id)
                        home, spare = _choose(name, topic.id, named, seen[name], directory)
                        _set_aside(spare, name, f"the partition is in {home.path} too")
                    seen[name] = home
                    self._settle(topic.id, name.partition, home)
            directory.checkpoint.keep_only(image)
        self.flushed_note.keep_only(image)

    @property
    def knows_strays(self) -> bool:
        """Whether the directories were compared with current metadata."""
        return self._deleted_before is None

    def _remove_moved(self, directory: Directory, name: TopicPartition, topic_id: TopicId) -> None:
        if directory.topic_id_of(*name) != topic_id:
            _set_aside(directory, name, "this node has no replica of the partition")
            return
        self._remove(directory, name, topic_id, "removing a replica that was moved away")

    def _remove(self, directory: Directory, name: TopicPartition, topic_id: TopicId, reason: str) -> None:
        self._logger.info(reason, partition=str(name))
        directory.partition_count -= 1
        # If the replica comes back, its old data must not be reported missing.
        directory.checkpoint.forget(topic_id, name.partition)
        self._remove_later([directory.rename(*name, "delete")], 0)

    def _settle(self, topic_id: TopicId, index: int, directory: Directory) -> None:
        if len(self.directories) > 1:
            self._homes[topic_id, index] = directory

    def partitions_to_recover(self) -> list[TopicPartition]:
        """The partitions in directories that the last run did not close cleanly."""
        unclean = [directory for directory in self._online() if not directory.was_clean]
        return [name for directory in unclean for name in directory.partitions()]

    def remembered_high_watermark(self, hosted: StoredPartition) -> int:
        """The high watermark when the checkpoint was written: a hint, never too high."""
        home = self._known_home(hosted)
        return 0 if home is None else home.checkpoint.get(hosted.topic_id, hosted.index).high_watermark

    def holds(self, hosted: StoredPartition) -> bool:
        """Whether the partition has a directory on an online disk."""
        directory = self.directory_of(hosted)
        return directory is not None and directory.is_online

    def directory_of(self, hosted: StoredPartition) -> Directory | None:
        """The data directory, possibly offline, that holds the partition's files; None when it has none."""
        known = self._known_home(hosted)
        if known is not None and not known.is_online:
            return known  # do not access a failed disk
        for directory in self._online() if known is None else [known]:
            if directory.holds(hosted.topic, hosted.index):
                return directory
        return None

    def _known_home(self, hosted: StoredPartition) -> Directory | None:
        if len(self.directories) == 1:
            return self.directories[0]
        return self._homes.get((hosted.topic_id, hosted.index))

    def _home(self, hosted: StoredPartition, placed_in: bytes = UNASSIGNED_DIRECTORY) -> Directory:
        """The partition's directory: where its files are, else the one in the metadata, else the least used one.

        Raises:
            OSError: the directory is offline or cannot be read.
        """
        home = self._known_home(hosted)
        if home is None:
            home = self.directory_of(hosted)
        if home is None:
            named = [
                directory
                for directory in self.directories
                if directory.id == placed_in != UNASSIGNED_DIRECTORY
            ]
            home = (
                named[0] if named else min(self._online(), key=lambda one: (one.is_full, one.partition_count))
            )
            if not named and not (is_reserved(placed_in) or self.has_lost(placed_in)):
                raise OSError(errno.EIO, "its directory cannot be read", str(hosted))
            home.partition_count += 1
        self._settle(hosted.topic_id, hosted.index, home)
        if not home.is_online:
            raise OSError(errno.EIO, "the directory is offline", home.path)
        return home

    def open_log(
        self, hosted: StoredPartition, placed_in: bytes = UNASSIGNED_DIRECTORY, *, may_cut: bool = True
    ) -> Log:
        """Open the partition's log; ``placed_in`` is the directory that the metadata names.

        Raises:
            CorruptLog: the log is damaged, and may not be truncated.
            OSError: its files cannot be used, or its directory is offline.
        """
        home = self._home(hosted, placed_in)
        try:
            return self._open_in(home, hosted, may_cut=may_cut)
        except OSError as error:
            if error.errno in _BROKEN:
                self.check_disk(home, error)
            raise

    def _open_in(self, home: Directory, hosted: StoredPartition, *, may_cut: bool) -> Log:
        path = home.path_of(hosted.topic, hosted.index)
        files = self.environment.files
        checkpoint = home.checkpoint
        remembered = checkpoint.get(hosted.topic_id, hosted.index)
        if home.holds(hosted.topic, hosted.index):
            topic_id = read_partition_metadata(files, path)
            if topic_id is not None and topic_id != hosted.topic_id:
                home.quarantine(
                    hosted.topic, hosted.index, f"it belongs to the topic with id {format_id(topic_id)}"
                )
            elif topic_id is None and home.lost_page_cache and remembered.recovery_point == 0:
                # Nothing in it was ever flushed, and it may belong to a deleted topic of the same name.
                home.quarantine(
                    hosted.topic, hosted.index, "a power loss has taken the note of which topic it belongs to"
                )
        elif remembered.recovery_point > remembered.log_start_offset:
            raise OSError(errno.ENOENT, "the checkpoint says it held data", path)
        log = Log.open(
            self.environment,
            path,
            hosted.config.log,
            clean=home.was_clean,
            recovery_point=remembered.recovery_point,
            log_start_offset=remembered.log_start_offset or None,
            may_cut=may_cut,
            before_cut=lambda offset: self._lower(home, hosted, offset),
        )
        log.give_room = home.reserve.give_spare
        if log.recovery is not None and log.recovery.had_more:
            # If the machine stayed up, every write is still there, so what is unreadable is damaged. After a power
            # loss it may be only what no fsync had covered. But fsyncs since the checkpoint are not recorded, and a
            # flushed replica has confirmed everything they covered.
            log.recovery.was_cut = True
        self.schedule_removal(hosted, log)
        if not home.was_clean and log.log_end_offset > log.recovery_point:
            # Recovery may have read from the page cache. Make sure it is on the disk too.
            offset, work = log.prepare_flush()
            work()
            log.flushed(offset)
        return log

    def _lower(self, home: Directory, hosted: StoredPartition, offset: int) -> None:
        try:
            home.checkpoint.lower(hosted.topic_id, hosted.index, offset)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            # Truncating makes room, and the log cannot grow again before there is some.
            self._logger.warning("the checkpoint could not be lowered", partition=repr(hosted))

    def place(self, hosted: StoredPartition) -> Directory:
        """The directory that the partition is in, or will be in. Raises OSError when it is offline."""
        return self._home(hosted)

    def make_directory(self, hosted: StoredPartition) -> None:
        """Create the partition's directory, if it has none, and store the topic id in it."""
        home = self._home(hosted)
        path = home.path_of(hosted.topic, hosted.index)
        files = self.environment.files
        home.checkpoint.renew(hosted.topic_id, hosted.index)
        files.make_directory(path)
        if read_partition_metadata(files, path) is None:
            write_partition_metadata(files, path, hosted.topic_id)

    def give_up(self, hosted: StoredPartition, offset: int) -> None:
        """The partition's data from this offset on is lost here, and other replicas have it.

        The next open treats nothing above the offset as flushed. If no files are left, the partition may start
        empty, in any directory.
        """
        home = self.directory_of(hosted)
        if home is not None and home.is_online:
            self._lower(home, hosted, offset)
            return
        for directory in self._online():
            directory.checkpoint.forget(hosted.topic_id, hosted.index)
        self._leave_home(hosted)

    def _leave_home(self, hosted: StoredPartition) -> None:
        home = self._homes.pop((hosted.topic_id, hosted.index), None)
        if home is not None:
            home.partition_count -= 1

    # Failing disks

    def append_failed(self, hosted: StoredPartition, error: OSError) -> None:
        """An append failed and left the log unchanged. A broken disk goes offline, a full one does not."""
        home = self._known_home(hosted)
        if home is not None and error.errno in NO_ROOM:
            self._filled(home, error)
            return
        self._logger.error("cannot write", partition=f"{hosted.topic}-{hosted.index}", error=str(error))
        self.check_disk(home, error)

    def read_failed(self, path: str, error: Exception) -> None:
        """A file could not be read. A broken disk goes offline, so that other brokers lead its partitions."""
        if isinstance(error, OSError) and error.errno in _BROKEN:
            for directory in self.directories:
                if path.startswith(f"{directory.path}/"):
                    self.check_disk(directory, error)

    def giving_up(self, hosted: StoredPartition, start: int, end: int) -> None:
        """Records below this replica's high watermark are about to be truncated."""
        self._logger.error(
            "giving up committed records that the leader does not have",
            partition=repr(hosted),
            start=start,
            end=end,
        )

    def flush_failed(self, hosted: StoredPartition, error: Exception) -> None:
        # After a failed fsync the page cache no longer tells what is on the disk.
        home = self._known_home(hosted) or self.directories[0]
        self._fail(home, f"fsync of {hosted.topic}-{hosted.index} under {home.path} failed: {error}")

    def check_disk(self, directory: Directory | None, error: OSError) -> None:
        """Take the directory offline if the error of a write means that its disk failed."""
        # A damaged log says nothing about the rest of the disk.
        if directory is not None and not isinstance(error, CorruptLog) and error.errno not in _HARMLESS:
            self._fail(directory, f"the disk under {directory.path} failed: {error}")

    # Full disks

    def has_no_room(self, hosted: StoredPartition) -> bool:
        """Whether the partition's directory is full."""
        if not self.is_any_full:
            return False
        home = self._known_home(hosted)
        return home is not None and home.is_full

    def _filled(self, directory: Directory, error: OSError | None) -> None:
        """From now on no records are written here. Logged once: there may be thousands of batches a second."""
        if directory.is_full or not directory.is_online:
            return
        directory.is_full = self.is_any_full = True
        self._logger.error(
            "the disk is full: cannot write records until there is room",
            path=directory.path,
            error="metadata took from the reserve" if error is None else str(error),
        )
        # Not from here: the caller is in the middle of its write.
        self.environment.spawn.soon(lambda: self._on_room_changed(directory))

    def look_for_room(self) -> None:
        """Check whether full disks have room again. Called regularly."""
        self._write_cluster_ids([directory for directory in self._online() if not directory.is_full])
        for directory in self._online():
            if not directory.reserve.is_whole:
                self._filled(directory, None)
            if directory.is_full and not directory.is_looked_at:
                self._look(directory)

    def _look(self, directory: Directory) -> None:
        def done(_: None, error: Exception | None) -> None:
            directory.is_looked_at = False
            if error is None and directory.is_full and directory.is_online:
                directory.is_full = False
                self.is_any_full = any(each.is_full for each in self._online())
                self._logger.warning("there is room on the disk again", path=directory.path)
                self._on_room_changed(directory)
            elif isinstance(error, OSError):
                self.check_disk(directory, error)

        directory.is_looked_at = True
        self.environment.spawn.in_thread(directory.reserve.look, done, lane="upkeep")

    def give_reserves(self) -> None:
        """At shutdown: free the reserve on full disks, for the checkpoints and clean shutdown markers."""
        for directory in self._online():
            while directory.is_full and directory.reserve.give():
                pass

    def _fail(self, directory: Directory, reason: str) -> None:
        """Take the directory offline: no more reads or writes. The node stops if it cannot continue without it."""
        if not directory.is_online:
            return
        directory.is_online = False
        if directory is self.directories[0] or not self._online():
            self._on_failure(reason)
            return
        self._logger.error("a directory went offline", path=directory.path, reason=reason)
        self.flush_queue.drop(lambda hosted: self._known_home(hosted) is directory)
        self._on_directory_failed(directory, reason)

    # Deleting

    def delete_log(self, hosted: StoredPartition) -> None:
        """Rename the log now, so that its name is free; remove it later, for requests that still read it.

        For a deleted topic, and for a replica that moved to another broker. While a start replays old metadata,
        the deletion is only noted: the files under this name may be a newer topic's, or the replica may be back.
        """
        if self._deleted_before is not None:
            self._deleted_before.add((hosted.topic_id, hosted.index))
            if hosted.is_open:
                hosted.log.abandon()
            return
        home = self.directory_of(hosted)
        for directory in self._online():
            directory.checkpoint.forget(hosted.topic_id, hosted.index)
        self.flushed_note.remove((hosted.topic_id, hosted.index))
        self._leave_home(hosted)
        if home is None or not home.is_online:
            return
        log = hosted.log if hosted.is_open else None
        try:
            target = home.rename(hosted.topic, hosted.index, "delete")
        except OSError as error:
            self._logger.error("cannot delete", partition=repr(hosted), error=str(error))
            return
        if log is not None:
            # Requests that still read it must not open the files of a new topic of the same name.
            log.moved(target)

        def close() -> None:
            if log is not None:
                log.abandon()

        self._remove_later([target], hosted.config.file_delete_delay_ms, close)

    def schedule_removal(self, hosted: StoredPartition, log: Log) -> None:
        """Remove the segments that a log has dropped, after the delay."""
        paths, log.pending_deletes = log.pending_deletes, []
        if paths:
            self._remove_later(paths, hosted.config.file_delete_delay_ms)

    def _remove_later(
        self, paths: list[str], delay_ms: int, first: Callable[[], None] = lambda: None
    ) -> None:
        def work() -> None:
            for path in paths:
                self.environment.files.remove(path)

        def done(_: None, error: Exception | None) -> None:
            if error is not None:
                self._logger.error("cannot remove", paths=paths, error=str(error))

        def remove() -> None:
            first()
            for path in paths:
                self.environment.files.forget(path)
            self.environment.spawn.in_thread(work, done, lane="upkeep")

        self.environment.spawn.later(delay_ms, remove)

    # Checkpoints

    def remember(self, partitions: Iterable[StoredPartition]) -> None:
        """Pass the recovery point, log start offset and high watermark of these logs to the next checkpoint."""
        for hosted in partitions:
            home = self._known_home(hosted)
            # The partition may have been deleted since the caller made the list.
            if hosted.is_open and not hosted.is_deleted and home is not None and home.is_online:
                log = hosted.log
                home.checkpoint.remember(
                    hosted.topic_id,
                    hosted.index,
                    Remembered(log.recovery_point, log.log_start_offset, hosted.high_watermark),
                )

    def prepare_checkpoint(self, *, all_caught_up: bool = False) -> Callable[[], None]:
        """Return the work of writing the checkpoints, for a worker thread. It raises OSError if one failed.

        ``all_caught_up``: every replica has been in sync since the last power failure.
        """
        works = [directory.checkpoint.prepare_write() for directory in self._online()]
        if all_caught_up:
            works += [directory.forget_loss for directory in self._online() if directory.has_noted_loss]
        # Directories whose disk was full at the start.
        works += [
            directory.note_boot
            for directory in self._online()
            if not directory.has_noted_boot and not directory.lost_page_cache
        ]

        def write() -> None:
            failed: OSError | None = None
            for work in works:
                try:
                    work()
                except OSError as error:
                    failed = error
            if failed is not None:
                raise failed

        return write

    def leave_clean_marker(self, broker_epoch: int) -> None:
        """Record in each directory that every log was closed."""
        for directory in self._online():
            if directory.has_noted_boot:
                directory.leave_clean_marker(broker_epoch)


def _set_aside(directory: Directory, name: TopicPartition, reason: str) -> None:
    directory.quarantine(*name, reason)
    directory.partition_count -= 1


def _choose(
    name: TopicPartition, topic_id: TopicId, named: bytes, one: Directory, other: Directory
) -> tuple[Directory, Directory]:
    """Two directories hold the same partition: return the one to use, then the one to set aside."""
    by_id = [directory for directory in (one, other) if directory.topic_id_of(*name) == topic_id]
    if other in by_id and (one not in by_id or other.id == named):
        return other, one
    return one, other
