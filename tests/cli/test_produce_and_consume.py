"""Records in by `produce`, out by `consume`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Outcome, Penstock
from tests.interop.murmur2 import partition_of

Unique = Callable[[str], str]

pytestmark = pytest.mark.interop


@pytest.fixture
def topic(kafka: Penstock, unique: Unique) -> str:
    """A topic of three partitions."""
    name = unique("topic")
    kafka("topics", "create", name, "--partitions", "3")
    return name


def records(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in outcome.out.splitlines()]


def read(kafka: Penstock, topic: str, *words: str) -> list[dict[str, Any]]:
    return records(kafka("consume", topic, "--no-follow", "--json", *words))


def test_each_line_is_a_record_and_comes_back_as_it_was(kafka: Penstock, topic: str) -> None:
    produced = kafka("produce", topic, "--partition", "0", stdin=b"one\n\ntwo words\nlast")
    assert produced.out.splitlines()[0] == f"produced 4 records to {topic}"
    assert ["0", "4", "0", "3"] in produced.rows
    assert kafka("consume", topic, "--no-follow").out == "one\n\ntwo words\nlast\n"


def test_records_without_a_key_go_round_the_partitions(kafka: Penstock, topic: str) -> None:
    summary = kafka("produce", topic, "--json", stdin=b"".join(b"%d\n" % n for n in range(12))).json
    assert (summary["records"], summary["failed"]) == (12, 0)
    assert [each["records"] for each in summary["partitions"]] == [4, 4, 4]


def test_a_key_goes_where_the_java_client_sends_it(kafka: Penstock, topic: str) -> None:
    keys = [f"key-{number}" for number in range(40)]
    kafka("produce", topic, "--key-separator", ":", stdin="".join(f"{key}:x\n" for key in keys).encode())
    found = {each["key"]: each["partition"] for each in read(kafka, topic)}
    assert found == {key: partition_of(key.encode(), 3) for key in keys}


def test_the_same_key_keeps_its_order(kafka: Penstock, topic: str) -> None:
    kafka("produce", topic, "--key", "k", stdin=b"".join(b"%d\n" % n for n in range(50)))
    assert [each["value"] for each in read(kafka, topic)] == [str(number) for number in range(50)]


def test_headers_keep_their_order_and_repeats(kafka: Penstock, topic: str) -> None:
    kafka("produce", topic, "--value", "v", "--header", "a=1", "--header", "b=", "--header", "a=x=y")
    assert read(kafka, topic)[0]["headers"] == [
        {"name": "a", "value": "1"},
        {"name": "b", "value": ""},
        {"name": "a", "value": "x=y"},
    ]


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_comes_back(kafka: Penstock, topic: str, codec: str) -> None:
    line = b"compress me " * 100
    kafka("produce", topic, "--compression", codec, "--partition", "0", stdin=(line + b"\n") * 20)
    assert [each["value"] for each in read(kafka, topic)] == [line.decode()] * 20


@pytest.mark.parametrize(("acks", "first"), [("0", None), ("1", 0), ("all", 0)])
def test_offsets_are_known_where_acknowledgements_were_asked_for(
    kafka: Penstock, topic: str, acks: str, first: int | None
) -> None:
    summary = kafka("produce", topic, "--acks", acks, "--partition", "1", "--value", "v", "--json").json
    assert summary["partitions"] == [{"partition": 1, "records": 1, "first": first, "last": first}]


def test_lines_of_files_are_records_too(kafka: Penstock, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(b"\xff\xfe\nplain\n")
    kafka("produce", topic, "--partition", "0", "--file", str(file), "--file", "-", stdin=b"typed\n")
    first, *rest = read(kafka, topic)
    assert first["value_base64"] == "//4="
    assert [each["value"] for each in rest] == ["plain", "typed"]


def test_a_file_that_is_not_there_is_one_line(kafka: Penstock, topic: str) -> None:
    assert "no-such-file" in kafka("produce", topic, "--file", "no-such-file", code=1).err


def test_a_line_without_its_key_stops_after_those_before_it(kafka: Penstock, topic: str) -> None:
    failed = kafka("produce", topic, "--key-separator", "\\t", stdin=b"a\t1\nb\t2\nbare\nc\t3\n", code=1)
    assert "line 3 has no key" in failed.err
    assert sorted(each["value"] for each in read(kafka, topic)) == ["1", "2"]


def test_a_record_that_is_too_large_fails_and_the_others_do_not(kafka: Penstock, unique: Unique) -> None:
    name = unique("topic")
    # A batch is refused as a whole, so each record gets a partition of its own.
    kafka("topics", "create", name, "--partitions", "3", "--config", "max.message.bytes=5000")
    failed = kafka("produce", name, stdin=b"small\n" + b"x" * 20_000 + b"\nsmall\n", code=1)
    assert "1 record not delivered" in failed.err
    assert [each["value"] for each in read(kafka, name)] == ["small", "small"]


def test_a_partition_that_is_not_there_is_refused(kafka: Penstock, topic: str) -> None:
    assert "has no partition 9" in kafka("produce", topic, "--partition", "9", "--value", "v", code=1).err
    assert "has no partition 9" in kafka("consume", topic, "--partition", "9", code=1).err


@pytest.mark.parametrize(
    "words",
    [
        ["--value", "v", "--file", "f"],
        ["--key", "k", "--key-separator", ":"],
        ["--key-separator", ""],
        ["--header", "bare"],
    ],
)
def test_what_excludes_itself_is_wrong_usage(kafka: Penstock, words: list[str]) -> None:
    kafka("produce", "any", *words, code=2)


def test_a_topic_appears_by_being_produced_to(kafka: Penstock, unique: Unique) -> None:
    name = unique("topic")
    kafka("produce", name, "--value", "v")
    assert [each["value"] for each in read(kafka, name)] == ["v"]


def numbered(kafka: Penstock, topic: str, count: int) -> None:
    kafka("produce", topic, "--partition", "0", stdin=b"".join(b"%d\n" % number for number in range(count)))


@pytest.mark.parametrize(
    ("place", "values"),
    [
        ("beginning", ["0", "1", "2", "3", "4"]),
        ("3", ["3", "4"]),
        ("99", []),
        ("-2", ["3", "4"]),
        ("end", []),
    ],
)
def test_reading_begins_where_it_is_told(kafka: Penstock, topic: str, place: str, values: list[str]) -> None:
    numbered(kafka, topic, 5)
    assert [each["value"] for each in read(kafka, topic, f"--from={place}")] == values


def test_reading_begins_at_a_time(kafka: Penstock, topic: str) -> None:
    numbered(kafka, topic, 2)
    last = read(kafka, topic)[-1]["timestamp"]
    while datetime.now(UTC).timestamp() * 1000 <= last + 1:
        pass
    now = datetime.now(UTC)
    kafka("produce", topic, "--partition", "0", "--value", "late")
    assert [each["value"] for each in read(kafka, topic, "--from", now.isoformat())] == ["late"]
    assert read(kafka, topic, "--from", (now + timedelta(hours=1)).isoformat()) == []
    assert len(read(kafka, topic, "--from", f"@{last - 60_000}")) == 3


def test_reading_stops_after_so_many(kafka: Penstock, topic: str) -> None:
    numbered(kafka, topic, 5)
    assert kafka("consume", topic, "--max", "3").out == "0\n1\n2\n"


def test_reading_one_partition_leaves_the_others(kafka: Penstock, topic: str) -> None:
    kafka("produce", topic, stdin=b"a\nb\nc\n")
    found = read(kafka, topic, "--partition", "1")
    assert [(each["partition"], each["offset"]) for each in found] == [(1, 0)]


def test_several_topics_are_read_together(kafka: Penstock, unique: Unique) -> None:
    names = [unique("topic"), unique("topic")]
    for name in names:
        kafka("produce", name, "--value", name)
    found = records(kafka("consume", *names, "--no-follow", "--json"))
    assert sorted(each["value"] for each in found) == sorted(names)


def test_columns_and_templates_shape_the_lines(kafka: Penstock, topic: str) -> None:
    kafka("produce", topic, "--key", "k", "--value", "v", "--header", "a=1", "--partition", "2")
    assert kafka("consume", topic, "--no-follow", "--keys", "--headers").out == "a=1\tk\tv\n"
    assert kafka("consume", topic, "--no-follow", "--offsets").out == f"{topic}-2@0\tv\n"
    assert kafka("consume", topic, "--no-follow", "--format", "{partition}/{key}").out == "2/k\n"
    kafka("consume", topic, "--format", "{nothing}", code=2)
    kafka("consume", topic, "--format", "{value}", "--json", code=2)
    kafka("consume", topic, "--from", "somewhere", code=2)


def test_a_record_that_is_too_large_is_named_with_its_size_and_the_limit(kafka: Penstock, topic: str) -> None:
    kafka("configs", "set", topic, "max.message.bytes=2000")
    lines = [b"small", b"x" * 3000, b"small too"]
    refused = kafka("produce", topic, stdin=b"\n".join(lines), code=1)
    assert "1 record not delivered: line 2 is too large: 3000 bytes" in refused.err
    assert "at most 2000" in refused.err
    assert sorted(kafka("consume", topic, "--no-follow").out.splitlines()) == ["small", "small too"]


def test_small_records_are_not_refused_because_together_they_are_too_large(
    kafka: Penstock, topic: str
) -> None:
    kafka("configs", "set", topic, "max.message.bytes=2000")
    lines = [b"%d" % number + b"x" * 500 for number in range(50)]
    assert kafka("produce", topic, "--json", stdin=b"\n".join(lines)).json["records"] == 50


def test_a_refused_partition_leaves_no_topic_behind(kafka: Penstock, unique: Unique) -> None:
    topic = unique("topic")
    refused = kafka("produce", topic, "--partition", "7", "--value", "x", code=1)
    assert f"`penstock topics create {topic} --partitions 8`" in refused.err
    assert topic not in [each["topic"] for each in kafka("topics", "--json").json]


def test_partition_0_of_a_new_topic_is_there(kafka: Penstock, unique: Unique) -> None:
    topic = unique("topic")
    kafka("produce", topic, "--partition", "0", "--value", "x")
    assert kafka("consume", topic, "--no-follow").out == "x\n"


@pytest.mark.parametrize("place", ["500", "2999-01-01"])
def test_a_place_beyond_the_end_is_said(kafka: Penstock, topic: str, place: str) -> None:
    numbered(kafka, topic, 5)
    outcome = kafka("consume", topic, "--from", place, "--no-follow")
    assert outcome.out == ""
    assert "there are no records at or after" in outcome.err and f"{topic}-0 at 5" in outcome.err
    assert kafka("consume", topic, "--from", "4", "--no-follow").err == ""


def test_a_mistyped_topic_is_told_which_one_was_meant(kafka: Penstock, topic: str) -> None:
    for words in (["topics", "describe"], ["consume"], ["configs", "describe"]):
        assert f"did you mean {topic}?" in kafka(*words, f"{topic}x", code=1).err


def test_a_mistyped_setting_is_told_which_one_was_meant(kafka: Penstock, topic: str) -> None:
    assert "Did you mean retention.ms?" in kafka("configs", "set", topic, "retention.mss=5", code=1).err
    words = ["topics", "create", f"{topic}-b", "--config", "retension.ms=5"]
    assert "Did you mean retention.ms?" in kafka(*words, code=1).err
    words = ["configs", "set", "--broker", "1", "log.retention.mss=5"]
    assert "Did you mean log.retention.ms?" in kafka(*words, code=1).err


@pytest.mark.parametrize("words", ["topics describe", "consume", "produce", "topics delete", "spark archive"])
def test_topic_names_are_completed(topic: str, bootstrap: str, words: str) -> None:
    assert topic in completed(f"penstock {words} {topic[:-3]}", bootstrap)


def test_group_names_are_completed(kafka: Penstock, topic: str, unique: Unique, bootstrap: str) -> None:
    group = unique("group")
    numbered(kafka, topic, 1)
    kafka("consume", topic, "--group", group, "--no-follow")
    assert group in completed(f"penstock groups describe {group[:-3]}", bootstrap)
    assert group in completed(f"penstock consume {topic} --group {group[:-3]}", bootstrap)


def test_nothing_is_completed_and_nothing_said_where_no_broker_answers() -> None:
    assert completed("penstock topics describe o", "127.0.0.1:1") == []


def completed(line: str, bootstrap: str) -> list[str]:
    """What the shell would offer for the last word of a command line."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock"],
        env={
            **os.environ,
            "_PENSTOCK_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
            "PENSTOCK_BOOTSTRAP": bootstrap,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_a_group_goes_on_where_it_had_got_to(kafka: Penstock, topic: str, unique: Unique) -> None:
    group = unique("group")
    numbered(kafka, topic, 5)
    assert kafka("consume", topic, "--group", group, "--max", "2").out == "0\n1\n"
    assert kafka("consume", topic, "--group", group, "--no-follow").out == "2\n3\n4\n"
    assert kafka("consume", topic, "--group", group, "--no-follow").out == ""


def test_a_new_group_may_begin_at_the_end(kafka: Penstock, topic: str, unique: Unique) -> None:
    numbered(kafka, topic, 5)
    words = ["consume", topic, "--group", unique("group"), "--from", "end", "--no-follow"]
    assert kafka(*words).out == ""


def test_a_group_is_moved_by_its_own_command(kafka: Penstock, topic: str) -> None:
    refused = kafka("consume", topic, "--group", "g", "--from", "3", code=2)
    assert "penstock groups offsets reset g --to 3" in refused.err
    kafka("consume", topic, "--group", "g", "--partition", "1", code=2)


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_following_ends_with_a_signal_and_commits(
    kafka: Penstock, topic: str, unique: Unique, bootstrap: str, stop: signal.Signals, code: int
) -> None:
    group = unique("group")
    numbered(kafka, topic, 2)
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "consume", topic, "--group", group],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PENSTOCK_BOOTSTRAP": bootstrap},
    )
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(2)] == [b"0\n", b"1\n"]
        kafka("produce", topic, "--partition", "0", "--value", "2")
        assert process.stdout.readline() == b"2\n"
        process.send_signal(stop)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (code, b"", b"")
    described = kafka("groups", "describe", group, "--json").json
    ((partition, committed),) = [(each["partition"], each["committed"]) for each in described["partitions"]]
    # The signal may fall between printing the last record and taking note of it; then it is printed again.
    assert partition == 0
    assert committed in (2, 3)


def test_a_reader_that_goes_away_ends_the_reading_quietly(
    kafka: Penstock, topic: str, bootstrap: str
) -> None:
    numbered(kafka, topic, 20_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "consume", topic, "--bootstrap", bootstrap],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=30) == 1


@pytest.mark.parametrize("level", ["read_committed", "read_uncommitted"])
def test_records_outside_transactions_are_printed_at_both_levels(
    kafka: Penstock, topic: str, level: str
) -> None:
    kafka("produce", topic, stdin=b"one\ntwo\n")
    words = ("consume", topic, "--no-follow", "--isolation", level)
    assert sorted(kafka(*words).out.splitlines()) == ["one", "two"]
    assert len(kafka(*words, "--from=-1", "--partition", "0").out.splitlines()) <= 1


def test_an_unknown_isolation_level_is_refused(kafka: Penstock, topic: str) -> None:
    assert "read_committed" in kafka("consume", topic, "--isolation", "serializable", code=2).err
