"""`penstock spark` on a cluster that requires client certificates: the jobs, and where the password is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from penstock.cli.spark_session import REDACTED
from penstock.spark.errors import SparkOptionError
from penstock.spark.librdkafka import librdkafka_settings, spark_options
from penstock.spark.option_values import parse_security
from tests.cli.conftest import Outcome, Penstock
from tests.tls.broker import TlsBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PASSWORD = "hunter2"
RECORDS = 10


@pytest.fixture
def config(tls_broker: TlsBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """For the listener that requires certificates; the key is encrypted."""
    monkeypatch.delenv("PENSTOCK_BOOTSTRAP", raising=False)
    chain, key = tls_broker.files.authority.issue("alice")
    encrypted = load_pem_private_key(key.encode(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(PASSWORD.encode())
    )
    keystore = tmp_path / "alice.pem"
    keystore.write_text(encrypted.decode() + chain)
    values = {
        "bootstrap.servers": tls_broker.address("MUTUAL"),
        "security.protocol": "ssl",
        "ssl.ca.location": str(tls_broker.files.authorities),
        "ssl.certificate.location": str(keystore),
        "ssl.key.location": str(keystore),
        "ssl.key.password": PASSWORD,
    }
    file = tmp_path / "client.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return str(file)


def done(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome
    return outcome


@pytest.mark.interop_long
def test_all_jobs_run_over_tls_and_the_password_is_in_no_plan(
    penstock: Penstock,
    spark: SparkSession,
    config: str,
    unique: Callable[[str], str],
    tmp_path: Path,
) -> None:
    topic, target = unique("tls"), unique("target")
    done(penstock("topics", "create", topic, "--partitions", "2", "--command-config", config))
    lines = b"".join(b"%d:%d\n" % (number, number) for number in range(RECORDS))
    done(penstock("produce", topic, "--key-separator", ":", "--config", config, stdin=lines))

    def run(job: str, *words: str) -> Any:
        outcome = done(penstock("spark", job, *words, "--config", config, "--json"))
        assert PASSWORD not in outcome.out + outcome.err
        return outcome.json

    archive = str(tmp_path / "archive")
    assert run("archive", topic, "--to", archive)["records"] == RECORDS
    done(penstock("produce", topic, "--config", config, stdin=b"after the archive\n"))
    # Also from the brokers.
    assert run("table", topic, "--archive", archive)["records"] == RECORDS + 1
    assert run("snapshot", topic, "--to", str(tmp_path / "snapshot"))["keys"] == RECORDS
    replayed = run("replay", topic, target, "--create")["partitions"]
    assert sum(each["records"] for each in replayed) == RECORDS + 1
    assert run("profile", topic, "--to", str(tmp_path / "profile"))["topics"][0]["records"] == RECORDS + 1
    # What Spark writes into its event log.
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    plans = [executions.apply(number).physicalPlanDescription() for number in range(executions.size())]
    assert plans and not [plan for plan in plans if PASSWORD in plan]


def test_a_wrong_password_is_said_before_spark_starts_and_not_shown(
    penstock: Penstock, config: str, tmp_path: Path
) -> None:
    file = Path(config)
    file.write_text(file.read_text().replace(PASSWORD, "hunter3"))
    outcome = penstock("spark", "archive", "a", "--to", str(tmp_path / "a"), "--config", config)
    assert outcome.code == 2 and outcome.err.count("\n") == 1, outcome
    assert "cannot be decrypted with ssl.key.password" in outcome.err and "hunter" not in outcome.err


def test_a_profile_reaches_the_jobs(
    penstock: Penstock, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line.partition("=") for line in Path(config).read_text().splitlines()]
    profiles = tmp_path / "profiles.toml"
    profiles.touch(mode=0o600)
    profiles.write_text("[tls]\n" + "".join(f'{name} = "{value}"\n' for name, _, value in lines))
    monkeypatch.setenv("PENSTOCK_PROFILES", str(profiles))
    # The cluster was reached: it knows that there is no such topic.
    outcome = penstock("--profile", "tls", "spark", "archive", "no-such", "--to", str(tmp_path / "a"))
    assert outcome.code == 1 and "no-such" in outcome.err and "TLS" not in outcome.err, outcome


def test_settings_become_sparks_and_librdkafkas_again(config: str, tls_broker: TlsBroker) -> None:
    lines = [line.partition("=") for line in Path(config).read_text().splitlines()]
    given = {name: value for name, _, value in lines if name != "bootstrap.servers"}
    given |= {
        "ssl.cipher.suites": "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384",
        "ssl.endpoint.identification.algorithm": "none",
    }
    options = spark_options(given)
    assert set(options) - {"kafka.security.protocol"} == {
        "kafka.ssl.truststore.type",
        "kafka.ssl.truststore.location",
        "kafka.ssl.keystore.type",
        "kafka.ssl.keystore.location",
        "kafka.ssl.key.password",
        "kafka.ssl.cipher.suites",
        "kafka.ssl.endpoint.identification.algorithm",
    }
    assert librdkafka_settings(options) == given
    parsed = parse_security(options)
    assert parsed is not None and PASSWORD not in repr(parsed)
    assert spark_options({}) == {} and parse_security(None) is None and librdkafka_settings(None) == {}


@pytest.mark.parametrize("password", ["hunter2", 'a"b', "a\\\\0\\n", " a\tb;\n ", "\u00fc\u4e2d'"])
@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"])
def test_a_user_becomes_javas_line_and_a_user_again(mechanism: str, password: str) -> None:
    given = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": mechanism,
        "sasl.username": "alice",
        "sasl.password": password,
    }
    options = spark_options(given)
    assert set(options) == {
        "kafka.security.protocol",
        "kafka.sasl.mechanism",
        "kafka.sasl.jaas.config",
    }
    assert librdkafka_settings(options) == given
    parsed = parse_security(options)
    assert parsed is not None and parsed.sasl is not None
    assert (parsed.sasl.user, parsed.sasl.password) == ("alice", password)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"ssl.certificate.location": "a", "ssl.key.location": "b"},
            "a certificate and its key from one file",
        ),
        ({"ssl.certificate.pem": "x", "ssl.key.pem": "x"}, "instead of ssl.certificate.pem"),
        ({"enable.ssl.certificate.verification": "false"}, "always check the broker's certificate"),
    ],
)
def test_what_spark_has_no_name_for_is_refused(settings: dict[str, str], line: str) -> None:
    with pytest.raises(SparkOptionError, match=line):
        spark_options({"security.protocol": "ssl", **settings})


def test_jobs_take_no_other_options() -> None:
    with pytest.raises(SparkOptionError, match="unknown option subscribe of the job"):
        parse_security({"subscribe": "t"})


def test_spark_hides_what_may_be_secret() -> None:
    import re

    (pattern,) = REDACTED.values()
    for name in ("kafka.ssl.key.password", "kafka.sasl.jaas.config", "kafka.ssl.keystore.key"):
        assert re.search(pattern, name)
    assert not re.search(pattern, "kafka.ssl.keystore.location")
