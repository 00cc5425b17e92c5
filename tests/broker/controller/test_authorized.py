"""What a client without rights costs: it may name as much as fits into a request."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.broker.controller.authorized import check
from penstock.broker.network.authorization import Operation, ResourceType
from penstock.metadata.image import Image
from penstock.model import NO_TOPIC_ID
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DeleteTopicState,
)
from penstock.protocol.schema import Message

COUNT = 300
NAMES = [f"t{number}" for number in range(COUNT)]
# One is named twice.
ASKED = [*NAMES, NAMES[0]]


def denied(operation: Operation, resource: ResourceType, name: str, *, quietly: bool = False) -> bool:
    return False


@pytest.mark.parametrize(
    ("request_", "version"),
    [
        (CreateTopicsRequest(topics=[CreatableTopic(name=name) for name in ASKED]), 7),
        (CreatePartitionsRequest(topics=[CreatePartitionsTopic(name=name) for name in ASKED]), 3),
        (DeleteTopicsRequest(topic_names=list(ASKED)), 5),
        (
            DeleteTopicsRequest(topics=[DeleteTopicState(name=name, topic_id=NO_TOPIC_ID) for name in ASKED]),
            6,
        ),
        (
            IncrementalAlterConfigsRequest(
                resources=[
                    IncrementalAlterConfigsResource(resource_type=2, resource_name=name) for name in ASKED
                ]
            ),
            1,
        ),
    ],
    ids=["create", "grow", "delete", "delete-6", "alter"],
)
def test_many_refusals_are_not_compared_with_each_other(
    monkeypatch: pytest.MonkeyPatch, request_: Any, version: int
) -> None:
    compared = 0
    equal = Message.__eq__

    def counted(self: Message, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(self, other)

    monkeypatch.setattr(Message, "__eq__", counted)
    response = check(request_, version, Image(), denied).complete(None)
    assert compared < 10 * COUNT
    results = response.results if isinstance(request_, CreatePartitionsRequest) else None
    if results is None:
        results = response.topics if isinstance(request_, CreateTopicsRequest) else response.responses
    assert [result.error_code for result in results] == [ErrorCode.TOPIC_AUTHORIZATION_FAILED] * COUNT
