"""A change of one partition: ISR, eligible leaders, leader election, and the resulting change record.

Whatever happens to a partition (a broker dies, the ISR shrinks, a replica is moved) becomes a ``Revision``: the
caller edits the wanted state (``isr``, ``replicas``, ``adding``, ...), and ``change`` derives the rest in this
order:

1. A reassignment whose new replicas are all in sync is completed.
2. The eligible leaders are determined (KIP-966): replicas that leave the ISR while it is smaller than
   ``min.insync.replicas`` still hold everything committed, because nothing is committed without them. They may
   lead when no member of the ISR can, until the ISR is large enough again.
3. A leader is chosen: the present one if it may stay, else the first replica of the ISR that can lead, else the
   first eligible one; a replica with a full disk only if there is no other. If both the ISR and the eligible
   leaders are empty, the last leader may come back; it may lack records (a whole cluster lost its power), so it
   is marked as recovering. Any other replica is chosen only if the topic allows unclean elections, or an
   administrator asks for one.

The ISR may become empty. The last member leaves it like any other when it is fenced, and becomes the eligible
leader, so that the ISR contains live replicas only.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import TypeAlias

from penstock.metadata.values import (
    NO_LEADER,
    NO_LEADER_CHANGE,
    RECOVERING,
    PartitionImage,
)
from penstock.model import BrokerId
from penstock.protocol.messages.metadata_records import PartitionChangeRecord


class Standing(IntEnum):
    """What a replica can be used for now, from worst to best."""

    # Its broker is fenced or unknown, or its directory offline.
    GONE = 0
    # Its broker wants to stop: it may be in sync, and lead if no other replica can.
    STOPPING = 1
    # Its disk is full: it may lead, and be in sync, only if no replica in sync has space.
    FULL = 2
    ACTIVE = 3


# (broker, the directory its replica is in) -> its standing.
StandingOf: TypeAlias = Callable[[BrokerId, bytes], Standing]
BrokerIds: TypeAlias = tuple[BrokerId, ...]


class Election(Enum):
    # Only if the present leader cannot stay.
    IF_NEEDED = "if needed"
    # The first replica, if it is in sync.
    PREFERRED = "preferred"
    # If needed, and then even a replica that may lack records.
    UNCLEAN = "unclean"


class Revision:
    __slots__ = (
        "_has_nothing",
        "_least",
        "_min_isr",
        "_partition",
        "_standing_of",
        "_topic_id",
        "_were_in_sync",
        "adding",
        "directories",
        "election",
        "elr",
        "isr",
        "last_known",
        "must_bump",
        "recovery_state",
        "removing",
        "replicas",
    )

    def __init__(
        self, topic_id: bytes, partition: PartitionImage, min_isr: int, standing_of: StandingOf
    ) -> None:
        self._topic_id = topic_id
        self._partition = partition
        self._min_isr = min_isr
        self._standing_of = standing_of
        # Replicas that may become eligible leaders when they leave the ISR.
        self._were_in_sync: BrokerIds = partition.isr
        self._has_nothing = NO_LEADER
        # The minimum standing of a leader.
        self._least = Standing.FULL
        # The wanted state; initially the present one.
        self.isr: BrokerIds = partition.isr
        self.elr: BrokerIds = partition.eligible_leader_replicas
        self.last_known: BrokerIds = partition.last_known_elr
        self.replicas: BrokerIds = partition.replicas
        self.adding: BrokerIds = partition.adding_replicas
        self.removing: BrokerIds = partition.removing_replicas
        # In the order of ``replicas``.
        self.directories: tuple[bytes, ...] = partition.directories
        self.recovery_state = partition.leader_recovery_state
        self.election = Election.IF_NEEDED
        # A new leader epoch even if the leader stays.
        self.must_bump = False

    def leave_isr(self, broker: BrokerId) -> None:
        """Remove a replica from the ISR. It still holds its records, so it may become an eligible leader."""
        self.isr = tuple([member for member in self.isr if member != broker])

    def lose(self, broker: BrokerId, *, everything: bool = False) -> None:
        """Note that a replica lost records that it had confirmed: it no longer counts as a copy.

        If it lost everything, it cannot come back as the last leader either.
        """
        self._were_in_sync = tuple([member for member in self._were_in_sync if member != broker])
        self.leave_isr(broker)
        self.elr = tuple([member for member in self.elr if member != broker])
        if everything:
            self._has_nothing = broker
            self.last_known = tuple([member for member in self.last_known if member != broker])

    def reassign(self, target: BrokerIds, directory_of: Callable[[BrokerId], bytes]) -> None:
        """Start moving from the present replicas to the target; meanwhile the partition has both."""
        known = dict(zip(self.replicas, self.directories))
        adding = self.adding
        # Drop replicas that an earlier reassignment was adding and that never got in sync.
        current = [
            broker
            for broker in self.replicas
            if broker in target or broker not in adding or broker in self.isr or broker in self.elr
        ]
        self.adding = tuple([broker for broker in target if broker not in current or broker in adding])
        self.removing = tuple([broker for broker in current if broker not in target])
        self._set_replicas(target + self.removing, known, directory_of)

    def cancel(self) -> bool:
        """Return to the replicas before the reassignment; False when too few of them hold what was confirmed."""
        adding = self.adding
        isr = tuple([broker for broker in self.isr if broker not in adding])
        elr = tuple([broker for broker in self.elr if broker not in adding])
        kept = tuple([broker for broker in self.replicas if broker not in adding])
        is_missed = len(isr) < len(self.isr) or len(elr) < len(self.elr)
        # The added replicas are deleted. As when a reassignment is completed, enough others must hold their
        # records.
        if is_missed and len(isr) + len(elr) < max(1, min(self._min_isr, len(kept))):
            return False
        self.isr, self.elr = isr, elr
        self._set_replicas(kept, dict(zip(self.replicas, self.directories)), None)
        self.adding = self.removing = ()
        return True

    def change(self) -> PartitionChangeRecord | None:
        """The change to the wanted state and its consequences; None if nothing changes."""
        partition = self._partition
        leader_before = partition.leader
        # A replica that is gone leaves the ISR with any change.
        self.isr = tuple([broker for broker in self.isr if self._standing(broker)])
        self._leave_out_full()
        if self.adding or self.removing:
            self._complete_reassignment()
        self._find_eligible()
        leader = self._elect()
        if self.isr:
            self.last_known = ()
        else:
            last = self.last_known if leader_before == NO_LEADER else (leader_before,)
            self.last_known = tuple(
                [broker for broker in last if broker in self.replicas and broker != self._has_nothing]
            )
        is_new_epoch = leader != leader_before or (
            leader != NO_LEADER
            # Removed replicas must no longer be accepted as followers.
            and (self.must_bump or any([broker not in self.replicas for broker in partition.replicas]))
        )
        return self._difference(leader if is_new_epoch else NO_LEADER_CHANGE)

    @property
    def _isr_needed(self) -> int:
        return min(self._min_isr, len(self.replicas))

    def _set_replicas(
        self,
        replicas: BrokerIds,
        known: dict[BrokerId, bytes],
        directory_of: Callable[[BrokerId], bytes] | None,
    ) -> None:
        self.replicas = replicas
        self.directories = tuple(
            [
                known[broker] if broker in known or directory_of is None else directory_of(broker)
                for broker in replicas
            ]
        )

    def _complete_reassignment(self) -> None:
        removing = self.removing
        isr = tuple([broker for broker in self.isr if broker not in removing])
        target = tuple([broker for broker in self.replicas if broker not in removing])
        if not all([broker in isr for broker in self.adding]):
            return
        # Kafka completes here. That could leave confirmed records on too few replicas, because the removed ones
        # are deleted; so we wait until enough of the others are in sync.
        if len(isr) < max(1, min(self._min_isr, len(target))) or not self._any_leads(isr):
            return
        self._set_replicas(target, dict(zip(self.replicas, self.directories)), None)
        self.isr = isr
        self.adding = self.removing = ()

    def _leave_out_full(self) -> None:
        """Drop full replicas from the ISR, because they block the others. If all members are full, keep them."""
        standings = [self._standing(broker) for broker in self.isr]
        if Standing.FULL in standings and Standing.ACTIVE in standings:
            self.isr = tuple([broker for broker, one in zip(self.isr, standings) if one is not Standing.FULL])

    def _find_eligible(self) -> None:
        isr = self.isr
        if isr and len(isr) >= self._isr_needed:
            self.elr = ()
            return
        before = self._were_in_sync
        if not before and not self.elr:
            return
        self.elr = tuple(
            [
                broker
                for broker in self.replicas
                if broker not in isr and (broker in self.elr or broker in before)
            ]
        )

    def _elect(self) -> BrokerId:
        present = self._partition.leader
        isr = self.isr
        self._least = Standing.ACTIVE
        if not self._any_leads((*isr, *self.elr)):
            self._least = Standing.FULL
        if self.election is Election.PREFERRED and self.replicas[0] in isr and self._leads(self.replicas[0]):
            return self.replicas[0]
        if present in isr and self._leads(present):
            return present
        for broker in self.replicas:
            if broker in isr and self._leads(broker):
                return broker
        for broker in self.replicas:
            if broker in self.elr and self._leads(broker):
                # It holds everything committed, so no data is lost; but which other replicas do is no longer
                # known.
                self.isr = (broker,)
                self._find_eligible()
                return broker
        if present in isr:
            return present
        if not isr and not self.elr and len(self.last_known) == 1 and self._leads(self.last_known[0]):
            return self._elect_unclean(self.last_known[0])
        if self.election is Election.UNCLEAN:
            for broker in self.replicas:
                if self._leads(broker):
                    return self._elect_unclean(broker)
        return NO_LEADER

    def _elect_unclean(self, broker: BrokerId) -> BrokerId:
        self.isr = (broker,)
        # Their records are given up.
        self.elr = ()
        self.recovery_state = RECOVERING
        return broker

    def _leads(self, broker: BrokerId) -> bool:
        return self._standing(broker) >= self._least

    def _standing(self, broker: BrokerId) -> Standing:
        if broker not in self.replicas:
            return Standing.GONE
        return self._standing_of(broker, self.directories[self.replicas.index(broker)])

    def _any_leads(self, brokers: BrokerIds) -> bool:
        return any([self._leads(broker) for broker in brokers])

    def _difference(self, leader: int) -> PartitionChangeRecord | None:
        before = self._partition
        change = PartitionChangeRecord(partition_id=before.index, topic_id=self._topic_id, leader=leader)
        is_different = leader != NO_LEADER_CHANGE
        if self.isr != before.isr:
            change.isr = list(self.isr)
            is_different = True
        if self.elr != before.eligible_leader_replicas:
            change.eligible_leader_replicas = list(self.elr)
            is_different = True
        if self.last_known != before.last_known_elr:
            change.last_known_elr = list(self.last_known)
            is_different = True
        if self.replicas != before.replicas:
            change.replicas = list(self.replicas)
            is_different = True
        if self.directories != before.directories:
            change.directories = list(self.directories)
            is_different = True
        if self.removing != before.removing_replicas:
            change.removing_replicas = list(self.removing)
            is_different = True
        if self.adding != before.adding_replicas:
            change.adding_replicas = list(self.adding)
            is_different = True
        if self.recovery_state != before.leader_recovery_state:
            change.leader_recovery_state = self.recovery_state
            is_different = True
        return change if is_different else None
