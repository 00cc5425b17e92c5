"""The options of the source and the sink for SASL: Java's line with user and password, which nobody gets to see."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.sasl.settings import SaslSettings
from penstock.spark import sink
from penstock.spark.errors import SparkOptionError
from penstock.spark.options import parse
from penstock.wire import Client, Security
from tests.conftest import BROKER_SETTINGS
from tests.sasl.broker import PASSWORD, USER, sasl_broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
OPTIONS = {
    "kafka.bootstrap.servers": "127.0.0.1:1",
    "kafka.security.protocol": "SASL_PLAINTEXT",
    "kafka.sasl.mechanism": "SCRAM-SHA-512",
    "kafka.sasl.jaas.config": f'{MODULE} required username="alice" password="hunter2";',
}
ALICE = SaslSettings("SCRAM-SHA-512", "alice", "hunter2")


def test_source_and_sink_read_the_line_of_java() -> None:
    source = parse({**OPTIONS, "subscribe": "t"}, "batch")
    assert source.read.security == Security(None, ALICE, kafka_names=True)
    assert sink.parse({**OPTIONS, "topic": "t"}).produce.security == source.read.security
    both = parse({**OPTIONS, "subscribe": "t", "kafka.security.protocol": "SASL_SSL"}, "batch").read.security
    assert both is not None and both.tls is not None and both.sasl == ALICE


def test_options_reach_executors_and_hide_the_password() -> None:
    parsed = parse({**OPTIONS, "subscribe": "t"}, "batch")
    assert pickle.loads(pickle.dumps(parsed)) == parsed
    assert "hunter2" not in repr(parsed)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"kafka.sasl.mechanism": "GSSAPI"}, "kafka.sasl.mechanism: GSSAPI is not supported"),
        ({"kafka.sasl.mechanism": "PLAIN"}, "kafka.sasl.jaas.config: this login module is not for PLAIN"),
        ({"kafka.sasl.jaas.config": "hunter2"}, "kafka.sasl.jaas.config: not a line such as"),
        (
            {"kafka.sasl.jaas.config": 'com.sun.security.auth.module.JndiLoginModule required a="hunter2";'},
            "kafka.sasl.jaas.config: only ScramLoginModule and PlainLoginModule",
        ),
        ({"kafka.sasl.jaas.config": f"{MODULE} required;"}, "kafka.sasl.jaas.config: username is missing"),
    ],
)
def test_wrong_options_are_refused_without_the_password(changed: dict[str, str], why: str) -> None:
    with pytest.raises(SparkOptionError) as caught:
        parse({**OPTIONS, "subscribe": "t", **changed}, "batch")
    assert str(caught.value).startswith(why) and "hunter2" not in str(caught.value)


def test_spark_hides_the_line_wherever_it_shows_options(spark: SparkSession) -> None:
    """Because it hides options whose value contains the word password, not only those with such a name."""
    assert spark._jvm is not None
    options = spark._jvm.PythonUtils.toScalaMap(OPTIONS)
    shown = spark._jsparkSession.sessionState().conf().redactOptions(options).toString()
    assert "kafka.sasl.mechanism" in shown and "kafka.sasl.jaas.config" in shown
    assert "hunter2" not in shown and "redacted" in shown


def test_rows_go_through_sasl_and_back_and_the_password_is_in_no_plan(
    spark: SparkSession, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    topic = unique("sasl")
    with sasl_broker(tmp_path, BROKER_SETTINGS) as broker:
        with Client(broker.address(), security=broker.librdkafka()) as client:
            client.create_topic(topic, 2)
        options = {
            **OPTIONS,
            "kafka.bootstrap.servers": broker.address(),
            "kafka.sasl.jaas.config": f'{MODULE} required username="{USER}" password="{PASSWORD}";',
        }
        written = spark.range(100).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
        written.write.format("penstock").mode("append").options(**options, topic=topic).save()
        read = spark.read.format("penstock").options(**options, subscribe=topic).load()
        assert sorted(int(row.value) for row in read.select("value").collect()) == list(range(100))
        with pytest.raises(
            Exception, match=r"the broker did not accept user eve with SCRAM-SHA-512"
        ) as caught:
            wrong = {"kafka.sasl.jaas.config": f'{MODULE} required username="eve" password="{PASSWORD}";'}
            spark.read.format("penstock").options(**{**options, **wrong}, subscribe=topic).load().count()
    # What Spark writes into its event log.
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    plans = [executions.apply(number).physicalPlanDescription() for number in range(executions.size())]
    assert len(plans) >= 2 and [plan for plan in plans if "penstock" in plan]
    assert PASSWORD not in str(caught.value) and not [plan for plan in plans if PASSWORD in plan]
