"""Assembles the parts of a node. Handlers get the Broker and reach everything through it.

Every node has one, also a node that is only a controller: it hosts no partitions, because it never registers as a
broker.

The parts are made from the bottom up. Where a lower part has to call a higher one, it gets a method at the end of
this file, which passes the call on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from penstock.broker.clocks.clock_watch import ClockWatch
from penstock.broker.config import BrokerConfig
from penstock.broker.controller.active_controller import ActiveController
from penstock.broker.controller.broker_connections import BrokerConnections
from penstock.broker.controller.controller_client import ControllerClient
from penstock.broker.controller.first_users import FirstUsers, check_admin
from penstock.broker.coordination.coordinator_partition import CoordinatorHost
from penstock.broker.coordination.coordinators import CoordinatorRegistry
from penstock.broker.coordination.group_coordinators import group_coordinators
from penstock.broker.coordination.producer_ids import ProducerIds
from penstock.broker.coordination.transaction_coordinators import transaction_coordinators
from penstock.broker.counters import WaitingRequests
from penstock.broker.dynamic_settings import DynamicSettings
from penstock.broker.logs import Logger
from penstock.broker.membership.freshness import Freshness
from penstock.broker.membership.membership import Membership
from penstock.broker.membership.registration import Registration
from penstock.broker.metadata_publisher import MetadataPublisher
from penstock.broker.network.connection import Encoded
from penstock.broker.network.connection_limits import ConnectionLimits
from penstock.broker.network.fetch_sessions import FetchSessions
from penstock.broker.network.metadata_pages import MetadataPages
from penstock.broker.network.node_connector import NodeConnector
from penstock.broker.network.peers import Peers
from penstock.broker.network.throttling import Throttling
from penstock.broker.node_partition_host import NodePartitionHost
from penstock.broker.options import ServeOptions
from penstock.broker.partition.cleaner import Cleaner
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.partition.housekeeping import Housekeeping
from penstock.broker.partition.partition_lifecycle import PartitionLifecycle
from penstock.broker.quorum.consensus import Consensus, ConsensusSettings
from penstock.broker.replication.replication import Replication
from penstock.broker.startup import Startup
from penstock.broker.storage.data_directory import METADATA_DIRECTORY, Directory
from penstock.broker.storage.storage import Storage
from penstock.broker.transactions.coordinator_client import TransactionCoordinatorClient
from penstock.broker.transactions.marker_sender import MarkerSender
from penstock.broker.transactions.marker_writer import MarkerWriter
from penstock.broker.transactions.open_elsewhere import OpenElsewhere
from penstock.broker.transactions.verification import Verification
from penstock.environment import Environment
from penstock.metadata.features import TRANSACTION_VERSION, may_compact
from penstock.metadata.image import Delta, Endpoint, Image
from penstock.model import BrokerId
from penstock.protocol.listeners import NODES, ListenerDescription, SecurityProtocol

# So that the last messages to other nodes are sent before the connections close.
LAST_WORDS_MS = 50


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
        nodes: NodeConnector | None = None,
        internal_protocol: SecurityProtocol = NODES.security_protocol,
    ) -> None:
        """``nodes`` connects to other nodes; None: in plain text."""
        self.environment = environment
        self._nodes = nodes
        self._internal_protocol = internal_protocol
        self.config = config
        self.logger = logger
        self.node_id = BrokerId(options.node_id)
        self.rack = options.rack
        # The number of configured controllers, running or not.
        self.brokers_expected = max(1, len(options.controllers))
        # Decides by the committed image; None: every client may do everything.
        self.authorizer = config.make_authorizer()
        self._is_alone = not options.controllers
        self.is_broker = "broker" in options.roles
        self._fail = on_failure
        self.waiting_requests = WaitingRequests()
        # Called when this broker has handed over its leaderships and stops answering clients.
        self.on_left: Callable[[], None] = lambda: None
        # Called when users were added, changed or removed.
        self.on_credentials_changed: Callable[[], None] = lambda: None

        self._make_storage_and_network(options)
        self._make_cluster_parts(options, on_active)
        self._make_partition_parts()
        self._make_startup_and_publisher()

    def _make_storage_and_network(self, options: ServeOptions) -> None:
        """Disks, clocks and connections."""
        environment = self.environment
        self.storage = Storage(
            environment,
            options.data_dirs,
            self.node_id,
            self.logger,
            self._fail,
            on_directory_failed=self._directory_failed,
            on_room_changed=self._room_changed,
            is_alone=self._is_alone,
        )
        self._registration = Registration(self.storage, self.logger)
        self.clocks = ClockWatch(environment, self.storage.path, self.node_id, self.logger)
        self.peers = Peers(environment, None if self._nodes is None else self._nodes.connect)
        for node, (host, port) in options.controllers.items():
            self.peers.set_address(node, host, port)
        self.connection_limits = ConnectionLimits(
            self.config.max_connections, self.config.max_connections_per_ip
        )
        self.throttling = Throttling(environment)
        # Encoded ApiVersions responses by (listener, version), each with the image offset it was made at.
        self.encoded_api_versions: dict[tuple[str, int], tuple[int, Encoded]] = {}
        self.metadata_pages = MetadataPages(environment.spawn)

    def _make_cluster_parts(self, options: ServeOptions, on_active: Callable[[], None]) -> None:
        """The metadata quorum, the controller, and this broker's membership."""
        environment = self.environment
        self.consensus = Consensus(
            environment,
            os.path.join(self.storage.path, METADATA_DIRECTORY),
            node_id=self.node_id,
            directory_id=self.storage.directory_ids[0],
            controllers=options.controllers,
            peers=self.peers,
            lost_page_cache=self.storage.lost_page_cache,
            logger=self.logger,
            on_committed=self._committed,
            on_active=self._became_active,
            on_failure=self._fail,
            cluster_id=self.storage.cluster_id,
            reserve=self.storage.directories[0].reserve,
            settings=ConsensusSettings(raft=self.config.raft),
        )
        self._first_users = FirstUsers(
            environment, self.storage.path, check_admin(options.admin), self.logger
        )
        self.active_controller = ActiveController(
            environment,
            self.consensus,
            self.config,
            self.logger,
            node_id=self.node_id,
            cluster_id=self.storage.cluster_id or "",
            brokers_expected=self.brokers_expected,
            first_users=self._first_users.for_new_cluster,
            authorizer=self.config.make_authorizer(),
        )
        self.controller = ControllerClient(
            environment, self.consensus, self.active_controller, self.peers, node_id=self.node_id
        )
        self.connections_of_brokers = BrokerConnections(
            self.consensus, self.active_controller, self.peers, node_id=self.node_id
        )
        self.membership = Membership(
            environment,
            self.config,
            self.logger,
            self.storage,
            self._registration,
            self.clocks,
            self.consensus,
            self.controller,
            node_id=self.node_id,
            rack=options.rack,
            prepare_partitions=self._prepare_partitions,
            on_active=on_active,
            on_failure=self._fail,
        )
        self.freshness = Freshness(environment, self.consensus, self.peers, node_id=self.node_id)

    def _make_partition_parts(self) -> None:
        """Partitions, and the parts that work on all of them."""
        environment, config, node_id = self.environment, self.config, self.node_id
        self.partitions = Partitions(environment.clock)
        self.fetch_sessions = FetchSessions(
            config.max_incremental_fetch_session_cache_slots, environment.clock, environment.random
        )
        self.replication = Replication(
            environment,
            config,
            self.logger,
            self.storage,
            self.partitions,
            self.peers,
            self.consensus,
            self.controller,
            self.membership,
            node_id=node_id,
            role_changed=self._role_changed,
        )
        self.producer_ids = ProducerIds(
            self.controller, node_id=node_id, broker_epoch=lambda: self.membership.epoch
        )
        self.coordinators = CoordinatorRegistry(
            CoordinatorHost(
                environment,
                self.clocks,
                self.logger,
                self.partitions,
                image=lambda: self.consensus.image,
                are_logs_ready=lambda: self.membership.are_logs_ready,
                is_serving=self.membership.is_serving,
                create_topic=self.controller.create_internal_topic,
            )
        )
        self.group_coordinators = self.coordinators.register(group_coordinators(config, environment.random))
        self.transaction_coordinators = self.coordinators.register(transaction_coordinators(config))
        self._make_transactions()
        self.housekeeping = Housekeeping(
            environment,
            config,
            self.storage,
            self.partitions,
            self.clocks,
            self.logger,
            may_delete=self.membership.is_serving,
            when_full=self.replication.full_followers.look,
        )
        self.cleaner = Cleaner(
            environment,
            self.storage,
            self.partitions,
            self.clocks,
            self.logger,
            settings=lambda: config.cleaner_settings(self.consensus.image, node_id),
            may_clean=lambda: may_compact(self.consensus.image),
        )
        self.partition_host = NodePartitionHost(
            environment,
            self.logger,
            self.clocks,
            self.consensus,
            self.membership,
            self.replication,
            self.coordinators,
            self.housekeeping,
            me=node_id,
            lag_max_ms=config.replica_lag_time_max_ms,
        )
        self.partition_lifecycle = PartitionLifecycle(
            self.partitions,
            self.storage,
            self.partition_host,
            lambda image, topic: config.topic_config(image, node_id, topic),
        )

    def _make_transactions(self) -> None:
        """What a broker does for transactions, besides being their coordinator."""
        client = TransactionCoordinatorClient(
            self.environment, self.peers, self.transaction_coordinators, node_id=self.node_id
        )
        self.verification = Verification(self.environment, client)
        self.marker_writer = MarkerWriter(
            self.partitions,
            self.group_coordinators,
            self.verification,
            OpenElsewhere(
                self.environment,
                self.peers,
                self.transaction_coordinators,
                node_id=self.node_id,
                image=lambda: self.consensus.image,
                wall_ms=self.clocks.stamp_ms,
            ),
            image=lambda: self.consensus.image,
            is_serving=self.membership.is_serving,
        )
        markers = MarkerSender(
            self.environment,
            self.peers,
            self.marker_writer,
            self.logger,
            node_id=self.node_id,
            image=lambda: self.consensus.image,
            broker_epoch=lambda: self.membership.epoch,
        )
        self.transaction_coordinators.on_committed = markers.send_due

    def _make_startup_and_publisher(self) -> None:
        """The start, and the publisher of new images."""
        self.startup = Startup(
            self.environment,
            self.logger,
            self.storage,
            self.consensus,
            self.partitions,
            self.replication.directories,
            self.coordinators,
            self.partition_host,
        )
        self._publisher = MetadataPublisher(
            self.storage,
            self.peers,
            self.metadata_pages,
            self.partition_lifecycle,
            DynamicSettings(
                self.config, self.connection_limits, self.partitions, self.replication, node_id=self.node_id
            ),
            self.coordinators,
            self.membership,
            self.freshness,
            self.controller,
            self.throttling,
            node_id=self.node_id,
            on_credentials_changed=self._credentials_changed,
            on_failure=self._fail,
        )

    # Starting and stopping

    def start(
        self,
        clients: Iterable[tuple[ListenerDescription, tuple[str, int]]],
        internal: tuple[str, int] | None,
    ) -> None:
        """Join the cluster; clients and nodes reach this node at these addresses."""
        self._follow_acls(self.image)
        self._publisher.publish_first(self.image)
        self.consensus.start()
        if self.is_broker:
            endpoints = [
                Endpoint(listener.name, *address, listener.security_protocol) for listener, address in clients
            ]
            if internal is not None:
                endpoints.append(Endpoint(NODES.name, *internal, self._internal_protocol))
            self.membership.start(endpoints)

    def stop(self, then: Callable[[], None]) -> None:
        """Hand over this node's leaderships, then call ``then``: the node may be closed."""

        def left() -> None:
            # From now on clients must use another broker.
            self.on_left()
            self.consensus.resign()
            self.environment.spawn.later(LAST_WORDS_MS, then)

        if self._is_alone:
            # There is no other node to hand over to.
            self.membership.close()
            left()
        else:
            self.membership.leave(left)

    def close(self) -> None:
        """Flush and close every log, and leave a marker, so that the next start need not recover them."""
        self.environment.processes.close()
        self.membership.close()
        self.replication.close()
        self.peers.close()
        self.storage.give_reserves()
        self.partitions.close_logs(self.environment.files)
        self.storage.remember(self.partitions)
        self.storage.prepare_checkpoint()()
        self.consensus.close()
        if self.startup.has_recovered and not self.replication.directories.has_damaged:
            self.storage.leave_clean_marker(self.membership.epoch)

    # Committed state

    @property
    def has_authorizer(self) -> bool:
        """Whether ACLs decide what clients may do."""
        return self.authorizer is not None

    @property
    def serves_transactions(self) -> bool:
        """Whether every broker of the cluster supports transactions. If not, transactional ids are refused."""
        return self.image.features.get(TRANSACTION_VERSION, 0) > 0

    @property
    def image(self) -> Image:
        """The committed image, which clients may see."""
        return self.consensus.image

    @property
    def cluster_id(self) -> str | None:
        """None on a new node that has not heard from its cluster yet."""
        return self.image.cluster_id or self.storage.cluster_id

    @property
    def controller_id(self) -> int:
        """The node to report to clients as the controller; any broker forwards their requests."""
        leader = self.consensus.leader_id
        return leader if leader is not None and leader in self.image.brokers else self.node_id

    def controller_id_for(self, listener: ListenerDescription) -> int:
        """The same for clients of a listener, which may not reach every broker."""
        known = self.image.brokers.get(BrokerId(self.controller_id))
        has_listener = known is None or known.endpoint_for(listener) is not None
        return self.controller_id if has_listener else self.node_id

    # Callbacks of the parts

    def _committed(self, image: Image, delta: Delta) -> None:
        # First: what waits for the other changes is answered by the new ACLs.
        self._follow_acls(image)
        self._publisher.publish(image, delta)
        self._first_users.committed(image)

    def _follow_acls(self, image: Image) -> None:
        if self.authorizer is not None:
            self.authorizer.follow(image.security.acls)

    def _prepare_partitions(self, then: Callable[[], None]) -> None:
        self.startup.prepare(then)

    def _role_changed(self, hosted: HostedPartition) -> None:
        self.partition_host.role_changed(hosted)

    def _credentials_changed(self) -> None:
        self.on_credentials_changed()

    def _became_active(self, is_active: bool) -> None:
        self.active_controller.on_active(is_active)
        if is_active:
            # The previous controller may have died together with a broker's process.
            self.connections_of_brokers.probe_all()

    def _directory_failed(self, directory: Directory, reason: str) -> None:
        self.logger.error("a data directory is offline", directory=directory.path, reason=reason)
        self.partition_lifecycle.directory_failed(directory)
        self.membership.directories_changed()

    def _room_changed(self, directory: Directory) -> None:
        """A disk became full or has room again: tell the controller, and stop or resume following."""
        self.membership.directories_changed()
        # Also partitions without files yet: their first record may go to this disk.
        self.partition_host.roles_changed([hosted for hosted in self.partitions if not hosted.is_leader])
