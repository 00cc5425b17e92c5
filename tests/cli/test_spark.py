"""`penstock spark`: each job by its command, in the session that all Spark tests share, and once in its own."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import spark as commands
from penstock.cli import spark_session
from penstock.cli.failures import Failure
from tests.cli.conftest import Penstock
from tests.spark.topics import Topics
from tests.support import wait_until

RECORDS = 20
# Of a thread that serves requests.
TRACEBACK = "Exception occurred during processing of request"


@pytest.fixture
def topics(bootstrap: str) -> Topics:
    return Topics(bootstrap)


@pytest.fixture
def orders(topics: Topics, unique: Callable[[str], str]) -> str:
    """Two partitions, a bad value, and a key for each five records."""
    topic = topics.create(unique("orders"), 2)
    for partition in (0, 1):
        values = [json.dumps({"id": number}).encode() for number in range(RECORDS // 2 - 1)] + [b"bad"]
        keys = [b"%d-%d" % (partition, number // 5) for number in range(RECORDS // 2)]
        topics.send(topic, values, keys=keys, partition=partition)
    return topic


def test_archive_and_table(kafka: Penstock, spark: Any, orders: str, tmp_path: Path) -> None:
    where = str(tmp_path / "archive")
    schema = ("--value-schema", "id BIGINT")
    shown = kafka("spark", "archive", orders, "--to", where, *schema, "--no-by-date", "--no-headers")
    assert shown.rows[0][:2] == ["TOPIC", "PARTITION"]
    assert [row[:2] for row in shown.rows[1:3]] == [[orders, "0"], [orders, "1"]]
    assert shown.rows[-1][:3] == ["archived", "20", "records"]
    again = kafka(
        "spark", "archive", orders, "--to", where, *schema, "--no-by-date", "--no-headers", "--json"
    ).json
    assert (again["job"], again["records"], again["partitions"][0]["end"]) == ("archive", 0, RECORDS // 2)

    found = kafka("spark", "table", orders, "--archive", where, "--limit", "3", "--json").json
    assert (found["records"], len(found["rows"])) == (RECORDS, 3)
    assert {"column": "id", "type": "bigint"} in found["columns"]
    assert found["rows"][0]["value"].startswith("{") and found["rows"][0]["timestamp"].endswith("Z")
    shown = kafka("spark", "table", orders, "--archive", where)
    assert shown.out.startswith(f"{RECORDS} records of {orders}\n")
    assert shown.out.count("not a JSON object") == 2

    view = orders.replace("-", "_")
    query = f"SELECT count(error) AS bad, max(id) AS most FROM {view}"
    assert kafka("spark", "table", orders, "--archive", where, "--sql", query).rows == [
        ["bad", "most"],
        ["2", "8"],
    ]
    wrong = kafka("spark", "table", orders, "--archive", where, "--sql", "SELECT x FROM nowhere", code=1)
    assert "`nowhere` cannot be found" in wrong.err
    missing = kafka("spark", "table", orders, "--archive", str(tmp_path / "none"), code=2)
    assert "there is no archive at" in missing.err


def test_a_topic_may_be_named_like_a_number(
    kafka: Penstock, spark: Any, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create(str(uuid.uuid4().int))
    topics.send(topic, [b"x"])
    kafka("spark", "archive", topic, "--to", str(tmp_path))
    query = f"SELECT count(*) AS records FROM `{topic}`"
    shown = kafka("spark", "table", topic, "--archive", str(tmp_path), "--sql", query)
    assert shown.rows == [["records"], ["1"]]


def test_snapshot(kafka: Penstock, spark: Any, orders: str, tmp_path: Path) -> None:
    where = str(tmp_path / "snapshot")
    shown = kafka("spark", "snapshot", orders, "--to", where)
    assert shown.rows[1][:5] == [orders, "1", "yes", str(RECORDS), "4"]
    found = kafka("spark", "snapshot", orders, "--to", where, "--full", "--grace-hours", "0", "--json").json
    assert (found["version"], found["is_new"], found["keys"]) == (2, True, 4)
    assert spark.read.parquet(found["path"]).count() == 4
    wrong = kafka("spark", "snapshot", orders, "--to", where, "--value-schema", "id NUMBER", code=2)
    assert "the schema of the values cannot be read" in wrong.err


def test_replay(kafka: Penstock, spark: Any, orders: str, unique: Callable[[str], str]) -> None:
    target = unique("target")
    shown = kafka("spark", "replay", orders, target, "--create", "--from=-3", "--dry-run")
    assert shown.rows[0] == ["PARTITION", "START", "END", "NEXT", "OFFSET", "RECORDS", "BYTES"]
    assert shown.rows[-1][:4] == ["would", "send", "6", "records,"]
    found = kafka(
        "spark",
        "replay",
        orders,
        target,
        "--create",
        "--from",
        "2",
        "--until",
        "5",
        "--partition",
        "1",
        "--json",
    ).json
    assert [(each["partition"], each["records"]) for each in found["partitions"]] == [(1, 3)]
    held = kafka("topics", "describe", target, "--json").json
    assert sum(each["end"] for each in held["partitions"]) == 3
    assert "has no partition 7" in kafka("spark", "replay", orders, target, "--partition", "7", code=2).err
    assert (
        "--from: not a position: 'noon'"
        in kafka("spark", "replay", orders, target, "--from", "noon", code=2).err
    )
    assert "pass --into-itself" in kafka("spark", "replay", orders, orders, code=2).err
    assert "pass --create" in kafka("spark", "replay", orders, unique("missing"), code=2).err
    assert "run_id is empty" in kafka("spark", "replay", orders, target, "--run-id", "", code=2).err


def test_a_replay_that_goes_on_says_what_retention_took(
    kafka: Penstock, spark: Any, topics: Topics, orders: str, unique: Callable[[str], str]
) -> None:
    words = ("spark", "replay", orders, topics.create(unique("target"), 2), "--run-id", "interrupted")
    kafka(*words, "--until", "3")
    topics.delete_records(orders, 1, 7)
    told = kafka(*words, code=1).err
    assert f"records {orders}-1 [3, 7) are gone" in told and "pass --allow-data-loss" in told
    kafka(*words, "--allow-data-loss")
    assert _records(kafka, words[3]) == RECORDS - 4


def test_times_outside_of_the_calendar_are_shown_as_numbers(
    kafka: Penstock, spark: Any, topics: Topics, unique: Callable[[str], str], tmp_path: Path
) -> None:
    wild = {"message.timestamp.after.max.ms": str(2**63 - 1)}
    topic = topics.create(unique("wild"), 1, configs=wild)
    topics.send(topic, [b"x"], timestamp_ms=300_000_000_000_000)
    kafka("spark", "archive", topic, "--to", str(tmp_path))
    found = kafka("spark", "table", topic, "--archive", str(tmp_path), "--json").json
    assert (found["rows"][0]["timestamp"].split()[0], found["rows"][0]["date"]) == (
        "300000000000000000",
        None,
    )


def test_profile(kafka: Penstock, spark: Any, orders: str, tmp_path: Path) -> None:
    shown = kafka("spark", "profile", orders, "--to", str(tmp_path))
    assert shown.rows[1][:3] == [orders, "2", str(RECORDS)]
    assert str(tmp_path / orders / "forecast.png") in shown.out
    found = kafka(
        "spark", "profile", orders, orders, "--to", str(tmp_path), "--sample", "1000", "--json"
    ).json
    assert [each["topic"] for each in found["topics"]] == [orders]
    assert all(Path(each).exists() for each in found["files"])


@pytest.mark.parametrize("job", ["archive", "snapshot", "profile"])
def test_what_is_wrong_is_said_before_spark_is_started(
    kafka: Penstock, penstock: Penstock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: str
) -> None:
    monkeypatch.setattr(commands, "spark_session", None)
    where = ("--to", str(tmp_path))
    assert "there is no topic nothing" in kafka("spark", job, "nothing", *where, code=1).err
    assert (
        "--conf takes KEY=VALUE, such as spark.driver.memory=4g;"
        in kafka("spark", job, "nothing", *where, "--conf", "x", code=2).err
    )
    assert "Missing option '--to'" in kafka("spark", job, "nothing", code=2).err
    nobody = penstock("spark", job, "nothing", *where, "--bootstrap", "127.0.0.1:1")
    assert (nobody.code, "no broker answers at 127.0.0.1:1" in nobody.err) == (1, True)


@pytest.mark.parametrize("job", ["archive", "snapshot", "profile"])
def test_a_place_that_cannot_be_written_to_is_told_in_one_line(
    kafka: Penstock, spark: Any, orders: str, tmp_path: Path, job: str
) -> None:
    (tmp_path / "file").write_text("")
    for where, code in ((tmp_path / "file", 2), (tmp_path / "file" / "below", 1)):
        assert str(where) in kafka("spark", job, orders, "--to", str(where), code=code).err


def test_missing_libraries_are_named(kafka: Penstock, orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_session, "find_spec", lambda name: None if name == "pyspark" else object())
    told = kafka("spark", "profile", orders, "--to", "nowhere", code=1).err
    # Not 'penstock[spark]': what is called so on PyPI is another project.
    assert told == "penstock: pyspark is not installed; run pip install 'penstock-mq[spark]'\n"


@pytest.mark.parametrize(
    ("version", "complaint"),
    [
        ('openjdk version "11.0.2" 2019-01-15', "is Java 11"),
        ('java version "1.8.0_391"', "is Java 8"),
        (None, "has no Java"),
    ],
)
def test_java_that_is_missing_or_too_old_is_told(
    version: str | None, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    if version is not None:
        java.parent.mkdir()
        java.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
        java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(Failure, match=f"Spark needs Java 17 or later; .*{complaint}"):
        spark_session._require_java()


def test_a_topic_named_like_a_parameter_keeps_its_name() -> None:
    told = "the table was made with dates (by_date), not without value_schema"
    assert spark_session._with_options(told) == (
        "the table was made with dates (--by-date), not without --value-schema"
    )
    lost = "records orders.by_date-0 [0, 5) are gone"
    assert spark_session._with_options(lost) == lost


def test_what_pyspark_says_while_it_stops_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its thread that takes accumulators has a traceback to tell whenever the JVM hangs up on it."""
    from pyspark import SparkContext
    from pyspark.accumulators import _start_update_server

    context = _HangsUp(_start_update_server("secret", False))
    monkeypatch.setattr(SparkContext, "_active_spark_context", context)
    with spark_session._own_log() as log:
        spark_session._stop()
        assert TRACEBACK in log.read_text()
    # Clients that other tests have left in this process may have something to say just now.
    out, err = capfd.readouterr()
    assert (out, TRACEBACK in err) == ("", False)


