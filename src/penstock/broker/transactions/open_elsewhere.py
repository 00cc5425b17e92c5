"""Whether any coordinator knows a producer's transaction in a partition as open.

Then an operator may not abort it (KIP-664): the coordinator will end it itself. A leader does not know the
transactional id of a producer id, so every broker is asked for the transactions that it coordinates. If one does
not answer, the question stays open, and the operator has to try again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.broker.coordination.coordinators import Coordinators
from penstock.broker.network.peers import Peers
from penstock.environment import Environment
from penstock.metadata.image import Image
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.transactions import (
    DescribedTransaction,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
)
from penstock.protocol.schema import Message
from penstock.transactions.administration import STATE_NAMES
from penstock.transactions.coordinator import TransactionCoordinator

CHANNEL = "transactions"
LIST_VERSION = 1
DESCRIBE_VERSION = 0
TIMEOUT_MS = 5_000

Done = Callable[[ErrorCode], None]


class OpenElsewhere:
    def __init__(
        self,
        environment: Environment,
        peers: Peers,
        coordinators: Coordinators[TransactionCoordinator],
        *,
        node_id: BrokerId,
        image: Callable[[], Image],
        wall_ms: Callable[[], int],
    ) -> None:
        self._environment = environment
        self._peers = peers
        self._coordinators = coordinators
        self._node_id = node_id
        self._image = image
        self._wall_ms = wall_ms

    def ask(self, producer_id: int, topic: str, index: int, done: Done) -> None:
        """``done`` gets NONE if no coordinator knows it, CONCURRENT_TRANSACTIONS if one does, or another error."""
        brokers = sorted(self._image().brokers)
        unanswered = len(brokers)
        is_done = False

        def settled(error: ErrorCode) -> None:
            nonlocal unanswered, is_done
            unanswered -= 1
            if not is_done and (error or not unanswered):
                is_done = True
                done(error)

        for broker in brokers:
            self._ask_one(broker, producer_id, topic, index, settled)

    def _ask_one(self, broker: int, producer_id: int, topic: str, index: int, settled: Done) -> None:
        def listed(response: ListTransactionsResponse | None) -> None:
            if response is None or response.error_code:
                settled(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            elif not response.transaction_states:
                settled(ErrorCode.NONE)
            else:
                ids = [each.transactional_id for each in response.transaction_states]
                request = DescribeTransactionsRequest(transactional_ids=ids)
                self._call(broker, request, DESCRIBE_VERSION, described)

        def described(response: DescribeTransactionsResponse | None) -> None:
            if response is None:
                settled(ErrorCode.COORDINATOR_NOT_AVAILABLE)
                return
            is_open = any(
                each.producer_id == producer_id and _is_open_in(each, topic, index)
                for each in response.transaction_states
            )
            settled(ErrorCode.CONCURRENT_TRANSACTIONS if is_open else ErrorCode.NONE)

        self._call(broker, ListTransactionsRequest(producer_id_filters=[producer_id]), LIST_VERSION, listed)

    def _call(self, broker: int, request: Message, version: int, done: Callable[[Any], None]) -> None:
        if broker != self._node_id:
            self._peers.call(broker, CHANNEL, request, version, done, timeout_ms=TIMEOUT_MS)
        elif isinstance(request, ListTransactionsRequest):
            response = list_transactions(self._coordinators, request, self._wall_ms())
            self._environment.spawn.soon(lambda: done(response))
        else:
            assert isinstance(request, DescribeTransactionsRequest)
            answer = describe_transactions(self._coordinators, request)
            self._environment.spawn.soon(lambda: done(answer))


def _is_open_in(transaction: DescribedTransaction, topic: str, index: int) -> bool:
    # A coordinator that has just changed may coordinate it elsewhere.
    if transaction.error_code:
        return True
    return any(each.topic == topic and index in each.partitions for each in transaction.topics)


def list_transactions(
    coordinators: Coordinators[TransactionCoordinator], request: ListTransactionsRequest, wall_ms: int
) -> ListTransactionsResponse:
    """The transactions that this broker coordinates."""
    if coordinators.is_loading:
        return ListTransactionsResponse(error_code=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    response = ListTransactionsResponse(
        unknown_state_filters=[name for name in request.state_filters if name not in STATE_NAMES]
    )
    known = [name for name in request.state_filters if name in STATE_NAMES]
    if request.state_filters and not known:
        return response
    for partition in coordinators:
        response.transaction_states += partition.core.list_transactions(
            known, request.producer_id_filters, duration_ms=request.duration_filter, wall_ms=wall_ms
        )
    return response


def describe_transactions(
    coordinators: Coordinators[TransactionCoordinator], request: DescribeTransactionsRequest
) -> DescribeTransactionsResponse:
    described = []
    for transactional_id in dict.fromkeys(request.transactional_ids):
        partition = coordinators.of(transactional_id)
        described.append(
            DescribedTransaction(error_code=partition, transactional_id=transactional_id)
            if isinstance(partition, ErrorCode)
            else partition.core.describe(transactional_id)
        )
    return DescribeTransactionsResponse(transaction_states=described)
