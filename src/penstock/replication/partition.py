"""One replica of one partition: its role, the in-sync replicas, and the high watermark.

The core of both roles; the shell owns the log. A leader tracks its followers by their fetch offsets, advances the
high watermark and proposes changes of the in-sync replicas (ISR) to the controller. A follower learns the high
watermark from its leader.

    assign (newer)      any role -> leader, follower or neither; a stale assignment is refused
    appended            leader: the end of its own log; in flushed mode, of the part that is on disk
    fetched_by          leader: a follower has everything below its fetch offset
    proposal, answered  leader: at most one in flight
    learned, truncated, started_over    follower

A leader's high watermark is the smallest end offset in the *maximal* ISR: the committed ISR plus every replica
that may have been added by a proposal whose outcome is unknown. An addition counts as soon as it is sent, because
it may be committed long before we learn of it; a removal counts only once it is committed, because it may never
be. The high watermark does not move while fewer than ``min_isr`` replicas are in sync (KIP-966), nor while there
are eligible leader replicas: they may be elected because they have everything below it. The second rule does not
follow from the first: ``min_isr`` is the newest setting we know, but the controller chose the eligible replicas
by the settings it had then, and they come with the partition epoch.

Careful: no answer is not a refusal. A proposal may be committed as long as its partition epoch is current, so the
replicas it would add keep counting until that epoch changes. If nothing else changes it, the leader proposes the
ISR that is already committed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from penstock.protocol.errors import ErrorCode
from penstock.replication.events import NO_EPOCH, NO_LEADER, Assignment, IsrProposal

UNKNOWN_OFFSET = -1
UNKNOWN_BROKER_EPOCH = -1

# The controller's state is ahead of ours: the next metadata image will bring the change.
_OURS_IS_OLD = frozenset(
    (
        ErrorCode.INVALID_UPDATE_VERSION,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.NEW_LEADER_ELECTED,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_REQUEST,
    )
)


class Truncation(Enum):
    """Whether a follower may drop its records from an offset on."""

    FINE = "fine"
    # Below the high watermark, after a possibly unclean election: committed records are lost, as the operator
    # allowed.
    UNCLEAN = "unclean"
    # Below the high watermark after a clean election. Such a leader has everything below it, so this is a bug.
    REFUSED = "refused"


class _Follower:
    """What a leader knows about a follower, from the follower's fetches in this epoch."""

    __slots__ = (
        "broker",
        "broker_epoch",
        "caught_up_ms",
        "end_offset",
        "fetched_ms",
        "is_at_end",
        "is_in_isr",
        "leader_end",
        "log_start_offset",
    )

    def __init__(self, broker: int, is_in_isr: bool, now_ms: int) -> None:
        self.broker = broker
        self.is_in_isr = is_in_isr
        self.broker_epoch = UNKNOWN_BROKER_EPOCH
        # Exclusive: it has everything below.
        self.end_offset = UNKNOWN_OFFSET
        # It has deleted everything below.
        self.log_start_offset = UNKNOWN_OFFSET
        # When it was last caught up with our log end.
        self.caught_up_ms = now_ms
        # It was caught up at its last fetch. If it is behind now, it fell behind after that.
        self.is_at_end = False
        # The time of its last fetch, and our log end then.
        self.fetched_ms = now_ms
        self.leader_end = UNKNOWN_OFFSET


