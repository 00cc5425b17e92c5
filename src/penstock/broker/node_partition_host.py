"""The node's implementation of ``PartitionHost``.

It passes the events of a hosted partition on to the parts they concern: replication, coordinators, housekeeping.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.clocks.clock_watch import ClockWatch
from penstock.broker.coordination.coordinators import CoordinatorRegistry
from penstock.broker.logs import Logger
from penstock.broker.membership.membership import Membership
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.housekeeping import Housekeeping
from penstock.broker.quorum.consensus import Consensus
from penstock.broker.replication.following import FOLLOWED_PER_TURN
from penstock.broker.replication.replication import Replication
from penstock.environment import Environment
from penstock.model import BrokerId


class NodePartitionHost:
    def __init__(
        self,
        environment: Environment,
        logger: Logger,
        clocks: ClockWatch,
        consensus: Consensus,
        membership: Membership,
        replication: Replication,
        coordinators: CoordinatorRegistry,
        housekeeping: Housekeeping,
        *,
        me: BrokerId,
        lag_max_ms: int,
    ) -> None:
        self._environment = environment
        self._logger = logger
        self._consensus = consensus
        self._membership = membership
        self._proposals = replication.proposals
        self._fetchers = replication.fetchers
        self._directories = replication.directories
        self._following = replication.following
        self._coordinators = coordinators
        self._housekeeping = housekeeping
        self.me = me
        self.lag_max_ms = lag_max_ms
        self.time_range_ms = clocks.range_ms
        self.stamp_ms = clocks.stamp_ms
        self.is_silent = replication.follower_activity.is_silent
        self.wants_proposal = replication.proposals.wants_proposal
        self.appended = replication.proposals.appended
        self.placed = replication.directories.placed
        self.established = coordinators.role_changed

    def live(self, broker: int) -> int | None:
        return self._consensus.image.active_epoch(broker)

    def role_changed(self, hosted: HostedPartition) -> None:
        if not hosted.is_leader or hosted.is_deleted:
            self._proposals.forget(hosted)
        self._following.follow(hosted)
        self._coordinators.role_changed(hosted)

    def roles_changed(self, hosteds: list[HostedPartition], start: int = 0) -> None:
        """Handle the roles of all these partitions again, some in each turn of the loop."""
        if self._membership.is_stopped:
            return  # and the logs are closed
        for hosted in hosteds[start : start + FOLLOWED_PER_TURN]:
            # Skip deleted ones. The same partition may be back meanwhile, as another object.
            if not hosted.is_deleted:
                self.role_changed(hosted)
        if start + FOLLOWED_PER_TURN < len(hosteds):
            self._environment.spawn.soon(lambda: self.roles_changed(hosteds, start + FOLLOWED_PER_TURN))

    def reassigned(self, hosted: HostedPartition) -> None:
        self._directories.assigned(hosted)
        self._following.follow(hosted)

    def start_raised(self, hosted: HostedPartition, then: Callable[[], None]) -> None:
        def written(_: bool) -> None:
            then()
            self._fetchers.tell(hosted)

        self._housekeeping.checkpoint(written)

    def may_cut(self, hosted: HostedPartition) -> bool:
        return self._membership.has_current_image and not self._directories.has_others(hosted)

    def damaged(self, hosted: HostedPartition, offset: int) -> None:
        if not self._membership.has_current_image:
            # Whether the replica is in sync is not known yet. The damage is found again at the next opening.
            return
        self._logger.error("found a damaged log", partition=repr(hosted), offset=offset)
        if self._membership.are_logs_ready:
            # The caller is in the middle of a read.
            self._environment.spawn.soon(lambda: self._directories.damaged(hosted, offset))
        else:
            self._directories.damaged(hosted, offset)
