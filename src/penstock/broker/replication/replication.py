"""Assembles the parts of replication on one node: following other brokers, and being followed."""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.config import BrokerConfig
from penstock.broker.controller.controller_client import ControllerClient
from penstock.broker.logs import Logger
from penstock.broker.membership.membership import Membership
from penstock.broker.network.peers import Peers
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.quorum.consensus import Consensus
from penstock.broker.replication.directory_reports import DirectoryReports
from penstock.broker.replication.following import Following
from penstock.broker.replication.full_followers import FullFollowers
from penstock.broker.replication.isr_proposals import IsrProposals
from penstock.broker.replication.replica_fetchers import ReplicaFetchers
from penstock.broker.storage.storage import Storage
from penstock.environment import Environment
from penstock.replication.follower_activity import FollowerActivity


class Replication:
    def __init__(
        self,
        environment: Environment,
        config: BrokerConfig,
        logger: Logger,
        storage: Storage,
        partitions: Partitions,
        peers: Peers,
        consensus: Consensus,
        controller: ControllerClient,
        membership: Membership,
        *,
        node_id: int,
        role_changed: Callable[[HostedPartition], None],
    ) -> None:
        """``role_changed(hosted)``: a damaged partition is no longer usable, or is usable again."""

        def broker_epoch() -> int:
            return membership.epoch

        def live(broker: int) -> int | None:
            return consensus.image.active_epoch(broker)

        # Detects followers that have stopped fetching from this broker.
        self.follower_activity = FollowerActivity(config.follower_silence_max_ms, environment.clock.now_ms())
        self.proposals = IsrProposals(
            environment,
            controller.ask,
            logger,
            me=node_id,
            broker_epoch=broker_epoch,
            lag_max_ms=config.replica_lag_time_max_ms,
            follower_activity=self.follower_activity,
            live=live,
        )
        self.fetchers = ReplicaFetchers(
            environment,
            peers,
            logger,
            me=node_id,
            broker_epoch=broker_epoch,
            limits=config.replica_fetch_limits,
            fetchers_per_leader=config.num_replica_fetchers,
        )
        self.directories = DirectoryReports(
            environment,
            storage,
            controller,
            logger,
            node_id=node_id,
            broker_epoch=broker_epoch,
            role_changed=role_changed,
        )
        self.following = Following(
            environment, logger, storage, membership, self.fetchers, self.directories, node_id=node_id
        )
        self.full_followers = FullFollowers(
            environment,
            storage,
            partitions,
            peers,
            logger,
            are_logs_ready=lambda: membership.are_logs_ready,
        )

    def close(self) -> None:
        self.fetchers.close()
        self.proposals.close()
        self.directories.close()

    def check(self) -> None:
        self.fetchers.check()
        self.proposals.check()
