"""Waits until this broker's image holds everything that was committed when a request arrived.

A broker learns of a metadata change shortly after it is committed; a broker that was paused may be far behind.
Mostly that is harmless: a client that is sent to the wrong broker asks again. It matters where a stale response
looks like a current one. Before such a response the broker asks the quorum leader for its high watermark, once for
all waiting requests.

No request waits longer than ``TIMEOUT_MS``. Without a quorum leader nothing can be committed, and groups must
continue to work without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.broker.network.peers import Peers
from penstock.broker.quorum.consensus import Consensus
from penstock.environment import Environment
from penstock.protocol.messages.quorum import (
    DescribeQuorumRequest,
    DescribeQuorumRequestPartition,
    DescribeQuorumRequestTopic,
)

CHANNEL = "quorum-offset"
DESCRIBE_VERSION = 2
TIMEOUT_MS = 1_000
RETRY_MS = 50
_QUESTION = DescribeQuorumRequest(
    topics=[
        DescribeQuorumRequestTopic(
            topic_name="__cluster_metadata", partitions=[DescribeQuorumRequestPartition(partition_index=0)]
        )
    ]
)


class Freshness:
    def __init__(self, environment: Environment, consensus: Consensus, peers: Peers, *, node_id: int) -> None:
        self._environment = environment
        self._consensus = consensus
        self._peers = peers
        self._node_id = node_id
        # Requests that arrived after the current question was sent. They need the answer to another one.
        self._next: list[Callable[[], None]] = []
        # Requests that wait for the current question.
        self._current: list[Callable[[], None]] = []
        # Exclusive. The offset that the image has to reach; None until the leader has answered.
        self._offset: int | None = None

    def when_fresh(self, then: Callable[[], None]) -> None:
        """Call ``then`` once the image has all that was committed before; at once on the active controller."""
        if self._consensus.is_active:
            then()
            return
        self._next.append(then)
        if not self._current:
            self._begin()

    def image_moved(self) -> None:
        if self._offset is not None and self._consensus.image.offset + 1 >= self._offset:
            self._end()

    def _begin(self) -> None:
        self._current, self._next = self._next, []
        self._later(TIMEOUT_MS, self._end)
        self._ask()

    def _ask(self) -> None:
        waiting = self._current

        def answered(response: Any | None) -> None:
            if self._current is not waiting:
                return
            topics = [] if response is None or response.error_code else response.topics
            if topics and not topics[0].partitions[0].error_code:
                self._offset = topics[0].partitions[0].high_watermark
                self.image_moved()
            else:
                # The leader has changed, or there is none yet.
                self._later(RETRY_MS, self._ask)

        if self._consensus.is_active:
            self._end()
            return
        leader = self._consensus.leader_id
        if leader is None or leader == self._node_id:
            answered(None)
        else:
            self._peers.call(leader, CHANNEL, _QUESTION, DESCRIBE_VERSION, answered, timeout_ms=TIMEOUT_MS)

    def _later(self, delay_ms: int, act: Callable[[], None]) -> None:
        """Call ``act`` after the delay, unless the requests that wait now are done by then."""
        waiting = self._current

        def due() -> None:
            if self._current is waiting:
                act()

        self._environment.spawn.later(delay_ms, due)

    def _end(self) -> None:
        done, self._current, self._offset = self._current, [], None
        for then in done:
            then()
        if self._next and not self._current:
            self._begin()
