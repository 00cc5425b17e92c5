"""What is remembered of every log outside it: how far the disk is known to hold it, and where it begins.

One file, replaced as a whole, a line for each partition:

    penstock-checkpoint 1 <CRC-32 of all that follows, in hexadecimal>
    <topic id> <partition> <recovery point> <log start offset>

It goes by topic id and not by name, because a topic that is deleted and made again under the same name is
another topic: a line about the old one must never shorten the new one. It is a hint: without it more of each
log is read at the next start, and records that DeleteRecords hid in the middle of a segment show again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple
from zlib import crc32

from penstock.environment import Files
from penstock.metadata.image import Image
from penstock.model import TopicId, format_id, parse_id


class Remembered(NamedTuple):
    # Everything below is on the disk.
    recovery_point: int = 0
    log_start_offset: int = 0


class Checkpoint:
    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._logs: dict[tuple[TopicId, int], Remembered] = {}

    def load(self) -> None:
        """Raises ValueError when the file is damaged; nothing is remembered then."""
        if not self._files.exists(self._path):
            return
        title, _, text = self._files.read(self._path).decode().partition("\n")
        if title != _title(text):
            raise ValueError("it is not what was written")
        logs = {}
        for line in text.splitlines():
            topic_id, partition, recovery_point, log_start_offset = line.split(" ")
            key = (TopicId(parse_id(topic_id)), int(partition))
            logs[key] = Remembered(int(recovery_point), int(log_start_offset))
        self._logs = logs

    def get(self, topic_id: TopicId, partition: int) -> Remembered:
        return self._logs.get((topic_id, partition), Remembered())

    def forget(self, topic_id: TopicId, partition: int) -> None:
        self._logs.pop((topic_id, partition), None)

    def keep_only(self, image: Image) -> None:
        """Forget the topics that no longer exist."""
        self._logs = {key: log for key, log in self._logs.items() if key[0] in image.topics_by_id}

    def prepare_write(self, logs: Iterable[tuple[tuple[TopicId, int], Remembered]]) -> Callable[[], None]:
        """Remember these; the work of writing everything down, for a worker thread."""
        self._logs.update(logs)
        lines = [
            f"{format_id(topic_id)} {partition} {log.recovery_point} {log.log_start_offset}\n"
            for (topic_id, partition), log in self._logs.items()
        ]
        text = "".join(lines)
        content = f"{_title(text)}\n{text}".encode()
        return lambda: self._files.replace(self._path, content)


def _title(text: str) -> str:
    return f"penstock-checkpoint 1 {crc32(text.encode()):08x}"
