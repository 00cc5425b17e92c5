"""One replica of one partition: its role, who is in sync, and how far the log is committed.

The core of both roles; the log itself is the shell's. A leader counts what its followers have by the offsets
they fetch from, moves the high watermark and proposes changes of the in-sync replicas (ISR) to the controller.
A follower learns the high watermark from its leader.

    assign (newer)      any role -> leader, follower or neither; a stale assignment is refused
    appended            leader: its own end that counts; in flushed mode what is on the disk
    fetched_by          leader: a follower has everything below its fetch offset
    proposal, answered  leader: at most one in flight
    learned, truncated, started_over    follower

The high watermark of a leader is the least end offset of the *maximal* ISR: the committed one, and everyone
who may have been added to it by a proposal whose fate is not known. An addition counts as soon as it is sent,
because it may be committed long before we hear of it; a removal only once it is committed, because it may
never be. While fewer than ``min_isr`` are in sync it stands still (KIP-966), and so it does while there are
eligible leader replicas: they may be elected because they have everything below it. The second is not the first
said twice. ``min_isr`` is what the settings say as far as we have heard; who is eligible the controller decided
by the settings of its own time, and it comes with the partition epoch.

What a newcomer gets wrong: no answer is not a refusal. What was sent under a partition epoch may be committed
as long as that epoch stands, so the members it would add keep counting until the epoch has moved on. If
nothing else moves it, the leader proposes the ISR that is committed already.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from penstock.protocol.errors import ErrorCode
from penstock.replication.events import NO_EPOCH, NO_LEADER, Assignment, IsrProposal

UNKNOWN_OFFSET = -1
UNKNOWN_BROKER_EPOCH = -1

# The controller answered from a state that is ahead of ours: what it knows will come with the image.
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
    """Whether a follower may give up its records from an offset on."""

    FINE = "fine"
    # Below the high watermark, after what may have been an unclean election: committed records are lost, as was
    # asked for.
    UNCLEAN = "unclean"
    # Below the high watermark without one. A clean leader has everything below it: somebody has erred.
    REFUSED = "refused"


class _Follower:
    """What a leader knows of another replica, all of it from the replica's own fetches in this epoch."""

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
        # It has everything below.
        self.end_offset = UNKNOWN_OFFSET
        # Where its log begins: what lies before, it has deleted.
        self.log_start_offset = UNKNOWN_OFFSET
        # When it last had all there was.
        self.caught_up_ms = now_ms
        # It had all there was at its last fetch, so it fell behind, if it did, at some later time.
        self.is_at_end = False
        # Its last fetch, and our end then.
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

        ``is_silent(broker, since_ms, now_ms)`` says that it has fetched nothing at all for too long (``Silence``).

        ``high_watermark`` comes from a checkpoint. It is a hint: nothing is refused because of it.
        """
        self.me = me
        self.lag_max_ms = lag_max_ms
        self._live = live
        self._is_silent = is_silent
        self._min_isr = min_isr
        # Exclusive.
        self.high_watermark = high_watermark
        # The high watermark as far as this process has seen it itself.
        self._proven = 0

        # As assigned.
        self.leader = NO_LEADER
        self.leader_epoch = NO_EPOCH
        self.partition_epoch = NO_EPOCH
        self.replicas: tuple[int, ...] = ()
        self.isr: tuple[int, ...] = ()
        self.elr: tuple[int, ...] = ()
        self.is_recovering = False
        # Such a leader there was, or may have been, and we have not yet made our log agree with its own.
        self._was_recovering = False

        # Of a leader, while it is one.
        self.is_leader = False
        # Where our log ended when we were elected.
        self.epoch_start_offset = 0
        self._own_end = 0
        self._own_start = UNKNOWN_OFFSET
        self._followers: dict[int, _Follower] = {}
        self._in_flight: IsrProposal | None = None
        # Whom proposals without a good answer may yet add, as long as the partition epoch stands.
        self._unresolved: dict[int, None] = {}
        # Nothing is proposed before: the image will say more.
        self._wait_until_ms = 0
        # The committed ISR and those who may have been added to it.
        self.maximal_isr: tuple[int, ...] = ()
        # Whether as many are in sync as must be. Kept up to date while we lead.
        self.has_enough = False
        # That, and nobody is eligible who would lack what we commit now.
        self._may_commit = False
        # The followers among them: those the high watermark waits for.
        self._counting: list[_Follower] = []
        # Whether it is worth while to ask for a proposal before the next look for laggards.
        self.wants_proposal = False

    def __repr__(self) -> str:
        role = "leader" if self.is_leader else f"follower of {self.leader}"
        return (
            f"<{role} {self.me} epoch={self.leader_epoch}/{self.partition_epoch} isr={self.isr}"
            f" hw={self.high_watermark}>"
        )

    # Questions

    @property
    def has_established(self) -> bool:
        """Whether a leader's high watermark has reached its election, so that it has all of its predecessors'."""
        return self.is_leader and self.high_watermark >= self.epoch_start_offset

    @property
    def min_isr(self) -> int:
        """How many must be in sync; never more than there are replicas."""
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
        """Whether nobody can fall out of sync before the next append. Who comes back makes itself heard."""
        if not self.is_leader:
            return True
        if self._in_flight is not None or self._unresolved:
            return False
        end_offset = self._own_end
        return all(follower.end_offset >= end_offset for follower in self._counting)

    def has(self, replica: int, offset: int) -> bool:
        """Whether a leader knows that a reader at this offset can go on at a follower."""
        follower = self._followers.get(replica)
        return follower is not None and 0 <= follower.log_start_offset <= offset <= follower.end_offset

    def have_deleted_before(self, offset: int) -> bool:
        """Whether a leader knows that nobody who may lead next has anything left before an offset."""
        eligible = [self._followers.get(broker) for broker in self.elr]
        return all(
            follower is not None and follower.log_start_offset >= offset
            for follower in (*self._counting, *eligible)
        )

    def broker_epoch_of(self, broker: int) -> int:
        """Which life of a replica a leader's knowledge of it is from; -1 when there is none."""
        if broker != self.me:
            return self._followers[broker].broker_epoch
        epoch = self._live(broker)
        return UNKNOWN_BROKER_EPOCH if epoch is None else epoch

    def may_truncate(self, offset: int) -> Truncation:
        """Whether records from an offset on may be given up. Ask before; say ``truncated`` afterwards."""
        if offset >= self._proven:
            return Truncation.FINE
        return Truncation.UNCLEAN if self._was_recovering else Truncation.REFUSED

    # Both roles

    def assign(
        self, assignment: Assignment, *, end_offset: int, now_ms: int, counted_end: int | None = None
    ) -> bool:
        """Take what the metadata says; False when we know something newer.

        ``end_offset`` is where our log ends. ``counted_end`` is how much of it counts where that is less: in
        flushed mode, what is on the disk.
        """
        if assignment.leader_epoch < self.leader_epoch:
            return False
        is_new_epoch = assignment.leader_epoch > self.leader_epoch
        if not is_new_epoch and assignment.partition_epoch < self.partition_epoch:
            return False
        if is_new_epoch:
            # Changes that came together are seen as one. Among those that we have not seen may be an unclean
            # election, and the end of its recovery.
            has_missed_some = NO_EPOCH < self.partition_epoch < assignment.partition_epoch - 1
            self._was_recovering = self._was_recovering or has_missed_some
            self._change_role(assignment, end_offset, counted_end, now_ms)
        assert assignment.leader == self.leader, "two leaders in one epoch"
        is_newer = assignment.partition_epoch > self.partition_epoch
        self.partition_epoch = assignment.partition_epoch
        self.replicas = assignment.replicas
        self.elr = assignment.elr
        self.is_recovering = assignment.is_recovering
        self._was_recovering = self._was_recovering or assignment.is_recovering
        if self.is_leader:
            # An answer to a proposal knows less than its image, which may complete a reassignment as well.
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
            # In flushed mode a follower may have learned of more than it has on its own disk.
            self._own_end = max(self._own_end, self.high_watermark)

    def _take_members(self, assignment: Assignment, is_newer: bool, now_ms: int) -> None:
        """Leader: these are in sync now."""
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
                    # Somebody had a reason: it comes back by what it fetches from now on, not by what it had.
                    follower.end_offset = UNKNOWN_OFFSET
                    follower.is_at_end = False
                elif is_in_isr and not follower.is_in_isr:
                    follower.caught_up_ms = max(follower.caught_up_ms, now_ms)
                follower.is_in_isr = is_in_isr
            self.isr = assignment.isr
            # Compared with an older partition epoch, whatever was sent can no longer be committed.
            self._in_flight = None
            self._unresolved = {}
            self._wait_until_ms = 0
            # Also a leader whose followers never come must be looked at, though nobody appends anything.
            self.wants_proposal = len(assignment.replicas) > 1
        self._count()

    # The leader

    def appended(self, end_offset: int) -> None:
        """Our own log counts up to here: what is written, or in flushed mode what is on the disk."""
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

        Only for a fetch of our own leader epoch whose log does not diverge from ours: the caller has compared
        the epochs first. A fetch that is told where to truncate does not count.

        A replica that is not assigned is answered UNKNOWN_LEADER_EPOCH, as Kafka does: it, or we, have not
        heard of the reassignment yet, and this is the code after which it asks again.
        """
        if not self.is_leader:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        follower = self._followers.get(replica)
        if follower is None:
            return ErrorCode.UNKNOWN_LEADER_EPOCH
        if broker_epoch != follower.broker_epoch:
            # Once an incarnation of the broker has fetched, what its predecessors said is worth nothing: they
            # may have had more than was left after a power loss (KIP-903).
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
                # It has all there was at its last fetch: a busy leader's end is never reached.
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
        """Our own log begins here now: what lay before was deleted."""
        self._own_start = offset

    def proposal(self, now_ms: int) -> IsrProposal | None:
        """The change of the ISR that should be sent now, if any. It is in flight until ``answered``."""
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
        """What became of a proposal; None when nobody answered. With NONE comes what is committed now."""
        if proposal is not self._in_flight:
            # The image was faster.
            return
        self._in_flight = None
        if error == ErrorCode.NONE:
            assert assignment is not None, "a committed proposal has a result"
            if assignment.leader_epoch == self.leader_epoch:
                if assignment.partition_epoch > self.partition_epoch:
                    self.assign(assignment, end_offset=self._own_end, now_ms=now_ms)
                else:
                    # We proposed the committed ISR, and the controller saw no need to write that down.
                    self._unresolved = {}
                    self._count()
                return
        for broker, _ in proposal.isr:
            if broker not in self.isr and broker in self._followers:
                self._unresolved[broker] = None
                if error == ErrorCode.INELIGIBLE_REPLICA:
                    # It may try again, when it fetches again.
                    self._followers[broker].end_offset = UNKNOWN_OFFSET
        if error in _OURS_IS_OLD:
            # Not for ever: what the controller has decided may be lost together with it.
            self._wait_until_ms = now_ms + self.lag_max_ms
        self.wants_proposal = True
        self._count()

    # The follower

    def learned(self, high_watermark: int, end_offset: int) -> None:
        """The leader's high watermark, from a fetch response; our own log ends at ``end_offset``."""
        assert not self.is_leader, "a leader learns from nobody"
        self.high_watermark = max(self.high_watermark, min(high_watermark, end_offset))
        self._proven = max(self._proven, self.high_watermark)
        self._was_recovering = self.is_recovering

    def truncated(self, end_offset: int) -> None:
        """Our log has been cut off here."""
        assert not self.is_leader, "a leader never truncates"
        self.high_watermark = min(self.high_watermark, end_offset)
        self._proven = min(self._proven, end_offset)

    def started_over(self, offset: int) -> None:
        """Our log begins and ends here now: what was before, the leader has deleted, so it was committed."""
        assert not self.is_leader, "a leader never starts over"
        self.high_watermark = self._proven = offset

    # Rules

    def _may_join(self, follower: _Follower) -> bool:
        """It has all that is committed, and all that may have been before our time; nothing that was deleted,
        which would be back if it led; and it is who it says.
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
            # A quiet partition is not named in fetches. Behind since some append; the clock starts now.
            follower.is_at_end = False
            follower.caught_up_ms = now_ms
        return now_ms - follower.caught_up_ms > self.lag_max_ms

    def _count(self) -> None:
        """Say anew whom the high watermark waits for."""
        members = dict.fromkeys(self.isr)
        if self._in_flight is not None:
            for broker, _ in self._in_flight.isr:
                members[broker] = None
        members.update(self._unresolved)
        followers = self._followers
        if not members.keys() <= {self.me, *followers}:
            # The answer to the proposal before did not say that a reassignment is complete. Whom it has taken away
            # the controller will not let in.
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
