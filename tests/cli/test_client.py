"""Brokers that do not answer, and how librdkafka's errors read."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from penstock.cli import client
from tests.cli.conftest import Penstock

COMMANDS = [
    ["topics", "list"],
    ["topics", "describe", "orders"],
    ["groups", "list"],
    ["groups", "describe", "billing"],
    ["configs", "describe", "orders"],
    ["produce", "orders", "--value", "x"],
    ["consume", "orders"],
    ["bench", "produce"],
]


@pytest.fixture
def closed_port() -> Iterator[str]:
    """A port that is taken, so that nobody else can have it, and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def mute_port() -> Iterator[str]:
    """A port where connections are taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_nobody_listening_is_said_at_once(penstock: Penstock, closed_port: str, words: list[str]) -> None:
    outcome = penstock(*words, "--bootstrap", closed_port)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        f"penstock: no broker answers at {closed_port}; "
        "start one with `penstock serve` or choose another with --bootstrap\n"
    )


def test_a_port_that_says_nothing_is_given_up(
    penstock: Penstock, mute_port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 0.5)
    started = time.monotonic()
    outcome = penstock("topics", "list", "--bootstrap", mute_port)
    assert outcome.code == 1
    assert f"no broker answers at {mute_port}" in outcome.err
    assert outcome.err.count("\n") == 1
    assert time.monotonic() - started < 30  # librdkafka by itself would wait for a minute


def test_the_broker_may_be_named_by_the_environment(
    penstock: Penstock, closed_port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", closed_port)
    assert f"at {closed_port};" in penstock("topics", "list").err


def test_an_address_that_is_none_is_wrong_usage(penstock: Penstock) -> None:
    outcome = penstock("topics", "list", "--bootstrap", "localhost")
    assert outcome.code == 2
    assert outcome.err.startswith("penstock: --bootstrap: 'localhost' has no port")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            KafkaError(KafkaError.INVALID_CONFIG, "Unknown topic config name: nope."),
            "Unknown topic config name: nope",
        ),
        (KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), "Topic authorization failed"),
        (KafkaError(KafkaError._TIMED_OUT), "the broker did not answer: Timed out"),
    ],
)
def test_librdkafkas_errors_read_as_sentences(error: KafkaError, line: str) -> None:
    assert client.explain(KafkaException(error)) == line


def test_errors_of_others_are_left_to_others() -> None:
    assert client.explain(KeyError("x")) is None


def test_a_coordinator_that_loads_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRY_INTERVAL_S", 0)
    answers = iter([KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS, None])

    def ask() -> str:
        code = next(answers)
        if code is not None:
            raise KafkaException(KafkaError(code))
        return "ready"

    assert client.when_ready(ask) == "ready"


def test_another_refusal_is_final() -> None:
    def ask() -> str:
        raise KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))

    with pytest.raises(KafkaException):
        client.when_ready(ask)


@pytest.mark.parametrize("wait", [client.collect, client.flush])
def test_ctrl_c_in_the_middle_of_a_callback_is_ctrl_c(
    closed_port: str, wait: Callable[[Producer, float], None]
) -> None:
    def interrupted(_error: KafkaError | None, _message: Message) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    producer = Producer({"bootstrap.servers": closed_port, "message.timeout.ms": 100, "log_level": 0})
    producer.produce("orders", b"value", on_delivery=interrupted)
    with pytest.raises(KeyboardInterrupt):
        while len(producer):
            wait(producer, 10)