class _HangsUp:
    """Stops as a context does whose JVM was interrupted in the middle of a word to that thread."""

    def __init__(self, accumulators: Any) -> None:
        self._accumulators = accumulators
        self._has_told = threading.Event()
        accumulators.shutdown_request = self._told

    def _told(self, request: socket.socket) -> None:
        type(self._accumulators).shutdown_request(self._accumulators, request)
        self._has_told.set()

    def stop(self) -> None:
        socket.create_connection(self._accumulators.server_address).close()
        assert self._has_told.wait(60)
        self._accumulators.shutdown()


@pytest.mark.parametrize("job", ["archive", "table", "snapshot", "replay", "profile"])
def test_the_command_has_the_defaults_of_the_function(job: str) -> None:
    from penstock.spark import jobs

    command = inspect.signature(getattr(commands, job)).parameters
    for name, parameter in inspect.signature(getattr(jobs, job)).parameters.items():
        if name in command and parameter.default is not inspect.Parameter.empty:
            assert command[name].default == parameter.default, name


def test_help_waits_for_no_spark() -> None:
    program = (
        "import sys; from penstock.cli.main import run; run(['--help']); run(['spark', 'archive', '--help']);"
        "sys.exit(any(name in sys.modules for name in ('pyspark', 'pyarrow', 'pandas', 'matplotlib')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_ctrl_c_ends_a_job_of_its_own_quietly(
    kafka: Penstock, spark: Any, bootstrap: str, orders: str, unique: Callable[[str], str], tmp_path: Path
) -> None:
    """A whole process: nothing of Spark's reaches the terminal, nothing is left behind, and it can go on."""
    target = unique("target")
    words = [
        "spark",
        "replay",
        orders,
        target,
        "--create",
        "--records-per-second",
        "0.2",  # there is time enough to interrupt it
        "--master",
        "local[1]",
    ]
    words += ["--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"]
    environment = {**os.environ, "PENSTOCK_BOOTSTRAP": bootstrap, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        wait_until(lambda: _records(kafka, target) > 0, 120, "the replay begins")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err.startswith("stopped; continue with --run-id ") and err.count("\n") == 1, err
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("penstock-spark-")] == []

    kafka("spark", "replay", orders, target, "--run-id", err.split()[-1])
    # At least once: the round that was cut off may have sent some before.
    assert _records(kafka, target) >= RECORDS


def _records(kafka: Penstock, topic: str) -> int:
    held = kafka("topics", "list", "--json").json
    if topic not in {each["topic"] for each in held}:
        return 0
    return sum(each["end"] or 0 for each in kafka("topics", "describe", topic, "--json").json["partitions"])
