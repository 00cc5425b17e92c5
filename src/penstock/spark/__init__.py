"""Topics as Spark tables: the source and sink ``format("penstock")``, and the jobs built on them.

Call ``register(spark)`` (or use ``session``) before ``spark.read.format("penstock")``. Importing this package is
cheap; pyspark is imported where it is needed.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress

__all__ = ["offsets_behind_latest", "register", "session"]

_taught: WeakSet[SparkSession] = WeakSet()


def register(spark: SparkSession) -> SparkSession:
    """Register ``format("penstock")`` with a session and return it. A second call changes nothing."""
    from penstock.spark.source import PenstockDataSource  # noqa: PLC0415  pyspark only where it is used

    # Spark warns when a source replaces another, even itself.
    if spark not in _taught:
        spark.dataSource.register(PenstockDataSource)
        _taught.add(spark)
    return spark


def offsets_behind_latest(progress: Mapping[str, Any] | StreamingQueryProgress) -> dict[str, float]:
    """How many records a stream is behind its topics: maximum, minimum and average over its partitions.

    ``progress`` is a query's ``lastProgress``, or the progress passed to a ``StreamingQueryListener``. The keys are
    the metrics of Spark's Kafka source, which Spark does not accept from a Python source:
    ``maxOffsetsBehindLatest``, ``minOffsetsBehindLatest``, ``avgOffsetsBehindLatest``. Empty before the first
    micro-batch.
    """
    from penstock.spark.progress import behind_latest  # noqa: PLC0415

    return behind_latest(progress)


def session(app_name: str = "penstock", master: str | None = None, **conf: str) -> SparkSession:
    """A Spark session with ``format("penstock")`` registered.

    ``master`` is ``local[*]`` unless given here, by ``spark-submit``, in Spark's defaults file or in ``conf``,
    which takes any Spark setting by its name: ``session("etl", **{"spark.driver.memory": "4g"})``.
    """
    return start(app_name, master, conf, defaults={})


def start(
    app_name: str, master: str | None, conf: Mapping[str, str], *, defaults: Mapping[str, str]
) -> SparkSession:
    """As ``session``, with ``defaults`` for settings that are not set elsewhere."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    # Spark starts its workers with `python3` from the PATH, which rarely has this package.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    _be_found()
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        # Under spark-submit the JVM already runs and has its settings; SparkConf then asks the JVM.
        SparkContext._ensure_initialized()
    spark_conf = SparkConf()
    settings = {"spark.sql.execution.arrow.pyspark.enabled": "true", **defaults}
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in settings.items():
        if not spark_conf.contains(name):
            builder = builder.config(name, value)
    for name, value in conf.items():
        builder = builder.config(name, value)
    return register(builder.getOrCreate())


def _be_found() -> None:
    """Let Spark start on a machine that cannot resolve its own name, such as a laptop on a foreign network."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
