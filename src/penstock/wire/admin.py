"""Create topics and read their settings.

Any broker forwards these requests to the controller. (Kafka's brokers before KRaft do not; they answer
NOT_CONTROLLER.) A created topic is not usable at once, because each broker learns of it in its own time; so
``create_topic`` waits until every partition has a leader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import DescribeConfigsRequest, DescribeConfigsResource
from penstock.protocol.messages.topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from penstock.wire.core import Core, Question, Steps, Task
from penstock.wire.errors import (
    BUSY,
    LEADER_MOVED,
    BrokerRefused,
    UnknownTopic,
    UnsupportedBroker,
    words_of,
)
from penstock.wire.links import Address, Answered, Ask, Channel
from penstock.wire.operations import UNKNOWN_TOPIC_MS, ask_anybody, back_off, know_leaders, refresh

CREATE_TOPICS, DESCRIBE_CONFIGS = 19, 32
# From this version on -1 means the cluster's default number of partitions and replicas (KIP-464).
CREATE_WITH_DEFAULTS = 4
TOPIC_RESOURCE = 2


def create_topic(
    core: Core,
    task: Task[Any],
    name: str,
    partitions: int,
    replication: int,
    configs: Mapping[str, str],
) -> Steps[bool]:
    message = CreateTopicsRequest(
        topics=[
            CreatableTopic(
                name=name,
                num_partitions=partitions,
                replication_factor=replication,
                configs=[CreatableTopicConfig(name=key, value=value) for key, value in configs.items()],
            )
        ],
        timeout_ms=core.request_timeout_ms,
    )
    needed = CREATE_WITH_DEFAULTS if -1 in (partitions, replication) else 0
    ask = Ask(CREATE_TOPICS, lambda _: message, version_min=needed, patience_ms=core.request_timeout_ms)
    # Whether an earlier request of ours may have created it although its answer was lost.
    may_be_ours = False
    controller: Address | None = None
    while True:
        asked = controller or core.candidates()[0]
        answer = (yield [Question(asked, Channel.CONTROL, ask)])[0]
        if not isinstance(answer, Answered):
            if answer.is_unsupported:
                raise UnsupportedBroker(answer.why)
            task.trouble = answer.why
            may_be_ours = may_be_ours or answer.may_be_done
            controller = None
            # Also gives up when no broker can be reached.
            yield from refresh(core, task, [])
            yield from back_off(core, task)
            continue
        result = answer.message.topics[0]
        code = result.error_code
        if code in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
            yield from _wait_for_leaders(core, task, name)
            return code == ErrorCode.NONE or may_be_ours
        if code == ErrorCode.REQUEST_TIMED_OUT:
            may_be_ours = True
        elif code not in BUSY and code not in LEADER_MOVED:
            raise BrokerRefused(f"cannot create topic {name}: {words_of(code, result.error_message)}", code)
        task.trouble = words_of(code, result.error_message)
        if code == ErrorCode.NOT_CONTROLLER:
            yield from refresh(core, task, [])
            controller = core.cluster.brokers.get(core.cluster.controller_id)
        yield from back_off(core, task)


def _wait_for_leaders(core: Core, task: Task[Any], name: str) -> Steps[None]:
    core.cluster.forget(name)  # there may have been an older topic of that name
    while name not in core.cluster.topics:
        yield from refresh(core, task, [name])
        if name not in core.cluster.topics:
            task.trouble = f"no broker knows topic {name} yet"
            yield from back_off(core, task)
    numbers = core.cluster.topics[name].partitions
    yield from know_leaders(core, task, [TopicPartition(name, number) for number in numbers])


def topic_configs(
    core: Core, task: Task[Any], names: Sequence[str]
) -> Steps[dict[str, dict[str, str | None]]]:
    message = DescribeConfigsRequest(
        resources=[
            DescribeConfigsResource(resource_type=TOPIC_RESOURCE, resource_name=name) for name in names
        ]
    )
    # An empty ``configuration_keys`` would mean no settings; null means all of them.
    for resource in message.resources:
        resource.configuration_keys = None
    unknown_since_ms: int | None = None
    while True:
        answer = yield from ask_anybody(core, task, Ask(DESCRIBE_CONFIGS, lambda _: message))
        found: dict[str, dict[str, str | None]] = {}
        for result in answer.message.results:
            code, name = result.error_code, result.resource_name
            if code == ErrorCode.NONE:
                found[name] = {each.name: each.value for each in result.configs}
                continue
            task.trouble = f"cannot read the settings of topic {name}: {words_of(code, result.error_message)}"
            if code not in BUSY and code not in LEADER_MOVED:
                raise BrokerRefused(task.trouble, code)
            if code in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID):
                if unknown_since_ms is None:
                    unknown_since_ms = core.now_ms
                elif core.now_ms - unknown_since_ms >= UNKNOWN_TOPIC_MS:
                    raise UnknownTopic(f"there is no topic {name}; create it or correct the name")
        if len(found) == len(names):
            return found
        yield from back_off(core, task)
