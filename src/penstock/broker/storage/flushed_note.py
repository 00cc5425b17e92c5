"""The partitions of which everything this node ever confirmed is on disk: a file that survives a power loss.

After a power loss the controller asks which replicas have lost nothing. Settings cannot tell: they may have
changed since, and a topic that was switched to flushed has older records that no fsync covered. So a partition is
added here once everything it has confirmed is on the disk; from then on it confirms only after an fsync. Before
it may confirm without an fsync again, it is removed, durably.

One file in the first data directory, replaced as a whole, a line for each partition:

    penstock-flushed 0 <CRC-32 of all that follows, in hexadecimal>
    <topic id> <partition>

Careful: while a partition *may* be in the file it must behave as if it were. ``holds`` says so, and ``remove``
calls back only when the file without it is durable. Nothing is added before the controller knows what this start
has lost (``loss_told``): the next process would report it as kept.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from penstock.broker.logs import Logger
from penstock.environment import Environment
from penstock.metadata.image import Image
from penstock.model import TopicId, format_id, parse_id

Key = tuple[TopicId, int]

RETRY_MS = 1_000


class FlushedNote:
    def __init__(self, environment: Environment, path: str, logger: Logger) -> None:
        self._environment = environment
        self._path = path
        self._logger = logger
        # What should be in the file, in the order of arrival.
        self._wanted: dict[Key, None] = {}
        # What may be in the file.
        self._written: frozenset[Key] = frozenset()
        # What a thread is writing now.
        self._writing: frozenset[Key] | None = None
        # Callbacks for when a partition is no longer in the file.
        self._removals: dict[Key, Callable[[], None]] = {}
        self._is_loss_told = False
        self._is_delayed = False
        self._has_failed = False

    def load(self) -> None:
        """Read what the last run left. A damaged file is ignored."""
        files = self._environment.files
        if not files.exists(self._path):
            return
        try:
            title, _, text = files.read(self._path).decode().partition("\n")
            if title != _title(text):
                raise ValueError("its checksum does not match")
            keys = [_parse(line) for line in text.splitlines()]
        except ValueError as error:
            self._logger.warning(
                "ignored a damaged note of flushed partitions", path=self._path, error=str(error)
            )
            return
        self._wanted = dict.fromkeys(keys)
        self._written = frozenset(keys)

    def holds(self, key: Key) -> bool:
        """Whether the partition may be in the file."""
        return key in self._written or key in self._wanted or key in (self._writing or ())

    def partitions(self) -> list[Key]:
        """The partitions in the file: these lose nothing in a power loss."""
        return sorted(self._written)

    def add(self, key: Key) -> None:
        """Everything the partition has confirmed is on the disk, and from now on it confirms only what is."""
        self._removals.pop(key, None)
        if key not in self._wanted:
            self._wanted[key] = None
            self._write()

    def remove(self, key: Key, then: Callable[[], None] = lambda: None) -> None:
        """Call ``then()`` when the partition is no longer in the file, unless it is added again before that."""
        self._wanted.pop(key, None)
        if not self.holds(key):
            then()
            return
        self._removals[key] = then
        self._write()

    def loss_told(self) -> None:
        """The controller has registered this process and knows which partitions were flushed before it started."""
        self._is_loss_told = True
        self._write()

    def keep_only(self, image: Image) -> None:
        """Remove deleted topics."""
        for key in [key for key in self._wanted if key[0] not in image.topics_by_id]:
            self.remove(key)

    def _write(self) -> None:
        if self._writing is not None or self._is_delayed:
            return
        keys = [key for key in self._wanted if self._is_loss_told or key in self._written]
        if self._written == set(keys):
            return
        self._writing = frozenset(keys)
        text = "".join([f"{format_id(topic_id)} {index}\n" for topic_id, index in keys])
        data = f"{_title(text)}\n{text}".encode()
        self._environment.spawn.in_thread(
            lambda: self._environment.files.replace(self._path, data),
            lambda _, error: self._ended(error),
            lane="upkeep",
        )

    def _ended(self, error: Exception | None) -> None:
        assert self._writing is not None
        written, self._writing = self._writing, None
        if error is not None:
            # The file may be the old one or the new one.
            self._written |= written
            if not self._has_failed:
                self._logger.warning("cannot write the flushed note", path=self._path, error=str(error))
            self._has_failed = self._is_delayed = True
            self._environment.spawn.later(RETRY_MS, self._again)
            return
        self._has_failed = False
        self._written = written
        removed = [key for key in self._removals if not self.holds(key)]
        for then in [self._removals.pop(key) for key in removed]:
            then()
        self._write()

    def _again(self) -> None:
        self._is_delayed = False
        self._write()


def _title(text: str) -> str:
    return f"penstock-flushed 0 {crc32(text.encode()):08x}"


def _parse(line: str) -> Key:
    topic_id, index = line.split(" ")
    return TopicId(parse_id(topic_id)), int(index)
