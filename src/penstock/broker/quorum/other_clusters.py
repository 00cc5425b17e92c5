"""Whether the controllers that this node was told to join belong to another cluster than its data directory.

Two ways lead here. A controller refuses what the quorum says to it (INCONSISTENT_CLUSTER_ID): one such controller
may itself be the wrong one, most of them are not. And a node whose own log names none of the others as a voter
never speaks to them, but leads a quorum of its own: that one asks them which cluster they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from penstock.broker.network.peers import Peers
from penstock.environment import Environment
from penstock.protocol.messages.cluster import DescribeClusterRequest, DescribeClusterResponse

CHANNEL = "cluster"
DESCRIBE_CLUSTER_VERSION = 0
RETRY_MS = 5_000


class OtherClusters:
    def __init__(
        self,
        environment: Environment,
        controllers: Collection[int],
        node_id: int,
        *,
        cluster_id: Callable[[], str | None],
        on_found: Callable[[str | None], None],
    ) -> None:
        """``on_found`` gets the other cluster's id, where it is known."""
        self._environment = environment
        self._controllers = frozenset(controllers)
        self._node_id = node_id
        self._cluster_id = cluster_id
        self._on_found = on_found
        # Controllers that said so when they were last spoken to.
        self._refusing: set[int] = set()
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True

    def answered(self, node_id: int, *, is_refusal: bool) -> None:
        """A node has answered what the quorum said to it."""
        if not is_refusal:
            self._refusing.discard(node_id)
        elif node_id in self._controllers and self._cluster_id():
            self._refusing.add(node_id)
            if 2 * len(self._refusing) > len(self._controllers):
                self._on_found(None)

    def ask(self, peers: Peers, voters: Collection[int]) -> None:
        """Ask the controllers, if none of them has a vote in this node's log."""
        others = self._controllers - {self._node_id}
        if self._cluster_id() and voters and not others.intersection(voters):
            for node_id in sorted(others):
                self._ask(peers, node_id)

    def _ask(self, peers: Peers, node_id: int) -> None:
        def done(response: DescribeClusterResponse | None) -> None:
            if self._is_closed:
                return
            theirs = None if response is None else response.cluster_id
            if not theirs:
                self._environment.spawn.later(RETRY_MS, again)
            elif theirs != self._cluster_id():
                self._on_found(theirs)

        def again() -> None:
            if not self._is_closed:
                self._ask(peers, node_id)

        peers.call(node_id, CHANNEL, DescribeClusterRequest(), DESCRIBE_CLUSTER_VERSION, done)
