"""The newest value of each key: run after run what reading everything would give, wherever a run is cut off."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.spark.errors import DataLossError, SparkOptionError
from penstock.spark.jobs import archive, read_snapshot, snapshot
from penstock.spark.jobs.snapshot_versions import CURRENT, DIRECTORY, SnapshotConflict, Version, Versions
from penstock.spark.jobs.tables.errors import TableError
from tests.spark.tables import Crash, CrashingDisk
from tests.spark.topics import Topics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR_MS = 3_600_000


@pytest.fixture
def topic(topics: Topics, unique: Callable[[str], str]) -> str:
    return topics.create(unique("snapshot"), 2)


@pytest.fixture
def location(tmp_path: Path) -> Path:
    return tmp_path / "snap [1] {a}*? 100% \u00fc"  # no character of a path may mean anything


def rows(spark: SparkSession, location: Path, state: str = CURRENT) -> dict[bytes, bytes | None]:
    found = read_snapshot(spark, location, state=state).collect()
    assert len({bytes(row.key) for row in found}) == len(found), "a key is there twice"
    return {bytes(row.key): None if row.value is None else bytes(row.value) for row in found}


def test_each_run_reads_what_is_new_and_merges_it(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, location: Path
) -> None:
    topics.send(topic, [b"1", b"2", b"3"], keys=[b"a", b"b", b"a"], partition=0)
    topics.send(topic, [b"4", b"5"], keys=[b"c", None], partition=1)
    told: list[tuple[int, int]] = []
    first = snapshot(spark, bootstrap, topic, location, progress=lambda *each: told.append(each))
    assert (first.version, first.is_new, first.read, first.keys, first.deleted) == (1, True, 5, 3, 0)
    assert rows(spark, location) == {b"a": b"3", b"b": b"2", b"c": b"4"}
    assert told[-1] == (5, 5) and told == sorted(told)
    plain = snapshot(spark, bootstrap, topic, location.parent / "plain")
    assert spark.read.parquet(plain.path).count() == 3

    assert snapshot(spark, bootstrap, topic, location).is_new is False

    topics.send(topic, [b"6", None, b"7"], keys=[b"b", b"a", b"d"], partition=0)
    second = snapshot(spark, bootstrap, topic, location)
    assert (second.version, second.is_new, second.read, second.keys, second.deleted) == (2, True, 3, 3, 1)
    assert rows(spark, location) == {b"b": b"6", b"c": b"4", b"d": b"7"}
    assert rows(spark, location, "deleted") == {b"a": None}

    # A key that was deleted comes back, and another goes.
    topics.send(topic, [b"8", None], keys=[b"a", b"d"], partition=0)
    third = snapshot(spark, bootstrap, topic, location, grace_hours=0)
    assert rows(spark, location) == {b"a": b"8", b"b": b"6", b"c": b"4"}
    assert (third.version, third.deleted) == (3, 0)
    # The newest two versions are kept, whoever reads the older one may end.
    assert sorted(each.name[:9] for each in location.glob("v*")) == ["v00000002", "v00000003"]
    assert Path(second.path).exists()

    again = snapshot(spark, bootstrap, topic, location, full=True)
    assert (again.version, again.read) == (4, 10)
    assert rows(spark, location) == {b"a": b"8", b"b": b"6", b"c": b"4"}


def test_a_key_in_two_partitions_has_the_value_with_the_later_time(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, location: Path
) -> None:
    now_ms = time.time_ns() // 1_000_000
    topics.send(topic, [b"old"], keys=[b"moved"], partition=0, timestamp_ms=now_ms - 5000)
    topics.send(topic, [b"kept"], keys=[b"stayed"], partition=0, timestamp_ms=now_ms - 1000)
    snapshot(spark, bootstrap, topic, location)
    topics.grow(topic, 3)
    topics.send(topic, [b"new"], keys=[b"moved"], partition=2, timestamp_ms=now_ms - 3000)
    topics.send(topic, [b"stale"], keys=[b"stayed"], partition=2, timestamp_ms=now_ms - 4000)
    snapshot(spark, bootstrap, topic, location)
    assert rows(spark, location) == {b"moved": b"new", b"stayed": b"kept"}
    assert rows(spark, location, "superseded") == {b"moved": b"old", b"stayed": b"stale"}

    # By offset in a partition, though its clock went back: what was superseded is the newest again.
    topics.send(topic, [b"back"], keys=[b"stayed"], partition=0, timestamp_ms=now_ms - 6000)
    snapshot(spark, bootstrap, topic, location)
    incremental = rows(spark, location)
    assert incremental == {b"moved": b"new", b"stayed": b"stale"}
    snapshot(spark, bootstrap, topic, location, full=True)
    assert rows(spark, location) == incremental


def test_an_old_tombstone_takes_with_it_what_it_has_deleted(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, location: Path
) -> None:
    then_ms = time.time_ns() // 1_000_000 - 48 * HOUR_MS
    topics.send(topic, [b"1"], keys=[b"a"], partition=0, timestamp_ms=then_ms)
    topics.send(topic, [None], keys=[b"a"], partition=1, timestamp_ms=then_ms + 1)
    result = snapshot(spark, bootstrap, topic, location)
    assert (result.keys, result.deleted) == (0, 0)
    assert rows(spark, location) == rows(spark, location, "superseded") == {}
    result = snapshot(spark, bootstrap, topic, location, full=True, grace_hours=72)
    assert (result.keys, result.deleted) == (0, 1)


def test_values_become_columns(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, location: Path
) -> None:
    topics.send(topic, [b'{"id":1}', b"bad"], keys=[b"a", b"b"])
    snapshot(spark, bootstrap, topic, location)
    # Nothing is new, but the columns are.
    assert snapshot(spark, bootstrap, topic, location, value_schema="id BIGINT").is_new
    found = {bytes(row.key): (row.id, row.error) for row in read_snapshot(spark, location).collect()}
    assert found == {b"a": (1, None), b"b": (None, "not a JSON object")}
    topics.send(topic, [b'{"id":2}'], keys=[b"b"])
    snapshot(spark, bootstrap, topic, location, value_schema="id BIGINT")
    found = {bytes(row.key): (row.id, row.error) for row in read_snapshot(spark, location).collect()}
    assert found == {b"a": (1, None), b"b": (2, None)}
    with pytest.raises(SparkOptionError, match="column offset already"):
        snapshot(spark, bootstrap, topic, location, value_schema="offset BIGINT")


def test_what_brokers_no_longer_have_comes_from_the_archive(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, location: Path, tmp_path: Path
) -> None:
    cold = tmp_path / "archive"
    topics.send(topic, [b"1", b"2"], keys=[b"a", b"b"])
    snapshot(spark, bootstrap, topic, location)
    topics.send(topic, [b"3", b"4"], keys=[b"b", b"c"])
    archive(spark, bootstrap, topic, cold)
    topics.send(topic, [b"5"], keys=[b"d"])
    topics.delete_records(topic, 0, 4)
    with pytest.raises(DataLossError, match=r"records \[2, 4\) of .* are gone.*Pass the archive"):
        snapshot(spark, bootstrap, topic, location)
    result = snapshot(spark, bootstrap, topic, location, archive=cold)
    assert result.read == 3
    everything = {b"a": b"1", b"b": b"3", b"c": b"4", b"d": b"5"}
    assert rows(spark, location) == everything
    # From the archive's own beginning, also where no snapshot was before.
    assert snapshot(spark, bootstrap, topic, tmp_path / "anew", archive=cold).read == 5
    assert rows(spark, tmp_path / "anew") == everything

    topics.send(topic, [b"6", b"7"], keys=[b"e", b"a"])
    topics.delete_records(topic, 0, 6)
    result = snapshot(spark, bootstrap, topic, location, archive=cold, fail_on_data_loss=False)
    assert rows(spark, location) == {**everything, b"a": b"7"}


def test_what_was_lost_with_leave_is_lost_only_once(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, location: Path
) -> None:
    topics.send(topic, [b"1"], keys=[b"a"])
    snapshot(spark, bootstrap, topic, location)
    topics.send(topic, [b"2"], keys=[b"a"])
    topics.delete_records(topic, 0, 2)
    with pytest.raises(DataLossError, match="are gone"):
        snapshot(spark, bootstrap, topic, location)
    assert snapshot(spark, bootstrap, topic, location, fail_on_data_loss=False).read == 0
    assert not snapshot(spark, bootstrap, topic, location).is_new
    assert rows(spark, location) == {b"a": b"1"}


@pytest.mark.usefixtures("impatient")
def test_a_topic_that_is_not_the_one_of_the_snapshot_is_refused(
    spark: SparkSession,
    bootstrap: str,
    topics: Topics,
    topic: str,
    location: Path,
    unique: Callable[[str], str],
) -> None:
    result = snapshot(spark, bootstrap, topic, location)
    assert (result.is_new, result.keys, rows(spark, location)) == (True, 0, {})
    other = topics.create(unique("other"))
    with pytest.raises(SparkOptionError, match=f"has a snapshot of topic {topic}"):
        snapshot(spark, bootstrap, other, location)
    topics.delete(topic)
    with pytest.raises(SparkOptionError, match="does not exist"):
        snapshot(spark, bootstrap, topic, location)
    topics.create(topic)
    topics.send(topic, [b"1"], keys=[b"a"])
    with pytest.raises(SparkOptionError, match=r"recreated .* start again with full"):
        snapshot(spark, bootstrap, topic, location)
    snapshot(spark, bootstrap, topic, location, full=True)
    assert rows(spark, location) == {b"a": b"1"}


def test_a_mistake_is_told_in_one_line(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    with pytest.raises(SparkOptionError, match="no snapshot at"):
        read_snapshot(spark, tmp_path)
    with pytest.raises(SparkOptionError, match="state must be"):
        read_snapshot(spark, tmp_path, state="new")
    with pytest.raises(SparkOptionError, match="no archive at"):
        snapshot(spark, bootstrap, topic, tmp_path / "s", archive=tmp_path)
    with pytest.raises(SparkOptionError, match="grace_hours must be at least 0"):
        snapshot(spark, bootstrap, topic, tmp_path, grace_hours=-1)
    with pytest.raises(SparkOptionError, match="must be a directory that driver and executors share"):
        snapshot(spark, bootstrap, topic, "s3://bucket/snapshot")


# The commit, without Spark


def written(location: Path, number: int, name: str = "aaaaaa") -> Version:
    """A version whose files are there."""
    directory = f"v{number:08d}-{name}"
    data = location / directory / "state=current"
    data.mkdir(parents=True)
    pq.write_table(pa.table({"key": [b"k"] * number}), data / "part-0.parquet")
    return Version(number, directory, "orders", "00" * 16, {0: number}, {}, 0, "{}", None, 0)


def test_a_commit_that_is_cut_off_anywhere_leaves_a_whole_version(tmp_path: Path) -> None:
    reached = set()
    for steps in range(100):
        location = tmp_path / str(steps)
        for number in (1, 2):
            Versions(location).commit(written(location, number))
        disk = CrashingDisk(steps)
        version = written(location, 3)
        with contextlib.suppress(Crash):
            Versions(location, disk).commit(version)
        newest = Versions(location).load()
        assert newest is not None
        reached.add(newest.number)
        assert (location / newest.directory / "state=current" / "part-0.parquet").exists()
        assert newest.rows[CURRENT] == newest.number
        # The run after it completes, and leaves only what counts.
        last = Versions(location).commit(written(location, newest.number + 1, "bbbbbb"))
        assert Versions(location).load() == last
        assert len(list(location.glob("v*"))) == len(list((location / DIRECTORY).iterdir())) == 2
        if disk.steps <= steps:
            break
    else:
        pytest.fail("the commit did not end")
    assert reached == {2, 3}


def test_a_run_that_others_have_overtaken_by_far_has_lost(tmp_path: Path) -> None:
    """Its number is free again, because old versions are pruned; and yet it is not the newest."""
    for number in (1, 2, 3, 4):
        Versions(tmp_path).commit(written(tmp_path, number))
    with pytest.raises(SnapshotConflict, match="another run has committed version 2"):
        Versions(tmp_path).commit(written(tmp_path, 2, "bbbbbb"))
    newest = Versions(tmp_path).load()
    assert newest is not None and newest.number == 4
    assert len(list(tmp_path.glob("v*"))) == len(list((tmp_path / DIRECTORY).iterdir())) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format":1}', '{"format":2}'])
def test_a_damaged_snapshot_is_told_of_by_name(tmp_path: Path, text: str) -> None:
    Versions(tmp_path).commit(written(tmp_path, 1))
    newest = tmp_path / DIRECTORY / f"{1:020d}.json"
    newest.write_text(text)
    with pytest.raises(TableError, match=str(newest)):
        Versions(tmp_path).load()


def test_of_two_runs_that_commit_at_once_one_wins(tmp_path: Path) -> None:
    Versions(tmp_path).commit(written(tmp_path, 1))
    winner, loser = written(tmp_path, 2, "aaaaaa"), written(tmp_path, 2, "bbbbbb")
    Versions(tmp_path).commit(winner)
    # It has tidied up: what the other has written is gone already, as is what would become its manifest.
    assert not (tmp_path / loser.directory).exists()
    with pytest.raises(SnapshotConflict, match="another run has committed version 2"):
        Versions(tmp_path).commit(written(tmp_path, 2, "cccccc"))
    newest = Versions(tmp_path).load()
    assert newest is not None and newest.directory == winner.directory
    assert not (tmp_path / "v00000002-cccccc").exists()
