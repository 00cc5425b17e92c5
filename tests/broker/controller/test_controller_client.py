"""Requests on their way to the active controller: which are tried again, and which must not be."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.controller.controller_client import (
    FORWARD_RETRY_MS,
    FORWARD_TIMEOUT_MS,
    SEEN_TIMEOUT_MS,
    ControllerClient,
)
from penstock.environment import Environment
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import AllocateProducerIdsRequest, AllocateProducerIdsResponse
from penstock.protocol.messages.placement import ElectLeadersRequest, ElectLeadersResponse, TopicPartitions
from penstock.protocol.messages.topics import CreatableTopicResult, CreateTopicsRequest, CreateTopicsResponse
from tests.broker.replication.stage import Loop

ME, OTHER = 1, 2
REQUEST = AllocateProducerIdsRequest(broker_id=ME, broker_epoch=7)
WRONG_NODE = AllocateProducerIdsResponse(error_code=ErrorCode.NOT_CONTROLLER)
ANSWER = AllocateProducerIdsResponse(producer_id_start=5, producer_id_len=10)


class Node:
    """A node that knows OTHER as the active controller, and what it has sent there."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.sent: list[tuple[Any, Callable[[Any], None]]] = []
        self.handled_here: list[Any] = []
        self.is_refused = False
        self.answers: list[Any] = []
        consensus: Any = SimpleNamespace(is_active=False, leader_id=OTHER, image=SimpleNamespace(topics={}))
        self.consensus = consensus
        active_controller: Any = SimpleNamespace(handle=self._handle)
        peers: Any = SimpleNamespace(call=self._call, is_refused=lambda node, channel: self.is_refused)
        environment = Environment(
            clock=self.loop.clock,
            files=None,  # type: ignore[arg-type]
            network=None,  # type: ignore[arg-type]
            random=random.Random(1),
            spawn=self.loop,
            processes=None,  # type: ignore[arg-type]
        )
        self.client = ControllerClient(environment, self.consensus, active_controller, peers, node_id=ME)

    def forward(self) -> None:
        self.client.forward(REQUEST, 0, self.answers.append)

    def answer(self, response: Any) -> None:
        self.sent.pop(0)[1](response)

    def topic_appears(self, name: str) -> None:
        self.consensus.image = SimpleNamespace(topics={name: object()})
        self.client.image_moved()

    def _call(
        self, node: int, channel: str, request: Any, version: int, done: Any, *, timeout_ms: int
    ) -> None:
        assert node == OTHER
        self.sent.append((request, done))

    def _handle(self, request: Any, version: int, answer: Any, *, from_broker: bool, requester: Any) -> None:
        self.handled_here.append(request)
        answer(ANSWER)


def test_a_request_goes_to_the_node_that_leads_the_quorum() -> None:
    node = Node()
    node.forward()
    node.answer(ANSWER)
    assert node.answers == [ANSWER]


def test_the_active_controller_asks_nobody_else() -> None:
    node = Node()
    node.consensus.is_active = True
    node.forward()
    assert (node.answers, node.sent, node.handled_here) == ([ANSWER], [], [REQUEST])


def test_a_request_waits_until_there_is_a_controller() -> None:
    node = Node()
    node.consensus.leader_id = None
    node.forward()
    node.loop.run_for(3 * FORWARD_RETRY_MS)
    assert (node.answers, node.sent) == ([], [])
    node.consensus.leader_id = OTHER
    node.loop.run_for(FORWARD_RETRY_MS)
    node.answer(ANSWER)
    assert node.answers == [ANSWER]


def test_a_request_to_a_node_that_was_the_controller_is_sent_again() -> None:
    node = Node()
    node.forward()
    node.answer(WRONG_NODE)
    assert node.answers == []
    node.loop.run_for(FORWARD_RETRY_MS)
    node.answer(ANSWER)
    assert node.answers == [ANSWER]


@pytest.mark.parametrize("version", range(3))
def test_the_wrong_node_is_known_wherever_a_version_has_its_error(version: int) -> None:
    node = Node()
    asked = ElectLeadersRequest(topic_partitions=[TopicPartitions(topic="t", partitions=[0])])
    node.client.forward(asked, version, node.answers.append)
    node.answer(error_response(asked, version, ErrorCode.NOT_CONTROLLER))
    assert node.answers == []
    node.loop.run_for(FORWARD_RETRY_MS)
    node.answer(ElectLeadersResponse())
    assert node.answers == [ElectLeadersResponse()]


def test_a_request_that_nobody_could_have_received_is_sent_again() -> None:
    node = Node()
    node.is_refused = True
    node.forward()
    node.answer(None)
    node.loop.run_for(FORWARD_RETRY_MS)
    node.answer(ANSWER)
    assert node.answers == [ANSWER]


def test_a_request_that_may_have_been_carried_out_is_not_sent_again() -> None:
    node = Node()
    node.forward()
    node.answer(None)
    node.loop.run_for(FORWARD_TIMEOUT_MS)
    assert node.sent == []
    assert [answer.error_code for answer in node.answers] == [ErrorCode.NOT_CONTROLLER]


def test_without_a_controller_the_client_is_told_so_in_the_end() -> None:
    node = Node()
    node.consensus.leader_id = None
    node.forward()
    node.loop.run_for(FORWARD_TIMEOUT_MS + FORWARD_RETRY_MS)
    assert [answer.error_code for answer in node.answers] == [ErrorCode.NOT_CONTROLLER]


def test_a_topic_that_was_created_is_answered_for_once_this_broker_knows_it() -> None:
    node = Node()
    created: list[dict[str, int]] = []
    node.client.create_topics(["a"], 0, created.append)
    request, _ = node.sent[0]
    assert isinstance(request, CreateTopicsRequest)
    node.answer(CreateTopicsResponse(topics=[CreatableTopicResult(name="a")]))
    assert created == []
    node.topic_appears("b")
    assert created == []
    node.topic_appears("a")
    assert created == [{"a": ErrorCode.NONE}]


def test_a_topic_that_another_broker_has_just_created_is_as_good() -> None:
    node = Node()
    node.topic_appears("a")
    created: list[dict[str, int]] = []
    node.client.create_topics(["a"], 0, created.append)
    exists = CreatableTopicResult(name="a", error_code=ErrorCode.TOPIC_ALREADY_EXISTS)
    node.answer(CreateTopicsResponse(topics=[exists]))
    assert created == [{"a": ErrorCode.NONE}]


def test_nobody_waits_for_ever_to_see_a_topic() -> None:
    node = Node()
    went_on: list[bool] = []
    node.client.when_seen(["a"], lambda: went_on.append(True))
    node.loop.run_for(SEEN_TIMEOUT_MS - 1)
    node.topic_appears("b")
    assert went_on == []
    node.loop.run_for(1)
    node.topic_appears("b")
    assert went_on == [True]
