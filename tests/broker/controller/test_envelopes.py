"""Envelopes: a client's request arrives at the controller with its principal and host, and nothing else does."""

from __future__ import annotations

import random
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.controller.controller_client import ControllerClient
from penstock.broker.controller.envelopes import (
    FORWARDED,
    BadEnvelope,
    disclosed,
    enclosed,
    sealed,
    unsealed,
)
from penstock.broker.handlers.routes import HANDLERS
from penstock.broker.network.authorization import Principal, Requester
from penstock.broker.network.connection import WAITING
from penstock.environment import Environment
from penstock.metadata.features import SECURITY
from penstock.protocol.apis import APIS, CLIENT, error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import UnregisterBrokerRequest
from penstock.protocol.messages.configs import (
    AlterConfigsResourceResponse,
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
    IncrementalAlterConfigsResponse,
)
from penstock.protocol.messages.forwarding import EnvelopeRequest, EnvelopeResponse
from penstock.protocol.messages.placement import ElectLeadersRequest
from penstock.protocol.messages.quorum import VoteRequest
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from penstock.protocol.schema import encode
from tests.broker.replication.stage import Loop

ALICE = Requester(Principal("User", "CN=alice,O=żółć"), "10.1.2.3")
CREATE = CreateTopicsRequest(topics=[CreatableTopic(name="t", num_partitions=3, replication_factor=1)])
ME, OTHER = 1, 2


@pytest.mark.parametrize("version", range(2, 8))
@pytest.mark.parametrize(
    "host", ["10.1.2.3", "2001:db8::7", "::ffff:10.1.2.3", "fe80::1%eth0", "client-3", "::"]
)
def test_a_request_comes_out_of_its_envelope_as_it_was_sent(version: int, host: str) -> None:
    envelope = sealed(CREATE, version, ALICE._replace(host=host))
    inside = unsealed(envelope)
    assert inside.version == version
    assert inside.requester == (ALICE.principal, host)
    assert encode(inside.request, version) == encode(CREATE, version)


def test_an_envelope_is_as_kafka_writes_it() -> None:
    envelope = sealed(
        UnregisterBrokerRequest(broker_id=7), 0, ALICE._replace(principal=Principal("User", "bob"))
    )
    # API 64, version 0, a correlation id, an empty client id, no tags; the broker's id, no tags.
    assert envelope.request_data == bytes.fromhex("0040 0000 00000000 0000 00 00000007 00")
    # Version 0; the type and the name as compact strings; not a token; no tags.
    assert envelope.request_principal == bytes.fromhex("0000 05") + b"User" + b"\x04bob" + bytes(2)
    assert envelope.client_host_address == bytes((10, 1, 2, 3))
    assert envelope.client_host == ""


@pytest.mark.parametrize("version", [2, 7])
def test_a_response_comes_out_of_its_envelope_as_it_was_sent(version: int) -> None:
    response = CreateTopicsResponse(topics=[CreatableTopicResult(name="t", error_code=36)])
    inside = disclosed(enclosed(response, version), CREATE, version)
    assert inside is not None and encode(inside, version) == encode(response, version)


def test_the_wrong_controller_says_so_on_the_envelope() -> None:
    response = error_response(CREATE, 7, ErrorCode.NOT_CONTROLLER)
    envelope = enclosed(response, 7)
    assert envelope.error_code == ErrorCode.NOT_CONTROLLER
    inside = disclosed(envelope, CREATE, 7)
    assert inside is not None and inside.first_error() == ErrorCode.NOT_CONTROLLER


def test_a_response_that_cannot_be_written_is_an_error_of_the_envelope() -> None:
    """Clients choose the names in messages, and old versions have strings of 32 KB: the controller must go on."""
    config = IncrementalAlterableConfig(name="x" * 32_760, value=None)
    request = IncrementalAlterConfigsRequest(
        resources=[IncrementalAlterConfigsResource(resource_type=2, resource_name="t", configs=[config])]
    )
    assert unsealed(sealed(request, 0, ALICE)).request == request
    result = AlterConfigsResourceResponse(
        error_code=ErrorCode.INVALID_REQUEST,
        error_message=f"{config.name} has no value.",
        resource_type=2,
        resource_name="t",
    )
    envelope = enclosed(IncrementalAlterConfigsResponse(responses=[result]), 0)
    assert envelope.error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    response = disclosed(envelope, request, 0)
    assert response is not None and response.first_error() == ErrorCode.UNKNOWN_SERVER_ERROR


def test_an_answer_that_cannot_be_read_is_none() -> None:
    assert disclosed(None, CREATE, 7) is None
    assert disclosed(EnvelopeResponse(response_data=b"\0\0\0\0\0"), CREATE, 7) is None


def test_every_request_of_clients_that_the_controller_decides_fits_into_an_envelope() -> None:
    decided = {
        key
        for key, handler in HANDLERS.items()
        if handler.function in ("decide", "create_topics", "unregister_broker")
        and CLIENT in APIS[key].listeners
    }
    assert decided <= FORWARDED
    assert all(CLIENT in APIS[key].listeners for key in FORWARDED if key in APIS)


@pytest.mark.parametrize("key", sorted(set(APIS) - FORWARDED))
def test_nothing_else_is_accepted_in_an_envelope(key: int) -> None:
    envelope = sealed(CREATE, 7, ALICE)
    envelope.request_data = struct.pack(">h", key) + envelope.request_data[2:]
    with pytest.raises(BadEnvelope) as bad:
        unsealed(envelope)
    assert bad.value.error == ErrorCode.INVALID_REQUEST


