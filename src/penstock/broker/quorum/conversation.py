"""The messages between this node and the other nodes of the metadata quorum.

It sits between the core (``raft/``), which knows nodes by id, and the connections to them (``peers.py``). A request
is queued for the core, which may take it later; the core's answer is sent with the data that only the disk has:
records, or a piece of a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from penstock.broker.logs import Logger
from penstock.broker.network.connection import WAITING, Call
from penstock.broker.network.peers import Peers
from penstock.broker.quorum import messages as wire
from penstock.broker.quorum.addresses import AddressBook
from penstock.broker.quorum.metadata_log import MetadataLog
from penstock.broker.quorum.other_clusters import OtherClusters
from penstock.broker.quorum.snapshots import Snapshots
from penstock.environment import Clock
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import quorum as messages
from penstock.raft.events import (
    DescribeAnswer,
    DescribeRequest,
    Effect,
    FetchAnswer,
    FetchRequest,
    Reply,
    Send,
    SnapshotRequest,
)
from penstock.raft.quorum import voter_with
from penstock.raft.raft import Raft

# Passes one event to the core at the given time (now_ms), and returns the core's effects.
Happening: TypeAlias = Callable[[int], list[Effect]]


class Conversation:
    def __init__(
        self,
        raft: Raft,
        log: MetadataLog,
        snapshots: Snapshots,
        addresses: AddressBook,
        peers: Peers | None,
        clock: Clock,
        logger: Logger,
        *,
        cluster_id: Callable[[], str | None],
        strangers: OtherClusters,
        tell: Callable[[Happening], None],
    ) -> None:
        """``tell`` queues an event for the core. A single node has no ``peers``."""
        self._raft = raft
        self._log = log
        self._snapshots = snapshots
        self._addresses = addresses
        self._peers = peers
        self._clock = clock
        self._logger = logger
        self._cluster_id = cluster_id
        self._strangers = strangers
        self._tell = tell
        self._is_closed = False

    def start(self) -> None:
        if self._peers is not None:
            self._addresses.start()
            self._peers.on_lost.append(self._peer_lost)
            self._strangers.ask(self._peers, [voter.id for voter in self._raft.voters])

    def close(self) -> None:
        self._is_closed = True
        self._strangers.close()
        if self._peers is not None and self._peer_lost in self._peers.on_lost:
            self._peers.on_lost.remove(self._peer_lost)

    # Being asked

    def handle(self, request: Any, call: Call) -> Any:
        """Handle a request of another node or an operator. It is answered when the core has decided."""
        asked = wire.read(request)
        if asked is None:
            return error_response(request, call.version, ErrorCode.INVALID_REQUEST)
        if self._is_closed:
            return error_response(request, call.version, ErrorCode.BROKER_NOT_AVAILABLE)
        ours, theirs = self._cluster_id(), getattr(request, "cluster_id", None)
        # A new node has no cluster id yet. But an epoch never goes down again, so a request without a cluster id
        # must not raise it.
        if ours and ours != theirs and (theirs or getattr(asked, "epoch", -1) > self._raft.epoch):
            return error_response(request, call.version, ErrorCode.INCONSISTENT_CLUSTER_ID)
        self._learn_from(request)
        self._tell(lambda now_ms: self._raft.request(asked, call, now_ms))
        return WAITING

    def reply(self, effect: Reply) -> None:
        call, request, answer = effect
        if isinstance(answer, DescribeAnswer):
            call.answer(self._description(answer))
            return
        records: Any = b""
        size = 0
        if isinstance(request, FetchRequest) and isinstance(answer, FetchAnswer):
            if not answer.error and answer.diverging is None and answer.snapshot_id is None:
                records = self._log.read(request.offset, wire.FETCH_BYTES_MAX) or b""
        elif isinstance(request, SnapshotRequest) and not answer.error:
            piece = self._snapshots.piece_of(request.snapshot_id, request.position, wire.SNAPSHOT_CHUNK_BYTES)
            assert piece is not None, "the core knows only snapshots that are there"
            records, size = piece
        call.answer(wire.write_answer(request, answer, records, size))

    def _description(self, answer: DescribeAnswer) -> messages.DescribeQuorumResponse:
        raft = self._raft
        wall_ms = self._clock.wall_ms()
        since_ms = wall_ms - self._clock.now_ms()
        standings = {
            replica: wire.Standing(
                replica,
                offset,
                since_ms + fetched_ms,
                since_ms + fetched_ms if offset >= raft.high_watermark else -1,
            )
            for replica, offset, fetched_ms in raft.progress()
        }
        standings[raft.me] = wire.Standing(
            raft.me, answer.end_offset, wall_ms, wall_ms if raft.is_leader else -1
        )
        return wire.write_description(
            answer,
            raft.high_watermark,
            [standings.pop(voter, wire.Standing(voter)) for voter in answer.voters],
            list(standings.values()),
            self._addresses.all(),
        )

    # Asking

    def send(self, effect: Send) -> None:
        node_id, request = effect
        peers = self._peers
        assert peers is not None, "a node alone has nobody to ask"
        letter = wire.write(request, self._cluster_id(), self._raft.me, self._addresses.all())

        def done(response: Any | None) -> None:
            if self._is_closed:
                return
            is_stranger = response is not None and response.error_code == ErrorCode.INCONSISTENT_CLUSTER_ID
            if response is not None and not isinstance(request, DescribeRequest):
                self._strangers.answered(node_id, is_refusal=is_stranger)
            if is_stranger:
                self._logger.error("a controller belongs to another cluster", controller=node_id)
            elif isinstance(request, DescribeRequest) and response is not None:
                for node in response.nodes:
                    for endpoint in node.listeners[:1]:
                        self._addresses.learn(node.node_id, (endpoint.host, endpoint.port))
            answer = wire.read_answer(node_id, request, response)
            if isinstance(answer, DescribeAnswer) and answer.epoch < self._raft.epoch:
                self._strangers.doubt(peers, node_id)
            self._tell(lambda now_ms: self._raft.answered(request, answer, now_ms))
            if response is None and peers.is_refused(node_id, letter.channel):
                self._peer_lost(node_id, letter.channel)

        peers.call(
            node_id, letter.channel, letter.message, letter.version, done, timeout_ms=letter.timeout_ms
        )

    def _peer_lost(self, node_id: int, _channel: str) -> None:
        """The node refuses connections: its process is gone."""
        self._tell(lambda now_ms: self._raft.unreachable(node_id, now_ms))

    def _learn_from(self, request: Any) -> None:
        """Learn a node's address from a request that contains it."""
        match request:
            case messages.BeginQuorumEpochRequest():
                node_id, endpoints = request.topics[0].partitions[0].leader_id, request.leader_endpoints
            case messages.AddRaftVoterRequest() if voter_with(self._raft.voters, request.voter_id) is None:
                # Before the change, because the address is recorded with it. A current voter's address is known.
                node_id, endpoints = request.voter_id, request.listeners
            case _:
                return
        if endpoints:
            self._addresses.learn(node_id, (endpoints[0].host, endpoints[0].port))