class Partition:
    __slots__ = (
        "_counting",
        "_followers",
        "_in_flight",
        "_is_silent",
        "_live",
        "_may_commit",
        "_min_isr",
        "_own_end",
        "_own_start",
        "_proven",
        "_replicated_before",
        "_unresolved",
        "_wait_until_ms",
        "_was_recovering",
        "elr",
        "epoch_start_offset",
        "has_enough",
        "high_watermark",
        "is_leader",
        "is_recovering",
        "isr",
        "lag_max_ms",
        "leader",
        "leader_epoch",
        "maximal_isr",
        "me",
        "partition_epoch",
        "replicas",
        "wants_proposal",
    )

    def __init__(
        self,
        me: int,
        *,
        live: Callable[[int], int | None],
        lag_max_ms: int,
        min_isr: int,
        high_watermark: int = 0,
        is_silent: Callable[[int, int, int], bool] = lambda broker, since_ms, now_ms: False,
    ) -> None:
        """``live(broker)`` is its current broker epoch if it is registered, unfenced and not shutting down.

        ``is_silent(broker, since_ms, now_ms)``: it has not fetched at all for too long (``FollowerActivity``).

        ``high_watermark`` comes from a checkpoint and is only a hint: no truncation is refused because of it.
        """
        self.me = me
        self.lag_max_ms = lag_max_ms
        self._live = live
        self._is_silent = is_silent
        self._min_isr = min_isr
        # Exclusive.
        self.high_watermark = high_watermark
        # The high watermark that this process has itself observed. Never above ``high_watermark``.
        self._proven = 0

        # Follower: as ``replicated_before``, from the leader, in this partition epoch.
        self._replicated_before = 0

        # From the assignment.
        self.leader = NO_LEADER
        self.leader_epoch = NO_EPOCH
        self.partition_epoch = NO_EPOCH
        self.replicas: tuple[int, ...] = ()
        self.isr: tuple[int, ...] = ()
        self.elr: tuple[int, ...] = ()
        self.is_recovering = False
        # There was or may have been an unclean leader, and our log does not yet agree with the current leader's.
        self._was_recovering = False

        # Only while we lead.
        self.is_leader = False
        # Our log end when we were elected.
        self.epoch_start_offset = 0
        self._own_end = 0
        self._own_start = UNKNOWN_OFFSET
        self._followers: dict[int, _Follower] = {}
        self._in_flight: IsrProposal | None = None
        # Replicas that proposals without a successful answer may still add, while the partition epoch is unchanged.
        self._unresolved: dict[int, None] = {}
        # Propose nothing before this time: an image with newer state is on its way.
        self._wait_until_ms = 0
        # The committed ISR and the replicas that may have been added to it.
        self.maximal_isr: tuple[int, ...] = ()
        # Whether at least ``min_isr`` replicas are in sync. Up to date only while we lead.
        self.has_enough = False
        # ``has_enough``, and there are no eligible leader replicas, which would lack what we commit now.
        self._may_commit = False
        # The followers in ``maximal_isr``: the high watermark waits for them.
        self._counting: list[_Follower] = []
        # Whether the shell should call ``proposal`` before the next regular check for laggards.
        self.wants_proposal = False

    def __repr__(self) -> str:
        role = "leader" if self.is_leader else f"follower of {self.leader}"
        return (
            f"<{role} {self.me} epoch={self.leader_epoch}/{self.partition_epoch} isr={self.isr}"
            f" hw={self.high_watermark}>"
        )

    # State

    @property
    def has_established(self) -> bool:
        """Whether a leader's high watermark has reached ``epoch_start_offset``, and so covers its predecessors'."""
        return self.is_leader and self.high_watermark >= self.epoch_start_offset

    @property
    def min_isr(self) -> int:
        """How many replicas must be in sync; never more than there are replicas."""
        return min(self._min_isr, len(self.replicas) or 1)

    @min_isr.setter
    def min_isr(self, value: int) -> None:
        self._min_isr = value
        if self.is_leader:
            self._count()

    @property
    def proposal_in_flight(self) -> IsrProposal | None:
        return self._in_flight

    @property
    def is_settled(self) -> bool:
        """Whether no follower can fall out of sync before the next append. One that returns will fetch."""
        if not self.is_leader:
            return True
        if self._in_flight is not None or self._unresolved:
            return False
        end_offset = self._own_end
        return all(follower.end_offset >= end_offset for follower in self._counting)

    def has(self, replica: int, offset: int) -> bool:
        """Whether, as the leader knows, a consumer at this offset can continue at this follower."""
        follower = self._followers.get(replica)
        return follower is not None and 0 <= follower.log_start_offset <= offset <= follower.end_offset

    @property
    def replicated_before(self) -> int:
        """Exclusive: every assigned replica has had everything below, whether it is in sync or not.

        Tombstones below may be compacted away: no replica that comes back has only the values before them.
        """
        if not self.is_leader:
            return self._replicated_before
        offset = self._own_end
        for follower in self._followers.values():
            offset = min(offset, follower.end_offset)
        return max(0, offset)

    def have_deleted_before(self, offset: int) -> bool:
        """Whether, as the leader knows, all replicas that may lead next have deleted all below ``offset``."""
        eligible = [self._followers.get(broker) for broker in self.elr]
        return all(
            follower is not None and follower.log_start_offset >= offset
            for follower in (*self._counting, *eligible)
        )

    def broker_epoch_of(self, broker: int) -> int:
        """The broker epoch with which a replica last fetched; -1 when it has not. Our own current one for us."""
        if broker != self.me:
            return self._followers[broker].broker_epoch
        epoch = self._live(broker)
        return UNKNOWN_BROKER_EPOCH if epoch is None else epoch

    def may_truncate(self, offset: int) -> Truncation:
        """Whether records from ``offset`` on may be dropped. Call it before, and ``truncated`` afterwards."""
        if offset >= self._proven:
            return Truncation.FINE
        return Truncation.UNCLEAN if self._was_recovering else Truncation.REFUSED

    # Both roles

    def assign(
        self, assignment: Assignment, *, end_offset: int, now_ms: int, counted_end: int | None = None
    ) -> bool:
        """Apply an assignment from the metadata; False when ours is newer.

        ``end_offset`` is where our log ends. ``counted_end`` is the part of it that counts if that is less: in
        flushed mode, the part that is on disk.
        """
        if assignment.leader_epoch < self.leader_epoch:
            return False
        is_new_epoch = assignment.leader_epoch > self.leader_epoch
        if not is_new_epoch and assignment.partition_epoch < self.partition_epoch:
            return False
        if is_new_epoch:
            # Changes in one metadata image arrive as one. An unclean election and the end of its recovery may be
            # among those that we have not seen.
            has_missed_some = NO_EPOCH < self.partition_epoch < assignment.partition_epoch - 1
            self._was_recovering = self._was_recovering or has_missed_some
            self._change_role(assignment, end_offset, counted_end, now_ms)
        assert assignment.leader == self.leader, "two leaders in one epoch"
        is_newer = assignment.partition_epoch > self.partition_epoch
        if is_newer:
            # There may be another replica now.
            self._replicated_before = 0
        self.partition_epoch = assignment.partition_epoch
        self.replicas = assignment.replicas
        self.elr = assignment.elr
        self.is_recovering = assignment.is_recovering
        self._was_recovering = self._was_recovering or assignment.is_recovering
        if self.is_leader:
            # The answer to a proposal holds less than the image, which may also complete a reassignment.
            self._take_members(assignment, is_newer or assignment.isr != self.isr, now_ms)
        else:
            self.isr = self.maximal_isr = assignment.isr
        return True

    def _change_role(
        self, assignment: Assignment, end_offset: int, counted_end: int | None, now_ms: int
    ) -> None:
        self.leader = assignment.leader
        self.leader_epoch = assignment.leader_epoch
        self.partition_epoch = NO_EPOCH
        self.is_leader = assignment.leader == self.me
        self._followers = {}
        self._counting = []
        self._in_flight = None
        self._unresolved = {}
        self._wait_until_ms = 0
        self.wants_proposal = False
        self.high_watermark = min(self.high_watermark, end_offset)
        if self.is_leader:
            self.isr = ()
            self.epoch_start_offset = end_offset
            self._own_end = end_offset if counted_end is None else counted_end
            # In flushed mode the high watermark may be above the part of our log that is on disk.
            self._own_end = max(self._own_end, self.high_watermark)

    def _take_members(self, assignment: Assignment, is_newer: bool, now_ms: int) -> None:
        """Leader: apply the assigned replicas and ISR."""
        followers = self._followers
        everyone = dict.fromkeys((*assignment.replicas, *assignment.isr))
        for broker in everyone:
            if broker != self.me and broker not in followers:
                followers[broker] = _Follower(broker, broker in assignment.isr, now_ms)
        for broker in [broker for broker in followers if broker not in everyone]:
            del followers[broker]
        if is_newer:
            for follower in followers.values():
                is_in_isr = follower.broker in assignment.isr
                if follower.is_in_isr and not is_in_isr:
                    # It was removed for a reason: only fetches from now on can bring it back.
                    follower.end_offset = UNKNOWN_OFFSET
                    follower.is_at_end = False
                elif is_in_isr and not follower.is_in_isr:
                    follower.caught_up_ms = max(follower.caught_up_ms, now_ms)
                follower.is_in_isr = is_in_isr
            self.isr = assignment.isr
            # Proposals sent with an older partition epoch can no longer be committed.
            self._in_flight = None
            self._unresolved = {}
            self._wait_until_ms = 0
            # Followers that never fetch must be noticed even if there are no appends.
            self.wants_proposal = len(assignment.replicas) > 1
        self._count()

    # The leader

    def appended(self, end_offset: int) -> None:
        """Our own log counts up to ``end_offset``: what is written, or in flushed mode what is on disk."""
        self._own_end = end_offset
        self._advance()

    def fetched_by(
        self,
        replica: int,
        broker_epoch: int,
        offset: int,
        end_offset: int,
        now_ms: int,
        *,
        log_start_offset: int = UNKNOWN_OFFSET,
    ) -> ErrorCode:
        """A follower fetches from ``offset``, so it has everything below; our own log ends at ``end_offset``.

        Only for a fetch in our leader epoch whose log does not diverge from ours: the caller has compared the
        epochs first. A fetch that is answered with a diverging epoch does not count.

        A replica that is not assigned gets UNKNOWN_LEADER_EPOCH, as in Kafka: it or we have not learned of the
        reassignment yet, and after this error it tries again.
        """
        if not self.is_leader:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        follower = self._followers.get(replica)
        if follower is None:
            return ErrorCode.UNKNOWN_LEADER_EPOCH
        if broker_epoch != follower.broker_epoch:
            # Once a restarted broker has fetched, the fetches of its earlier epochs no longer count: it may have
            # lost records in a power loss (KIP-903).
            live_epoch = self._live(replica)
            if broker_epoch < follower.broker_epoch or (live_epoch is not None and broker_epoch < live_epoch):
                return ErrorCode.STALE_BROKER_EPOCH
            follower.broker_epoch = broker_epoch
            follower.is_at_end = False
            follower.leader_end = UNKNOWN_OFFSET
        if offset >= end_offset:
            follower.caught_up_ms = now_ms
            follower.is_at_end = True
        else:
            if follower.leader_end != UNKNOWN_OFFSET and offset >= follower.leader_end:
                # It has everything we had at its previous fetch: on a busy leader it never reaches the end itself.
                follower.caught_up_ms = max(follower.caught_up_ms, follower.fetched_ms)
            follower.is_at_end = False
        follower.fetched_ms = now_ms
        follower.leader_end = end_offset
        follower.end_offset = offset
        follower.log_start_offset = log_start_offset
        if not follower.is_in_isr and self._may_join(follower):
            self.wants_proposal = True
        self._advance()
        return ErrorCode.NONE

    def begins_at(self, offset: int) -> None:
        """Our own log begins at ``offset`` now: everything below was deleted."""
        self._own_start = offset

    def proposal(self, now_ms: int) -> IsrProposal | None:
        """The ISR change to send now, if any. It is in flight until ``answered``."""
        self.wants_proposal = False
        if not self.is_leader or self._in_flight is not None or now_ms < self._wait_until_ms:
            return None
        members = [broker for broker in self.isr if broker == self.me or not self._lags(broker, now_ms)]
        joiners = []
        for broker in self.replicas:
            if broker != self.me and broker not in self.isr and self._may_join(self._followers[broker]):
                joiners.append(broker)
        if not joiners and len(members) == len(self.isr) and not self._unresolved:
            return None
        proposal = IsrProposal(
            self.leader_epoch,
            self.partition_epoch,
            tuple([(broker, self.broker_epoch_of(broker)) for broker in (*members, *joiners)]),
        )
        self._in_flight = proposal
        if joiners:
            self._count()
        return proposal

    def answered(
        self, proposal: IsrProposal, error: int | None, assignment: Assignment | None, now_ms: int
    ) -> None:
        """The outcome of a proposal; ``error`` is None without an answer. NONE comes with the new assignment."""
        if proposal is not self._in_flight:
            # The image arrived first.
            return
        self._in_flight = None
        if error == ErrorCode.NONE:
            assert assignment is not None, "a committed proposal has a result"
            if assignment.leader_epoch == self.leader_epoch:
                if assignment.partition_epoch > self.partition_epoch:
                    self.assign(assignment, end_offset=self._own_end, now_ms=now_ms)
                else:
                    # We proposed the committed ISR, and the controller did not write a record for it.
                    self._unresolved = {}
                    self._count()
                return
        for broker, _ in proposal.isr:
            if broker not in self.isr and broker in self._followers:
                self._unresolved[broker] = None
                if error == ErrorCode.INELIGIBLE_REPLICA:
                    # Propose it again only after its next fetch.
                    self._followers[broker].end_offset = UNKNOWN_OFFSET
        if error in _OURS_IS_OLD:
            # Wait with a limit: the controller's newer state may be lost with the controller.
            self._wait_until_ms = now_ms + self.lag_max_ms
        self.wants_proposal = True
        self._count()

    # The follower

    def learned(self, high_watermark: int, end_offset: int) -> None:
        """Take the high watermark from the leader's fetch response; our own log ends at ``end_offset``."""
        assert not self.is_leader, "a leader computes its own high watermark"
        self.high_watermark = max(self.high_watermark, min(high_watermark, end_offset))
        self._proven = max(self._proven, self.high_watermark)
        self._was_recovering = self.is_recovering

    def learned_replicated(self, offset: int, partition_epoch: int) -> None:
        """The leader says that in this partition epoch all assigned replicas have everything below the offset."""
        if partition_epoch == self.partition_epoch:
            self._replicated_before = offset

    def truncated(self, end_offset: int) -> None:
        """Our log has been truncated to ``end_offset``."""
        assert not self.is_leader, "a leader never truncates"
        self.high_watermark = min(self.high_watermark, end_offset)
        self._proven = min(self._proven, end_offset)

    def started_over(self, offset: int) -> None:
        """Our log begins and ends at ``offset`` now. The leader deleted what is below, so that was committed."""
        assert not self.is_leader, "a leader never starts over"
        self.high_watermark = self._proven = offset

    # Rules

    def _may_join(self, follower: _Follower) -> bool:
        """Whether a follower may join the ISR: it has everything committed, also by earlier leaders; it has no
        deleted records, which would be back if it led; and its broker epoch is current.
        """
        return (
            follower.end_offset >= self.high_watermark
            and follower.end_offset >= self.epoch_start_offset
            and follower.log_start_offset >= self._own_start
            and follower.broker_epoch != UNKNOWN_BROKER_EPOCH
            and self._live(follower.broker) == follower.broker_epoch
        )

    def _lags(self, broker: int, now_ms: int) -> bool:
        follower = self._followers[broker]
        if follower.end_offset >= self._own_end:
            return False
        if self._is_silent(broker, follower.fetched_ms, now_ms):
            return True
        if follower.is_at_end:
            # Fetches do not list a quiet partition, so it is behind only since a recent append: count from now.
            follower.is_at_end = False
            follower.caught_up_ms = now_ms
        return now_ms - follower.caught_up_ms > self.lag_max_ms

    def _count(self) -> None:
        """Recompute ``maximal_isr`` and which followers the high watermark waits for."""
        members = dict.fromkeys(self.isr)
        if self._in_flight is not None:
            for broker, _ in self._in_flight.isr:
                members[broker] = None
        members.update(self._unresolved)
        followers = self._followers
        if not members.keys() <= {self.me, *followers}:
            # The answer to the previous proposal did not include the completion of a reassignment. The controller
            # will not accept the replicas that it removed.
            members = {broker: None for broker in members if broker == self.me or broker in followers}
        self.maximal_isr = tuple(members)
        self._counting = [followers[broker] for broker in members if broker != self.me]
        self.has_enough = len(self.isr) >= self.min_isr
        self._may_commit = self.has_enough and not self.elr
        self._advance()

    def _advance(self) -> None:
        if not self._may_commit:
            return
        high_watermark = self._own_end
        for follower in self._counting:
            if follower.end_offset < high_watermark:  # noqa: PLR1730 - at every append and fetch
                high_watermark = follower.end_offset
        if high_watermark > self.high_watermark:
            self.high_watermark = self._proven = high_watermark

    def check(self) -> None:
        assert 0 <= self._proven <= self.high_watermark
        assert self.is_leader == (self.leader == self.me and self.leader_epoch != NO_EPOCH)
        if not self.is_leader:
            assert not self._followers
            assert self._in_flight is None
            assert not self._unresolved
            return
        assert self.me in self.isr, "a leader is in sync with itself"
        assert self.high_watermark <= self._own_end
        assert sorted([*self._followers, self.me]) == sorted({*self.replicas, *self.isr})
        assert self.has_enough == (len(self.isr) >= self.min_isr)
        assert self._may_commit == (self.has_enough and not self.elr)
        assert self.maximal_isr[: len(self.isr)] == self.isr
        for follower in self._followers.values():
            assert follower.is_in_isr == (follower.broker in self.isr)
        if self._in_flight is not None:
            assert self._in_flight.leader_epoch == self.leader_epoch
            assert self._in_flight.partition_epoch == self.partition_epoch
            members = [broker for broker, _ in self._in_flight.isr]
            assert self.me in members
            assert all(broker in self.maximal_isr for broker in members if broker in self._followers)
        assert all(broker in self.maximal_isr for broker in self._unresolved if broker in self._followers)
        assert [follower.broker for follower in self._counting] == [
            broker for broker in self.maximal_isr if broker != self.me
        ]
