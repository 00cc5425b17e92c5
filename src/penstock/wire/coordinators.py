"""Find the coordinator of a group or of a transactional id, and ask it.

The two kinds are different brokers for the same name. A coordinator that does not answer, or answers that it is not
the coordinator, is forgotten and looked up again.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import FindCoordinatorRequest
from penstock.protocol.schema import VERSION_MAX, Message
from penstock.wire.core import Core, Question, Steps, Task
from penstock.wire.errors import BUSY, COORDINATOR_MOVED, BrokerRefused, UnsupportedBroker, words_of
from penstock.wire.links import Address, Ask, Channel, Failed, Lane
from penstock.wire.operations import ask_anybody, back_off

FIND_COORDINATOR = 10
# The first version of FindCoordinator with kinds, and with several keys.
OF_TRANSACTIONS = 1
MANY_COORDINATORS = 4


class Kind(IntEnum):
    """The values are those of the protocol."""

    GROUP = 0
    TRANSACTION = 1


_NOUNS = {Kind.GROUP: "group", Kind.TRANSACTION: "transactional id"}


def find(core: Core, task: Task[Any], kind: Kind, name: str) -> Steps[Address]:
    """The coordinator's address; retries until there is one."""

    def build(version: int) -> FindCoordinatorRequest:
        if version >= MANY_COORDINATORS:
            return FindCoordinatorRequest(key_type=kind, coordinator_keys=[name])
        return FindCoordinatorRequest(key=name, key_type=kind)

    ask = Ask(FIND_COORDINATOR, build, version_min=OF_TRANSACTIONS if kind == Kind.TRANSACTION else 0)
    while True:
        known = _known(core, kind).get(name)
        if known is not None:
            return known
        answer = yield from ask_anybody(core, task, ask)
        response = answer.message
        found = response.coordinators[0] if answer.version >= MANY_COORDINATORS else response
        if found.error_code == ErrorCode.NONE:
            address = _known(core, kind)[name] = Address(found.host, found.port)
            return address
        words = words_of(found.error_code, found.error_message)
        if found.error_code not in COORDINATOR_MOVED and found.error_code not in BUSY:
            raise BrokerRefused(f"{task.what}: {words}", found.error_code)
        task.trouble = f"the coordinator of {_NOUNS[kind]} {name}: {words}"
        yield from back_off(core, task)


def ask(
    core: Core,
    task: Task[Any],
    kind: Kind,
    name: str,
    key: int,
    message: Message,
    *,
    version_min: int = 0,
    version_max: int = VERSION_MAX,
    channel: Channel | Lane = Channel.CONTROL,
    patience_ms: int = 0,
) -> Steps[Any]:
    """The coordinator's response; None when there was none: the coordinator has been forgotten, ask again."""
    address = yield from find(core, task, kind, name)
    question = Ask(key, lambda _: message, version_max, version_min, patience_ms)
    answer = (yield [Question(address, channel, question)])[0]
    if not isinstance(answer, Failed):
        return answer.message
    if answer.is_unsupported:
        raise UnsupportedBroker(answer.why)
    task.trouble = answer.why
    yield from forget(core, task, kind, name)
    return None


def forget(core: Core, task: Task[Any], kind: Kind, name: str) -> Steps[None]:
    """Look the coordinator up again for the next request, after a while."""
    _known(core, kind).pop(name, None)
    yield from back_off(core, task)


def _known(core: Core, kind: Kind) -> dict[str, Address]:
    cluster = core.cluster
    return cluster.coordinators if kind == Kind.GROUP else cluster.transaction_coordinators
