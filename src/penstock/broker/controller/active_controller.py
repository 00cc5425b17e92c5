"""The active controller: created when this node leads the quorum, dropped when it no longer does.

``ActiveController`` is the shell around ``metadata.Controller``. Requests of brokers and clients come in through
``handle``, decisions go to the quorum, and a response is sent when its decision is committed. A timer calls the
controller at its deadlines (sessions, rebalancing, the rest of a large decision).

The controller decides ahead of the log. When a decision cannot be appended (no room on the disk) or may not be
committed (leadership lost), its state differs from the log. Then it is rebuilt from the log: no decision is ever
undone in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from penstock.broker.controller import authorized
from penstock.broker.controller.authorized import Checked
from penstock.broker.logs import Logger
from penstock.broker.network.authorization import Operation, Requester, ResourceType
from penstock.decision import Decision
from penstock.environment import Environment, Timer
from penstock.metadata.authorizer import Authorizer
from penstock.metadata.controller import Controller
from penstock.metadata.first_users import Credentials
from penstock.metadata.image import Image
from penstock.model import BrokerId, format_id
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import metadata_records
from penstock.protocol.schema import Message

# How soon a timed decision is tried again after the disk was full.
RETRY_MS = 1000
# A timer this late means that the process or its machine was paused.
ASLEEP_MS = 3000
# Timed decisions in flight: the next one is made while the last is on its way to the other voters. With more, a
# client's request would wait behind all of them.
AHEAD_MAX = 2
# Kafka's cluster ids are random UUIDs.
CLUSTER_ID_BYTES = 16


class Quorum(Protocol):
    """The consensus, as the controller sees it."""

    def propose(
        self, decision: Decision[Message], answer: Callable[[Any], None], lost: Callable[[], None]
    ) -> bool: ...

    def decided_image(self) -> Image: ...


class Config(Protocol):
    @property
    def static(self) -> Any: ...


class ActiveController:
    def __init__(
        self,
        environment: Environment,
        consensus: Quorum,
        config: Config,
        logger: Logger,
        *,
        node_id: int = -1,
        cluster_id: str = "",
        brokers_expected: int = 1,
        first_users: Callable[[], Credentials] = dict,
        authorizer: Authorizer | None = None,
    ) -> None:
        """``cluster_id`` comes from this node's disk, for a log that has none, and so do ``first_users``.

        ``brokers_expected`` is the number of brokers that the cluster should have, for topics created before all of
        them are registered.

        ``authorizer`` checks forwarded requests; it is for the controller alone, whose image is ahead of others.
        """
        self._environment = environment
        self._authorizer = authorizer
        self._consensus = consensus
        self._config = config
        self._logger = logger
        self._node_id = node_id
        self._cluster_id = cluster_id
        self._brokers_expected = brokers_expected
        self._first_users = first_users
        # Only while this node is the active controller.
        self._controller: Controller | None = None
        # Timed decisions that are not committed yet.
        self._ahead = 0
        self._timer: Timer | None = None
        self._timer_at_ms = 0

    @property
    def is_active(self) -> bool:
        return self._controller is not None

    @property
    def image(self) -> Image | None:
        """The decided state, including changes that are not committed yet."""
        return None if self._controller is None else self._controller.image

    def on_active(self, is_active: bool) -> None:
        """This node became, or is no longer, the active controller."""
        self._cancel_timer()
        if not is_active:
            self._controller = None
            return
        controller = self._begin()
        if not controller.image.cluster_id or not controller.image.features:
            cluster_id = self._cluster_id or format_id(self._environment.random.randbytes(CLUSTER_ID_BYTES))
            users = {} if controller.image.features else self._first_users()
            self._propose(controller.found_cluster(cluster_id, users), _ignore, _nothing, _nothing)
        self._plan()

    def close(self) -> None:
        self.on_active(False)

    def handle(
        self,
        request: Message,
        version: int,
        answer: Callable[[Any], None],
        *,
        from_host: str | None = None,
        from_broker: bool = False,
        requester: Requester | None = None,
    ) -> None:
        """Call ``answer(response)`` now or when the decision is committed; NOT_CONTROLLER if it is not active.

        ``from_broker``: a broker asks for itself, and may create internal topics. ``requester``: the client that
        asks; None if a node asks for itself, or a broker that does not say for whom.
        """
        controller = self._controller
        if controller is None:
            answer(error_response(request, version, ErrorCode.NOT_CONTROLLER))
            return
        if requester is not None and self._authorizer is not None:
            checked = self._checked(self._authorizer, controller.image, request, version, requester)
            if checked.request is None:
                answer(checked.complete(None))
                return
            request, answer = checked.request, _completing(checked, answer)
        clock = self._environment.clock
        decision = controller.handle(
            request, version, clock.wall_ms(), clock.now_ms(), from_host=from_host, from_broker=from_broker
        )
        self._propose(
            decision,
            answer,
            lambda: answer(error_response(request, version, ErrorCode.NOT_CONTROLLER)),
            # If this node has resigned, the next controller may have room.
            lambda: answer(
                error_response(request, version, ErrorCode.KAFKA_STORAGE_ERROR, "The disk is full.")
                if self._controller is not None
                else error_response(request, version, ErrorCode.NOT_CONTROLLER)
            ),
        )
        self._plan()

    def _checked(
        self, authorizer: Authorizer, image: Image, request: Message, version: int, requester: Requester
    ) -> Checked:
        # The decided image: a right that was taken away is gone for whatever is decided later.
        authorizer.follow(image.security.acls)

        def allows(operation: Operation, resource: ResourceType, name: str, *, quietly: bool = False) -> bool:
            return authorizer.allows(requester.principal, requester.host, operation, resource, name)

        return authorized.check(request, version, image, allows)

    def broker_lost(self, broker_id: int, epoch: int = -1) -> None:
        """The broker's connection closed, and its address refuses new ones."""
        if self._controller is not None:
            decision = self._controller.broker_lost(broker_id, epoch, self._environment.clock.now_ms())
            self._propose(decision, _ignore, _nothing, _nothing)
            self._plan()

    def _begin(self) -> Controller:
        self._controller = controller = Controller(
            self._consensus.decided_image(),
            random=self._environment.random,
            broker=self._node_id,
            static=self._config.static,
            brokers_expected=self._brokers_expected,
        )
        self._ahead = 0
        controller.took_over(self._environment.clock.now_ms())
        return controller

    def _propose(
        self,
        decision: Decision[Message],
        answer: Callable[[Any], None],
        lost: Callable[[], None],
        full: Callable[[], None],
    ) -> bool:
        self._report(decision.changes)
        if self._consensus.propose(decision, answer, lost):
            return True
        if self._controller is not None:
            self._begin()
        full()
        return False

    def _tick(self) -> None:
        self._timer = None
        controller = self._controller
        if controller is None or self._ahead >= AHEAD_MAX:
            return
        clock = self._environment.clock
        now_ms = clock.now_ms()
        if now_ms - self._timer_at_ms >= ASLEEP_MS:
            self._logger.warning("the controller was asleep", ms=now_ms - self._timer_at_ms)
            controller.was_asleep(now_ms)
        decision = controller.tick(now_ms, clock.wall_ms())
        if not decision.changes:
            self._plan()
            return
        self._ahead += 1

        def committed(_: object) -> None:
            if self._controller is controller:
                self._ahead -= 1
                self._plan()

        if self._propose(decision, committed, _nothing, _nothing):
            self._plan()
        else:
            self._set_timer(now_ms + RETRY_MS)

    def _plan(self) -> None:
        """Set the timer for the controller's next deadline."""
        if self._controller is None or self._ahead >= AHEAD_MAX:
            return
        deadline_ms = self._controller.next_deadline_ms(self._environment.clock.now_ms())
        # Every heartbeat moves deadlines into the future. A timer that fires too early sets the next one.
        if deadline_ms is not None and (self._timer is None or deadline_ms < self._timer_at_ms):
            self._set_timer(deadline_ms)

    def _set_timer(self, at_ms: int) -> None:
        self._cancel_timer()
        self._timer_at_ms = at_ms
        delay_ms = max(0, at_ms - self._environment.clock.now_ms())
        self._timer = self._environment.spawn.later(delay_ms, self._tick)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report(self, changes: list[Message]) -> None:
        """Log what happens to brokers: it is rare, and operators ask about it afterwards."""
        for change in changes:
            match change:
                case metadata_records.PartitionChangeRecord() | metadata_records.PartitionRecord():
                    continue
                case metadata_records.RegisterBrokerRecord():
                    self._logger.info("broker registered", broker=change.broker_id, epoch=change.broker_epoch)
                case metadata_records.UnregisterBrokerRecord():
                    self._logger.info("broker unregistered", broker=change.broker_id)
                case metadata_records.BrokerRegistrationChangeRecord():
                    if change.in_controlled_shutdown > 0:
                        self._logger.info("broker is stopping", broker=change.broker_id)
                    if change.log_dirs:
                        self._logger.warning("broker lost a directory", broker=change.broker_id)
                    if change.fenced > 0 and self._has_stopped(change.broker_id):
                        self._logger.info("broker stopped", broker=change.broker_id)
                    elif change.fenced > 0:
                        self._logger.warning("broker fenced", broker=change.broker_id)
                    if change.fenced < 0:
                        self._logger.info("broker active", broker=change.broker_id)

    def _has_stopped(self, broker_id: int) -> bool:
        """Whether a broker left by controlled shutdown."""
        if self._controller is None:
            return False
        known = self._controller.image.brokers.get(BrokerId(broker_id))
        return known is not None and known.in_controlled_shutdown


def _completing(checked: Checked, answer: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda response: answer(checked.complete(response))


def _nothing() -> None:
    """For decisions that no request waits for."""


def _ignore(_: object) -> None:
    """For decisions that no request waits for."""
