"""Decides which partitions this broker fetches: those that another broker leads, if there is room for the data."""

from __future__ import annotations

import errno

from penstock.broker.logs import Logger
from penstock.broker.membership.membership import Membership
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.replication.directory_reports import DirectoryReports
from penstock.broker.replication.replica_fetchers import ReplicaFetchers
from penstock.broker.storage.storage import Storage
from penstock.environment import Environment

# Partitions to begin to follow in one turn of the loop: about 30 ms.
FOLLOWED_PER_TURN = 500


class Following:
    def __init__(
        self,
        environment: Environment,
        logger: Logger,
        storage: Storage,
        membership: Membership,
        fetchers: ReplicaFetchers,
        directories: DirectoryReports,
        *,
        node_id: int,
    ) -> None:
        self._environment = environment
        self._logger = logger
        self._storage = storage
        self._membership = membership
        self._fetchers = fetchers
        self._directories = directories
        self._node_id = node_id

    def follow(self, hosted: HostedPartition) -> None:
        """Fetch from the partition's leader if it is another broker; otherwise stop fetching."""
        is_ready = self._membership.are_logs_ready
        if (
            not is_ready
            or hosted.is_leader
            or hosted.is_deleted
            or hosted.is_offline
            or hosted.leader < 0
            # It would fetch the same data again and again, and the leader would take it to be in sync.
            or self._storage.has_no_room(hosted)
        ):
            # A broker that has to register again may still fetch what it now leads.
            self._fetchers.unfollow(hosted.key)
            return
        try:
            self._fetchers.follow(hosted, is_throttled=self._node_id in hosted.image.adding_replicas)
        except OSError as error:
            self._logger.error("cannot follow", partition=repr(hosted), error=str(error))
            if error.errno == errno.ENOENT:
                # Its directory is missing from a working disk. (A failed disk may come back with it.)
                self._directories.damaged(hosted, 0)

    def follow_all(self, hosteds: list[HostedPartition]) -> None:
        """Call ``follow`` for all of them, some in each turn of the loop."""
        for hosted in hosteds[:FOLLOWED_PER_TURN]:
            if not hosted.is_deleted:
                self.follow(hosted)
        rest = hosteds[FOLLOWED_PER_TURN:]
        if rest and not self._membership.is_stopped:
            self._environment.spawn.soon(lambda: self.follow_all(rest))
