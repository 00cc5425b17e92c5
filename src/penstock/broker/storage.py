"""The data directory: whose it is, what was left in it, and the files beside the partitions' own.

    meta.properties                    cluster id, node id, directory id (Kafka's file)
    .lock                              held while a broker runs here
    .kafka_cleanshutdown               left by a clean stop, removed at the next start
    .boot-id                           which boot of the machine the last start was on
    penstock-checkpoint                how far the disk holds each log, and where it begins
    <topic>-<partition>/               a log
    <topic>-<partition>.<hex>-delete   a log on its way out, removed after file.delete.delay.ms
    <topic>-<partition>.<hex>-stray    a log that no metadata explains: kept, reported, never removed

Newcomers: a partition without a directory is an empty one (the directory appears at the first append), unless
the checkpoint says that it was not empty. Then the disk lost it, and the partition refuses to start over.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from penstock.broker.checkpoint import Checkpoint, Remembered
from penstock.broker.options import ServeError
from penstock.environment import Environment
from penstock.log.log import Log
from penstock.log.names import read_partition_metadata, write_partition_metadata
from penstock.metadata.image import Image
from penstock.model import TopicPartition, format_id, parse_id

if TYPE_CHECKING:
    from penstock.broker.logs import Logger
    from penstock.broker.partitions import HostedPartition

METADATA_DIRECTORY = "__cluster_metadata-0"
LOCK = ".lock"
META_PROPERTIES = "meta.properties"
CLEAN_SHUTDOWN = ".kafka_cleanshutdown"
LAST_BOOT = ".boot-id"
CHECKPOINT = "penstock-checkpoint"
BOOT_ID = "/proc/sys/kernel/random/boot_id"

FLUSHES_MAX = 16
FLUSH_RETRY_MS = 100

_partition_directory = re.compile(r"(?P<topic>.+)-(?P<partition>\d{1,10})")
_doomed_directory = re.compile(r".+\.[0-9a-f]{32}-delete")


class Storage:
    def __init__(
        self,
        environment: Environment,
        path: str,
        node_id: int,
        logger: Logger,
        on_failure: Callable[[str], None],
    ) -> None:
        self.environment = environment
        self.path = os.path.abspath(path)
        self._logger = logger
        # Called with one line when the disk can no longer be trusted; the broker stops.
        self._on_failure = on_failure
        # Partitions with appends that no flush has covered, oldest first.
        self.unflushed: dict[HostedPartition, None] = {}
        # Flushes hold descriptors, so only some run at a time; the others stand in line here.
        self._flushes_running = 0
        self._flushes_waiting: dict[HostedPartition, None] = {}
        self.was_clean = False
        self.lost_page_cache = False
        self._claim()
        self.cluster_id, self.directory_id = self._identify(node_id)
        self._checkpoint = Checkpoint(environment.files, os.path.join(self.path, CHECKPOINT))
        self._recall()

    # Start

    def _claim(self) -> None:
        files = self.environment.files
        try:
            files.make_directory(self.path)
            locked = files.lock(os.path.join(self.path, LOCK))
        except OSError as error:
            raise ServeError(f"cannot use the data directory {self.path}: {error.strerror}") from error
        if not locked:
            raise ServeError(
                f"another broker is running on {self.path}; stop it or choose another --data-dir"
            )

    def _identify(self, node_id: int) -> tuple[str, str]:
        """Whose directory this is: read, or made up and written at the first start."""
        path = os.path.join(self.path, META_PROPERTIES)
        files = self.environment.files
        if not files.exists(path):
            if files.exists(os.path.join(self.path, METADATA_DIRECTORY)):
                raise ServeError(
                    f"{path} is missing beside existing data; restore it or choose another --data-dir"
                )
            random_id = self.environment.random.randbytes
            cluster_id, directory_id = format_id(random_id(16)), format_id(random_id(16))
            text = f"version=1\ncluster.id={cluster_id}\nnode.id={node_id}\ndirectory.id={directory_id}\n"
            files.replace(path, text.encode())
            return cluster_id, directory_id
        lines = files.read(path).decode("utf-8", "replace").splitlines()
        properties = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
        try:
            owner = int(properties["node.id"])
            cluster_id, directory_id = properties["cluster.id"], properties["directory.id"]
            parse_id(directory_id)
        except (KeyError, ValueError):
            raise ServeError(f"{path} is damaged; restore it or choose another --data-dir") from None
        if owner != node_id:
            raise ServeError(
                f"{self.path} belongs to node {owner}; use --node-id {owner} or another --data-dir"
            )
        return cluster_id, directory_id

    def _recall(self) -> None:
        """Read what the last run left, and forget that it ended well."""
        files = self.environment.files
        marker = os.path.join(self.path, CLEAN_SHUTDOWN)
        self.was_clean = files.exists(marker)
        if self.was_clean:
            files.remove(marker)
            files.sync_directory(self.path)
        # A killed process leaves its writes in the page cache; a machine that went down does not.
        last_boot = os.path.join(self.path, LAST_BOOT)
        boot_id = self._boot_id()
        self.lost_page_cache = (
            not self.was_clean and files.exists(last_boot) and files.read(last_boot) != boot_id
        )
        files.replace(last_boot, boot_id)
        try:
            self._checkpoint.load()
        except ValueError as error:
            # A hint only: without it every log is looked at.
            self._logger.warning("ignored a damaged checkpoint", file=CHECKPOINT, error=str(error))
            self.was_clean = False
        for name in files.list(self.path):
            if _doomed_directory.fullmatch(name):
                files.remove(os.path.join(self.path, name))

    def quarantine_strays(self, image: Image) -> None:
        """Set aside directories that no committed metadata explains. They are never removed."""
        for name in self.environment.files.list(self.path):
            match = _partition_directory.fullmatch(name)
            if match is None or name == METADATA_DIRECTORY:
                continue
            if not _is_in(image, TopicPartition(match["topic"], int(match["partition"]))):
                self._quarantine(name, "no topic in the metadata has this partition")
        self._checkpoint.keep_only(image)

    def partitions_on_disk(self) -> list[TopicPartition]:
        names = map(_partition_directory.fullmatch, self.environment.files.list(self.path))
        return [TopicPartition(name["topic"], int(name["partition"])) for name in names if name is not None]

    def holds(self, hosted: HostedPartition) -> bool:
        """Whether the partition has a directory."""
        return self.environment.files.exists(self._directory(hosted))

    def _directory(self, hosted: HostedPartition) -> str:
        return f"{self.path}/{hosted.topic}-{hosted.index}"

    def open_log(self, hosted: HostedPartition) -> Log:
        """Raises OSError when the partition's files cannot be used."""
        directory = self._directory(hosted)
        files = self.environment.files
        remembered = self._checkpoint.get(hosted.topic_id, hosted.index)
        if files.exists(directory):
            topic_id = read_partition_metadata(files, directory)
            if topic_id is not None and topic_id != hosted.topic_id:
                name = os.path.basename(directory)
                self._quarantine(name, f"it belongs to the topic with id {format_id(topic_id)}")
        elif remembered.recovery_point > remembered.log_start_offset:
            raise OSError(errno.ENOENT, "the checkpoint says it held data", directory)
        log = Log.open(
            self.environment,
            directory,
            hosted.config.log,
            clean=self.was_clean,
            recovery_point=remembered.recovery_point,
            log_start_offset=remembered.log_start_offset or None,
        )
        self.doom(hosted, log)
        if not self.was_clean and log.log_end_offset > log.recovery_point:
            # What recovery kept was readable from the page cache; now it is on the disk as well.
            offset, work = log.prepare_flush()
            work()
            log.flushed(offset)
        return log

    def make_directory(self, hosted: HostedPartition) -> None:
        """Make the partition's directory, if it has none, and write into it whose it is."""
        directory = self._directory(hosted)
        files = self.environment.files
        files.make_directory(directory)
        if read_partition_metadata(files, directory) is None:
            write_partition_metadata(files, directory, hosted.topic_id)

    def _quarantine(self, name: str, reason: str) -> None:
        target = f"{name}.{self.environment.random.randbytes(16).hex()}-stray"
        self.environment.files.rename(os.path.join(self.path, name), os.path.join(self.path, target))
        self._logger.warning("set aside a directory that is not explained", directory=target, reason=reason)

    # Flushing

    def may_flush_now(self, hosted: HostedPartition) -> bool:
        """Whether there is room for one more flush; if not, the partition is called when there is."""
        if self._flushes_running < FLUSHES_MAX:
            return True
        self._flushes_waiting[hosted] = None
        return False

    def start_flush(self, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        """Run the work of a flush in a thread, and let the next one in when it has ended."""

        def ended(_: None, error: Exception | None) -> None:
            self._flushes_running -= 1
            done(error)
            if self._flushes_waiting and self._flushes_running < FLUSHES_MAX:
                following = next(iter(self._flushes_waiting))
                del self._flushes_waiting[following]
                following.flush()

        self._flushes_running += 1
        self.environment.spawn.in_thread(work, ended, lane="flush")

    def flush_delayed(self, hosted: HostedPartition, error: OSError) -> None:
        self._logger.error("a flush has to wait", partition=repr(hosted), error=str(error))
        self.environment.spawn.later(FLUSH_RETRY_MS, hosted.flush)

    # Failing disks

    def append_failed(self, hosted: HostedPartition, error: OSError) -> None:
        """The log is as it was, the client is told. A failing disk stops the broker, a full one does not."""
        self._logger.error("cannot write", partition=f"{hosted.topic}-{hosted.index}", error=str(error))
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EMFILE, errno.ENFILE):
            self._on_failure(f"the disk under {self.path} failed: {error}")

    def flush_failed(self, hosted: HostedPartition, error: Exception) -> None:
        # After a failed fsync the page cache no longer tells what is on the disk.
        self._on_failure(f"fsync of {hosted.topic}-{hosted.index} under {self.path} failed: {error}")

    # Deleting

    def delete_log(self, hosted: HostedPartition) -> None:
        """Rename at once, so that the name is free; remove later, for readers that are still at it."""
        self._checkpoint.forget(hosted.topic_id, hosted.index)
        source = self._directory(hosted)
        if not self.holds(hosted):
            return
        target = f"{source}.{self.environment.random.randbytes(16).hex()}-delete"
        log = hosted.log if hosted.is_open else None
        try:
            self.environment.files.rename(source, target)
        except OSError as error:
            self._logger.error("cannot delete", directory=source, error=str(error))
            return
        if log is not None:
            # Readers that are in the middle of it must not open the files of a new topic of the same name.
            log.moved(target)

        def close() -> None:
            if log is not None:
                log.abandon()

        self._remove_later([target], hosted.config.file_delete_delay_ms, close)

    def doom(self, hosted: HostedPartition, log: Log) -> None:
        """Remove the segments that a log has let go of, after the delay."""
        doomed, log.doomed = log.doomed, []
        if doomed:
            self._remove_later(doomed, hosted.config.file_delete_delay_ms)

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

    def prepare_checkpoint(self, partitions: Iterable[HostedPartition]) -> Callable[[], None]:
        """The work of writing the checkpoint, for a worker thread."""
        return self._checkpoint.prepare_write(
            (
                (hosted.topic_id, hosted.index),
                Remembered(hosted.log.recovery_point, hosted.log.log_start_offset),
            )
            for hosted in partitions
            if hosted.is_open
        )

    def leave_clean_marker(self, broker_epoch: int) -> None:
        """Say that every log was closed. The boot id tells a killed process from a power loss later."""
        marker = {"version": 0, "brokerEpoch": broker_epoch, "bootId": self._boot_id().decode()}
        self.environment.files.replace(os.path.join(self.path, CLEAN_SHUTDOWN), json.dumps(marker).encode())

    def _boot_id(self) -> bytes:
        try:
            return self.environment.files.read(BOOT_ID).strip()
        except OSError:
            return b""


def _is_in(image: Image, name: TopicPartition) -> bool:
    topic = image.topics.get(name.topic)
    return topic is not None and name.partition < len(topic.partitions)
