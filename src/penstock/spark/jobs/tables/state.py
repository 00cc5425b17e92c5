"""The state of an archive's table: its files, end offsets and gaps.

A `State` is read at once and belongs to one version of the table; `State.after` is the state after a commit, the
same for every format. The seam between archive and brokers is `State.spans`, never the file names: a file's name
says what it contains, a span says what was read, even if there were no records.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

from penstock.spark.jobs.tables.errors import TableError

STATE_FORMAT: Final = 1
# The partition of Hive, and so of Spark, for rows with a null partition value.
NO_DATE: Final = "__HIVE_DEFAULT_PARTITION__"

_NAME = re.compile(
    r"(?P<topic_id>[0-9a-f]{32})-(?P<partition>\d{5,})-(?P<start>\d{20})-(?P<end>\d{20})-(?P<batch>[0-9a-f]{12})\.parquet"
)
_TEMPORARY = re.compile(r"\.(?P<name>.+\.parquet)\.[0-9a-f]{12}\.tmp")


class CommitConflict(Exception):
    """Another archiver has committed since the state was read. Nothing was changed; read the state again."""


class ArchivedPartition(NamedTuple):
    """A partition of one life of a topic: a topic that is deleted and recreated has another id."""

    topic: str
    topic_id: str  # 32 hexadecimal digits
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Span(NamedTuple):
    """The offsets that the archive has processed, whether or not each had a record."""

    start: int
    end: int  # exclusive: what the brokers are read from


@dataclass(frozen=True, slots=True)
class DataFile:
    path: str  # relative to the table's location
    topic: str
    topic_id: str
    partition: int
    # Offsets of the first record, and after the last. With dates, files of one partition may interleave.
    start: int
    end: int
    records: int
    bytes: int
    timestamp_min_us: int
    timestamp_max_us: int
    # None in a table without dates, NO_DATE for a timestamp outside of the calendar.
    date: str | None

    @property
    def at(self) -> ArchivedPartition:
        return ArchivedPartition(self.topic, self.topic_id, self.partition)


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets that were gone before they could be archived."""

    topic: str
    topic_id: str
    partition: int
    start: int
    # None: the end of the log is unknown, because its topic was deleted.
    end: int | None
    # "retention", "recreated" or "rewound": the log ended before what was archived, and may fill up differently.
    reason: str

    @property
    def at(self) -> ArchivedPartition:
        return ArchivedPartition(self.topic, self.topic_id, self.partition)

    def __str__(self) -> str:
        end = "?" if self.end is None else self.end
        return f"{self.topic}-{self.partition} [{self.start}, {end}) by {self.reason}"


@dataclass(frozen=True, slots=True)
class Shape:
    """Common to all files of a table, fixed when it is created."""

    by_date: bool
    headers: bool
    # Spark's JSON of the parsed columns; None if values are not parsed.
    value_schema: str | None


