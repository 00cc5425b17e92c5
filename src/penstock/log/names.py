"""The names of a partition's files, which are Kafka's, and the file that says which topic they belong to.

    00000000000000000000.log            record batches from offset 0 on
    00000000000000000000.index          offset -> position, sparse
    00000000000000000000.timeindex      timestamp -> offset, sparse
    00000000000000000000.txnindex       aborted transactions; only if there are any
    00000000000000001234.snapshot       producer state below offset 1234
    leader-epoch-checkpoint             where each leader epoch began
    penstock-cleaning                   how far the log is compacted (``cleaning_state.py``)
    partition.metadata                  the topic id: it, not the directory's name, identifies the topic

The suffix ``.deleted`` marks a file that is no longer part of the log and is removed after a delay. ``.corrupt``
marks data that recovery found after a damaged batch: not part of the log either, but kept for inspection.
``.cleaned`` marks files that the cleaner has written: not part of the log yet (``swapping.py``).
"""

from __future__ import annotations

from penstock.environment import Files
from penstock.model import TopicId, format_id, parse_id

LOG = ".log"
INDEX = ".index"
TIME_INDEX = ".timeindex"
ABORTED_INDEX = ".txnindex"
SNAPSHOT = ".snapshot"
DELETED = ".deleted"
CORRUPT = ".corrupt"
CLEANED = ".cleaned"
EPOCHS = "leader-epoch-checkpoint"
PARTITION_METADATA = "partition.metadata"

SEGMENT_SUFFIXES = (LOG, INDEX, TIME_INDEX, ABORTED_INDEX)
_OFFSET_DIGITS = 20


def name_of(offset: int, suffix: str) -> str:
    return f"{offset:020d}{suffix}"


def path_of(directory: str, offset: int, suffix: str) -> str:
    return f"{directory}/{offset:020d}{suffix}"


def offset_of(name: str, suffix: str) -> int | None:
    """The offset in a file's name when it ends in ``suffix``, else None."""
    digits = name[:_OFFSET_DIGITS]
    if name[_OFFSET_DIGITS:] != suffix or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits)


def write_partition_metadata(files: Files, directory: str, topic_id: TopicId) -> None:
    text = f"version: 0\ntopic_id: {format_id(topic_id)}"
    # Not durable yet: the first flush of the log syncs it, with the directory.
    files.replace(f"{directory}/{PARTITION_METADATA}", text.encode(), durable=False)


def read_partition_metadata(files: Files, directory: str) -> TopicId | None:
    """The topic id of a partition's directory; None when the file is missing or malformed."""
    path = f"{directory}/{PARTITION_METADATA}"
    if not files.exists(path):
        return None
    try:
        lines = files.read(path).decode().splitlines()
        fields = dict(line.split(": ", 1) for line in lines if line)
        if fields.get("version") != "0":
            return None
        return TopicId(parse_id(fields["topic_id"]))
    except (KeyError, ValueError):
        return None