def test_neither_an_envelope_nor_a_vote_is_accepted_in_an_envelope() -> None:
    for request in (sealed(CREATE, 7, ALICE), VoteRequest()):
        with pytest.raises(BadEnvelope) as bad:
            unsealed(sealed(request, 0, ALICE))
        assert bad.value.error == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"request_principal": None}, ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE),
        ({"request_principal": b"\0"}, ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE),
        ({"request_principal": b"\0\1\5User\2a\0\0"}, ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE),
        ({"request_principal": b"\0\0\5Us"}, ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE),
        ({"request_principal": b"\0\0\5User\1\0\0"}, ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE),
        ({"client_host_address": b"12345"}, ErrorCode.INVALID_REQUEST),
        ({"client_host_address": b""}, ErrorCode.INVALID_REQUEST),
        ({"request_data": b""}, ErrorCode.INVALID_REQUEST),
        ({"request_data": bytes.fromhex("0013 0007 00000000 7fff")}, ErrorCode.INVALID_REQUEST),
        ({"request_data": bytes.fromhex("0013 0007 00000000 0000 00 ff")}, ErrorCode.INVALID_REQUEST),
        ({"request_data": bytes.fromhex("0013 0063 00000000 0000 00")}, ErrorCode.UNSUPPORTED_VERSION),
    ],
)
def test_a_damaged_envelope_is_refused(changes: dict[str, Any], error: ErrorCode) -> None:
    envelope = sealed(CREATE, 7, ALICE)
    for name, value in changes.items():
        setattr(envelope, name, value)
    with pytest.raises(BadEnvelope) as bad:
        unsealed(envelope)
    assert bad.value.error == error


class Forwarding:
    """A broker that forwards, and the controller it forwards to, as ``ControllerClient`` sees both."""

    def __init__(self, *, level: int) -> None:
        self.loop = Loop()
        image = SimpleNamespace(topics={}, features={SECURITY: level})
        consensus: Any = SimpleNamespace(is_active=False, leader_id=OTHER, image=image)
        self.consensus = consensus
        # What arrived at the other node, and what its controller was given.
        self.sent: list[Any] = []
        self.handled: list[tuple[Any, bool, Requester | None]] = []
        controller: Any = SimpleNamespace(handle=self._handle)
        peers: Any = SimpleNamespace(call=self._call, is_refused=lambda node, channel: False)
        environment = Environment(
            clock=self.loop.clock,
            files=None,  # type: ignore[arg-type]
            network=None,  # type: ignore[arg-type]
            random=random.Random(1),
            spawn=self.loop,
            processes=None,  # type: ignore[arg-type]
        )
        self.client = ControllerClient(environment, self.consensus, controller, peers, node_id=ME)
        self.answers: list[Any] = []

    def _call(self, node: int, channel: str, request: Any, version: int, done: Any, **_: Any) -> None:
        self.sent.append(request)
        if isinstance(request, EnvelopeRequest):
            call: Any = SimpleNamespace(answer=done)
            early = self.client.open(request, call)
            if early is not WAITING:
                done(early)
        else:
            self._handle(request, version, done, from_broker=True)

    def _handle(
        self, request: Any, version: int, answer: Any, *, from_broker: bool = False, requester: Any = None
    ) -> None:
        self.handled.append((request, from_broker, requester))
        answer(APIS[request.KEY].response.for_error(request, version, ErrorCode.NONE))


def client_call(answers: list[Any], version: int) -> Any:
    return SimpleNamespace(
        is_internal=False,
        version=version,
        answer=answers.append,
        principal=ALICE.principal,
        host=ALICE.host,
        authorizer=None,
    )


def test_the_controller_learns_who_asks() -> None:
    broker = Forwarding(level=1)
    broker.client.decide(CREATE, client_call(broker.answers, 7))
    assert isinstance(broker.sent[0], EnvelopeRequest)
    ((request, from_broker, requester),) = broker.handled
    assert (request.topics[0].name, from_broker, requester) == ("t", False, ALICE)
    assert broker.answers[0].topics[0].name == "t"


def test_the_controller_on_this_node_learns_it_without_an_envelope() -> None:
    broker = Forwarding(level=1)
    broker.consensus.is_active = True
    broker.client.decide(CREATE, client_call(broker.answers, 7))
    assert (broker.sent, broker.handled) == ([], [(CREATE, False, ALICE)])


def test_before_every_broker_knows_envelopes_requests_are_sent_as_they_are() -> None:
    broker = Forwarding(level=0)
    broker.client.decide(CREATE, client_call(broker.answers, 7))
    assert (broker.sent, broker.handled) == ([CREATE], [(CREATE, True, None)])


def test_a_node_that_asks_for_itself_uses_no_envelope() -> None:
    broker = Forwarding(level=1)
    request = ElectLeadersRequest(topic_partitions=[])
    broker.client.forward(request, 2, broker.answers.append)
    assert broker.sent == [request]
    assert broker.handled == [(request, True, None)]


def test_a_bad_envelope_is_answered_and_handled_by_nobody() -> None:
    broker = Forwarding(level=1)
    call: Any = SimpleNamespace(answer=broker.answers.append)
    response = broker.client.open(sealed(sealed(CREATE, 7, ALICE), 0, ALICE), call)
    assert (response.error_code, broker.handled, broker.answers) == (ErrorCode.INVALID_REQUEST, [], [])
