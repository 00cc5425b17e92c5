"""One node: its storage, its metadata, its partitions and its coordinators, put together.

Handlers get the Broker and reach everything through it. It holds no state of its own beyond caches of
answers, which follow the committed image. Every node has one of these, also one that is
only a controller: that one hosts no partitions because it never registers as a broker.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable

from penstock.broker.clocks.clock_watch import ClockWatch
from penstock.broker.config import BrokerConfig, TopicConfig
from penstock.broker.controller.active_controller import ActiveController
from penstock.broker.controller.broker_connections import BrokerConnections
from penstock.broker.controller.controller_client import FORWARD_RETRY_MS, ControllerClient
from penstock.broker.coordination.coordinator_partition import CoordinatorHost
from penstock.broker.coordination.coordinators import CoordinatorRegistry
from penstock.broker.coordination.group_coordinators import group_coordinators
from penstock.broker.coordination.producer_ids import ProducerIds
from penstock.broker.handlers.metadata_pages import MetadataPages
from penstock.broker.logs import Logger
from penstock.broker.membership.freshness import Freshness
from penstock.broker.membership.membership import Membership, State
from penstock.broker.membership.registration import Registration
from penstock.broker.network.connection import Encoded
from penstock.broker.network.connection_limits import ConnectionLimits
from penstock.broker.network.fetch_sessions import FetchSessions
from penstock.broker.network.peers import Peers
from penstock.broker.options import ServeOptions
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.quorum.consensus import Consensus, ConsensusSettings
from penstock.broker.replication.directory_reports import DirectoryReports
from penstock.broker.replication.full_followers import FullFollowers
from penstock.broker.replication.isr_proposals import IsrProposals
from penstock.broker.replication.replica_fetchers import ReplicaFetchers
from penstock.broker.storage.data_directory import METADATA_DIRECTORY, Directory
from penstock.broker.storage.housekeeping import Housekeeping
from penstock.broker.storage.storage import Storage
from penstock.environment import Environment
from penstock.metadata.configs import broker_value, layers_of
from penstock.metadata.image import BROKER_RESOURCE, BrokerImage, Delta, Endpoint, Image
from penstock.metadata.settings import LONG_MAX
from penstock.metadata.values import LOST_DIRECTORY
from penstock.model import BrokerId, TopicId
from penstock.raft.settings import RaftSettings
from penstock.replication.follower import FetchLimits
from penstock.replication.follower_activity import FollowerActivity

# Of what a reassignment copies to this broker.
THROTTLE = "follower.replication.throttled.rate"
# Kafka's number for a listener without TLS and SASL.
PLAINTEXT = 0
# With more logs to close, asking the kernel for everything at once is several times faster.
SYNCED_ONE_BY_ONE_MAX = 32
RECOVERED_PER_TURN = 16
# Partitions to begin to follow in one turn of the loop: some 30 ms.
FOLLOWED_PER_TURN = 500


class Broker:
    def __init__(
        self,
        environment: Environment,
        options: ServeOptions,
        config: BrokerConfig,
        logger: Logger,
        *,
        on_failure: Callable[[str], None],
        on_active: Callable[[], None],
    ) -> None:
        self.environment = environment
        self.config = config
        self.logger = logger
        self.fail = on_failure
        self.me = self.node_id = BrokerId(options.node_id)
        # Those that vote on the metadata, whether they have come yet or not.
        self.brokers_expected = max(1, len(options.controllers))
        self.connection_limits = ConnectionLimits(config.max_connections, config.max_connections_per_ip)
        self.lag_max_ms = config.replica_lag_time_max_ms
        self._rack = options.rack
        self._is_alone = not options.controllers
        self.is_broker = "broker" in options.roles
        # Answers in bytes, by what was asked; valid for the current image.
        self.encoded_api_versions: dict[tuple[str, int], tuple[int, Encoded]] = {}
        self.metadata_pages = MetadataPages(environment.spawn)
        # Called when this broker has handed over what it leads and answers no more.
        self.on_left: Callable[[], None] = lambda: None

        self.storage = Storage(
            environment,
            options.data_dirs,
            options.node_id,
            logger,
            on_failure,
            on_directory_failed=self._directory_failed,
            on_room_changed=self._room_changed,
            is_alone=not options.controllers,
        )
        self.registration = Registration(self.storage, logger)
        self.clocks = ClockWatch(environment, self.storage.path, options.node_id, logger)
        self.peers = Peers(environment)
        for node, (host, port) in options.controllers.items():
            self.peers.set_address(node, host, port)
        self.partitions = Partitions(self.storage, self, self._topic_config)
        self.consensus = Consensus(
            environment,
            os.path.join(self.storage.path, METADATA_DIRECTORY),
            node_id=options.node_id,
            directory_id=self.storage.directory_ids[0],
            controllers=options.controllers,
            peers=self.peers,
            lost_page_cache=self.storage.lost_page_cache,
            logger=logger,
            on_committed=self._committed,
            on_active=self._became_active,
            on_failure=on_failure,
            cluster_id=self.storage.cluster_id,
            reserve=self.storage.directories[0].reserve,
            settings=ConsensusSettings(
                raft=RaftSettings(
                    fetch_timeout_ms=config.controller_quorum_fetch_timeout_ms,
                    election_timeout_ms=config.controller_quorum_election_timeout_ms,
                )
            ),
        )
        self.active_controller = ActiveController(
            environment,
            self.consensus,
            config,
            logger,
            node_id=options.node_id,
            cluster_id=self.storage.cluster_id or "",
            brokers_expected=self.brokers_expected,
        )
        self.controller = ControllerClient(
            environment, self.consensus, self.active_controller, self.peers, node_id=self.node_id
        )
        self.connections_of_brokers = BrokerConnections(
            self.consensus, self.active_controller, self.peers, node_id=self.node_id
        )
        self.membership = Membership(
            environment,
            config,
            logger,
            self.storage,
            self.registration,
            self.clocks,
            self.consensus,
            self.controller,
            node_id=self.node_id,
            rack=options.rack,
            prepare_partitions=self.prepare_partitions,
            on_active=on_active,
            on_failure=on_failure,
        )
        self.producer_ids = ProducerIds(
            self.controller, node_id=self.node_id, broker_epoch=lambda: self.membership.epoch
        )
        self.fetch_sessions = FetchSessions(
            config.max_incremental_fetch_session_cache_slots, environment.clock, environment.random
        )
        self.follower_activity = FollowerActivity(
            # Of a follower that has nothing to fetch, a request lies here for that long.
            min(
                self.lag_max_ms,
                max(config.broker_session_timeout_ms, 3 * config.replica_fetch_wait_max_ms),
            ),
            environment.clock.now_ms(),
        )
        self.proposals = IsrProposals(
            environment,
            self.controller.ask,
            logger,
            me=self.node_id,
            broker_epoch=lambda: self.membership.epoch,
            lag_max_ms=self.lag_max_ms,
            follower_activity=self.follower_activity,
            live=self.live,
            on_answered=HostedPartition.proposal_answered,
        )
        self.fetchers = ReplicaFetchers(
            environment,
            self.peers,
            logger,
            me=self.node_id,
            broker_epoch=lambda: self.membership.epoch,
            limits=FetchLimits(
                max_wait_ms=config.replica_fetch_wait_max_ms,
                min_bytes=config.replica_fetch_min_bytes,
                max_bytes=config.replica_fetch_response_max_bytes,
                partition_max_bytes=config.replica_fetch_max_bytes,
                backoff_ms=config.replica_fetch_backoff_ms,
            ),
            fetchers_per_leader=config.num_replica_fetchers,
        )
        self.directories = DirectoryReports(
            environment,
            self.storage,
            self.controller,
            logger,
            node_id=self.node_id,
            broker_epoch=lambda: self.membership.epoch,
            role_changed=self.role_changed,
        )
        # Every log that the last run did not close was looked at.
        self._has_recovered = False
        self.coordinators = CoordinatorRegistry(
            CoordinatorHost(
                environment,
                self.clocks,
                logger,
                self.partitions,
                image=lambda: self.image,
                are_logs_ready=lambda: self.membership.are_logs_ready,
                is_serving=self.membership.is_serving,
                create_topic=self.controller.create_internal_topic,
            )
        )
        self.group_coordinators = self.coordinators.register(group_coordinators(config, environment.random))
        self.freshness = Freshness(environment, self.consensus, self.peers, node_id=self.node_id)
        self.full_followers = FullFollowers(
            environment,
            self.storage,
            self.partitions,
            self.peers,
            logger,
            are_logs_ready=lambda: self.membership.are_logs_ready,
        )
        self.housekeeping = Housekeeping(
            environment,
            config,
            self.storage,
            self.partitions,
            self.clocks,
            logger,
            may_delete=self.membership.is_serving,
            when_full=self.full_followers.look,
        )

    # Life

    def start(self, client: tuple[str, int] | None, internal: tuple[str, int] | None) -> None:
        """Take part from now on; clients and nodes reach this one at these addresses."""
        # What a snapshot says was committed before this run, and nobody is told of it again.
        image = self.image
        self._committed(image, Delta(created=tuple(image.topics), brokers_changed=tuple(image.brokers)))
        self._take_settings()
        self.consensus.start()
        if self.is_broker:
            endpoints = []
            if client is not None:
                endpoints.append(Endpoint("PLAINTEXT", *client, PLAINTEXT))
            if internal is not None:
                endpoints.append(Endpoint("INTERNAL", *internal, PLAINTEXT))
            self.membership.start(endpoints)

    def stop(self, then: Callable[[], None]) -> None:
        """Hand over what this node leads; ``then`` it may be closed."""

        def left() -> None:
            # Whoever asks from now on is better off asking another, or again.
            self.on_left()
            self.consensus.resign()
            # The last words to the others should leave before the connections end.
            self.environment.spawn.later(FORWARD_RETRY_MS, then)

        if self._is_alone:
            # There is nobody to hand anything over to.
            self.membership.close()
            left()
        else:
            self.membership.leave(left)

    def close(self) -> None:
        """Flush and close every log, and say so: the next start need not look inside."""
        self.membership.close()
        self.fetchers.close()
        self.proposals.close()
        self.directories.close()
        self.peers.close()
        self.storage.give_reserves()
        hosted_logs = [hosted for hosted in self.partitions if hosted.is_open]
        for hosted in hosted_logs:
            hosted.log.seal()
        if len(hosted_logs) > SYNCED_ONE_BY_ONE_MAX:
            self.environment.files.sync_everything()
        for hosted in hosted_logs:
            hosted.log.close()
        self.storage.remember(self.partitions)
        self.storage.prepare_checkpoint()()
        self.consensus.close()
        if self._are_logs_in_order():
            self.storage.leave_clean_marker(self.membership.epoch)

    def _are_logs_in_order(self) -> bool:
        """Whether the next start need not look inside the logs: this one has, and nothing is left to be mended."""
        has_recovered = self._has_recovered or not self.storage.partitions_to_recover()
        return has_recovered and not self.directories.has_damaged

    # What the cluster has agreed on

    @property
    def image(self) -> Image:
        """Committed state: what clients may be told."""
        return self.consensus.image

    @property
    def cluster_id(self) -> str | None:
        """None on a fresh node that has not heard from its cluster."""
        return self.image.cluster_id or self.storage.cluster_id

    @property
    def controller_id(self) -> int:
        """The node that clients may take for the controller; any broker passes their requests on."""
        leader = self.consensus.leader_id
        return leader if leader is not None and leader in self.image.brokers else self.node_id

    def brokers(self) -> Iterable[BrokerImage]:
        """Those that clients can talk to; never none, which clients would take for the end of the cluster."""
        known = self.image.brokers.values()
        return [broker for broker in known if not broker.fenced] or known

    def topic_name(self, topic_id: bytes) -> str:
        """Empty when no topic has this id."""
        topic = self.image.topics_by_id.get(TopicId(topic_id))
        return "" if topic is None else topic.name

    def exists(self, topic: str, index: int) -> bool:
        known = self.image.topics.get(topic)
        return known is not None and 0 <= index < len(known.partitions)

    def _committed(self, image: Image, delta: Delta) -> None:
        self.metadata_pages.moved(delta)
        if image.cluster_id and self.storage.cluster_id != image.cluster_id:
            if self.storage.cluster_id is not None:
                self.fail(
                    f"{self.storage.path} belongs to the cluster {self.storage.cluster_id}, and the controllers "
                    f"to {image.cluster_id}; choose another --data-dir"
                )
                return
            self.storage.adopt_cluster_id(image.cluster_id)
        for broker in delta.brokers_changed:
            known = image.brokers.get(broker)
            if known is not None and known.internal is not None and broker != self.node_id:
                self.peers.set_address(broker, known.internal.host, known.internal.port)
        self.partitions.apply(image, delta)
        if any(resource.type == BROKER_RESOURCE for resource in delta.configs_changed):
            self._take_settings()
        if delta.deleted:
            self.coordinators.topics_deleted()
        self.membership.image_moved()
        self.freshness.image_moved()
        self.controller.image_moved()

    def _take_settings(self) -> None:
        """Go by the settings of brokers that can be changed while they run."""
        layers = layers_of(self.image, self.node_id, self.config.static)
        rate: int = broker_value(THROTTLE, layers)
        self.fetchers.set_throttle(None if rate == LONG_MAX else rate)
        self.connection_limits.total = broker_value("max.connections", layers)
        self.connection_limits.per_address = broker_value("max.connections.per.ip", layers)
        if self.fetchers.set_fetchers_per_leader(broker_value("num.replica.fetchers", layers)):
            self._follow_some(list(self.partitions))

    def _became_active(self, is_active: bool) -> None:
        self.active_controller.on_active(is_active)
        if is_active:
            # The one before may have died together with a broker's process.
            self.connections_of_brokers.probe_all()

    def _topic_config(self, image: Image, name: str) -> TopicConfig:
        return self.config.topic_config(image, self.node_id, name)

    # The host of the partitions

    def time_range_ms(self) -> tuple[int, int]:
        return self.clocks.range_ms()

    def stamp_ms(self) -> int:
        return self.clocks.stamp_ms()

    def live(self, broker: int) -> int | None:
        known = self.image.brokers.get(BrokerId(broker))
        return known.epoch if known is not None and known.is_active else None

    def is_silent(self, broker: int, since_ms: int, now_ms: int) -> bool:
        return self.follower_activity.is_silent(broker, since_ms, now_ms)

    def wants_proposal(self, hosted: HostedPartition) -> None:
        self.proposals.wants_proposal(hosted)

    def appended(self, hosted: HostedPartition) -> None:
        self.proposals.appended(hosted)

    def role_changed(self, hosted: HostedPartition) -> None:
        if not hosted.is_leader or hosted.is_deleted:
            self.proposals.forget(hosted)
        self._follow(hosted)
        self.coordinators.role_changed(hosted)

    def established(self, hosted: HostedPartition) -> None:
        self.coordinators.role_changed(hosted)

    def nearest_replica(self, hosted: HostedPartition, rack: str, offset: int) -> int:
        """A replica in the consumer's rack that has what it asks for; -1 when none is better than this one.

        Who asks for what is not there must hear that from the leader. A follower's word for it is not believed,
        and the consumer would be sent to and fro for ever.
        """
        brokers = self.image.brokers
        if self._rack == rack or offset < hosted.log.log_start_offset:
            return -1
        for replica in hosted.image.isr:
            known = brokers.get(replica)
            if (
                known is not None
                and known.rack == rack
                and known.is_active
                and replica != self.node_id
                and hosted.replication.has(replica, offset)
            ):
                return replica
        return -1

    def reassigned(self, hosted: HostedPartition) -> None:
        self.directories.assigned(hosted)
        self._follow(hosted)

    def start_raised(self, hosted: HostedPartition, then: Callable[[], None]) -> None:
        def written(_: bool) -> None:
            then()
            self.fetchers.tell(hosted)

        self.housekeeping.checkpoint(written)

    def _follow(self, hosted: HostedPartition) -> None:
        """Fetch from the partition's leader, if another broker is it."""
        is_ready = self.membership.are_logs_ready
        if (
            not is_ready
            or hosted.is_leader
            or hosted.is_deleted
            or hosted.is_offline
            or hosted.leader < 0
            # What it fetched would be fetched again and again; and one that fetches is taken to be in sync.
            or self.storage.has_no_room(hosted)
        ):
            # A broker that has to register again may still fetch what it now leads.
            self.fetchers.unfollow(hosted.key)
            return
        try:
            self.fetchers.follow(hosted, is_throttled=self.node_id in hosted.image.adding_replicas)
        except OSError as error:
            self.logger.error("cannot follow", partition=repr(hosted), error=str(error))
            if error.errno == errno.ENOENT:
                # Its directory is gone, from a disk that works. One that fails may come back with it.
                self.directories.damaged(hosted, 0)

    def _follow_some(self, hosteds: list[HostedPartition]) -> None:
        for hosted in hosteds[:FOLLOWED_PER_TURN]:
            if not hosted.is_deleted:
                self._follow(hosted)
        rest = hosteds[FOLLOWED_PER_TURN:]
        if rest and self.membership.state is not State.STOPPED:
            self.environment.spawn.soon(lambda: self._follow_some(rest))

    def placed(self, hosted: HostedPartition) -> None:
        self.directories.placed(hosted)

    def may_cut(self, hosted: HostedPartition) -> bool:
        return self.membership.has_current_image and not self.directories.has_others(hosted)

    def damaged(self, hosted: HostedPartition, offset: int) -> None:
        if not self.membership.has_current_image:
            # Who counts on the replica is not known yet. It is found again when the log is opened then.
            return
        self.logger.error("damaged", partition=repr(hosted), offset=offset)
        if self.membership.are_logs_ready:
            # Whoever found it is in the middle of reading.
            self.environment.spawn.soon(lambda: self.directories.damaged(hosted, offset))
        else:
            self.directories.damaged(hosted, offset)

    # For the membership

    def prepare_partitions(self, then: Callable[[], None]) -> None:
        """Host what the image says, look at every log the last run did not close, begin to follow."""
        self.storage.quarantine_strays(self.image)
        waiting = iter(self.storage.partitions_to_recover())

        def recover_some() -> None:
            for _ in range(RECOVERED_PER_TURN):
                name = next(waiting, None)
                if name is None:
                    self._prepared(then)
                    return
                hosted = self.partitions.get(name.topic, name.partition)
                if hosted is not None:
                    self._recover(hosted)
            self.environment.spawn.soon(recover_some)

        recover_some()

    def _prepared(self, then: Callable[[], None]) -> None:
        self._has_recovered = True
        for hosted in list(self.partitions):
            if hosted.image.directory(self.node_id) == LOST_DIRECTORY:
                # The process before this one found it damaged and did not come to say that it is mended. Nobody
                # counts on it.
                self.directories.damaged(hosted, 0)

        def go_on() -> None:
            then()
            # Coordinators first. And whoever gets another role meanwhile is looked at twice, which does no harm.
            everyone = sorted(self.partitions, key=lambda hosted: hosted.topic not in self.coordinators)
            self._begin_with(everyone, 0)

        # Whoever is let in may be made a leader: the controller has to know first which replicas are no good.
        self.directories.when_reported(go_on)

    def _begin_with(self, everyone: list[HostedPartition], start: int) -> None:
        if self.membership.state is State.STOPPED:
            return  # and the logs are closed
        for hosted in everyone[start : start + FOLLOWED_PER_TURN]:
            # One that is gone was let go of, and the same partition may be followed again, as another object.
            if not hosted.is_deleted:
                self.role_changed(hosted)
        if start + FOLLOWED_PER_TURN < len(everyone):
            self.environment.spawn.soon(lambda: self._begin_with(everyone, start + FOLLOWED_PER_TURN))

    def _recover(self, hosted: HostedPartition) -> None:
        try:
            _ = hosted.log
        except OSError as error:
            # The others can be served; whoever asks for this one gets a storage error.
            self.logger.error("cannot open", partition=repr(hosted), error=str(error))
            self.directories.damaged(hosted, 0)

    def _directory_failed(self, directory: Directory, reason: str) -> None:
        self.logger.error("a data directory is offline", directory=directory.path, reason=reason)
        for hosted in list(self.partitions):
            if self.storage.directory_of(hosted) is directory:
                hosted.take_offline()
                self.role_changed(hosted)
        self.membership.directories_changed()

    def _room_changed(self, directory: Directory) -> None:
        """A disk has become full, or has room again: the controller hears of it, and followers rest meanwhile."""
        self.membership.directories_changed()
        # Also those that have nothing on any disk yet: they would have their first record there.
        self._begin_with([hosted for hosted in self.partitions if not hosted.is_leader], 0)
