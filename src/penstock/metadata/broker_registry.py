"""Brokers as the controller sees them: registration, heartbeats, sessions, fencing.

::

    unknown --BrokerRegistration--> fenced --heartbeat that has seen the registration--> active
    active --session over, connection lost, want_fence--> fenced
    active --want_shut_down--> shutting down --leads nothing that could move--> fenced, may stop
    any --BrokerRegistration by a new incarnation--> fenced      any --UnregisterBroker--> unknown

A broker that leaves the active state leaves the ISRs, and its leaderships move on. A broker that becomes active
gets the leaderships that waited for it. That may be tens of thousands of changes, so it is done in portions: the
first portion fences the broker, ``to_evict`` remembers that there is more to do, and the broker does not become
active before all of it is done.

Sessions are not in the log. A new controller does not know which brokers are alive: it gives every broker a whole
session, and lets a new incarnation replace one that it has not heard from itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from penstock.metadata.decided_state import CHANGES_MAX, PORTION, DecidedState
from penstock.metadata.elections import Election
from penstock.metadata.features import are_valid, raise_levels, ranges_of, unsupported_level
from penstock.metadata.isr import outdated_eligible, placed_in
from penstock.metadata.partition_index import Key
from penstock.metadata.refusal import Refusal
from penstock.metadata.topic_settings import MIN_ISR
from penstock.metadata.values import (
    BROKER_RESOURCE,
    NO_LEADER,
    SESSION,
    UNASSIGNED_DIRECTORY,
    BrokerImage,
    ConfigResource,
    Endpoint,
    FeatureRange,
    PartitionImage,
    TopicImage,
    config_record,
    newcomer_record,
    registration_record,
)
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import TIME_UNKNOWN
from penstock.protocol.messages.brokers import (
    BrokerHeartbeatRequest,
    BrokerHeartbeatResponse,
    BrokerRegistrationRequest,
    BrokerRegistrationResponse,
    NodeClock,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)
from penstock.protocol.messages.metadata_records import (
    BrokerRegistrationChangeRecord,
    PartitionChangeRecord,
    UnregisterBrokerRecord,
)

# From this many brokers on, min.insync.replicas has another default (see the departures from Kafka in the docs).
CLUSTER_BROKERS = 3
CLUSTER_MIN_ISR = "2"
ENDPOINTS_MAX = 16
DIRECTORIES_MAX = 1000
TEXT_MAX = 1000

# The session of brokers of older releases; they do not report it if they were started with another one. Also the
# session of a controller that has recorded none.
SESSION_DEFAULT_MS = 9_000

# How long a controller that is cut off may still act after another was elected.
OVERLAP_MS = 1_000


class Session:
    __slots__ = ("clock_offset_ms", "deadline_ms", "is_heard", "ms", "steady_ms")

    def __init__(self, now_ms: int, ms: int, is_heard: bool) -> None:
        self.ms = ms
        self.deadline_ms = now_ms + ms
        # From the last heartbeat: the broker's wall clock minus the controller's monotonic clock (which is never
        # set), and for how long that wall clock has not jumped.
        self.clock_offset_ms: int | None = None
        self.steady_ms = TIME_UNKNOWN
        # Whether this controller has had a heartbeat from the broker, or only assumes that it is alive.
        self.is_heard = is_heard


class BrokerRegistry:
    def __init__(self, decided: DecidedState) -> None:
        self._decided = decided
        self._session_ms: int = decided.setting("broker.session.timeout.ms")
        self.sessions: dict[BrokerId, Session] = {}
        # The time from which no broker holds a lease from an earlier controller.
        self._leases_end_ms = 0
        # When this controller learned that a broker is fenced. Fenced brokers only.
        self.fenced_since_ms: dict[BrokerId, int] = {}
        # When the last broker became active or was registered.
        self.joined_ms = 0
        # Fenced brokers, and brokers that lost a directory, which may still be in ISRs they must leave. True:
        # leave partitions unchanged whose only replica they are. No other broker could take them, and a restart
        # would otherwise cost two changes for each.
        self.to_evict: dict[BrokerId, bool] = {}
        # Brokers that want to stop and still have leaderships to hand over.
        self.to_hand_over: dict[BrokerId, None] = {}
        # For brokers that registered and have sent no heartbeat since: the epoch they had before, if they had
        # lost nothing. A broker that dies before it has stored its new epoch comes back with that one.
        self._epochs_before: dict[BrokerId, int] = {}
        # Whether a leaderless partition may now get a leader.
        self.has_to_elect = False
        # Whether min.insync.replicas may have changed since the eligible leaders were determined.
        self.has_to_review = False

    def took_over(self, now_ms: int) -> None:
        """Start from the log: brokers that are not fenced are assumed to be alive."""
        self.sessions.clear()
        self.fenced_since_ms.clear()
        self._epochs_before.clear()
        self.to_hand_over.clear()
        self._decided.full.clear()
        self.joined_ms = now_ms
        first_ms = self._first_session_ms
        self._leases_end_ms = now_ms + first_ms
        for broker in self._decided.image.brokers.values():
            if broker.fenced:
                self.fenced_since_ms[broker.id] = now_ms
                # Finish what another controller may have begun.
                self.to_evict[broker.id] = True
            else:
                self.sessions[broker.id] = Session(now_ms, first_ms, is_heard=False)
        self.has_to_elect = True
        # The previous controller may have been started with other settings.
        self.has_to_review = True

    @property
    def _first_session_ms(self) -> int:
        """How long a new controller waits for a broker that it has not heard from.

        As long as the previous controller's promises may last: the lease of two thirds of a session (its session,
        not ours), plus the time in which both believed to be the controller. Live brokers report at once.
        """
        longest_ms = max(self._session_ms, self._recorded_ms)
        return min(longest_ms, longest_ms * 2 // 3 + OVERLAP_MS)

    @property
    def _recorded_ms(self) -> int:
        """The longest session that brokers may hold a lease for, as the next controller will read it."""
        return self._decided.image.session_ms or SESSION_DEFAULT_MS

    def _record_session(self, now_ms: int) -> None:
        """Record our session: a longer one before any broker gets it, a shorter one when older leases are over."""
        if self._session_ms > self._recorded_ms or (
            self._session_ms < self._recorded_ms and now_ms >= self._leases_end_ms
        ):
            self._decided.take(
                [config_record(ConfigResource(BROKER_RESOURCE, ""), SESSION, str(self._session_ms))]
            )

    def renew(self, now_ms: int) -> None:
        """Give every broker a whole session again, because the controller itself was suspended."""
        for session in self.sessions.values():
            session.deadline_ms = now_ms + session.ms

    def next_deadline_ms(self, now_ms: int) -> int | None:
        if self.to_evict or self.to_hand_over or self.has_to_elect or self.has_to_review:
            return now_ms
        deadlines = [session.deadline_ms for session in self.sessions.values()]
        if self._session_ms != self._recorded_ms:
            deadlines.append(self._leases_end_ms)
        return min(deadlines, default=None)

    def tick(self, now_ms: int) -> None:
        """Fence brokers whose session is over, and continue the work that fencing has begun."""
        self._record_session(now_ms)
        for id, session in list(self.sessions.items()):
            if now_ms >= session.deadline_ms:
                self.fence(id, now_ms)
        for id in list(self.to_hand_over):
            self._hand_over(self._decided.image.brokers[id])
        self._evict_all(PORTION)
        self._elect(PORTION)
        self._review_eligible(PORTION)

    def lost(self, id: BrokerId, epoch: int, now_ms: int) -> None:
        """Fence a broker whose connection closed and whose port is closed: no need to wait for the session."""
        known = self._decided.image.brokers.get(id)
        # An older epoch means a process that has been replaced.
        if known is not None and epoch in (-1, known.epoch) and not known.fenced:
            self.fence(id, now_ms)
            self._evict_all(PORTION)
            self._elect(PORTION)

    def fence(self, id: BrokerId, now_ms: int, *, keep_single: bool = False) -> None:
        self.sessions.pop(id, None)
        self.to_hand_over.pop(id, None)
        known = self._decided.image.brokers.get(id)
        if known is None:
            return
        if not known.fenced:
            self._decided.take(
                [BrokerRegistrationChangeRecord(broker_id=id, broker_epoch=known.epoch, fenced=1)]
            )
        self.fenced_since_ms.setdefault(id, now_ms)
        self.to_evict[id] = keep_single

    def check_epoch(self, id: int, epoch: int) -> BrokerImage:
        """The sender of a request, if it is the registered broker. Raises Refusal."""
        known = self._decided.image.brokers.get(BrokerId(id))
        if known is None:
            raise Refusal(ErrorCode.BROKER_ID_NOT_REGISTERED)
        if known.epoch != epoch:
            raise Refusal(ErrorCode.STALE_BROKER_EPOCH)
        return known

    def check(self) -> None:
        brokers = self._decided.image.brokers
        for id in self.sessions:
            assert id in brokers, f"a session of broker {id}, which is not registered"
        for id in self.to_hand_over:
            assert brokers[id].in_controlled_shutdown, f"broker {id} does not want to stop"
        for id in self.fenced_since_ms:
            assert brokers[id].fenced, f"broker {id} is not fenced"

    # Registration.

    def register(
        self, request: BrokerRegistrationRequest, now_ms: int, from_host: str | None
    ) -> BrokerRegistrationResponse:
        try:
            return BrokerRegistrationResponse(broker_epoch=self._register(request, now_ms, from_host))
        except Refusal as refusal:
            return BrokerRegistrationResponse(error_code=refusal.error)

    def _register(self, request: BrokerRegistrationRequest, now_ms: int, from_host: str | None) -> int:
        decided = self._decided
        self._check_registration(request)
        id = BrokerId(request.broker_id)
        known = decided.image.brokers.get(id)
        if known is not None:
            if known.incarnation_id == request.incarnation_id:
                # A retry, most likely: the response was lost.
                self._heard(id, now_ms, self._session_ms)
                # Unless the process that asked first was of another release.
                self._amend(known, ranges_of(request.features))
                return known.epoch
            self._check_is_successor(known, request, now_ms)
        # Kafka's rule: a broker that knows the epoch of its last registration has lost nothing since.
        is_clean = known is not None and request.previous_broker_epoch in (
            known.epoch,
            self._epochs_before.get(id, known.epoch),
        )
        if is_clean:
            self._epochs_before[id] = request.previous_broker_epoch
        else:
            self._epochs_before.pop(id, None)
            self.fence(id, now_ms, keep_single=True)
            flushed = {(topic.topic_id, index) for topic in request.flushed for index in topic.partitions}
            if not self._give_up_on(
                id, PORTION, keep_single=True, directories=request.log_dirs, flushed=flushed
            ):
                # All of these changes come before the registration, so that no other controller can trust what is
                # left. The broker retries.
                raise Refusal(ErrorCode.REQUEST_TIMED_OUT)
        if known is None and decided.image.partition_count:
            decided.take([newcomer_record(id, True)])
        self._settle_min_isr(known is None)
        broker = BrokerImage(
            id,
            # The offset of the registration, as in Kafka.
            decided.image.offset + 1,
            request.incarnation_id,
            tuple(
                Endpoint(end.name, end.host or from_host or "", end.port, end.security_protocol)
                for end in request.listeners
            ),
            request.rack,
            fenced=True,
            in_controlled_shutdown=False,
            directories=tuple(request.log_dirs),
            features=ranges_of(request.features),
        )
        assert known is None or known.epoch < broker.epoch
        decided.take([registration_record(broker)])
        # The shutdown is over: this is the next process.
        self.to_hand_over.pop(id, None)
        if len(broker.directories) == 1 and (
            # If the directories are the same as before, a replica in none of them is on a disk that was missing
            # at the start and may come back.
            known is None or (len(known.directories) == 1 and known.directories != broker.directories)
        ):
            self._move_in(broker)
        self._heard(id, now_ms, self._session_ms)
        self.fenced_since_ms[id] = self.joined_ms = now_ms
        self.to_evict[id] = True
        self._evict_all(PORTION)
        raise_levels(decided)
        return broker.epoch

    def _amend(self, known: BrokerImage, features: tuple[FeatureRange, ...]) -> None:
        """Record the features of a broker whose registration has others: an older controller may have written it.

        The epoch stays the same, as in Kafka: it is the same process.
        """
        decided = self._decided
        if (
            features != known.features
            and are_valid(features)
            and unsupported_level(decided.image.features, features) is None
        ):
            decided.take([registration_record(known._replace(features=features))])
            raise_levels(decided)

    def _check_registration(self, request: BrokerRegistrationRequest) -> None:
        image = self._decided.image
        if image.cluster_id and request.cluster_id != image.cluster_id:
            raise Refusal(ErrorCode.INCONSISTENT_CLUSTER_ID)
        directories, features = request.log_dirs, ranges_of(request.features)
        others = [broker for broker in image.brokers.values() if broker.id != request.broker_id]
        if (
            request.broker_id < 0
            or not 0 < len(request.listeners) <= ENDPOINTS_MAX
            or any(len(end.host) > TEXT_MAX or len(end.name) > TEXT_MAX for end in request.listeners)
            or len(request.rack or "") > TEXT_MAX
            or len(directories) > DIRECTORIES_MAX
            or len(set(directories)) < len(directories)
            # A copied disk must not count as two replicas.
            or any(directory in broker.directories for broker in others for directory in directories)
            or not are_valid(features)
        ):
            raise Refusal(ErrorCode.INVALID_REGISTRATION)
        if unsupported_level(image.features, features) is not None:
            raise Refusal(ErrorCode.UNSUPPORTED_VERSION)

    def _check_is_successor(
        self, known: BrokerImage, request: BrokerRegistrationRequest, now_ms: int
    ) -> None:
        """Refuse a second broker with the same id while the first may be alive. Raises Refusal."""
        session = self.sessions.get(known.id)
        if session is None or not session.is_heard or now_ms >= session.deadline_ms:
            return
        # A process holds the lock of its directories. A broker that has these directories, or knows the epoch
        # stored there, must be the successor. So must one that registers from within this very process.
        if (
            request.previous_broker_epoch == known.epoch
            or any(directory in known.directories for directory in request.log_dirs)
            or known.id == self._decided.broker
        ):
            return
        raise Refusal(ErrorCode.DUPLICATE_BROKER_REGISTRATION)

    def _move_in(self, broker: BrokerImage) -> None:
        """Assign the replicas of a broker whose only directory was replaced to the new one; they start empty.

        A broker with several directories reports its replicas itself: a missing directory may soon be back.
        """
        decided = self._decided
        changes = [
            placed_in(decided, broker, topic, partition, broker.directories[0])
            for topic in decided.image.topics.values()
            for partition in topic.partitions
            if broker.id in partition.replicas and not broker.has(partition.directory(broker.id))
        ]
        decided.take([change for change in changes if change is not None])

    def _settle_min_isr(self, is_new: bool) -> None:
        """Make min.insync.replicas one setting of the whole cluster, as soon as there is more than one broker.

        The controller determines eligible leaders with it, so it must not differ between brokers.
        """
        decided = self._decided
        count = len(decided.image.brokers) + is_new
        if not is_new or count == 1 or MIN_ISR in decided.image.broker_config(None):
            return
        text = decided.static.get(MIN_ISR) or (CLUSTER_MIN_ISR if count >= CLUSTER_BROKERS else None)
        if text is not None:
            decided.take([config_record(ConfigResource(BROKER_RESOURCE, ""), MIN_ISR, text)])
            self.has_to_review = True

    # Heartbeats.

    def _filled(self, known: BrokerImage, directories: Collection[bytes]) -> None:
        """Note which directories of a broker are full, as its heartbeat reports."""
        full = self._decided.full
        told = frozenset(directories).intersection(known.directories)
        before = full.get(known.id, frozenset())
        if told:
            full[known.id] = told
        else:
            full.pop(known.id, None)
        if told != before:
            # Also brokers that were full before: another replica may be able to replace theirs now.
            for id in full:
                self.to_evict.setdefault(id, True)
        elif told:
            # It may have got new partitions since.
            self.to_evict.setdefault(known.id, True)
        if self.to_evict:
            self._evict_all(PORTION)

    def heartbeat(
        self, request: BrokerHeartbeatRequest, now_ms: int, wall_ms: int = TIME_UNKNOWN
    ) -> BrokerHeartbeatResponse:
        try:
            known = self.check_epoch(request.broker_id, request.broker_epoch)
        except Refusal as refusal:
            return BrokerHeartbeatResponse(error_code=refusal.error)
        id = known.id
        self._epochs_before.pop(id, None)
        if request.features:
            self._amend(known, ranges_of(request.features))
            known = self._decided.image.brokers[id]
        if request.offline_log_dirs:
            self._directories_failed(known, request.offline_log_dirs)
        self._filled(known, request.full_log_dirs or ())
        self._record_session(now_ms)
        session_ms = self._session_ms
        if not request.takes_session:
            session_ms = max(session_ms, SESSION_DEFAULT_MS)
        self._heard(id, now_ms, session_ms)
        if TIME_UNKNOWN not in (request.time_ms, wall_ms):
            self.sessions[id].clock_offset_ms = request.time_ms - now_ms
            self.sessions[id].steady_ms = request.steady_ms
        may_stop = False
        has_caught_up = request.current_metadata_offset >= known.epoch
        if known.fenced:
            may_stop = request.want_shut_down
            if not (request.want_shut_down or request.want_fence) and has_caught_up:
                self._unfence(known, now_ms)
        elif request.want_shut_down:
            may_stop = request.want_fence or not self._hand_over(known)
            if may_stop:
                self.fence(id, now_ms, keep_single=True)
                self._evict_all(PORTION)
        elif request.want_fence:
            self.fence(id, now_ms)
            self._evict_all(PORTION)
        self._elect(PORTION)
        return BrokerHeartbeatResponse(
            is_caught_up=has_caught_up,
            is_fenced=self._decided.image.brokers[id].fenced,
            should_shut_down=may_stop,
            controller_time_ms=wall_ms,
            clocks=self._clocks(wall_ms - now_ms),
            session_timeout_ms=self._session_ms,
        )

    def _clocks(self, offset_ms: int) -> list[NodeClock]:
        """What is known of all clocks. The brokers judge them: this controller's own clock may be the wrong one."""
        clocks = {
            id: NodeClock(node_id=id)
            if session.clock_offset_ms is None
            else NodeClock(
                node_id=id, ahead_ms=session.clock_offset_ms - offset_ms, steady_ms=session.steady_ms
            )
            for id, session in self.sessions.items()
        }
        me = self._decided.broker
        if me not in clocks or clocks[me].ahead_ms == TIME_UNKNOWN:
            clocks[me] = NodeClock(node_id=me, ahead_ms=0)
        return list(clocks.values())

    def _heard(self, id: BrokerId, now_ms: int, session_ms: int) -> None:
        before = self.sessions.get(id)
        self.sessions[id] = session = Session(now_ms, session_ms, is_heard=True)
        if before is not None:
            session.clock_offset_ms, session.steady_ms = before.clock_offset_ms, before.steady_ms
            # This response may be lost, so the promise of the previous controller holds until then.
            session.deadline_ms = max(session.deadline_ms, before.deadline_ms)

    def _unfence(self, known: BrokerImage, now_ms: int) -> None:
        self._evict_all(PORTION)
        if known.id in self.to_evict:
            return
        self._decided.take(
            [BrokerRegistrationChangeRecord(broker_id=known.id, broker_epoch=known.epoch, fenced=-1)]
        )
        self.fenced_since_ms.pop(known.id, None)
        self.joined_ms = now_ms
        self.has_to_elect = True

    def _directories_failed(self, known: BrokerImage, offline: list[bytes]) -> None:
        left = [directory for directory in known.directories if directory not in offline]
        # A broker that lost all of its directories stops by itself.
        if left and len(left) < len(known.directories):
            self._decided.take(
                [BrokerRegistrationChangeRecord(broker_id=known.id, broker_epoch=known.epoch, log_dirs=left)]
            )
        elif known.id in self.sessions and self.sessions[known.id].is_heard:
            return
        # Also at the first report of old failures: another controller may not have finished.
        self.to_evict.setdefault(known.id, True)
        self._evict_all(PORTION)

    def _hand_over(self, known: BrokerImage) -> bool:
        """Move away the leaderships and ISR memberships of a stopping broker; False when none was left to move."""
        decided = self._decided
        if not known.in_controlled_shutdown:
            decided.take(
                [
                    BrokerRegistrationChangeRecord(
                        broker_id=known.id, broker_epoch=known.epoch, in_controlled_shutdown=1
                    )
                ]
            )
        changes: list[PartitionChangeRecord] = []
        for topic, partition in self._leaderships_first(known.id):
            if len(partition.isr) == 1 and not partition.eligible_leader_replicas:
                continue
            revision = decided.revision(topic, partition)
            revision.election = Election.IF_NEEDED
            revision.leave_isr(known.id)
            change = revision.change()
            # Where no replica could replace it, it leads until it stops.
            if change is not None and revision.isr and change.leader != NO_LEADER:
                changes.append(change)
                if len(changes) == PORTION:
                    self.to_hand_over[known.id] = None
                    break
        else:
            self.to_hand_over.pop(known.id, None)
        decided.take(changes)
        return bool(changes)

    def unregister(self, request: UnregisterBrokerRequest, now_ms: int) -> UnregisterBrokerResponse:
        decided = self._decided
        id = BrokerId(request.broker_id)
        known = decided.image.brokers.get(id)
        if known is None:
            return UnregisterBrokerResponse(
                error_code=ErrorCode.BROKER_ID_NOT_REGISTERED, error_message=f"There is no broker {id}."
            )
        self.fence(id, now_ms)
        if not self._give_up_on(id, CHANGES_MAX, keep_single=False):
            return UnregisterBrokerResponse(
                error_code=ErrorCode.REQUEST_TIMED_OUT,
                error_message="The broker is in the ISR of too many partitions to remove it at once: try again.",
            )
        decided.take([UnregisterBrokerRecord(broker_id=id, broker_epoch=known.epoch)])
        self.sessions.pop(id, None)
        self.fenced_since_ms.pop(id, None)
        self.to_evict.pop(id, None)
        decided.full.pop(id, None)
        self._elect(PORTION)
        # It may have been the last one of an older release.
        raise_levels(decided)
        return UnregisterBrokerResponse(error_message=None)

    # Moving partitions.

    def _evict_all(self, changes_max: int) -> None:
        for id, keep_single in list(self.to_evict.items()):
            made = self._evict(id, keep_single, changes_max)
            changes_max -= made
            if changes_max <= 0:
                return
            del self.to_evict[id]
            # An eligible replica may lead where the ISR became empty before that replica was known to be alive.
            self.has_to_elect = True

    def _evict(self, id: BrokerId, keep_single: bool, changes_max: int) -> int:
        """Remove a broker from the ISRs it must not be in; returns the number of changes."""
        decided = self._decided
        broker = decided.image.brokers.get(id)
        changes: list[PartitionChangeRecord] = []
        for topic, partition in self._leaderships_first(id):
            has_directory = broker is not None and broker.has(partition.directory(id))
            if broker is not None and not broker.fenced and has_directory:
                if not decided.is_full(broker, partition.directory(id)):
                    continue
                # The last member stays, and continues to serve what it has.
                if len(partition.isr) == 1 and not partition.eligible_leader_replicas:
                    continue
                change = decided.revision(topic, partition).change()
                if change is not None:
                    changes.append(change)
                    if len(changes) >= changes_max:
                        decided.take(changes)
                        return len(changes)
                continue
            if keep_single and has_directory and partition.replicas == (id,):
                continue
            revision = decided.revision(topic, partition)
            revision.leave_isr(id)
            change = revision.change()
            assert change is not None
            changes.append(change)
            if len(changes) >= changes_max:
                decided.take(changes)
                return len(changes)
        decided.take(changes)
        return len(changes)

    def _leaderships_first(self, id: BrokerId) -> Iterator[tuple[TopicImage, PartitionImage]]:
        """The partitions whose ISR a broker is in; first those that it leads, because their clients are waiting."""
        decided = self._decided
        keys = decided.partition_index.in_isr.get(id, {})
        for is_led in (True, False) if decided.partition_index.led.get(id) else (False,):
            for key in keys:
                topic, partition = decided.find(key)
                if (partition.leader == id) == is_led:
                    yield topic, partition

    def _give_up_on(
        self,
        id: BrokerId,
        changes_max: int,
        *,
        keep_single: bool,
        directories: Collection[bytes] = (),
        flushed: Collection[tuple[bytes, int]] = (),
    ) -> bool:
        """Stop counting on the replicas of a broker that lost records; False when there is more to do.

        What it lost are writes that were not on its disk. A partition that it reports as flushed has lost nothing
        that the broker confirmed, as long as the directory is still there. Settings do not tell: the broker may
        have had others, and a topic may have been switched after its records were acknowledged.

        A replica without a directory has no records yet, because its directory is reported before the first
        record. It too is kept if it is reported as flushed and no directory of the broker is gone.
        """
        decided = self._decided
        known = decided.image.brokers.get(id)
        before = () if known is None else known.directories
        if before and all([directory in directories for directory in before]):
            directories = (*directories, UNASSIGNED_DIRECTORY)
        changes: list[PartitionChangeRecord] = []
        single: list[PartitionChangeRecord] = []
        for (topic_id, index), partition in self._resting_on(id):
            if keep_single and partition.replicas == (id,) and partition.leader == id:
                # There is no other copy. The new epoch tells clients about the loss (KIP-320).
                single.append(PartitionChangeRecord(partition_id=index, topic_id=topic_id, leader=id))
                continue
            topic = decided.image.topics_by_id[topic_id]
            if partition.directory(id) in directories and (topic_id, index) in flushed:
                continue
            if len(changes) >= changes_max:
                decided.take(changes)
                return False
            revision = decided.revision(topic, partition)
            revision.lose(id)
            change = revision.change()
            assert change is not None
            changes.append(change)
        # At the very end and all at once, because the image does not show for which partitions it was done.
        decided.take(changes + single)
        return True

    def _resting_on(self, id: BrokerId) -> list[tuple[Key, PartitionImage]]:
        # Looks at every partition, but only when a broker lost data.
        return [
            ((topic.id, partition.index), partition)
            for topic in self._decided.image.topics.values()
            for partition in topic.partitions
            if id in partition.isr or id in partition.eligible_leader_replicas
        ]

    def _review_eligible(self, changes_max: int) -> None:
        """Clear eligible leaders where the ISR is large enough: until then, those partitions commit nothing."""
        if not self.has_to_review:
            return
        changes = outdated_eligible(self._decided, self._decided.image.topics.values(), changes_max)
        self.has_to_review = len(changes) >= changes_max
        self._decided.take(changes)

    def _elect(self, changes_max: int) -> None:
        """Elect leaders for leaderless partitions, if there may be candidates now."""
        if not self.has_to_elect:
            return
        decided = self._decided
        changes: list[PartitionChangeRecord] = []
        for key in decided.partition_index.leaderless:
            topic, partition = decided.find(key)
            change = decided.revision(topic, partition).change()
            if change is not None:
                changes.append(change)
                if len(changes) >= changes_max:
                    break
        else:
            self.has_to_elect = False
        decided.take(changes)
