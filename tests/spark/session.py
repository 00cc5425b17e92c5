"""One Spark session for all tests of a run, those of the command line too: its start costs more than most tests.

Whatever Spark writes (warehouse, shuffle files, temporary checkpoints) goes into one directory that is removed
with the session. A test takes topic names from ``unique`` and its checkpoint from ``tmp_path``.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.jars import connector_jars
from tests.tools import Missing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark does not start on a machine that cannot resolve its own name. Every process of Spark that tests start
# inherits this, and asks for no name.
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """``local[2]`` with ``format("penstock")`` registered; no web page, no files outside its own directory."""
    from penstock.spark import session

    scratch = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyspark.java_gateway.Popen", _start)
        # Where no language is set, as in many containers, Java takes paths of plain ASCII only.
        patch.setenv("LC_ALL", "C.UTF-8")
        spark = session("penstock tests", "local[2]", **_settings(scratch))
    spark.sparkContext.setLogLevel("OFF")
    yield spark
    spark.stop()


def _start(command: list[str], *, preexec_fn: object, **options: Any) -> subprocess.Popen[bytes]:
    """Start the JVM without running Python in between, as pyspark does to let it ignore Ctrl-C.

    In the forked process Python buries the threads of the old one and whatever they hold. What other tests have
    left in them (clients, loops) does not always survive that: behind enough of them the JVM never started.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.Popen(command, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def _settings(scratch: Path) -> dict[str, str]:
    return {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        # The first of the JVM's two compilers is enough for small data, and starts seconds sooner.
        "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -Djava.io.tmpdir={scratch}",
        "spark.driver.extraClassPath": _class_path(),
        "spark.local.dir": str(scratch / "local"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.shuffle.partitions": "2",
        # A query that cannot be stopped fails its own test. Without this the test is torn out of its call into the
        # JVM at last, and every later test waits on the same connection for the answer to that call.
        "spark.sql.streaming.stopTimeout": "60s",
        "spark.sql.session.timeZone": "UTC",
    }


def _class_path() -> str:
    """Spark's own connector, if it can be had; the tests that need it ask for it again and say what is missing."""
    try:
        return os.pathsep.join(connector_jars())
    except Missing:
        return ""
