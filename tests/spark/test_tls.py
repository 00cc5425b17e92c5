"""The source and the sink over TLS, with a client certificate whose key is encrypted."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives import serialization

from penstock.spark.options import parse
from penstock.wire import Client
from tests.tls.authority import Authority
from tests.tls.broker import TlsBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Unique = Callable[[str], str]
PASSWORD = "hunter2"


@pytest.fixture
def options(tls_broker: TlsBroker, tmp_path: Path) -> dict[str, str]:
    """For the listener that requires certificates."""
    chain, key = tls_broker.files.authority.issue("alice")
    encrypted = serialization.load_pem_private_key(key.encode(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(PASSWORD.encode()),
    )
    keystore = tmp_path / "alice.pem"
    keystore.write_text(encrypted.decode() + chain)
    return {
        "kafka.bootstrap.servers": tls_broker.address("MUTUAL"),
        "kafka.security.protocol": "SSL",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.location": str(tls_broker.files.authorities),
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.location": str(keystore),
        "kafka.ssl.key.password": PASSWORD,
    }


def test_rows_go_through_tls_and_back_and_the_password_is_shown_nowhere(
    spark: SparkSession,
    tls_broker: TlsBroker,
    options: dict[str, str],
    unique: Unique,
    capfd: pytest.CaptureFixture[str],
) -> None:
    topic = unique("tls")
    with Client(tls_broker.address(), security=tls_broker.files.librdkafka()) as client:
        client.create_topic(topic, 2)
    written = spark.range(100).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
    written.write.format("penstock").mode("append").options(**options, topic=topic).save()
    read = spark.read.format("penstock").options(**options, subscribe=topic).load()
    assert sorted(int(row.value) for row in read.select("value").collect()) == list(range(100))
    capfd.readouterr()
    read.explain(True)
    shown = capfd.readouterr().out
    # What Spark writes into its event log.
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    plans = [executions.apply(number).physicalPlanDescription() for number in range(executions.size())]
    assert "penstock" in shown and len(plans) >= 2
    assert PASSWORD not in shown and not [plan for plan in plans if PASSWORD in plan]


def test_an_authority_that_is_not_trusted_is_named_as_spark_names_it(
    spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    other.write_text(Authority().pem)
    changed = {**options, "kafka.ssl.truststore.location": str(other), "subscribe": "t"}
    with pytest.raises(Exception, match=r"not trusted here; set ssl\.truststore\.location") as caught:
        spark.read.format("penstock").options(**changed).load().count()
    assert PASSWORD not in str(caught.value)


def test_options_reach_executors_and_hide_the_password(options: dict[str, str]) -> None:
    parsed = parse({**options, "subscribe": "t"}, "batch")
    again = pickle.loads(pickle.dumps(parsed))
    assert again == parsed
    assert again.read.security.tls.key_password == PASSWORD
    assert PASSWORD not in repr(parsed)


def test_a_wrong_password_is_said_before_anything_starts(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"cannot be decrypted with ssl\.key\.password") as caught:
        parse({**options, "subscribe": "t", "kafka.ssl.key.password": "hunter3"}, "batch")
    assert "hunter3" not in str(caught.value)
