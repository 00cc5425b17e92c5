"""The data directory: whose it is, what was left in it, and the files beside the partitions' own.

    meta.properties                    cluster id, node id, directory id (Kafka's file)
    .lock                              held while a broker runs here
    .kafka_cleanshutdown               left by a clean stop, removed at the next start
    .boot-id                           which boot of the machine the last start was on
    recovery-point-offset-checkpoint   everything below is fsynced
    log-start-offset-checkpoint        where DeleteRecords moved the beginning to
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
RECOVERY_POINTS = "recovery-point-offset-checkpoint"
LOG_STARTS = "log-start-offset-checkpoint"
BOOT_ID = "/proc/sys/kernel/random/boot_id"

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
        self.was_clean = False
        self.lost_page_cache = False
        self._claim()
        self.cluster_id, self.directory_id = self._identify(node_id)
        self._recovery_points: dict[TopicPartition, int] = {}
        self._log_starts: dict[TopicPartition, int] = {}
        # When the checkpoints that were found at the start had been written.
        self._checkpoints_ms = 0
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
        self._recovery_points = self._read_checkpoint(RECOVERY_POINTS)
        self._log_starts = self._read_checkpoint(LOG_STARTS)
        path = os.path.join(self.path, RECOVERY_POINTS)
        self._checkpoints_ms = files.modified_ms(path) if files.exists(path) else 0
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
        self._forget(lambda name: not _is_in(image, name))

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
        name = TopicPartition(hosted.topic, hosted.index)
        directory = self._directory(hosted)
        files = self.environment.files
        if hosted.created_ms > self._checkpoints_ms:
            # Written before the topic existed: what they say is about an older one of the same name.
            self._forget(lambda one: one == name)
        if files.exists(directory):
            topic_id = read_partition_metadata(files, directory)
            if topic_id is not None and topic_id != hosted.topic_id:
                self._quarantine(str(name), f"it belongs to the topic with id {format_id(topic_id)}")
                self._forget(lambda one: one == name)
        elif self._recovery_points.get(name, 0) > self._log_starts.get(name, 0):
            raise OSError(errno.ENOENT, "the checkpoint says it held data", directory)
        log = Log.open(
            self.environment,
            directory,
            hosted.config.log,
            clean=self.was_clean,
            recovery_point=self._recovery_points.get(name, 0),
            log_start_offset=self._log_starts.get(name),
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
        name = TopicPartition(hosted.topic, hosted.index)
        # Or the next checkpoint would say it of a new topic of the same name.
        self._recovery_points.pop(name, None)
        self._log_starts.pop(name, None)
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
            self.environment.spawn.in_thread(work, done)

        self.environment.spawn.later(delay_ms, remove)

    # Checkpoints

    def prepare_checkpoint(self, partitions: Iterable[HostedPartition]) -> Callable[[], None]:
        """The work of writing down how far the disk holds each log, and where each begins; for a thread."""
        for hosted in partitions:
            if hosted.is_open:
                name = TopicPartition(hosted.topic, hosted.index)
                self._recovery_points[name] = hosted.log.recovery_point
                self._log_starts[name] = hosted.log.log_start_offset
        recovery_points = _checkpoint_text(self._recovery_points)
        log_starts = _checkpoint_text({name: offset for name, offset in self._log_starts.items() if offset})

        def write() -> None:
            self.environment.files.replace(os.path.join(self.path, RECOVERY_POINTS), recovery_points)
            self.environment.files.replace(os.path.join(self.path, LOG_STARTS), log_starts)

        return write

    def _forget(self, is_gone: Callable[[TopicPartition], bool]) -> None:
        """Drop what the checkpoints say of partitions that no longer are what they were."""
        for offsets in (self._recovery_points, self._log_starts):
            for name in [name for name in offsets if is_gone(name)]:
                del offsets[name]

    def leave_clean_marker(self, broker_epoch: int) -> None:
        """Say that every log was closed. The boot id tells a killed process from a power loss later."""
        marker = {"version": 0, "brokerEpoch": broker_epoch, "bootId": self._boot_id().decode()}
        self.environment.files.replace(os.path.join(self.path, CLEAN_SHUTDOWN), json.dumps(marker).encode())

    def _boot_id(self) -> bytes:
        try:
            return self.environment.files.read(BOOT_ID).strip()
        except OSError:
            return b""

    def _read_checkpoint(self, name: str) -> dict[TopicPartition, int]:
        path = os.path.join(self.path, name)
        if not self.environment.files.exists(path):
            return {}
        try:
            version, count, *lines = self.environment.files.read(path).decode().splitlines()
            if version != "0" or int(count) != len(lines):
                raise ValueError("the count is wrong")
            offsets = {}
            for line in lines:
                topic, partition, offset = line.split(" ")
                offsets[TopicPartition(topic, int(partition))] = int(offset)
            return offsets
        except ValueError as error:
            # A hint only: without it more of each log is read at the start.
            self._logger.warning("ignored a damaged checkpoint", file=path, error=str(error))
            self.was_clean = False
            return {}


def _is_in(image: Image, name: TopicPartition) -> bool:
    topic = image.topics.get(name.topic)
    return topic is not None and name.partition < len(topic.partitions)


def _checkpoint_text(offsets: dict[TopicPartition, int]) -> bytes:
    """Kafka's form: a version, the number of lines, and a line for each partition."""
    lines = [f"{topic} {partition} {offset}\n" for (topic, partition), offset in offsets.items()]
    return f"0\n{len(lines)}\n{''.join(lines)}".encode()
