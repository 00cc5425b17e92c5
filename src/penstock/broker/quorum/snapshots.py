"""Snapshots of the metadata, which replace the beginning of the metadata log.

    00000000000000012345-0000000007.checkpoint        all records below offset 12345; the last one has epoch 7
    00000000000000012345-0000000007.checkpoint.part   being written, or being fetched from the leader

The file format is Kafka's: a control batch with the header, one with the voters, batches of changes that build the
image from an empty one, a control batch with the footer. A file without a footer is not a snapshot.

An image never changes, so it is written in slices between which the loop does other work: a hundred thousand
partitions take seconds to encode. The two newest snapshots are kept. The older one is used if the newer is
unreadable, so the log is kept from the end of the *older* one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

from penstock.broker.quorum.metadata_log import (
    addresses_in,
    control_batch,
    decode_changes,
    decode_control,
    removed_in,
    voters_in,
    voters_record,
)
from penstock.environment import Environment, File, FileRange
from penstock.metadata import changes as metadata_changes
from penstock.metadata.image import Delta, Image
from penstock.metadata.values import TOPIC_RESOURCE
from penstock.protocol.errors import DecodeError
from penstock.protocol.messages.quorum import (
    KRaftVersionRecord,
    SnapshotFooterRecord,
    SnapshotHeaderRecord,
    VotersRecord,
)
from penstock.protocol.records import CorruptBatch, batches, crc_matches, encode_batch
from penstock.protocol.schema import Message
from penstock.raft.events import KRAFT_VERSION
from penstock.raft.quorum import Voters
from penstock.raft.storage import SnapshotId

CHECKPOINT = ".checkpoint"
PART = ".part"
KEPT = 2
# Size of one slice: some milliseconds of work.
SLICE_PARTITIONS = 200
SLICE_CONFIGS = 500
# Between two slices, so that a whole snapshot takes at most half of the loop's time.
PAUSE_MS = 5

_OFFSET_DIGITS, _EPOCH_DIGITS = 20, 10

T = TypeVar("T")


class Loaded(NamedTuple):
    """The content of a snapshot."""

    snapshot_id: SnapshotId
    image: Image
    voters: Voters
    # Voters of the previous set that are not in this one.
    removed: Voters
    addresses: dict[int, tuple[str, int]]


class Snapshots:
    def __init__(
        self,
        environment: Environment,
        directory: str,
        keeping: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        """``keeping`` runs a write and, if the disk is full, lets it use the reserve (``Reserve.keeping``)."""
        self._environment = environment
        self._files = environment.files
        self._keeping = keeping
        self._directory = directory
        # Snapshots on disk, oldest first.
        self.ids: list[SnapshotId] = []
        self.is_writing = False
        self._is_closed = False
        # The snapshot that followers fetch now, kept open.
        self._served: tuple[SnapshotId, File] | None = None
        self._download: tuple[SnapshotId, File] | None = None

    # Reading

    def load(self, on_unreadable: Callable[[str, str], None]) -> Loaded | None:
        """Load the newest readable snapshot. Unreadable ones are renamed, with a call of ``on_unreadable``."""
        for name in self._files.list(self._directory):
            if name.endswith(CHECKPOINT + PART):
                self._files.remove(f"{self._directory}/{name}")
            snapshot_id = id_of(name)
            if snapshot_id is not None:
                self.ids.append(snapshot_id)
        while self.ids:
            path = self.path_of(self.ids[-1])
            try:
                return read_snapshot(self._files.read(path), self.ids[-1])
            except (CorruptBatch, DecodeError) as error:
                on_unreadable(path, str(error))
                self._files.rename(path, path + ".corrupt")
                self.ids.pop()
        return None

    def path_of(self, snapshot_id: SnapshotId) -> str:
        return f"{self._directory}/{snapshot_id.end_offset:020d}-{snapshot_id.epoch:010d}{CHECKPOINT}"

    def piece_of(self, snapshot_id: SnapshotId, position: int, size: int) -> tuple[FileRange, int] | None:
        """A piece for a follower, and the size of the whole snapshot; None when it no longer exists."""
        if snapshot_id not in self.ids:
            return None
        if self._served is None or self._served[0] != snapshot_id:
            self._stop_serving()
            self._served = snapshot_id, self._files.open(self.path_of(snapshot_id))
        file = self._served[1]
        return FileRange(file, position, max(0, min(size, file.size - position))), file.size

    def _stop_serving(self) -> None:
        if self._served is not None:
            self._served[1].close()
            self._served = None

    # Fetching

    def write_piece(self, snapshot_id: SnapshotId, position: int, data: bytes) -> None:
        """Raises OSError; then the download is dropped, and its further pieces are ignored."""
        if position == 0:
            self.drop_download()
            path = self.path_of(snapshot_id) + PART
            self._files.remove(path)
            self._download = snapshot_id, self._files.open(path)
        if self._download is None or self._download[0] != snapshot_id:
            return
        file = self._download[1]

        def append() -> None:
            # This creates the file, if there is none yet.
            assert file.size == position, "pieces come in order"
            file.append([data])

        try:
            self._keeping(append)
        except OSError:
            self.drop_download()
            raise

    def finish_download(self, snapshot_id: SnapshotId) -> Loaded | None:
        """Turn the download into a snapshot, durably; None when the download was dropped.

        Raises CorruptBatch, DecodeError and OSError.
        """
        if self._download is None or self._download[0] != snapshot_id:
            return None
        file = self._download[1]
        path = self.path_of(snapshot_id)
        loaded = read_snapshot(file.read_at(0, file.size), snapshot_id)
        file.prepare_sync()()
        file.close()
        self._download = None
        self._files.rename(path + PART, path)
        self._files.sync_directory(self._directory)
        older, self.ids = self.ids, [snapshot_id]
        self._stop_serving()
        for other in older:
            if other != snapshot_id:
                self._files.remove(self.path_of(other))
        return loaded

    def drop_download(self) -> None:
        if self._download is not None:
            snapshot_id, file = self._download
            file.close()
            self._files.remove(self.path_of(snapshot_id) + PART)
            self._download = None

    # Writing

    def write(
        self,
        snapshot_id: SnapshotId,
        image: Image,
        voters: Voters,
        removed: Voters,
        addresses: dict[int, tuple[str, int]],
        done: Callable[[Exception | None], None],
    ) -> None:
        """Write an image slice by slice; ``done(None)`` once it is durable and older ones are removed."""
        assert not self.is_writing
        self.is_writing = True
        spawn = self._environment.spawn
        path = self.path_of(snapshot_id)
        slices = _slices(
            image,
            voters_record(voters, addresses, removed),
            snapshot_id.epoch,
            self._environment.clock.wall_ms(),
        )
        file: File | None = None

        def write_slice() -> None:
            nonlocal file
            if self._is_closed:
                return
            try:
                if file is None:
                    self._files.remove(path + PART)
                    file = self._files.open(path + PART)
                part, batch = file, next(slices, None)
                if batch is not None:
                    self._keeping(lambda: part.append([batch]))
                    spawn.later(PAUSE_MS, write_slice)
                    return
                sync = file.prepare_sync()
            except OSError as error:
                ended(error)
                return
            spawn.in_thread(lambda: complete(sync), lambda _, error: ended(error), lane="upkeep")

        def complete(sync: Callable[[], None]) -> None:
            sync()
            self._files.rename(path + PART, path)
            self._files.sync_directory(self._directory)

        def ended(error: Exception | None) -> None:
            if self._is_closed:
                return
            self.is_writing = False
            if file is not None:
                file.close()
            if error is None:
                self._keep_newest(snapshot_id)
            else:
                self._files.remove(path + PART)
            done(error)

        spawn.soon(write_slice)

    def close(self) -> None:
        self._is_closed = True
        self._stop_serving()
        self.drop_download()

    def _keep_newest(self, snapshot_id: SnapshotId) -> None:
        if self.ids and snapshot_id < self.ids[-1]:
            # A newer one was fetched meanwhile, and the log that continues this one is gone.
            self._files.remove(self.path_of(snapshot_id))
            return
        self.ids = sorted({*self.ids, snapshot_id})
        for old in self.ids[:-KEPT]:
            if self._served is not None and self._served[0] == old:
                self._stop_serving()
            self._files.remove(self.path_of(old))
        self.ids = self.ids[-KEPT:]


def id_of(name: str) -> SnapshotId | None:
    """Parse the name of a snapshot file; None for any other file."""
    stem, extension = os.path.splitext(name)
    offset, _, epoch = stem.partition("-")
    is_one = len(offset) == _OFFSET_DIGITS and len(epoch) == _EPOCH_DIGITS and (offset + epoch).isdigit()
    return SnapshotId(int(offset), int(epoch)) if extension == CHECKPOINT and is_one else None


def read_snapshot(data: bytes, snapshot_id: SnapshotId) -> Loaded:
    """Raises CorruptBatch and DecodeError."""
    voters: Voters = ()
    removed: Voters = ()
    addresses: dict[int, tuple[str, int]] = {}
    changes: list[Message] = []
    is_whole = False
    for position, header in batches(data):
        if not crc_matches(data, position, header):
            raise CorruptBatch(f"the CRC of the batch at byte {position} does not match")
        if not header.is_control:
            changes += decode_changes(data, position, header)
            continue
        for record in decode_control(data, position, header):
            if isinstance(record, VotersRecord):
                voters, removed, addresses = voters_in(record), removed_in(record), addresses_in(record)
            is_whole = isinstance(record, SnapshotFooterRecord)
    if not is_whole:
        raise CorruptBatch("it has no footer")
    image, _ = Image().apply(changes, offset=snapshot_id.end_offset - 1, epoch=snapshot_id.epoch)
    return Loaded(snapshot_id, image, voters, removed, addresses)


def _slices(image: Image, voters: VotersRecord, epoch: int, wall_ms: int) -> Iterator[bytearray]:
    """The batches of a snapshot, each encoded when it is requested."""
    offset = 0
    beginning: list[list[Message]] = [
        [SnapshotHeaderRecord(version=0, last_contained_log_timestamp=wall_ms)],
        [KRaftVersionRecord(version=0, kraft_version=KRAFT_VERSION), voters],
    ]
    for records in beginning:
        yield control_batch(records, wall_ms, epoch, offset)
        offset += len(records)
    for changes in _parts(image):
        if changes:
            yield encode_batch(
                [(wall_ms, None, metadata_changes.encode(change), []) for change in changes],
                leader_epoch=epoch,
                base_offset=offset,
            )
            offset += len(changes)
    yield control_batch([SnapshotFooterRecord(version=0)], wall_ms, epoch, offset)


def _parts(image: Image) -> Iterator[list[Message]]:
    """The changes that build an image, in parts: each part is the snapshot of a small image."""
    yield dataclasses.replace(image, topics={}, topics_by_id={}, configs={}, next_producer_id=0).snapshot()
    chunk = []
    size = 0
    for item in image.topics.items():
        chunk.append(item)
        size += len(item[1].partitions)
        if size >= SLICE_PARTITIONS:
            yield Image(topics=dict(chunk)).snapshot()
            chunk, size = [], 0
    yield Image(topics=dict(chunk)).snapshot()
    for configs in _chunks(image.configs.items(), SLICE_CONFIGS):
        yield Image(configs=dict(configs)).snapshot()
    yield Image(next_producer_id=image.next_producer_id).snapshot()


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


def difference(before: Image, after: Image) -> Delta:
    """The delta between two images, computed without the changes in between."""
    deleted = tuple(topic for id, topic in before.topics_by_id.items() if id not in after.topics_by_id)
    created = tuple(topic.name for id, topic in after.topics_by_id.items() if id not in before.topics_by_id)
    changed: list[str] = []
    partitions: list[tuple[str, int]] = []
    for id, topic in after.topics_by_id.items():
        old = before.topics_by_id.get(id)
        if old is not None and old.partitions != topic.partitions:
            changed.append(topic.name)
            partitions += [
                (topic.name, partition.index)
                for partition in topic.partitions
                if partition not in old.partitions[partition.index : partition.index + 1]
            ]
    gone = {topic.name for topic in deleted}
    resources = dict.fromkeys((*before.configs, *after.configs))
    brokers = dict.fromkeys((*before.brokers, *after.brokers))
    return Delta(
        created=created,
        deleted=deleted,
        changed=tuple(changed),
        configs_changed=tuple(
            resource
            for resource in resources
            if before.configs.get(resource) != after.configs.get(resource)
            and not (resource.type == TOPIC_RESOURCE and (resource.name in gone or resource.name in created))
        ),
        brokers_changed=tuple(id for id in brokers if before.brokers.get(id) != after.brokers.get(id)),
        partitions_changed=tuple(partitions),
        security=after.security.changed_since(before.security),
    )
