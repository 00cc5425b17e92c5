"""Tables of an archive without Spark and brokers: their files, and disks that fail after any step."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.spark.jobs.tables.disk import Disk, make_directories, publish
from penstock.spark.jobs.tables.state import (
    ArchivedPartition,
    Change,
    DataFile,
    Shape,
    Span,
    State,
    file_path,
    new_batch_token,
    temporary_name,
)
from penstock.spark.reading import schema as record_schema

SHAPE = Shape(by_date=True, headers=False, value_schema=None)
AT = ArchivedPartition("orders", "0123456789abcdef" * 2, 3)
DATE = "2026-11-16"
MIDNIGHT_US = 1_794_787_200_000_000
SCHEMA = record_schema(headers=False)


class Crash(BaseException):
    """Not an Exception, so that nothing handles it."""


class CrashingDisk(Disk):
    """A real disk whose process dies after a number of steps that change something."""

    def __init__(self, steps_left: int = 10**9) -> None:
        self.steps_left = steps_left
        self.steps = 0

    def _step(self) -> None:
        self.steps += 1
        if self.steps > self.steps_left:
            raise Crash

    def create(self, path: Path, data: bytes) -> None:
        self._step()
        super().create(path, data)

    def sync(self, path: Path) -> None:
        self._step()
        super().sync(path)

    def link(self, existing: Path, name: Path) -> None:
        self._step()
        super().link(existing, name)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)

    def make_directory(self, path: Path) -> None:
        self._step()
        super().make_directory(path)

    def rename(self, existing: Path, name: Path) -> None:
        self._step()
        super().rename(existing, name)


class PowerDisk(Disk):
    """A disk in memory that forgets, when the power fails, what was not synced: names and contents apart.

    ``keeps`` decides for each thing that is not synced whether it happens to be on the disk already.
    """

    def __init__(self, steps_left: int = 10**9) -> None:
        self.steps_left = steps_left
        self._contents: dict[int, bytes] = {}
        self._durable_contents: dict[int, bytes] = {}
        self._names: dict[Path, int] = {}
        self._durable_names: dict[Path, int] = {}
        self._numbers = itertools.count()
        self._directories: set[Path] = set()
        # Renamed directories, by their new names, until that is durable.
        self._renamed: dict[Path, Path] = {}

    def _step(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise Crash

    def create(self, path: Path, data: bytes) -> None:
        self._step()
        if path in self._names:
            raise FileExistsError(path)
        self._names[path] = number = next(self._numbers)
        self._contents[number] = data

    def sync(self, path: Path) -> None:
        self._step()
        number = self._names[path]
        self._durable_contents[number] = self._contents[number]

    def sync_directory(self, path: Path) -> None:
        self._step()
        for new in [each for each in self._renamed if each.parent == path]:
            self._durable_names = _moved(self._durable_names, self._renamed.pop(new), new)
        for name in [each for each in self._durable_names if each.parent == path and each not in self._names]:
            del self._durable_names[name]
        self._durable_names.update({name: n for name, n in self._names.items() if name.parent == path})

    def link(self, existing: Path, name: Path) -> None:
        self._step()
        if name in self._names:
            raise FileExistsError(name)
        if existing not in self._names:
            raise FileNotFoundError(existing)
        self._names[name] = self._names[existing]

    def unlink(self, path: Path) -> None:
        self._step()
        self._names.pop(path, None)

    def make_directory(self, path: Path) -> None:
        self._step()
        self._directories.add(path)
        if path not in self._names:
            self._names[path] = number = next(self._numbers)
            self._contents[number] = self._durable_contents[number] = b""

    def rename(self, existing: Path, name: Path) -> None:
        self._step()
        if self.names(name):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        self._directories |= {
            name / each.relative_to(existing) for each in self._names if _is_in(each, existing)
        }
        self._names = _moved(self._names, existing, name)
        self._renamed[name] = existing

    def remove_directory(self, path: Path) -> None:
        self._step()
        if not self.names(path):
            self._names.pop(path, None)

    def names(self, directory: Path) -> list[str]:
        return [each.name for each in self._names if each.parent == directory]

    def read(self, path: Path) -> bytes:
        return self._contents[self._names[path]]

    def fail(self, keeps: Callable[[str], bool]) -> None:
        """The power fails and comes back. ``keeps`` is asked for "names" and "contents"."""
        names = self._names if keeps("names") else self._durable_names
        contents = self._contents if keeps("contents") else self._durable_contents
        self._names = {name: number for name, number in names.items() if self._is_reached(name, names)}
        self._renamed = {}
        # A file whose contents were never synced is there, and empty.
        self._contents = {number: contents.get(number, b"") for number in self._names.values()}
        self._durable_names, self._durable_contents = dict(self._names), dict(self._contents)
        self.steps_left = 10**9

    def _is_reached(self, name: Path, names: dict[Path, int]) -> bool:
        """Whether all directories that were made above it are there."""
        return all(each in names for each in name.parents if each in self._directories)


def _moved(names: dict[Path, int], old: Path, new: Path) -> dict[Path, int]:
    return {
        new / name.relative_to(old) if _is_in(name, old) else name: number for name, number in names.items()
    }


def _is_in(name: Path, directory: Path) -> bool:
    return name == directory or directory in name.parents


def write(
    root: Path,
    start: int,
    end: int,
    *,
    batch_token: str | None = None,
    date: str = DATE,
    midnight_us: int = MIDNIGHT_US,
) -> DataFile:
    """A file as a task leaves it: complete and durable, not committed."""
    path = file_path(AT, start, end, date=date, batch_token=batch_token or new_batch_token())
    make_directories(Disk(), root, str(Path(path).parent))
    count = end - start
    rows = {
        "key": pa.array([None] * count, pa.binary()),
        "value": pa.array([b"%d" % number for number in range(start, end)], pa.binary()),
        "topic": pa.array([AT.topic] * count),
        "partition": pa.array([AT.partition] * count, pa.int32()),
        "offset": pa.array(range(start, end), pa.int64()),
        "timestamp": pa.array(
            [midnight_us + number for number in range(start, end)], pa.timestamp("us", "UTC")
        ),
        "timestampType": pa.array([0] * count, pa.int32()),
    }
    final = root / path
    temporary = final.parent / temporary_name(final.name)
    pq.write_table(pa.table(rows, schema=SCHEMA), temporary)
    publish(Disk(), temporary, final)
    size = final.stat().st_size
    return DataFile(path, *AT, start, end, count, size, midnight_us + start, midnight_us + end - 1, date)


def step(root: Path, state: State, count: int, **given: Any) -> Change:
    """The next records of the partition, as a change to be committed."""
    begin = state.spans.get(AT, Span(0, 0)).end
    return Change({AT: Span(0, begin + count)}, (write(root, begin, begin + count, **given),))


def shown(location: Path) -> set[str]:
    """All files of a directory, of whatever name."""
    return {str(each.relative_to(location)) for each in location.rglob("*") if each.is_file()}


def offsets(root: Path, state: State) -> list[int]:
    """Every record that the table has, as a reader would find it."""
    found: list[int] = []
    for each in state.files:
        found += pq.ParquetFile(root / each.path).read(["offset"]).column("offset").to_pylist()
    return sorted(found)