@dataclass(frozen=True, slots=True)
class Change:
    """One commit to a table. ``spans`` has the order of ``State.spans``."""

    spans: dict[ArchivedPartition, Span] = field(default_factory=dict)
    added: tuple[DataFile, ...] = ()
    # Merged files: their records are in ``added``.
    removed: tuple[DataFile, ...] = ()
    gaps: tuple[Gap, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    archive_id: str
    # Number of this archive's commits; with the archive's id it identifies a commit.
    batch: int
    shape: Shape
    spans: dict[ArchivedPartition, Span]
    gaps: tuple[Gap, ...] = ()
    files: tuple[DataFile, ...] = ()
    # Files replaced by larger ones, with the time; deleted when no reader can need them any more.
    retired: tuple[tuple[str, int], ...] = ()
    # Files that another program merged from ours (OPTIMIZE): records of any topic, identified only by their
    # columns.
    foreign: tuple[str, ...] = ()

    def after(self, change: Change, *, wall_ms: int) -> State:
        """The state after a commit of ``change``.

        A change that does not begin at the end of this state is a broken invariant: it would repeat or lose
        records.
        """
        for at, span in change.spans.items():
            known = self.spans.get(at)
            assert span.start <= span.end, f"{at} would end before it begins: {span}"
            if known is not None:
                assert span.start == known.start, f"{at} would begin anew at {span.start}: {known}"
                assert span.end >= known.end, f"{at} would go back to {span.end}: {known}"
        if not change.removed:
            for each in change.added:
                begin, (_, end) = self.spans.get(each.at, (0, 0))[1], change.spans[each.at]
                assert begin <= each.start < each.end <= end, f"{each.path} is not within [{begin}, {end})"
        removed = {each.path for each in change.removed}
        paths = {each.path for each in self.files}
        assert removed <= paths, "a file was replaced that is not in the table"
        assert paths.isdisjoint(each.path for each in change.added), "a file would be in the table twice"
        return replace(
            self,
            batch=self.batch + 1,
            spans=self.spans | change.spans,
            gaps=self.gaps + change.gaps,
            files=(*(each for each in self.files if each.path not in removed), *change.added),
            retired=self.retired + tuple((path, wall_ms) for path in sorted(removed)),
        )

    def lives(self, topic: str) -> list[str]:
        """The archived ids of a topic's name, the oldest first."""
        return list(dict.fromkeys(at.topic_id for at in self.spans if at.topic == topic))

    def partitions_of(self, topic: str, topic_id: str) -> dict[int, Span]:
        return {
            at.partition: span
            for at, span in self.spans.items()
            if at.topic == topic and at.topic_id == topic_id
        }

    def files_of(self, topic: str, topic_id: str) -> list[DataFile]:
        return [each for each in self.files if each.topic == topic and each.topic_id == topic_id]

    # As text

    def to_json(self, *, files: bool) -> str:
        """``files`` is False if the table's own format lists the files."""
        document: dict[str, Any] = {
            "format": STATE_FORMAT,
            "archive_id": self.archive_id,
            "batch": self.batch,
            "shape": asdict(self.shape),
            "spans": [[*at, *span] for at, span in self.spans.items()],
            "gaps": [asdict(each) for each in self.gaps],
        }
        if files:
            document["files"] = [asdict(each) for each in self.files]
            document["retired"] = [list(each) for each in self.retired]
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> State:
        """Raises TableError for text that `to_json` did not write."""
        try:
            document = json.loads(text)
            written = document["format"]
            if written == STATE_FORMAT:
                return cls(
                    document["archive_id"],
                    document["batch"],
                    Shape(**document["shape"]),
                    {ArchivedPartition(*each[:3]): Span(*each[3:]) for each in document["spans"]},
                    tuple(Gap(**each) for each in document["gaps"]),
                    tuple(DataFile(**each) for each in document.get("files", ())),
                    tuple((path, wall_ms) for path, wall_ms in document.get("retired", ())),
                )
        except (KeyError, TypeError, ValueError) as error:
            raise TableError(f"the archive's state cannot be read: {error!r}") from None
        raise TableError(
            f"the archive has format {written}, not {STATE_FORMAT}; use a newer version of penstock"
        )


def new_state(shape: Shape) -> State:
    return State(uuid.uuid4().hex, 0, shape, {})


# File names. A name is made from everything that determines the contents, and from the batch that commits it: a
# retried task writes the same file, and two archivers never write the same file.


def new_batch_token() -> str:
    return uuid.uuid4().hex[:12]


def file_path(at: ArchivedPartition, start: int, end: int, *, date: str | None, batch_token: str) -> str:
    """Topics are directories, because their names may use the maximum length of a file name."""
    name = f"{at.topic_id}-{at.partition:05d}-{start:020d}-{end:020d}-{batch_token}.parquet"
    return f"{directory_of(at.topic, date)}/{name}"


def directory_of(topic: str, date: str | None) -> str:
    return f"topic={topic}" if date is None else f"topic={topic}/date={date}"


def temporary_name(name: str) -> str:
    """A hidden name, which readers of the directory skip."""
    return f".{name}.{uuid.uuid4().hex[:12]}.tmp"


def from_path(path: str, *, records: int, size: int) -> DataFile | None:
    """Parse a file's name; None if no archive named it. Its timestamps are unknown."""
    directory, _, name = path.rpartition("/")
    parts = dict(part.split("=", 1) for part in directory.split("/") if "=" in part)
    found = _NAME.fullmatch(name)
    if found is None or "topic" not in parts:
        return None
    return DataFile(
        path=path,
        topic=parts["topic"],
        topic_id=found["topic_id"],
        partition=int(found["partition"]),
        start=int(found["start"]),
        end=int(found["end"]),
        records=records,
        bytes=size,
        timestamp_min_us=0,
        timestamp_max_us=0,
        date=parts.get("date"),
    )


def is_ours(name: str) -> bool:
    """Whether an archive created a file of this name, finished or not. Other files are left alone."""
    temporary = _TEMPORARY.fullmatch(name)
    return _NAME.fullmatch(temporary["name"] if temporary else name) is not None


def in_order(files: Iterable[DataFile]) -> Iterator[DataFile]:
    return iter(sorted(files, key=lambda each: (each.topic, each.topic_id, each.partition, each.start)))
