"""The connection under `quorum` and `brokers`: what it says when the other side is not what it should be."""

from __future__ import annotations

import socket
import threading

import pytest

from penstock.cli.connection import Brokers
from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.raw import RawClient, reason
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ElectLeadersRequest,
)
from tests.cli.fake_broker import FakeBroker


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_the_newest_version_that_both_know_is_asked_in() -> None:
    request = AlterPartitionReassignmentsRequest(allow_replication_factor_change=False)
    for newest, kept in ((0, True), (1, False)):
        with (
            FakeBroker(AlterPartitionReassignmentsResponse(), newest={45: newest}) as broker,
            RawClient(Brokers(broker.bootstrap)) as client,
        ):
            client.ask(request)
            # Version 0 has no such field, so it reads as its default.
            assert broker.asked[0].allow_replication_factor_change is kept


def test_the_first_address_that_answers_is_used() -> None:
    with FakeBroker() as broker, RawClient(Brokers(f"127.0.0.1:{free_port()}, {broker.bootstrap}")):
        pass


def test_an_api_that_the_broker_has_not_is_named() -> None:
    with (
        FakeBroker() as broker,
        RawClient(Brokers(broker.bootstrap)) as client,
        pytest.raises(Failure, match="it does not support ElectLeaders"),
    ):
        client.ask(ElectLeadersRequest())


def test_a_port_where_nobody_listens_is_said_to_have_no_broker() -> None:
    with pytest.raises(Failure, match="no broker answers at"):
        RawClient(Brokers(f"127.0.0.1:{free_port()}"))


def test_an_address_without_a_port_is_wrong_usage() -> None:
    with pytest.raises(WrongUsage, match="has no port"):
        RawClient(Brokers("localhost"))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0\0",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\0\0\0\x06\0\0\0\x09\0\0",
        b"\0\0\0\x06\0\0\0\x01\0\0",
    ],
)
def test_something_else_that_listens_there_is_not_waited_for(answer: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def once() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)

    thread = threading.Thread(target=once)
    thread.start()
    with listener, pytest.raises(Failure, match="did not answer"):
        RawClient(Brokers(f"127.0.0.1:{listener.getsockname()[1]}"))
    thread.join()


def test_an_error_is_told_in_the_brokers_words_or_by_its_name_or_by_its_number() -> None:
    assert reason(42, "Too many.") == "Too many"
    assert reason(42, None) == "invalid request"
    assert reason(30_000, "") == "error 30000"
