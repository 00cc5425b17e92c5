"""This broker's membership in the cluster: registration, heartbeats, the lease, and controlled shutdown.

    REGISTERING --registered--> CATCHING_UP --image and logs ready--> FENCED <--heartbeats--> ACTIVE
                                                                                               |
                                              STOPPED <--may stop, or time is up-- STOPPING <--+

A broker serves clients only while it holds the lease. An answered heartbeat is worth two thirds of a session,
counted from when it was *sent*. The response names the session: this broker may be configured with another one, and
the controller fences by its own. So a broker that is cut off or paused stops serving before the controller gives
its partitions to other brokers, and a stale leader never answers a client. The lease is shorter than a session so
that a new controller, which does not know which leases were granted, need not wait for a whole one.

The lease is compared with the clock at every request (``is_serving``). A timer would fire too late in a process
that has just resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from penstock.broker.clocks.clock_watch import ClockWatch
from penstock.broker.clocks.timekeeper import Reading
from penstock.broker.config import BrokerConfig
from penstock.broker.controller.controller_client import ControllerClient
from penstock.broker.logs import Logger
from penstock.broker.membership.registration import Registration
from penstock.broker.quorum.consensus import Consensus
from penstock.broker.storage.storage import Storage
from penstock.environment import Environment, Timer
from penstock.metadata.features import SUPPORTED_FEATURES, unsupported_level
from penstock.metadata.image import Endpoint
from penstock.metadata.values import FeatureRange
from penstock.model import BrokerId, TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import (
    BrokerHeartbeatRequest,
    BrokerHeartbeatResponse,
    BrokerRegistrationRequest,
    BrokerRegistrationResponse,
    Feature,
    FlushedTopic,
    Listener,
)

REGISTRATION_VERSION = 4
HEARTBEAT_VERSION = 1
RETRY_MS = 100
# After a failed write: the disk is full, and will hardly have room a moment later.
UNWRITTEN_RETRY_MS = 500
# Between heartbeats of a broker that waits to be unfenced or to shut down.
IMPATIENT_INTERVAL_MS = 200
# How often to check for a new controller. It gets a heartbeat at once, and then notices when the connection ends.
LOOK_INTERVAL_MS = 300
CALL_TIMEOUT_MS = 2_000
# How long a stopping broker waits for its leaderships to be taken over, and how long for any response.
LEAVING_TIMEOUT_MS = 10_000
LEAVING_UNHEARD_MS = 2_000
CHANNEL = "heartbeat"


class State(Enum):
    REGISTERING = "registering"
    CATCHING_UP = "catching up"
    FENCED = "fenced"
    ACTIVE = "active"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Membership:
    # Replaced only in tests, by those of another release.
    supported_features: tuple[FeatureRange, ...] = SUPPORTED_FEATURES

    def __init__(
        self,
        environment: Environment,
        config: BrokerConfig,
        logger: Logger,
        storage: Storage,
        registration: Registration,
        clocks: ClockWatch,
        consensus: Consensus,
        controller: ControllerClient,
        *,
        node_id: int,
        rack: str | None,
        prepare_partitions: Callable[[Callable[[], None]], None],
        on_active: Callable[[], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """``prepare_partitions(then)`` opens the logs, which must be done before this broker is unfenced.

        ``on_active()`` is called once, when it first becomes active; ``on_failure(reason)`` when it never can.
        """
        self._environment = environment
        self._config = config
        self._logger = logger
        self._storage = storage
        self._clocks = clocks
        self._consensus = consensus
        self._controller = controller
        self._registration = registration
        self._node_id = node_id
        self._rack = rack
        self._prepare_partitions = prepare_partitions
        self._fail = on_failure
        self._on_active: Callable[[], None] | None = on_active
        self._endpoints: list[Endpoint] = []
        self.state = State.REGISTERING
        # The broker epoch of the current registration.
        self.epoch = -1
        # Stays the same when a registration has to be retried.
        self._incarnation_id: bytes | None = None
        # This broker's own setting, until a controller tells its session timeout.
        self._take_session(config.broker_session_timeout_ms)
        # Exclusive, by the monotonic clock.
        self._lease_ends_ms = 0
        self._timer: Timer | None = None
        # The logs are being opened, which may take many turns of the event loop.
        self._is_preparing = False
        # A request to the controller is under way.
        self._is_asking = False
        # Send the next heartbeat as soon as possible: something changed.
        self._is_due = False
        # The node that the last heartbeat went to, and when it was sent.
        self._asked: int | None = None
        self._asked_ms = 0
        self._leaving_since_ms = 0
        self._last_heard_ms = 0
        self._on_left: Callable[[], None] | None = None

    def _take_session(self, session_ms: int) -> None:
        self._lease_ms = session_ms * 2 // 3
        # At least two heartbeats in a lease, or it would end between two of them.
        self._interval_ms = min(self._config.broker_heartbeat_interval_ms, max(1, self._lease_ms // 2))

    def is_serving(self) -> bool:
        """Whether this broker may answer clients about its partitions."""
        return (
            self.state is State.ACTIVE or self.state is State.STOPPING
        ) and self._environment.clock.now_ms() < self._lease_ends_ms

    @property
    def are_logs_ready(self) -> bool:
        """Whether all logs that must be open are open, so that followers may begin to fetch."""
        return self.state is not State.REGISTERING and self.state is not State.CATCHING_UP

    @property
    def has_current_image(self) -> bool:
        """Whether the image holds everything that was committed before this process was registered."""
        return self.state is not State.REGISTERING and self._consensus.image.offset >= self.epoch

    @property
    def is_stopped(self) -> bool:
        return self.state is State.STOPPED

    def start(self, endpoints: list[Endpoint]) -> None:
        self._endpoints = endpoints
        self._register()

    def image_moved(self) -> None:
        """The committed image has changed."""
        is_new_enough = self.state is State.CATCHING_UP and self._consensus.image.offset >= self.epoch
        if is_new_enough and not self._is_preparing:
            self._is_preparing = True
            self._prepare_partitions(self._prepared)
        if self.state is State.FENCED or self.state is State.REGISTERING:
            self._ask_soon()

    def directories_changed(self) -> None:
        """A directory went offline, became full, or has room again: tell the controller now."""
        if self.state not in (State.REGISTERING, State.STOPPED):
            self._ask_soon()

    def leave(self, then: Callable[[], None]) -> None:
        """Hand over the partitions this broker leads, then call ``then``; also when no broker takes them."""
        self._on_left = then
        if self.state in (State.REGISTERING, State.CATCHING_UP, State.STOPPED):
            self._left()
            return
        self.state = State.STOPPING
        self._leaving_since_ms = self._last_heard_ms = self._environment.clock.now_ms()
        self._ask_soon()

    def close(self) -> None:
        self.state = State.STOPPED
        if self._timer is not None:
            self._timer.cancel()

    # Registering

    def _register(self) -> None:
        # None on a new node that has not heard from its cluster yet.
        cluster_id = self._consensus.image.cluster_id or self._storage.cluster_id
        if cluster_id is None:
            self._again_in(RETRY_MS)
            return
        storage, registration = self._storage, self._registration
        if self._incarnation_id is None:
            self._incarnation_id = registration.incarnation_id(
                registered_text(self._endpoints, self._rack, storage.directory_ids)
            )
        if self._incarnation_id is None:
            self._again_in(UNWRITTEN_RETRY_MS)
            return
        request = BrokerRegistrationRequest(
            broker_id=self._node_id,
            cluster_id=cluster_id,
            incarnation_id=self._incarnation_id,
            listeners=[
                Listener(name=name, host=host, port=port, security_protocol=protocol)
                for name, host, port, protocol in self._endpoints
            ],
            features=self._features(),
            rack=self._rack,
            log_dirs=storage.directory_ids,
            previous_broker_epoch=registration.previous_broker_epoch,
            flushed=_flushed_topics(storage.flushed_note.partitions()),
        )
        self._is_asking = True
        self._controller.ask(
            request, REGISTRATION_VERSION, self._registered, channel=CHANNEL, timeout_ms=CALL_TIMEOUT_MS
        )

    def _registered(self, response: BrokerRegistrationResponse | None) -> None:
        self._is_asking = False
        if self.state is not State.REGISTERING:
            return
        if response is None or response.error_code:
            if response is not None and response.error_code == ErrorCode.REQUEST_TIMED_OUT:
                # The controller is working on it, and does the next part when asked again.
                self._again_in(0)
                return
            if response is not None:
                self._refused(response.error_code)
            self._again_in(RETRY_MS)
            return
        if not self._registration.remember_epoch(response.broker_epoch):
            # With the same incarnation id the response will be the same.
            self._again_in(UNWRITTEN_RETRY_MS)
            return
        self.epoch = response.broker_epoch
        self.state = State.CATCHING_UP
        self._again_in(self._interval_ms)
        self.image_moved()

    def _refused(self, error: int) -> None:
        if error in (ErrorCode.NOT_CONTROLLER, ErrorCode.DUPLICATE_BROKER_REGISTRATION):
            return  # expected to pass soon
        name = ErrorCode(error).name
        self._logger.warning("the controller does not register this broker", error=name)
        if error == ErrorCode.INCONSISTENT_CLUSTER_ID:
            storage = self._storage
            self._fail(
                f"{storage.path} belongs to the cluster {storage.cluster_id}, but the controllers to another; "
                f"choose another --data-dir"
            )

        if error == ErrorCode.UNSUPPORTED_VERSION:
            # Without an image that says so, it is tried again: the image is on its way.
            missing = unsupported_level(self._consensus.image.features, self.supported_features)
            if missing is not None:
                name, level = missing
                self._fail(
                    f"the cluster uses level {level} of {name}, which this release does not support; "
                    f"install a newer release"
                )

    def _features(self) -> list[Feature]:
        return [
            Feature(name=name, min_supported_version=low, max_supported_version=high)
            for name, low, high in self.supported_features
        ]

    def _unregistered_features(self) -> list[Feature]:
        """What this broker supports, if a controller of an older release has registered it without."""
        known = self._consensus.image.brokers.get(BrokerId(self._node_id))
        if known is None or known.epoch != self.epoch or known.features == self.supported_features:
            return []
        return self._features()

    def _prepared(self) -> None:
        """All logs that must be open are open."""
        self._is_preparing = False
        # The broker may have registered again meanwhile. Then the next image starts this again.
        if self.state is State.CATCHING_UP and self._consensus.image.offset >= self.epoch:
            self.state = State.FENCED
            self._ask_soon()

    # Heartbeats

    def _ask_soon(self) -> None:
        self._is_due = True
        if not self._is_asking:
            self._again_in(0)

    def _again_in(self, delay_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._environment.spawn.later(delay_ms, self._ask)

    def _ask(self) -> None:
        self._timer = None
        if self._is_asking or self.state is State.STOPPED:
            return
        if self.state is State.REGISTERING:
            self._register()
            return
        sent = self._clocks.read()
        sent_ms = sent.now_ms
        leader = self._consensus.leader_id
        if (
            self.state is State.ACTIVE
            and not self._is_due
            and leader == self._asked
            and sent_ms - self._asked_ms < self._interval_ms
        ):
            self._again_in(min(LOOK_INTERVAL_MS, self._interval_ms - (sent_ms - self._asked_ms)))
            return
        self._asked, self._asked_ms = leader, sent_ms
        self._is_asking = True
        self._is_due = False
        request = BrokerHeartbeatRequest(
            broker_id=self._node_id,
            broker_epoch=self.epoch,
            current_metadata_offset=self._consensus.image.offset,
            # A node that cannot apply the metadata does not know what it leads.
            want_fence=self.state is State.CATCHING_UP or self._consensus.is_stuck,
            want_shut_down=self.state is State.STOPPING,
            offline_log_dirs=self._storage.offline_directory_ids,
            full_log_dirs=self._storage.full_directory_ids or None,
            time_ms=sent.wall_ms,
            steady_ms=self._clocks.steady_ms(sent),
            takes_session=True,
            features=self._unregistered_features(),
        )
        self._controller.ask(
            request,
            HEARTBEAT_VERSION,
            lambda response: self._answered(response, sent),
            channel=CHANNEL,
            timeout_ms=CALL_TIMEOUT_MS,
        )

    def _answered(self, response: BrokerHeartbeatResponse | None, sent: Reading) -> None:
        self._is_asking = False
        if self.state is State.STOPPED:
            return
        if response is not None and not response.error_code:
            self._last_heard_ms = sent.now_ms
            self._clocks.heard(sent, response)
            self._heard(response, sent.now_ms)
        elif response is not None and response.error_code in (
            ErrorCode.STALE_BROKER_EPOCH,
            ErrorCode.BROKER_ID_NOT_REGISTERED,
        ):
            self._logger.warning("registering again", error=ErrorCode(response.error_code).name)
            if self.state is State.STOPPING:
                self._left()
                return
            self.state = State.REGISTERING
            self._incarnation_id = None
        if self.state is State.STOPPING and self._has_waited_enough():
            self._left()
        if self.state is State.STOPPED:
            return
        if self._is_due or self.state is State.REGISTERING:
            self._again_in(0 if response is not None else RETRY_MS)
        elif response is None or response.error_code:
            self._is_due = True
            self._again_in(RETRY_MS)
        else:
            self._again_in(
                min(
                    LOOK_INTERVAL_MS if self.state is State.ACTIVE else IMPATIENT_INTERVAL_MS,
                    self._interval_ms,
                )
            )

    def _heard(self, response: BrokerHeartbeatResponse, sent_ms: int) -> None:
        if response.session_timeout_ms > 0:
            self._take_session(response.session_timeout_ms)
        if response.should_shut_down and self.state is State.STOPPING:
            self._left()
            return
        if response.is_fenced:
            if self.state is State.ACTIVE:
                # The controller has given our partitions to other brokers; the image will say so.
                self._logger.warning("fenced by the controller")
                self.state = State.FENCED
            return
        self._lease_ends_ms = sent_ms + self._lease_ms
        if self.state is State.FENCED:
            self.state = State.ACTIVE
            on_active, self._on_active = self._on_active, None
            if on_active is not None:
                on_active()

    def _has_waited_enough(self) -> bool:
        now_ms = self._environment.clock.now_ms()
        return (
            now_ms - self._leaving_since_ms > LEAVING_TIMEOUT_MS
            or now_ms - self._last_heard_ms > LEAVING_UNHEARD_MS
        )

    def _left(self) -> None:
        self.close()
        then, self._on_left = self._on_left, None
        if then is not None:
            # At once: a client that asks in between would be told that the partition has no leader.
            then()

    def check(self) -> None:
        assert self.state is not State.ACTIVE or self.epoch >= 0


def registered_text(endpoints: Iterable[Endpoint], rack: str | None, directory_ids: Iterable[bytes]) -> str:
    """What a broker registers, as text.

    It is stored, and the next process compares it with its own, also after an upgrade. So it must not depend on the
    types of the values.
    """
    plain = [endpoint._replace(security_protocol=int(endpoint.security_protocol)) for endpoint in endpoints]
    return repr((plain, rack, [id.hex() for id in directory_ids]))


def _flushed_topics(keys: list[tuple[TopicId, int]]) -> list[FlushedTopic]:
    topics: dict[bytes, list[int]] = {}
    for topic_id, index in keys:
        topics.setdefault(topic_id, []).append(index)
    return [FlushedTopic(topic_id=topic_id, partitions=partitions) for topic_id, partitions in topics.items()]
