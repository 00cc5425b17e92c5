"""One data directory, usually on its own disk: its identity, what the last run left, whether it is online or full.

    meta.properties                    cluster id, node id, directory id (Kafka's file)
    .lock                              held while a broker runs here
    .kafka_cleanshutdown               left by a clean stop, removed at the next start
    .boot-id                           which boot of the machine the last start was on
    penstock-checkpoint                recovery point and log start offset of each log
    penstock-reserve.<n>               space kept for metadata and checkpoints when the disk is full
    penstock-flushed                   partitions that flush before they confirm (in the first directory)
    penstock-first-users               users for a cluster that does not exist yet (in the first directory)
    <topic>-<partition>/               a log
    <topic>-<partition>.<hex>-delete   a deleted log, removed after file.delete.delay.ms
    <topic>-<partition>.<hex>-stray    a log that is not in the metadata: kept, reported, never removed

A directory is identified by its id, not by its path. A replaced disk under the same path has another id (or gets
a new one), and the partitions of the old disk are lost until it comes back.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from penstock.broker.logs import Logger
from penstock.broker.options import ServeError
from penstock.broker.storage.checkpoint import Checkpoint
from penstock.broker.storage.reserve import Reserve
from penstock.environment import NO_ROOM, Environment, Files
from penstock.log.names import LOG, offset_of, read_partition_metadata
from penstock.model import TopicId, TopicPartition, format_id, parse_id

METADATA_DIRECTORY = "__cluster_metadata-0"
LOCK = ".lock"
META_PROPERTIES = "meta.properties"
CLEAN_SHUTDOWN = ".kafka_cleanshutdown"
LAST_BOOT = ".boot-id"
# Writes were lost in a power failure, and not all replicas have caught up since.
POWER_LOST = ".power-lost"
CHECKPOINT = "penstock-checkpoint"
FLUSHED_NOTE = "penstock-flushed"
BOOT_ID = "/proc/sys/kernel/random/boot_id"

NO_EPOCH = -1
NO_ID = bytes(16)
# Ids up to this have meanings of their own (KIP-858).
_RESERVED_ID_MAX = 99

_partition_directory = re.compile(r"(?P<topic>.+)-(?P<partition>\d{1,10})")
_deleted_directory = re.compile(r".+\.[0-9a-f]{32}-delete")


class Identity(NamedTuple):
    """What ``meta.properties`` says."""

    # None until another node has told this one.
    cluster_id: str | None
    node_id: int
    directory_id: bytes


class Directory:
    def __init__(self, environment: Environment, path: str, logger: Logger) -> None:
        self._environment = environment
        self._files = environment.files
        self._logger = logger
        self.path = os.path.abspath(path)
        # NO_ID while meta.properties could not be read.
        self.id = NO_ID
        # As meta.properties has it.
        self.cluster_id: str | None = None
        # Stays False once the disk has failed.
        self.is_online = True
        # Offline, with no data of ours: a new disk that was too full to start with.
        self.is_blank = False
        # It had no meta.properties: the directory is new, or the disk was replaced.
        self.is_new = False
        # The last run closed every log in it.
        self.was_clean = False
        # Writes of the last run may be lost: the machine went down, not only the process.
        self.lost_page_cache = False
        # The same of an earlier run, and not all replicas have caught up since.
        self.lost_before = False
        # There is a note of either.
        self.has_noted_loss = False
        # Without it a clean stop leaves no marker, so that an unreported loss is not forgotten.
        self.has_noted_boot = False
        # The broker epoch of the last clean stop.
        self.stopped_epoch = NO_EPOCH
        # Used to place new partitions. Not counted when there is only one directory.
        self.partition_count = 0
        # No room for records; only metadata and checkpoints are written, from the reserve.
        self.is_full = False
        # A thread is checking whether there is room again.
        self.is_looked_at = False
        self.reserve = Reserve(self._files, self.path)
        self.checkpoint = Checkpoint(
            self._files, os.path.join(self.path, CHECKPOINT), keeping=self.reserve.keeping
        )

    def __repr__(self) -> str:
        return f"<directory {self.path}>"

    # Start

    def claim(self) -> None:
        """Create and lock it. Raises OSError when it cannot be used, ServeError when another broker uses it."""
        self._files.make_directory(self.path)
        if not self._files.lock(os.path.join(self.path, LOCK)):
            raise ServeError(
                f"another broker is running on {self.path}; stop it or choose another --data-dir"
            )

    @property
    def has_metadata(self) -> bool:
        return self._files.exists(os.path.join(self.path, METADATA_DIRECTORY))

    def holds_nothing(self) -> bool:
        """Whether it has no meta.properties, no metadata and no partitions."""
        is_named = self._files.exists(os.path.join(self.path, META_PROPERTIES))
        return not (is_named or self.has_metadata or any(self.partitions()))

    def identity(self) -> Identity | None:
        """Read meta.properties; None for a new directory. Raises ServeError when it is missing or damaged."""
        path = os.path.join(self.path, META_PROPERTIES)
        if not self._files.exists(path):
            found = list(self.partitions())
            if self.has_metadata or any(self.topic_id_of(*name) for name in found):
                raise ServeError(
                    f"{path} is missing beside existing data; restore it or choose another --data-dir"
                )
            if found:
                # Another program's directory: it would be renamed as a stray log.
                raise ServeError(
                    f"{self.path} holds {found[0]}, which is named like a partition but is not one; "
                    "choose an empty --data-dir"
                )
            return None
        lines = self._files.read(path).decode("utf-8", "replace").splitlines()
        properties = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
        try:
            self.id = parse_id(properties["directory.id"])
            if self.id == NO_ID:
                raise ValueError
            self.cluster_id = properties.get("cluster.id")
            return Identity(self.cluster_id, int(properties["node.id"]), self.id)
        except (KeyError, ValueError):
            raise ServeError(f"{path} is damaged; restore it or choose another --data-dir") from None

    def identify(self, identity: Identity) -> None:
        """Write meta.properties. Raises OSError."""
        cluster = "" if identity.cluster_id is None else f"cluster.id={identity.cluster_id}\n"
        text = f"version=1\n{cluster}node.id={identity.node_id}\ndirectory.id={format_id(identity.directory_id)}\n"
        path = os.path.join(self.path, META_PROPERTIES)
        self.reserve.keeping(lambda: self._files.replace(path, text.encode()))
        self.id, self.cluster_id = identity.directory_id, identity.cluster_id

    def recall(self) -> None:
        """Read what the last run left, and remove its clean shutdown marker."""
        files = self._files
        self.reserve.find()
        marker = os.path.join(self.path, CLEAN_SHUTDOWN)
        self.was_clean = files.exists(marker)
        if self.was_clean:
            self.stopped_epoch = _epoch_in(files.read(marker))
            files.remove(marker)
            files.sync_directory(self.path)
        # A killed process leaves its writes in the page cache; a machine that went down does not.
        last_boot = os.path.join(self.path, LAST_BOOT)
        boot_id = self._boot_id()
        self.lost_page_cache = (
            not self.was_clean and files.exists(last_boot) and files.read(last_boot) != boot_id
        )
        self.lost_before = self.has_noted_loss = files.exists(os.path.join(self.path, POWER_LOST))
        if not self.lost_page_cache:
            try:
                self.note_boot()
            except OSError as error:
                if error.errno not in NO_ROOM or not files.exists(last_boot):
                    raise
                # The disk is full, not broken. Until there is room, a start after a kill is taken for a power loss.
                self._logger.warning("cannot store the boot id", path=self.path, error=str(error))
        try:
            self.checkpoint.load()
        except ValueError as error:
            # It is only a hint: without it every log is recovered.
            self._logger.warning("ignored a damaged checkpoint", file=CHECKPOINT, error=str(error))
            self.was_clean = False
        for name in files.list(self.path):
            if _deleted_directory.fullmatch(name):
                files.remove(os.path.join(self.path, name))
        try:
            self.reserve.fill()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.is_full = True
            self._logger.error("the disk is full", path=self.path)
        if self.reserve.refusal is not None:
            self._logger.warning(
                "no reserve can be kept for a full disk", path=self.path, error=str(self.reserve.refusal)
            )

    def note_boot(self) -> None:
        """Store the boot id: unflushed writes from now on are lost only if the machine goes down.

        After a loss, call this only once the controller knows of it: if the process dies before that, the next
        one has to report the loss.
        """
        path, boot_id = os.path.join(self.path, LAST_BOOT), self._boot_id()
        if self.lost_page_cache and not self.has_noted_boot:
            # The next process will find nothing lost, but the replicas may still lack records.
            note = os.path.join(self.path, POWER_LOST)
            self.reserve.keeping(lambda: self._files.replace(note, boot_id))
            self.has_noted_loss = True
        if self._files.exists(path) and self._files.read(path) == boot_id:
            # Works on a full disk. The process that wrote the file may have died before its name was durable.
            self._files.sync_directory(self.path)
        else:
            self.reserve.keeping(lambda: self._files.replace(path, boot_id))
        self.has_noted_boot = True

    def forget_loss(self) -> None:
        """All replicas have caught up since the last power failure. Raises OSError."""
        self._files.remove(os.path.join(self.path, POWER_LOST))
        self.lost_before = self.has_noted_loss = False

    # Partitions

    def partitions(self) -> Iterator[TopicPartition]:
        """The partitions that have a directory here."""
        for name in self._files.list(self.path):
            match = _partition_directory.fullmatch(name)
            if match is not None and name != METADATA_DIRECTORY:
                yield TopicPartition(match["topic"], int(match["partition"]))

    def path_of(self, topic: str, index: int) -> str:
        return f"{self.path}/{topic}-{index}"

    def topic_id_of(self, topic: str, index: int) -> TopicId | None:
        """The topic id that is stored in a partition's directory."""
        return read_partition_metadata(self._files, self.path_of(topic, index))

    def holds(self, topic: str, index: int) -> bool:
        return self._files.exists(self.path_of(topic, index))

    def quarantine(self, topic: str, index: int, reason: str) -> None:
        """Rename a partition's directory to ``-stray``. It is never removed."""
        target = self.rename(topic, index, "stray")
        self._logger.warning("set aside a stray directory", directory=os.path.basename(target), reason=reason)

    def rename(self, topic: str, index: int, suffix: str) -> str:
        """Rename a partition's directory, so that its name is free. Return the new path."""
        source = self.path_of(topic, index)
        target = f"{source}.{self._environment.random.randbytes(16).hex()}-{suffix}"
        self._files.rename(source, target)
        return target

    # Leaving

    def leave_clean_marker(self, broker_epoch: int) -> None:
        """Record that every log was closed. The boot id later tells a killed process from a power loss."""
        marker = {"version": 0, "brokerEpoch": broker_epoch, "bootId": self._boot_id().decode()}
        path = os.path.join(self.path, CLEAN_SHUTDOWN)
        self.reserve.keeping(lambda: self._files.replace(path, json.dumps(marker).encode()))

    def _boot_id(self) -> bytes:
        try:
            return self._files.read(BOOT_ID).strip()
        except OSError:
            return b""


