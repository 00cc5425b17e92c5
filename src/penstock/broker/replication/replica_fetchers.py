"""The fetchers of this broker, and the partitions that each follows.

There is one ``ReplicaFetcher`` per leader, or several with ``num.replica.fetchers``. A partition always goes to the
same one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from penstock.broker.logs import Logger
from penstock.broker.replication.replica_fetcher import Calling, FetcherContext, Hosted, ReplicaFetcher
from penstock.environment import Environment
from penstock.replication.events import PartitionKey
from penstock.replication.follower import FetchLimits, Throttle


class ReplicaFetchers:
    """All partitions that this broker follows, by fetcher."""

    def __init__(
        self,
        environment: Environment,
        peers: Calling,
        logger: Logger,
        *,
        me: int,
        broker_epoch: Callable[[], int],
        limits: FetchLimits | None = None,
        fetchers_per_leader: int = 1,
    ) -> None:
        self._context = FetcherContext(
            environment, peers, logger, me, broker_epoch, limits or FetchLimits(), Throttle()
        )
        self._per_leader = fetchers_per_leader
        self._fetchers: dict[tuple[int, int], ReplicaFetcher] = {}
        self._followed: dict[PartitionKey, ReplicaFetcher] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._followed)

    def follow(self, hosted: Hosted, *, is_throttled: bool = False) -> None:
        """Fetch from the partition's current leader. Called for every assignment with another broker as leader.

        Raises:
            OSError: its log cannot be opened. It is not followed then.
        """
        key = hosted.key
        try:
            core = hosted.replication
        except OSError:
            self.unfollow(key)
            raise
        if core.is_leader or core.leader < 0 or self._is_closed:
            self.unfollow(key)
            return
        number = (key[1] + key[0][-1]) % self._per_leader
        fetcher = self._fetchers.get((core.leader, number))
        if fetcher is None:
            fetcher = self._fetchers[core.leader, number] = ReplicaFetcher(self._context, core.leader, number)
        known = self._followed.get(key)
        if known is not None and known is not fetcher:
            known.unfollow(key)
        self._followed[key] = fetcher
        fetcher.follow(hosted, is_throttled)

    def unfollow(self, key: PartitionKey) -> None:
        fetcher = self._followed.pop(key, None)
        if fetcher is not None:
            fetcher.unfollow(key)

    def tell(self, hosted: Hosted) -> None:
        """Its log start offset has changed since its last fetch: the leader may be waiting for that."""
        fetcher = self._followed.get(hosted.key)
        if fetcher is not None and not self._is_closed:
            # A log that cannot be opened has nothing to report.
            with suppress(OSError):
                fetcher.tell(hosted)

    def set_fetchers_per_leader(self, count: int) -> bool:
        """Return whether the number has changed. If so, call ``follow`` again for all partitions."""
        is_other, self._per_leader = count != self._per_leader, count
        return is_other

    def set_throttle(self, bytes_per_second: int | None) -> None:
        """Limit the rate for replicas that a reassignment adds here; None for no limit."""
        self._context.throttle.set_rate(bytes_per_second, self._context.environment.clock.now_ms())

    def close(self) -> None:
        self._is_closed = True
        for fetcher in self._fetchers.values():
            fetcher.close()

    def check(self) -> None:
        for key, fetcher in self._followed.items():
            assert key in fetcher
        for fetcher in self._fetchers.values():
            fetcher.check()
