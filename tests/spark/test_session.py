"""Sessions: that they know the format, and where their driver is to be found."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from penstock.spark import _be_found, register


def test_a_machine_that_cannot_resolve_its_own_name_is_found_by_its_loopback_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setenv("SPARK_LOCAL_IP", "")
    monkeypatch.delenv("SPARK_LOCAL_IP")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    _be_found()
    assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"

    monkeypatch.setenv("SPARK_LOCAL_IP", "10.0.0.7")
    _be_found()
    assert os.environ["SPARK_LOCAL_IP"] == "10.0.0.7", "who said where is left alone"


def test_a_session_is_taught_the_format_once(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark warns on the terminal of whatever is registered again."""
    taught: list[type[DataSource]] = []
    monkeypatch.setattr(
        "pyspark.sql.datasource.DataSourceRegistration.register", lambda _, source: taught.append(source)
    )
    another = spark.newSession()
    assert register(register(another)) is another
    assert [source.name() for source in taught] == ["penstock"]
    register(spark)
    assert len(taught) == 1, "that one was made by session()"
