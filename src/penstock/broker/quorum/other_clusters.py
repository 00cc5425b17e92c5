"""Detects that the configured controllers belong to another cluster than this node's data directory.

There are three ways to find out. Controllers refuse the quorum's requests (INCONSISTENT_CLUSTER_ID): a single one
may itself be the wrong one, a majority is not. A node with a higher epoch than theirs believes none of their
leaders, so it never sends them such a request: it asks them for their cluster id. And so does a node whose own log
has none of the controllers as a voter, which would lead a quorum of its own.
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
        """``on_found`` gets the other cluster's id, or None if unknown."""
        self._environment = environment
        self._controllers = frozenset(controllers)
        self._node_id = node_id
        self._cluster_id = cluster_id
        self._on_found = on_found
        # Controllers that were of another cluster when they last answered.
        self._refusing: set[int] = set()
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True

    def answered(self, node_id: int, *, is_refusal: bool) -> None:
        """A node has answered a request of the quorum that carried our cluster id."""
        self._saw(node_id, is_other=is_refusal)

    def doubt(self, peers: Peers, node_id: int) -> None:
        """A controller has a lower epoch than this node: it missed an election, or is of another cluster."""

        def done(response: DescribeClusterResponse | None) -> None:
            theirs = None if response is None else response.cluster_id
            if theirs and not self._is_closed:
                self._saw(node_id, is_other=theirs != self._cluster_id(), cluster_id=theirs)

        peers.call(node_id, CHANNEL, DescribeClusterRequest(), DESCRIBE_CLUSTER_VERSION, done)

    def ask(self, peers: Peers, voters: Collection[int]) -> None:
        """Ask the controllers for their cluster id, if none of them is a voter in this node's log."""
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

    def _saw(self, node_id: int, *, is_other: bool, cluster_id: str | None = None) -> None:
        if not is_other:
            self._refusing.discard(node_id)
        elif node_id in self._controllers and self._cluster_id():
            self._refusing.add(node_id)
            if 2 * len(self._refusing) > len(self._controllers):
                self._on_found(cluster_id)
