"""Topics as Spark tables: the source and sink ``format("penstock")``, and the jobs built on them.

A newcomer writes ``spark.read.format("penstock")`` and Spark knows no such format: ``register(spark)`` comes
first (``session`` does it). Importing this package costs nothing; pyspark is imported by what needs it.
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
    """Teach a session ``format("penstock")``, and return it. A second call changes nothing."""
    from penstock.spark.source import PenstockDataSource  # noqa: PLC0415  pyspark only where it is used

    # Spark warns of a source that takes the place of another, also of itself.
    if spark not in _taught:
        spark.dataSource.register(PenstockDataSource)
        _taught.add(spark)
    return spark


def offsets_behind_latest(progress: Mapping[str, Any] | StreamingQueryProgress) -> dict[str, float]:
    """How many records a stream is behind its topics: most, least and on average of its partitions.

    ``progress`` is a query's ``lastProgress``, or what a ``StreamingQueryListener`` is given. The keys are those
    of the metrics of Spark's Kafka source, which Spark does not take from a Python source:
    ``maxOffsetsBehindLatest``, ``minOffsetsBehindLatest``, ``avgOffsetsBehindLatest``. Empty before the first
    micro-batch.
    """
    from penstock.spark.progress import behind_latest  # noqa: PLC0415

    return behind_latest(progress)


def session(app_name: str = "penstock", master: str | None = None, **conf: str) -> SparkSession:
    """A Spark session that knows ``format("penstock")``.

    ``master`` is ``local[*]`` unless given here, by ``spark-submit``, in Spark's own defaults file or in
    ``conf``, which takes any setting of Spark's under its own name:
    ``session("etl", **{"spark.driver.memory": "4g"})``.
    """
    return start(app_name, master, conf, defaults={})


def start(
    app_name: str, master: str | None, conf: Mapping[str, str], *, defaults: Mapping[str, str]
) -> SparkSession:
    """As ``session``, with settings that hold where nobody has said otherwise."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    # Spark starts its Python workers as whatever `python3` is on the PATH, which rarely has this package.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    _be_found()
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        # Under spark-submit the JVM runs already and knows what spark-submit was told; SparkConf then asks it.
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
    """Spark does not start on a machine that cannot resolve its own name, as a laptop in a foreign network."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
