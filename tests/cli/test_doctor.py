"""`penstock doctor`: its findings provoked on real brokers, and its alerts received."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AclOperation, ResourceType

from penstock.monitoring.collecting import Collector
from penstock.monitoring.findings import DAY_MS, Thresholds, examine
from penstock.wire import Client, TopicPartition
from penstock.wire.security import client_context, client_security
from tests.cli.conftest import Outcome, Penstock
from tests.cli.test_lag import commit, now_ms, produce
from tests.interop.secured import ADMINISTRATOR, SASL_SSL, SecuredBroker, allow, put_user, secured_broker
from tests.monitoring.test_alerts import Receiver, receiving
from tests.tls.broker import TlsBroker

Unique = Callable[[str], str]

pytestmark = pytest.mark.interop

NOTHING, WARNINGS, CRITICAL = 0, 3, 4


@pytest.fixture
def doctor(penstock: Penstock, bootstrap: str) -> Penstock:
    """What it finds; other tests on the same broker may leave something to find."""

    def invoke(*words: str) -> Outcome:
        outcome = penstock("doctor", "--bootstrap", bootstrap, *words)
        assert outcome.code in (NOTHING, WARNINGS, CRITICAL), outcome
        return outcome

    return invoke


def found(outcome: Outcome, rule: str, subject: str) -> list[dict[str, Any]]:
    findings = outcome.json["findings"]
    return [each for each in findings if each["rule"] == rule and subject in each["subject"]]


@contextmanager
def writing(bootstrap: str, topic: str, partition: int, timestamp_ms: int) -> Iterator[None]:
    """Some hundred records a second, until the end."""
    is_over = threading.Event()
    producer = Producer({"bootstrap.servers": bootstrap})

    def write() -> None:
        while not is_over.wait(0.02):
            for _ in range(20):
                producer.produce(topic, b"value" * 20, b"heavy", partition=partition, timestamp=timestamp_ms)
            producer.flush(60)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_group_that_falls_behind_and_a_hot_partition_are_found(
    doctor: Penstock, kafka: Penstock, bootstrap: str, unique: Unique
) -> None:
    topic, group = unique("topic"), unique("group")
    kafka("topics", "create", topic, "--partitions", "3")
    produce(bootstrap, topic, [now_ms() - 60_000], partition=1)
    commit(bootstrap, group, topic, {1: 0})
    with writing(bootstrap, topic, 1, now_ms()):
        outcome = doctor("--sample", "1", "--json")
    (growing,) = found(outcome, "growing-lag", group)
    assert growing["severity"] == "warning" and "no members" in growing["advice"]
    (hot,) = found(outcome, "hot-partition", f"{topic}-1")
    assert "heaviest keys of recent records: heavy" in hot["what"]
    assert outcome.code in (WARNINGS, CRITICAL)


def test_groups_that_lose_data_and_that_nearly_do_are_found(
    doctor: Penstock, kafka: Penstock, bootstrap: str, unique: Unique
) -> None:
    topic, late, lost, beyond = unique("topic"), unique("late"), unique("lost"), unique("beyond")
    kafka("topics", "create", topic, "--config", "retention.ms=86400000")
    produce(bootstrap, topic, [now_ms() - DAY_MS + 600_000] * 4)
    kafka("topics", "trim", topic, "--before", "2", "--yes")
    for group, offset in ((late, 2), (lost, 0), (beyond, 99)):
        commit(bootstrap, group, topic, {0: offset})
    outcome = doctor("--sample", "0.1", "--json")
    assert outcome.code == CRITICAL
    assert found(outcome, "nearly-lost-records", late)[0]["severity"] == "critical"
    assert "2 records" in found(outcome, "lost-records", lost)[0]["what"]
    assert found(outcome, "beyond-end", beyond)
    table = doctor("--sample", "0.1")
    assert table.out.splitlines()[0].split()[:2] == ["SEVERITY", "RULE"]
    assert lost in table.out


def test_a_disk_above_the_limit_is_found(doctor: Penstock) -> None:
    outcome = doctor("--sample", "0.1", "--disk", "1", "--json")
    assert found(outcome, "disk-nearly-full", "broker 1 ")


def test_an_alert_is_posted(doctor: Penstock, kafka: Penstock, bootstrap: str, unique: Unique) -> None:
    topic, group = unique("topic"), unique("group")
    kafka("topics", "create", topic)
    commit(bootstrap, group, topic, {0: 99})
    receiver = Receiver(200)
    with receiving(receiver) as url:
        outcome = doctor("--sample", "0.1", "--webhook", url, "--json")
    ((kind, document),) = receiver.heard
    assert kind == "application/json"
    assert document["cluster"] == bootstrap
    assert document["findings"] == outcome.json["findings"]
    assert f"group {group} topic {topic}" in {each["subject"] for each in document["new"]}


def test_an_alert_that_is_not_delivered_is_a_line_and_no_failure(
    doctor: Penstock, kafka: Penstock, bootstrap: str, unique: Unique
) -> None:
    topic = unique("topic")
    kafka("topics", "create", topic)
    commit(bootstrap, unique("group"), topic, {0: 99})
    with receiving(Receiver(404)) as url:
        outcome = doctor("--sample", "0.1", "--webhook", url)
    assert "the alert was not delivered" in outcome.err and "answered 404" in outcome.err
    assert outcome.code in (WARNINGS, CRITICAL)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/", "somewhere"])
def test_a_webhook_is_an_address_of_http(penstock: Penstock, url: str) -> None:
    outcome = penstock("doctor", "--webhook", url)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "only http and https" in outcome.err


def test_a_cluster_that_does_not_answer_is_a_failure(penstock: Penstock) -> None:
    assert penstock("doctor", "--bootstrap", "127.0.0.1:1").code == 1


def test_a_certificate_near_its_end_is_found(tls_broker: TlsBroker) -> None:
    security = tls_broker.files.librdkafka() | {"security.protocol": "ssl"}
    context = client_context(client_security(security))
    with Client(tls_broker.address(), security=security) as client:
        snapshot = Collector(client, context=context).snapshot(10.0)
    (only,) = snapshot.certificates
    left_ms = only.not_after_ms - snapshot.time_ms
    assert left_ms > 0
    near = Thresholds(certificate_ms=left_ms + DAY_MS, certificate_ms_critical=0)
    assert [each.rule for each in examine(snapshot, near)] == ["certificate-expires"]


# Rights


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as running:
        yield running


def config(secured: SecuredBroker, path: Path, user: str) -> str:
    values = {"bootstrap.servers": secured.address(SASL_SSL), **secured.with_password(user)}
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return str(path)


def test_without_rights_one_line_says_what_was_not_seen(
    penstock: Penstock, secured: SecuredBroker, tmp_path: Path
) -> None:
    root = config(secured, tmp_path / "admin.properties", ADMINISTRATOR)
    admin = secured.client(ADMINISTRATOR).admin
    put_user(admin, "mallory")
    for topic in ("open-orders", "closed-orders"):
        assert (
            penstock(
                "topics", "create", topic, "--config", "retention.ms=86400000", "--command-config", root
            ).code
            == 0
        )
    allow(admin, "User:mallory", ResourceType.TOPIC, "open-", AclOperation.DESCRIBE)
    allow(admin, "User:mallory", ResourceType.GROUP, "open-", AclOperation.DESCRIBE)
    with Client(secured.address(SASL_SSL), security=secured.with_password(ADMINISTRATOR)) as client:
        client.commit("open-group", {TopicPartition("open-orders", 0): 9})
        client.commit("closed-group", {TopicPartition("closed-orders", 0): 9})
    mallory = config(secured, tmp_path / "mallory.properties", "mallory")

    def seen() -> Outcome | None:
        outcome = penstock("doctor", "--sample", "0.1", "--config", mallory, "--json")
        assert outcome.code in (NOTHING, WARNINGS), outcome
        return outcome if found(outcome, "beyond-end", "open-group") else None

    deadline = time.monotonic() + 60
    while (outcome := seen()) is None:
        assert time.monotonic() < deadline, "the rights have no effect"
    assert "closed" not in json.dumps(outcome.json)
    (unseen,) = found(outcome, "not-seen", "")
    assert unseen["severity"] == "info"
    for what in ("disks", "brokers", "settings of topics", "transactions"):
        assert what in unseen["what"]
    whole = penstock("doctor", "--sample", "0.1", "--config", root, "--json")
    assert len(found(whole, "beyond-end", "-group")) == 2
    assert not found(whole, "not-seen", "")

    lag = penstock("groups", "lag", "--config", mallory)
    assert lag.code == 0 and "open-group" in lag.out and "closed" not in lag.out + lag.err
    refused = penstock("groups", "lag", "closed-group", "--config", mallory)
    assert refused.code == 1 and refused.err.count("\n") == 1
