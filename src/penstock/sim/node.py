"""Starts the broker's real code in a simulated process, and gives access to its internals.

Only this file knows how a node is put together. The checkers see a running node only through ``RunningNode``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from penstock.broker.broker import Broker
from penstock.broker.config import BrokerConfig
from penstock.broker.logs import Logger
from penstock.broker.membership.membership import State
from penstock.broker.node import Bound, Node
from penstock.broker.options import ServeOptions
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.environment import Environment
from penstock.metadata.features import may_secure
from penstock.metadata.image import Image
from penstock.metadata.security import Acl
from penstock.protocol.schema import Message


class RunningNode:
    """A running node."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        # Registered and serving clients.
        self.is_ready = False
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        assert self._node is not None
        return self._node

    @node.setter
    def node(self, node: Node) -> None:
        self._node = node

    @property
    def broker(self) -> Broker:
        return self.node.broker

    @property
    def image(self) -> Image:
        return self.broker.image

    @property
    def is_controller(self) -> bool:
        return self.broker.consensus.is_active

    @property
    def quorum_epoch(self) -> int:
        return self.broker.consensus.epoch

    @property
    def metadata_segments(self) -> list[str]:
        """The files of the metadata log, oldest first."""
        return [segment.path for segment in self.broker.consensus._log.log._segments.items]

    @property
    def metadata_committed(self) -> int:
        """Exclusive."""
        return self.broker.consensus.high_watermark

    @property
    def is_voter(self) -> bool:
        return self.broker.consensus.is_voter

    @property
    def serving_epoch(self) -> int | None:
        """The broker epoch in which the node serves clients; None while it does not."""
        membership = self.broker.membership
        return membership.epoch if self.is_active and membership.is_serving() else None

    @property
    def is_active(self) -> bool:
        """Whether the node takes itself for unfenced, with or without a lease."""
        return self.broker.membership.state is State.ACTIVE

    @property
    def silence_ms(self) -> int:
        """Time since the controller last answered it, by the node's own clock."""
        return self.broker.environment.clock.now_ms() - self.broker.membership._last_heard_ms

    def hosted(self, topic: str, partition: int) -> HostedPartition | None:
        return self.broker.partitions.get(topic, partition)

    def led(self) -> Iterator[HostedPartition]:
        """The partitions that this node leads, with their logs open."""
        for hosted in self.broker.partitions:
            if hosted.is_open and hosted.is_serving:
                yield hosted

    def is_due_for_cleaning(self, hosted: HostedPartition) -> bool:
        """Whether the cleaner should compact this partition, which it has not set aside."""
        cleaner = self.broker.cleaner
        return (
            hosted.config.is_compact
            and hosted.key not in cleaner._set_aside
            and bool(hosted.log.due_for_cleaning(hosted.high_watermark, cleaner._clocks.expiry_ms()))
        )

    def vouches_for(self, path: str, position: int) -> bool:
        """Whether the node has written or checked this byte of a log, so that it will not check it again."""
        for hosted in self.broker.partitions:
            for segment in hosted.log._segments.items if hosted.is_open else ():
                if segment.path == path:
                    return segment.size >= 0 and (
                        position >= segment.trusted_from
                        or any(start <= position < end for start, end, _ in segment.checked)
                    )
        return False

    @property
    def delayed(self) -> int:
        """Connections that are over a quota."""
        return self.broker.throttling.delayed

    def check(self) -> None:
        """Assert the invariants between two events."""
        broker = self.broker
        broker.membership.check()
        broker.replication.check()
        broker.verification.check()
        broker.throttling.check()
        for coordinator in broker.transaction_coordinators:
            coordinator.core.check()
        for hosted in broker.partitions:
            if hosted.is_open and not hosted.is_offline:
                hosted.replication.check()

    def change_acls(self, changes_for: Callable[[Mapping[bytes, Acl]], list[Message]]) -> None:
        """Have the active controller, if this is it, change ACLs; ``changes_for`` gets those it has decided on."""
        active = self.broker.active_controller
        controller = active._controller
        if controller is not None and may_secure(controller.image):
            decision = controller._decide(changes_for(controller.image.security.acls))
            active._propose(decision, lambda _: None, lambda: None, lambda: None)

    def stop(self, done: Callable[[], None]) -> None:
        self.node.stop(done)


def start_node(
    environment: Environment,
    options: ServeOptions,
    config: BrokerConfig,
    logger: Logger,
    *,
    snapshot_records: int,
    on_ready: Callable[[], None],
    on_failure: Callable[[str], None],
) -> RunningNode:
    """Start a node. Raises ServeError or OSError when it cannot start."""
    running = RunningNode(options.node_id)

    def ready(_: Bound) -> None:
        running.is_ready = True
        on_ready()

    node = running.node = Node(environment, options, config, logger, on_ready=ready, on_failure=on_failure)
    # By default there would be no snapshots in such short runs.
    node.broker.consensus.committed.snapshot_records = snapshot_records
    node.start()
    return running
