"""The partitions this broker hosts: each one's log, its high watermark and who waits for it.

A hosted partition opens its log at the first use, so a restart with ten thousand partitions costs only those
that are touched. Newcomers: nothing here waits. An append answers at once with the offset after its batch;
``when_committed`` calls back when the high watermark has passed it, which in ``replicated`` mode on one node
is immediately and in ``flushed`` mode after the next fsync, which serves every append made meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.broker.config import TopicConfig
from penstock.environment import FileRange
from penstock.log.log import Log
from penstock.log.producers import Duplicate
from penstock.metadata.image import TOPIC_RESOURCE, Delta, Image, TopicImage
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import BatchHeader, check_produced, decode_header, set_log_append_time

if TYPE_CHECKING:
    from penstock.broker.storage import Storage

NO_TIMESTAMP = -1


class Appended(NamedTuple):
    error: ErrorCode
    base_offset: int = -1
    # When the broker stamped the batch; -1 when the producer's own timestamps stand.
    log_append_time_ms: int = NO_TIMESTAMP
    # What must be committed before the append may be acknowledged; 0 when it may be at once.
    commit_offset: int = 0


class Watcher(Protocol):
    def changed(self, partition: HostedPartition) -> None:
        """Readers can see more of the partition, or it begins later, or it is gone."""
        ...


class HostedPartition:
    __slots__ = (
        "_commit_waiters",
        "_flush_wanted",
        "_has_directory",
        "_is_flushing",
        "_log",
        "_storage",
        "_topic_config",
        "_watchers",
        "high_watermark",
        "index",
        "is_deleted",
        "leader_epoch",
        "topic",
        "topic_id",
        "unflushed_since_ms",
    )

    def __init__(
        self, storage: Storage, topic: TopicImage, index: int, leader_epoch: int, config: TopicConfig
    ) -> None:
        self._storage = storage
        self.topic = topic.name
        self.index = index
        self.topic_id = topic.id
        self.leader_epoch = leader_epoch
        self._topic_config = config
        self._log: Log | None = None
        self._has_directory = False
        self.is_deleted = False
        # Exclusive. Never above the log's end; valid once the log is open.
        self.high_watermark = 0
        self._watchers: dict[Watcher, None] = {}
        # (offset that must be committed, callback), in the order of the offsets.
        self._commit_waiters: deque[tuple[int, Callable[[ErrorCode], None]]] = deque()
        # Flushing: one at a time, the next one for everything appended meanwhile.
        self._is_flushing = False
        self._flush_wanted = False
        # When the oldest append that no flush has covered was made; -1 when there is none.
        self.unflushed_since_ms = -1

    def __repr__(self) -> str:
        return f"<partition {self.topic}-{self.index}>"

    @property
    def log(self) -> Log:
        """Raises OSError when it cannot be opened."""
        if self._log is None:
            self._log = self._storage.open_log(self)
            self.high_watermark = self._log.log_end_offset
        return self._log

    @property
    def is_open(self) -> bool:
        return self._log is not None

    @property
    def config(self) -> TopicConfig:
        return self._topic_config

    @config.setter
    def config(self, config: TopicConfig) -> None:
        self._topic_config = config
        log = self._log
        if log is not None:
            log.config = config.log
            if not config.is_flushed and self.high_watermark < log.log_end_offset:
                # What waited to be on the disk need not any more.
                self.high_watermark = log.log_end_offset
                self._notify()

    # Writing

    def append(self, records: memoryview, *, allow_zstd: bool = True) -> Appended:
        """Append one batch from a producer, if it is one and it is new."""
        config = self._topic_config
        checked = check_produced(records, max_message_bytes=config.max_message_bytes, allow_zstd=allow_zstd)
        if not isinstance(checked, BatchHeader):
            return Appended(checked)
        header = checked
        if header.is_transactional:
            return Appended(ErrorCode.INVALID_TXN_STATE)
        wall_ms = self._storage.environment.clock.wall_ms()
        stamped = NO_TIMESTAMP
        if config.is_log_append_time:
            stamped = wall_ms
        elif (
            header.max_timestamp > wall_ms + config.timestamp_after_max_ms
            or header.base_timestamp < wall_ms - config.timestamp_before_max_ms
        ):
            return Appended(ErrorCode.INVALID_TIMESTAMP)
        try:
            log = self.log
            if header.producer_id >= 0:
                verdict = log.producers.check(header, wall_ms)
                if isinstance(verdict, Duplicate):
                    # The first attempt may still be waiting for its fsync: the repeat waits with it.
                    return Appended(
                        ErrorCode.NONE,
                        verdict.base_offset,
                        verdict.timestamp if stamped != NO_TIMESTAMP else NO_TIMESTAMP,
                        self._acknowledged_at(verdict.base_offset + header.last_offset_delta + 1),
                    )
                if verdict is not None:
                    return Appended(verdict)
            if not self._has_directory:
                self._make_directory()
            if stamped != NO_TIMESTAMP:
                header = set_log_append_time(records, 0, header, stamped)
            base_offset = log.append(records, header, self.leader_epoch)
        except OSError as error:
            self._storage.append_failed(self, error)
            return Appended(ErrorCode.KAFKA_STORAGE_ERROR)
        return Appended(ErrorCode.NONE, base_offset, stamped, self._appended(log))

    def append_internal(self, batch: bytearray) -> int:
        """Append a batch of the broker's own; the offset that must be committed. Raises OSError."""
        log = self.log
        if not self._has_directory:
            self._make_directory()
        log.append(batch, decode_header(batch), self.leader_epoch)
        return self._appended(log)

    def _make_directory(self) -> None:
        self._storage.make_directory(self)
        self._has_directory = True

    def _appended(self, log: Log) -> int:
        """Account for an append; the offset that its acknowledgement has to wait for, or 0."""
        end_offset = log.log_end_offset
        config = self._topic_config
        if not config.is_flushed:
            self.high_watermark = end_offset
            if self._watchers:
                self._notify()
        if self.unflushed_since_ms < 0:
            self.unflushed_since_ms = self._storage.environment.clock.now_ms()
            self._storage.unflushed[self] = None
        # As in Kafka, the append that reaches flush.messages is acknowledged after the flush it causes.
        if end_offset - log.recovery_point >= config.flush_messages:
            self.flush()
            return end_offset
        if log.has_rolled:
            self.flush()
        return 0

    def _acknowledged_at(self, end_offset: int) -> int:
        return end_offset if self._topic_config.is_flushed and end_offset > self.high_watermark else 0

    def when_committed(self, offset: int, callback: Callable[[ErrorCode], None]) -> None:
        """Call back once everything below the offset is durable, or will never be."""
        log = self._log
        if self.is_deleted:
            callback(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        elif log is None or offset <= log.recovery_point:
            callback(ErrorCode.NONE)
        else:
            self._commit_waiters.append((offset, callback))

    # Reading

    def read(self, offset: int, bytes_max: int, *, at_least_one: bool) -> FileRange | None:
        """Raises OffsetOutOfRange, or OSError."""
        return self.log.read(offset, bytes_max, self.high_watermark, at_least_one=at_least_one)

    def watch(self, watcher: Watcher) -> None:
        self._watchers[watcher] = None

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.pop(watcher, None)

    def _notify(self) -> None:
        for watcher in tuple(self._watchers):
            watcher.changed(self)

    # Upkeep

    def flush(self) -> None:
        """Make everything appended so far durable, in a thread."""
        log = self._log
        if log is None or self.is_deleted:
            return
        if self._is_flushing or not self._storage.may_flush_now(self):
            self._flush_wanted = True
            return
        try:
            offset, work = log.prepare_flush()
        except OSError as error:
            # Too many open files, most likely. Nothing was tried, so nothing is lost: again in a moment.
            self._storage.flush_delayed(self, error)
            return
        self._is_flushing = True
        self._flush_wanted = False
        self.unflushed_since_ms = -1
        self._storage.unflushed.pop(self, None)

        def done(error: Exception | None) -> None:
            self._is_flushing = False
            if self.is_deleted:
                return
            if error is not None:
                self._storage.flush_failed(self, error)
                return
            self._flushed(offset)

        self._storage.start_flush(work, done)

    def _flushed(self, offset: int) -> None:
        assert self._log is not None
        self._log.flushed(offset)
        if offset > self.high_watermark:
            self.high_watermark = offset
            self._notify()
        waiters = self._commit_waiters
        while waiters and waiters[0][0] <= offset:
            waiters.popleft()[1](ErrorCode.NONE)
        if self._flush_wanted or waiters:
            self.flush()

    def delete_before(self, offset: int) -> int:
        """Raise the log's start, at the most to the high watermark; where it starts now."""
        self.log.delete_before(offset)
        self._storage.doom(self, self.log)
        self._notify()
        return self.log.log_start_offset

    def expire(self, wall_ms: int) -> int:
        """Apply retention; how many segments went."""
        count = self.log.expire(wall_ms, self.high_watermark)
        if count:
            self._storage.doom(self, self.log)
            self._notify()
        return count

    def deleted(self) -> None:
        """The topic is gone: tell everyone who waits."""
        self.is_deleted = True
        self._storage.unflushed.pop(self, None)
        self._notify()
        waiters = list(self._commit_waiters)
        self._commit_waiters.clear()
        for _, callback in waiters:
            callback(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


class Partitions:
    """Every hosted partition, by name; follows the image."""

    def __init__(self, storage: Storage, topic_config: Callable[[Image, str], TopicConfig]) -> None:
        self._storage = storage
        self._topic_config = topic_config
        self._topics: dict[str, list[HostedPartition]] = {}

    def get(self, topic: str, index: int) -> HostedPartition | None:
        hosted = self._topics.get(topic)
        if hosted is None or not 0 <= index < len(hosted):
            return None
        return hosted[index]

    def of_topic(self, topic: str) -> list[HostedPartition]:
        return self._topics.get(topic, [])

    def __iter__(self) -> Iterator[HostedPartition]:
        for hosted in self._topics.values():
            yield from hosted

    def __len__(self) -> int:
        return sum(map(len, self._topics.values()))

    def apply(self, image: Image, delta: Delta) -> None:
        for topic in delta.deleted:
            for hosted in self._topics.pop(topic.name, []):
                hosted.deleted()
                self._storage.delete_log(hosted)
        for name in (*delta.created, *delta.changed):
            self._host(image, image.topics[name])
        for resource in delta.configs_changed:
            # A broker's setting may be the default of any topic's.
            names = [resource.name] if resource.type == TOPIC_RESOURCE else list(self._topics)
            for name in names:
                config = self._topic_config(image, name)
                for hosted in self.of_topic(name):
                    if hosted.config is not config:
                        hosted.config = config

    def _host(self, image: Image, topic: TopicImage) -> None:
        hosted = self._topics.setdefault(topic.name, [])
        config = self._topic_config(image, topic.name)
        for here, partition in zip(hosted, topic.partitions):
            here.leader_epoch = partition.leader_epoch
        for partition in topic.partitions[len(hosted) :]:
            hosted.append(
                HostedPartition(self._storage, topic, partition.index, partition.leader_epoch, config)
            )
