from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.cli.conftest import Penstock

Unique = Callable[[str], str]

pytestmark = pytest.mark.interop


@pytest.fixture
def topic(kafka: Penstock, unique: Unique) -> str:
    """A topic of two partitions with five records each."""
    name = unique("topic")
    kafka("topics", "create", name, "--partitions", "2")
    for partition in ("0", "1"):
        kafka("produce", name, "--partition", partition, stdin=b"a\nb\nc\nd\ne\n")
    return name


@pytest.fixture
def group(kafka: Penstock, topic: str, unique: Unique) -> str:
    """A group that has read everything."""
    name = unique("group")
    kafka("consume", topic, "--group", name, "--no-follow")
    return name


@contextmanager
def member(topic: str, group: str, bootstrap: str) -> Iterator[None]:
    """A member of the group that has its partitions and waits for records."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "consume", topic, "--group", group],
        stdout=subprocess.PIPE,
        env={**os.environ, "PENSTOCK_BOOTSTRAP": bootstrap},
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()  # it has been assigned what it reads
        yield
    finally:
        process.terminate()
        process.communicate(timeout=30)


def committed(kafka: Penstock, group: str) -> dict[int, int]:
    rows = kafka("groups", "describe", group, "--json").json["partitions"]
    return {row["partition"]: row["committed"] for row in rows}


def test_groups_are_listed_with_their_state(kafka: Penstock, group: str) -> None:
    listed = {each["group"]: each for each in kafka("groups", "list", "--json").json}
    assert listed[group]["state"] == "empty"
    assert group in kafka("groups", "list").out


def test_lag_is_the_end_less_what_is_committed(kafka: Penstock, topic: str, group: str) -> None:
    kafka("produce", topic, "--partition", "1", "--value", "f", "--value", "g")
    document = kafka("groups", "describe", group, "--json").json
    assert document["partitions"] == [
        {"topic": topic, "partition": 0, "committed": 5, "end": 5, "lag": 0},
        {"topic": topic, "partition": 1, "committed": 5, "end": 7, "lag": 2},
    ]
    assert (document["state"], document["members"]) == ("empty", [])
    table = kafka("groups", "describe", group)
    assert "lag 2" in table.out
    assert [topic, "1", "5", "7", "2", "-", "-", "-"] in table.rows


def test_members_and_their_partitions_are_shown(
    kafka: Penstock, topic: str, unique: Unique, bootstrap: str
) -> None:
    name = unique("group")
    with member(topic, name, bootstrap):
        document = kafka("groups", "describe", name, "--json").json
        table = kafka("groups", "describe", name)
    (only,) = document["members"]
    assert only["client"] == "penstock-cli"
    assert only["partitions"] == [{"topic": topic, "partition": number} for number in (0, 1)]
    assert document["state"] == "stable"
    assert only["member"] in table.out


def test_a_group_that_is_not_there_is_said_to_be_missing(kafka: Penstock, unique: Unique) -> None:
    name = unique("group")
    assert f"there is no group {name}" in kafka("groups", "describe", name, code=1).err
    assert f"there is no group {name}" in kafka("groups", "delete", name, "--yes", code=1).err


@pytest.mark.parametrize(
    ("words", "after"),
    [
        (["--to", "beginning"], {0: 0, 1: 0}),
        (["--to", "earliest"], {0: 0, 1: 0}),
        (["--to", "end"], {0: 5, 1: 5}),
        (["--to", "2"], {0: 2, 1: 2}),
        (["--to", "99"], {0: 5, 1: 5}),
        (["--to=-1"], {0: 4, 1: 4}),
        (["--to", "2001-01-01T00:00:00Z"], {0: 0, 1: 0}),
        (["--to", "2101-01-01T00:00:00Z"], {0: 5, 1: 5}),
        (["--shift=-2"], {0: 3, 1: 3}),
        (["--shift=-100"], {0: 0, 1: 0}),
        (["--shift", "1"], {0: 5, 1: 5}),
    ],
)
def test_a_group_is_set_to_a_place(
    kafka: Penstock, group: str, words: list[str], after: dict[int, int]
) -> None:
    moves = kafka("groups", "offsets", "reset", group, *words, "--json").json["partitions"]
    assert [move["before"] for move in moves] == [5, 5]
    assert {move["partition"]: move["after"] for move in moves} == after
    assert committed(kafka, group) == after


def test_only_the_partitions_named_are_set(kafka: Penstock, topic: str, group: str) -> None:
    kafka("groups", "offsets", "reset", group, "--topic", f"{topic}:1", "--to", "3")
    assert committed(kafka, group) == {0: 5, 1: 3}


def test_what_was_reset_is_read_again(kafka: Penstock, topic: str, group: str) -> None:
    kafka("groups", "offsets", "reset", group, "--topic", f"{topic}:0", "--to", "3")
    assert kafka("consume", topic, "--group", group, "--no-follow").out == "d\ne\n"


def test_a_dry_run_only_shows(kafka: Penstock, topic: str, group: str) -> None:
    shown = kafka("groups", "offsets", "reset", group, "--to", "beginning", "--dry-run")
    assert shown.out.splitlines()[0] == f"would reset {group}"
    assert [topic, "0", "5", "0"] in shown.rows
    assert committed(kafka, group) == {0: 5, 1: 5}


def test_a_group_that_has_read_nothing_can_be_given_a_place(
    kafka: Penstock, topic: str, unique: Unique
) -> None:
    name = unique("group")
    assert "--topic" in kafka("groups", "offsets", "reset", name, "--to", "2", code=1).err
    kafka("groups", "offsets", "reset", name, "--topic", topic, "--to", "2")
    assert committed(kafka, name) == {0: 2, 1: 2}
    assert (
        "use --to"
        in kafka("groups", "offsets", "reset", unique("group"), "--topic", topic, "--shift", "1", code=1).err
    )


def test_a_place_must_be_one_and_exist(kafka: Penstock, topic: str, group: str) -> None:
    reset = ["groups", "offsets", "reset", group]
    kafka(*reset, code=2)
    kafka(*reset, "--to", "end", "--shift", "1", code=2)
    kafka(*reset, "--to", "tomorrow", code=2)
    kafka(*reset, "--to", "end", "--topic", f"{topic}:x", code=2)
    assert "has no partition 9" in kafka(*reset, "--to", "end", "--topic", f"{topic}:9", code=1).err


def test_a_group_with_members_is_left_alone(
    kafka: Penstock, topic: str, unique: Unique, bootstrap: str
) -> None:
    name = unique("group")
    with member(topic, name, bootstrap):
        for words in (["offsets", "reset", name, "--to", "end"], ["delete", name, "--yes"]):
            assert "has 1 member; stop them first" in kafka("groups", *words, code=1).err


def test_a_deleted_group_is_gone(kafka: Penstock, group: str) -> None:
    assert "--yes" in kafka("groups", "delete", group, code=1).err
    kafka("groups", "delete", group, "--yes")
    assert group not in kafka("groups", "list").out


def test_a_group_outlives_its_topic(kafka: Penstock, topic: str, group: str) -> None:
    kafka("topics", "delete", topic, "--yes")
    deadline = time.monotonic() + 30
    while kafka("groups", "describe", group, "--json").json["partitions"]:
        rows = kafka("groups", "describe", group, "--json").json["partitions"]
        if all((row["end"], row["lag"]) == (None, None) for row in rows):
            return
        assert time.monotonic() < deadline
