"""Which partitions hold on this node's disks all that they ever confirmed: a note that survives a power loss.

After a power loss the controller asks which replicas have lost nothing. Settings cannot say: they may have been
changed since, and a topic that was switched to flushed has older records that no fsync covered. So a partition is
noted here once all it has confirmed is on the disk, and from then on its writes count only after an fsync. Before
it may confirm anything sooner again, the note is removed, durably.

One file in the first data directory, replaced as a whole, a line for each partition:

    penstock-flushed 0 <CRC-32 of all that follows, in hexadecimal>
    <topic id> <partition>

What a newcomer gets wrong: while a partition *may* be in the file it has to behave as if it were. ``holds`` answers
that, and ``remove`` calls back only when the file without it is durable. And nothing is added before the controller
has heard what this start has lost (``loss_told``): the next process would report it as kept.
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
        # What should be in the file, in the order it came.
        self._wanted: dict[Key, None] = {}
        # What may be in it.
        self._written: frozenset[Key] = frozenset()
        # What is being written.
        self._writing: frozenset[Key] | None = None
        # To be called when a partition is no longer in the file.
        self._removals: dict[Key, Callable[[], None]] = {}
        self._is_loss_told = False
        self._is_delayed = False
        self._has_failed = False

    def load(self) -> None:
        """Read what the last run left. A file that is damaged says nothing."""
        files = self._environment.files
        if not files.exists(self._path):
            return
        try:
            title, _, text = files.read(self._path).decode().partition("\n")
            if title != _title(text):
                raise ValueError("it is not what was written")
            keys = [_parse(line) for line in text.splitlines()]
        except ValueError as error:
            self._logger.warning(
                "ignored a damaged note of what is flushed", path=self._path, error=str(error)
            )
            return
        self._wanted = dict.fromkeys(keys)
        self._written = frozenset(keys)

    def holds(self, key: Key) -> bool:
        """Whether the file may say that all the partition confirmed is on the disk."""
        return key in self._written or key in self._wanted or key in (self._writing or ())

    def partitions(self) -> list[Key]:
        """What the file says: of these nothing is lost with the power."""
        return sorted(self._written)

    def add(self, key: Key) -> None:
        """All that a partition has confirmed is on the disk, and it will confirm nothing sooner."""
        self._removals.pop(key, None)
        if key not in self._wanted:
            self._wanted[key] = None
            self._write()

    def remove(self, key: Key, then: Callable[[], None] = lambda: None) -> None:
        """``then()`` when the file does not say so any more, unless it is added again before."""
        self._wanted.pop(key, None)
        if not self.holds(key):
            then()
            return
        self._removals[key] = then
        self._write()

    def loss_told(self) -> None:
        """The controller has registered this process, and knows what was not flushed before it."""
        self._is_loss_told = True
        self._write()

    def keep_only(self, image: Image) -> None:
        """Forget topics that are gone."""
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
            # It may be the old one or the new one.
            self._written |= written
            if not self._has_failed:
                self._logger.warning("cannot note what is flushed", path=self._path, error=str(error))
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
