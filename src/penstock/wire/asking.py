"""Send any request to the broker that it is for, and again while the answer is that something has moved.

The steps here know nothing of a request but where it goes and where its errors are; ``operations.py`` and its
neighbours have steps that know more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schema import Message
from penstock.wire import coordinators
from penstock.wire.coordinators import Kind
from penstock.wire.core import Core, Question, Steps, Task
from penstock.wire.errors import (
    BUSY,
    COORDINATOR_MOVED,
    LEADER_MOVED,
    Unanswered,
    Unreachable,
    UnsupportedBroker,
    words_of,
)
from penstock.wire.links import Address, Answer, Ask, Channel, Failed
from penstock.wire.operations import back_off, know_leaders, refresh


@dataclass(frozen=True, slots=True)
class Anybody:
    """Any broker; brokers forward to the controller what only it can do."""


@dataclass(frozen=True, slots=True)
class ControllerOf:
    """The broker that metadata names as controller, for clusters whose brokers do not forward."""


@dataclass(frozen=True, slots=True)
class CoordinatorOf:
    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class LeaderOf:
    at: TopicPartition


@dataclass(frozen=True, slots=True)
class BrokerWith:
    broker_id: int


To: TypeAlias = Anybody | ControllerOf | CoordinatorOf | LeaderOf | BrokerWith

# A missing topic is the caller's to judge.
PASSING = (LEADER_MOVED | COORDINATOR_MOVED | BUSY) - {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.UNKNOWN_TOPIC_ID,
    ErrorCode.UNKNOWN_SERVER_ERROR,
}


def ask(
    core: Core,
    task: Task[Any],
    to: To,
    message: Message,
    version_min: int,
    version_max: int,
    codes: Callable[[Any], Iterable[int]],
    *,
    is_repeatable: bool,
) -> Steps[Any]:
    request = Ask(message.KEY, lambda _: message, version_max, version_min, core.request_timeout_ms)
    while True:
        address = yield from _find(core, task, to)
        answer = (yield [Question(address, Channel.CONTROL, request)])[0]
        if isinstance(answer, Failed):
            _note(task, answer)
            if answer.may_be_done and not is_repeatable:
                raise Unanswered(f"{task.what}: {answer.why}; it may have been done")
        else:
            passing = next((code for code in codes(answer.message) if code in PASSING), None)
            if passing is None:
                return answer.message
            task.trouble = f"{address}: {words_of(passing)}"
            if passing == ErrorCode.REQUEST_TIMED_OUT and not is_repeatable:
                raise Unanswered(f"{task.what}: {task.trouble}; it may have been done")
        yield from _forget(core, task, to)


def ask_every(core: Core, task: Task[Any], message: Message, version_min: int) -> Steps[dict[int, Any]]:
    """The response of every broker. A broker that is gone from the metadata meanwhile is left out."""
    request = Ask(message.KEY, lambda _: message, version_min=version_min)
    found: dict[int, Any] = {}
    while True:
        yield from refresh(core, task, [])
        brokers = core.cluster.brokers
        missing = {broker: address for broker, address in brokers.items() if broker not in found}
        if not missing:
            return {broker: found[broker] for broker in sorted(brokers)}
        answers: list[Answer] = yield [
            Question(address, Channel.CONTROL, request) for address in missing.values()
        ]
        for broker, answer in zip(missing, answers):
            if isinstance(answer, Failed):
                _note(task, answer)
            else:
                passing = next((code for code in codes_of(answer.message) if code in PASSING), None)
                if passing is None:
                    found[broker] = answer.message
                else:
                    task.trouble = f"broker {broker}: {words_of(passing)}"
        if len(found) < len(brokers):
            yield from back_off(core, task)


def codes_of(response: Any) -> Iterable[int]:
    """The error codes of a response, and of the parts in its lists."""
    code = getattr(response, "error_code", ErrorCode.NONE)
    if code:
        yield code
    for field in response.FIELDS:
        parts = getattr(response, field.name)
        if isinstance(parts, list):
            for part in parts:
                yield getattr(part, "error_code", ErrorCode.NONE)


def _note(task: Task[Any], failed: Failed) -> None:
    if failed.is_unsupported:
        raise UnsupportedBroker(failed.why)
    task.trouble = failed.why


def _find(core: Core, task: Task[Any], to: To) -> Steps[Address]:
    match to:
        case Anybody():
            return core.candidates()[0]
        case CoordinatorOf(kind, name):
            return (yield from coordinators.find(core, task, kind, name))
        case LeaderOf(at):
            return (yield from know_leaders(core, task, [at]))[at][0]
    while True:
        number = to.broker_id if isinstance(to, BrokerWith) else core.cluster.controller_id
        if number in core.cluster.brokers:
            return core.cluster.brokers[number]
        yield from refresh(core, task, [])
        if isinstance(to, BrokerWith) and number not in core.cluster.brokers:
            raise Unreachable(f"there is no broker {number} in the cluster now")
        task.trouble = "the cluster has no controller now"
        if number not in core.cluster.brokers:
            yield from back_off(core, task)


def _forget(core: Core, task: Task[Any], to: To) -> Steps[None]:
    """Look again for the broker, after a while."""
    match to:
        case CoordinatorOf(kind, name):
            yield from coordinators.forget(core, task, kind, name)
        case LeaderOf(at):
            yield from back_off(core, task)
            yield from refresh(core, task, [at.topic])
        case _:
            # Also gives up when no broker can be reached.
            yield from refresh(core, task, [])
            yield from back_off(core, task)
