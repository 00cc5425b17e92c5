"""Followers on a full disk: they do not fetch, but still delete what their leaders have deleted.

``replication/full_follower.py`` builds the requests and interprets the responses. This module sends them, one at a
time to each leader, each about some of the partitions, and carries out the effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.broker.logs import Logger
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.replication.replica_fetcher import FETCH_VERSION, Calling
from penstock.broker.storage.storage import Storage
from penstock.environment import Environment
from penstock.protocol.messages.fetch import FetchResponse
from penstock.replication.events import Append, Effect, PartitionKey, StartOver, Truncate
from penstock.replication.full_follower import Position, effects, question

CHANNEL = "starts"
# Short enough: with Kafka's defaults, deleted files are removed a minute later at the earliest.
ASK_INTERVAL_MS = 5_000
# Partitions in one request. Their logs may have to be opened first.
ASKED_MAX = 500


class FullFollowers:
    def __init__(
        self,
        environment: Environment,
        storage: Storage,
        partitions: Iterable[HostedPartition],
        peers: Calling,
        logger: Logger,
        *,
        are_logs_ready: Callable[[], bool],
    ) -> None:
        self._environment = environment
        self._storage = storage
        self._partitions = partitions
        self._peers = peers
        self._logger = logger
        self._are_logs_ready = are_logs_ready
        self._next_ms = 0
        # Leaders that have not answered yet.
        self._asked: set[int] = set()
        # By leader: how many of its partitions this round has covered.
        self._places: dict[int, int] = {}

    def look(self) -> None:
        """Ask the leaders, at most every ASK_INTERVAL_MS. Called regularly while a disk is full."""
        now_ms = self._environment.clock.now_ms()
        if now_ms < self._next_ms or not self._are_logs_ready():
            return
        self._next_ms = now_ms + ASK_INTERVAL_MS
        by_leader: dict[int, list[HostedPartition]] = {}
        for hosted in self._partitions:
            if self._rests(hosted):
                by_leader.setdefault(hosted.leader, []).append(hosted)
        for leader, resting in by_leader.items():
            if leader in self._asked:
                continue
            place = self._places.get(leader, 0)
            if place >= len(resting):
                place = 0
            self._places[leader] = place + ASKED_MAX
            self._ask(leader, resting[place : place + ASKED_MAX])

    def _rests(self, hosted: HostedPartition) -> bool:
        """Whether the partition would be followed if there were room."""
        return (
            not hosted.is_leader
            and hosted.leader >= 0
            and not hosted.is_deleted
            and not hosted.is_offline
            and self._storage.has_no_room(hosted)
        )

    def _ask(self, leader: int, resting: list[HostedPartition]) -> None:
        asked: dict[PartitionKey, HostedPartition] = {}
        positions: dict[PartitionKey, Position] = {}
        for hosted in resting:
            try:
                if (hosted.is_open or self._storage.holds(hosted)) and hosted.log.size_bytes:
                    positions[hosted.key] = _position(hosted)
                    asked[hosted.key] = hosted
            except OSError as error:
                self._logger.warning("cannot read the log", partition=repr(hosted), error=str(error))
        if not asked:
            return

        def answered(response: FetchResponse | None) -> None:
            self._asked.discard(leader)
            if response is None or response.error_code:
                return
            for effect in effects(positions, response):
                hosted = asked[effect.key]
                try:
                    # The leader may have changed, there may be room again, or the partition may be deleted.
                    if self._rests(hosted) and _position(hosted) == positions[effect.key]:
                        self._do(hosted, effect)
                except OSError as error:
                    self._logger.warning("cannot make room", partition=repr(hosted), error=str(error))

        self._asked.add(leader)
        self._peers.call(leader, CHANNEL, question(positions), FETCH_VERSION, answered)

    def _do(self, hosted: HostedPartition, effect: Effect) -> None:
        start = hosted.log.log_start_offset
        match effect:
            case Append():
                hosted.follower_log.append(b"", effect.high_watermark, effect.leader_log_start)
            case Truncate():
                hosted.follower_log.truncate_for(effect.epoch, effect.end_offset)
            case StartOver():
                hosted.follower_log.start_over_at(effect.at)
        if hosted.log.log_start_offset != start:
            self._logger.info(
                "deleted what the leader has deleted",
                partition=repr(hosted),
                start=hosted.log.log_start_offset,
            )


def _position(hosted: HostedPartition) -> Position:
    """Raises OSError when its log cannot be opened."""
    offset, last_epoch, _ = hosted.follower_log.position()
    return Position(hosted.leader_epoch, offset, last_epoch, hosted.high_watermark)
