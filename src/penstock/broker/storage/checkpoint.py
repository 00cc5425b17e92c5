"""The checkpoint file of a data directory: recovery point, log start offset and high watermark of each log.

One file, replaced as a whole, a line for each partition:

    penstock-checkpoint 1 <CRC-32 of all that follows, in hexadecimal>
    lowered <number of lines of the second file that are already included>
    <topic id> <partition> <recovery point> <log start offset> <high watermark, if not the recovery point>

Lines are keyed by topic id, not by name: a topic that is deleted and created again under the same name is
another topic, and a line about the old one must never shorten the new one. The file is a hint. Without it the
next start reads more of each log, and records that DeleteRecords hid in the middle of a segment appear again.

Careful: the values may be too low, never too high. A log truncated below its recovery point would grow past it
again with other bytes, and recovery would not read them. So ``lower`` is durable before the log is truncated.
It appends a line to a second file, ``penstock-checkpoint-lowered``, because another thread may be writing the
first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

from penstock.environment import File, Files
from penstock.metadata.image import Image
from penstock.model import TopicId, format_id, parse_id

LOWERED = "-lowered"


class Remembered(NamedTuple):
    # Exclusive. Everything below is on the disk.
    recovery_point: int = 0
    log_start_offset: int = 0
    # Exclusive. Everything below was committed.
    high_watermark: int = 0


_NOTHING = Remembered()


class Checkpoint:
    def __init__(
        self, files: Files, path: str, keeping: Callable[[Callable[[], None]], None] = lambda work: work()
    ) -> None:
        """``keeping`` runs a write and, if the disk is full, lets it use the reserve (``Reserve.keeping``)."""
        self._files = files
        self._keeping = keeping
        self._path = path
        self._logs: dict[tuple[TopicId, int], Remembered] = {}
        # Number of calls that lowered something, and how many of them the main file includes.
        self._lowered = 0
        self._lowered_in_file = 0
        self._lowered_file: File | None = None
        # Size of the whole lines in the second file; a crash may have left half a line after them.
        self._lowered_bytes = 0
        # Writes of the main file that were prepared, and those that are done.
        self._writes = 0
        self._writes_done = 0
        # Logs that are forgotten but may still be in the main file: the value of _writes when each was forgotten.
        self._forgotten: dict[tuple[TopicId, int], int] = {}

    def load(self) -> None:
        """Read both files. Raises ValueError, and remembers nothing, when one is damaged."""
        if self._files.exists(self._path):
            title, _, text = self._files.read(self._path).decode().partition("\n")
            if title != _title(text):
                raise ValueError("its checksum does not match")
            lines = text.splitlines()
            if lines and lines[0].startswith("lowered "):
                self._lowered = self._lowered_in_file = int(lines.pop(0).split(" ")[1])
            self._logs = dict(map(_parse, lines))
        if self._files.exists(self._path + LOWERED):
            self._load_lowered(self._files.read(self._path + LOWERED).decode("utf-8", "replace"))

    def _load_lowered(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            crc, _, rest = line.partition(" ")
            if crc != f"{crc32(rest.encode()):08x}":
                return  # a crash cut the last line short: its log was not truncated yet
            self._lowered_bytes += len(line)
            count, _, remembered = rest.rstrip("\n").partition(" ")
            if int(count) > self._lowered:
                self._lowered = int(count)
                key, log = _parse(remembered)
                self._logs[key] = log

    def get(self, topic_id: TopicId, partition: int) -> Remembered:
        return self._logs.get((topic_id, partition), _NOTHING)

    def lower(self, topic_id: TopicId, partition: int, offset: int) -> None:
        """The log is about to be truncated to this offset. Durable when this returns.

        Raises:
            OSError: the line could not be written.
        """
        key = (topic_id, partition)
        known = self._logs.get(key)
        if known is None or (max(known) <= offset and not self._may_be_in_file(key)):
            return
        lowered = Remembered(*(min(place, offset) for place in known))
        try:
            self._write_lowered(key, lowered)
        except OSError:
            # On a full disk the log is truncated anyway. The next write must not contain the old values.
            self._logs[key] = lowered
            self._forgotten[key] = self._writes
            raise

    def renew(self, topic_id: TopicId, partition: int) -> None:
        """A log is about to be created: remove what the file may still say about a forgotten log of the same key.

        Raises OSError, as ``lower`` does. (A replica that moves away and comes back has the same key.)
        """
        key = (topic_id, partition)
        if self._may_be_in_file(key):
            self._write_lowered(key, Remembered())

    def _may_be_in_file(self, key: tuple[TopicId, int]) -> bool:
        """Whether the main file may still hold values of a forgotten log."""
        return self._forgotten.get(key, -1) >= self._writes_done

    def _write_lowered(self, key: tuple[TopicId, int], lowered: Remembered) -> None:
        rest = f"{self._lowered + 1} {_line(key, lowered)}"
        file = self._lowered_file
        if file is None:
            file = self._files.open(self._path + LOWERED)
        if self._lowered_in_file == self._lowered:
            self._lowered_bytes = 0
        if file.size > self._lowered_bytes:
            file.truncate(self._lowered_bytes)
        line = f"{crc32(rest.encode()):08x} {rest}".encode()
        appended = file
        self._keeping(lambda: appended.append((line,)))
        file.prepare_sync()()
        if self._lowered_file is None:
            self._files.sync_directory(self._path.rpartition("/")[0])
            self._lowered_file = file
        self._logs[key] = lowered
        self._forgotten.pop(key, None)
        self._lowered += 1
        self._lowered_bytes += len(line)

    def forget(self, topic_id: TopicId, partition: int) -> None:
        if self._logs.pop((topic_id, partition), None) is not None:
            self._forgotten[topic_id, partition] = self._writes

    def keep_only(self, image: Image) -> None:
        """Forget the topics that no longer exist."""
        self._logs = {key: log for key, log in self._logs.items() if key[0] in image.topics_by_id}

    def remember(self, topic_id: TopicId, partition: int, log: Remembered) -> None:
        """Set the values that the next write stores."""
        key = (topic_id, partition)
        # A new, empty log needs no line.
        if log != _NOTHING or key in self._logs:
            self._logs[key] = log

    def prepare_write(self) -> Callable[[], None]:
        """Return the work of writing the current values, for a worker thread."""
        logs = self._logs.copy()
        lowered = self._lowered
        self._writes += 1
        writes = self._writes
        self._forgotten = {key: after for key, after in self._forgotten.items() if after >= self._writes_done}

        def write() -> None:
            text = "".join(_line(key, log) for key, log in logs.items())
            if lowered:
                text = f"lowered {lowered}\n{text}"
            data = f"{_title(text)}\n{text}".encode()
            self._keeping(lambda: self._files.replace(self._path, data))
            self._lowered_in_file = lowered
            self._writes_done = writes

        return write


def _line(key: tuple[TopicId, int], log: Remembered) -> str:
    watermark = "" if log.high_watermark == log.recovery_point else f" {log.high_watermark}"
    return f"{format_id(key[0])} {key[1]} {log.recovery_point} {log.log_start_offset}{watermark}\n"


def _parse(line: str) -> tuple[tuple[TopicId, int], Remembered]:
    topic_id, partition, recovery_point, log_start_offset, *rest = line.split(" ")
    (high_watermark,) = rest or [recovery_point]
    log = Remembered(int(recovery_point), int(log_start_offset), int(high_watermark))
    return (TopicId(parse_id(topic_id)), int(partition)), log


def _title(text: str) -> str:
    return f"penstock-checkpoint 1 {crc32(text.encode()):08x}"