def identify(
    directories: list[Directory],
    node_id: int,
    chance: random.Random,
    *,
    is_alone: bool,
    attempt: Callable[[Directory, Callable[[], None]], None],
) -> str | None:
    """Read the identity of all directories and write it to new ones. Return the cluster id, if known.

    A directory that has an identity without a cluster id is left as it is.

    ``attempt`` runs a step and takes the directory offline if its disk fails. Raises ServeError when the
    directories do not belong together, or not to this node.
    """
    found: dict[Directory, Identity] = {}

    def read(directory: Directory) -> None:
        identity = directory.identity()
        if identity is not None:
            found[directory] = identity

    for directory in directories:
        if directory.is_online:
            attempt(directory, partial(read, directory))
    first = directories[0]
    cluster_id: str | None = None
    for directory, identity in found.items():
        if identity.node_id != node_id:
            raise ServeError(
                f"{directory.path} belongs to node {identity.node_id}; "
                f"use --node-id {identity.node_id} or another --data-dir"
            )
        if identity.cluster_id is not None and cluster_id not in (None, identity.cluster_id):
            raise ServeError(f"{directory.path} belongs to another cluster than {first.path}")
        cluster_id = cluster_id or identity.cluster_id
        if directory is not first and directory.has_metadata:
            raise ServeError(f"the metadata is in {directory.path}: give that --data-dir first")
    if len({identity.directory_id for identity in found.values()}) < len(found):
        raise ServeError("two data directories have the same directory.id; one is a copy of the other")
    if found and first not in found and is_alone:
        raise ServeError(
            f"{first.path} is empty and the other data directories are not: the metadata is missing"
        )
    is_made_up = cluster_id is None and is_alone
    if is_made_up:
        cluster_id = format_id(chance.randbytes(16))
    for directory in directories:
        if not directory.is_online:
            continue
        directory.is_new = directory not in found
        identity = found.get(directory) or Identity(None, node_id, _made_up_id(chance))
        if directory.is_new or is_made_up:
            attempt(directory, partial(directory.identify, identity._replace(cluster_id=cluster_id)))
    return cluster_id


def size_on_disk(files: Files, path: str) -> int:
    """The bytes of a log that is not open. For a worker thread."""
    size = 0
    # A file may be removed meanwhile.
    with suppress(OSError):
        for name in files.list(path):
            if offset_of(name, LOG) is not None:
                size += files.size(f"{path}/{name}")
    return size


def is_reserved(directory_id: bytes) -> bool:
    return int.from_bytes(directory_id, "big") <= _RESERVED_ID_MAX


def _made_up_id(chance: random.Random) -> bytes:
    while is_reserved(made_up := chance.randbytes(16)):
        pass
    return made_up


def _epoch_in(marker: bytes) -> int:
    try:
        return int(json.loads(marker)["brokerEpoch"])
    except (ValueError, KeyError, TypeError):
        return NO_EPOCH
