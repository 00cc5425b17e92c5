"""One data directory, usually a disk of its own: whose it is, what was left in it, and whether it still works.

    meta.properties                    cluster id, node id, directory id (Kafka's file)
    .lock                              held while a broker runs here
    .kafka_cleanshutdown               left by a clean stop, removed at the next start
    .boot-id                           which boot of the machine the last start was on
    penstock-checkpoint                how far the disk holds each log, and where it begins
    penstock-reserve.<n>               room for metadata and checkpoints when the disk is full
    penstock-flushed                   which logs hold on the disk all they confirmed (in the first directory)
    <topic>-<partition>/               a log
    <topic>-<partition>.<hex>-delete   a log on its way out, removed after file.delete.delay.ms
    <topic>-<partition>.<hex>-stray    a log that no metadata explains: kept, reported, never removed

Newcomers: a directory is known by its id and not by its path. Another disk under the same path has another id
(or none yet, and then gets one), and what lay on the old one is lost until that comes back.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from penstock.broker.logs import Logger
from penstock.broker.options import ServeError
from penstock.broker.storage.checkpoint import Checkpoint
from penstock.broker.storage.reserve import Reserve
from penstock.environment import NO_ROOM, Environment
from penstock.log.names import read_partition_metadata
from penstock.model import TopicId, TopicPartition, format_id, parse_id

METADATA_DIRECTORY = "__cluster_metadata-0"
LOCK = ".lock"
META_PROPERTIES = "meta.properties"
CLEAN_SHUTDOWN = ".kafka_cleanshutdown"
LAST_BOOT = ".boot-id"
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

    # None until this node was told by the others of its cluster.
    cluster_id: str | None
    node_id: int
    directory_id: bytes


class Directory:
    def __init__(self, environment: Environment, path: str, logger: Logger) -> None:
        self._environment = environment
        self._files = environment.files
        self._logger = logger
        self.path = os.path.abspath(path)
        # NO_ID when it could not even be read.
        self.id = NO_ID
        # As it is written down here.
        self.cluster_id: str | None = None
        # False for good once the disk has failed.
        self.is_online = True
        # It is offline, and nothing of ours is on it: a new disk, too full to be begun with.
        self.is_blank = False
        # It had no ``meta.properties``: it is new, or the disk was replaced.
        self.is_new = False
        # Every log in it was closed by the last run.
        self.was_clean = False
        # Writes of the last run may be lost: the machine went down, and not only the process.
        self.lost_page_cache = False
        # A loss that nobody has heard of must not be forgotten by a clean stop.
        self.has_noted_boot = False
        # The broker epoch that the last clean stop was under.
        self.stopped_epoch = NO_EPOCH
        # Those that were found here, or were put here since. Not counted where there is no choice.
        self.partition_count = 0
        # Nothing but what the reserve is for can be written, for the time being.
        self.is_full = False
        # Somebody is finding out whether it still is.
        self.is_looked_at = False
        self.reserve = Reserve(self._files, self.path)
        self.checkpoint = Checkpoint(
            self._files, os.path.join(self.path, CHECKPOINT), keeping=self.reserve.keeping
        )

    def __repr__(self) -> str:
        return f"<directory {self.path}>"

    # Start

    def claim(self) -> None:
        """Raises OSError when it cannot be used, ServeError when somebody else uses it."""
        self._files.make_directory(self.path)
        if not self._files.lock(os.path.join(self.path, LOCK)):
            raise ServeError(
                f"another broker is running on {self.path}; stop it or choose another --data-dir"
            )

    @property
    def has_metadata(self) -> bool:
        return self._files.exists(os.path.join(self.path, METADATA_DIRECTORY))

    def holds_nothing(self) -> bool:
        """Whether nobody has used it, as far as can be seen."""
        is_named = self._files.exists(os.path.join(self.path, META_PROPERTIES))
        return not (is_named or self.has_metadata or any(self.partitions()))

    def identity(self) -> Identity | None:
        """Whose directory this is; None when nobody has said. Raises ServeError when it cannot be told."""
        path = os.path.join(self.path, META_PROPERTIES)
        if not self._files.exists(path):
            found = list(self.partitions())
            if self.has_metadata or any(self.topic_id_of(*name) for name in found):
                raise ServeError(
                    f"{path} is missing beside existing data; restore it or choose another --data-dir"
                )
            if found:
                # Somebody's own, in a directory that was not meant for us: it would be renamed as a stray log.
                raise ServeError(
                    f"{self.path} holds {found[0]}, which is named like a partition and is none; "
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
        """Write down whose directory this is. Raises OSError."""
        cluster = "" if identity.cluster_id is None else f"cluster.id={identity.cluster_id}\n"
        text = f"version=1\n{cluster}node.id={identity.node_id}\ndirectory.id={format_id(identity.directory_id)}\n"
        path = os.path.join(self.path, META_PROPERTIES)
        self.reserve.keeping(lambda: self._files.replace(path, text.encode()))
        self.id, self.cluster_id = identity.directory_id, identity.cluster_id

    def recall(self) -> None:
        """Read what the last run left, and forget that it ended well."""
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
        if not self.lost_page_cache:
            try:
                self.note_boot()
            except OSError as error:
                if error.errno not in NO_ROOM or not files.exists(last_boot):
                    raise
                # It has not failed. Until there is room, a start after a kill takes this for a loss of power.
                self._logger.warning("cannot remember the boot", path=self.path, error=str(error))
        try:
            self.checkpoint.load()
        except ValueError as error:
            # A hint only: without it every log is looked at.
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
        """What is written from now on is lost with this boot, and nothing else.

        After a loss this waits until the controller has heard of it: should the process die before that, the
        next one has to tell.
        """
        path, boot_id = os.path.join(self.path, LAST_BOOT), self._boot_id()
        if self._files.exists(path) and self._files.read(path) == boot_id:
            # A full disk does not matter then. But who wrote it may have been killed before its name was durable.
            self._files.sync_directory(self.path)
        else:
            self.reserve.keeping(lambda: self._files.replace(path, boot_id))
        self.has_noted_boot = True

    # Partitions

    def partitions(self) -> Iterator[TopicPartition]:
        """Those that have a directory here."""
        for name in self._files.list(self.path):
            match = _partition_directory.fullmatch(name)
            if match is not None and name != METADATA_DIRECTORY:
                yield TopicPartition(match["topic"], int(match["partition"]))

    def path_of(self, topic: str, index: int) -> str:
        return f"{self.path}/{topic}-{index}"

    def topic_id_of(self, topic: str, index: int) -> TopicId | None:
        """Of which topic a partition's directory says it is."""
        return read_partition_metadata(self._files, self.path_of(topic, index))

    def holds(self, topic: str, index: int) -> bool:
        return self._files.exists(self.path_of(topic, index))

    def quarantine(self, topic: str, index: int, reason: str) -> None:
        """Set a partition's directory aside. It is never removed."""
        target = self.rename(topic, index, "stray")
        self._logger.warning(
            "set aside a directory that is not explained", directory=os.path.basename(target), reason=reason
        )

    def rename(self, topic: str, index: int, suffix: str) -> str:
        """Free a partition's name; the new path."""
        source = self.path_of(topic, index)
        target = f"{source}.{self._environment.random.randbytes(16).hex()}-{suffix}"
        self._files.rename(source, target)
        return target

    # Leaving

    def leave_clean_marker(self, broker_epoch: int) -> None:
        """Say that every log was closed. The boot id tells a killed process from a power loss later."""
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
    """Find out whose directories these are, and write it down where nobody has; the cluster's id, if known.

    A directory that says whose it is, but not of which cluster, is left as it is.

    ``attempt`` runs a step that may find a disk failing, and takes that disk out. Raises ServeError when they
    do not belong together, or not to this node.
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
