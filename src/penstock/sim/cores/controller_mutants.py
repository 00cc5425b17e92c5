"""Planted bugs of the controller: each breaks a rule of elections or of the ISR on purpose.

As in ``replication_mutants.py``, every mutant must be found within a number of seeds, or the simulator is blind
to it. They override one rule of the real controller, or stand between it and the brokers.
"""

from __future__ import annotations

from penstock.metadata.elections import Election, Revision
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.replication.events import Assignment, IsrProposal
from penstock.sim.cores.controller import ControllerWorld, RealController
from penstock.sim.cores.replication_mutants import TrustsItsSettings

# Trap 7: a replica that lost its page cache still counts as complete.


class _TrustsTheForgetful(Revision):
    def lose(self, broker: BrokerId, *, everything: bool = False) -> None:
        self.leave_isr(broker)


class _TrustsTheForgetfulController(RealController):
    revision_type = _TrustsTheForgetful


class ForgetfulReplicasStayEligible(ControllerWorld):
    controller_type = _TrustsTheForgetfulController


# Trap 7: eligible leaders are kept although records were committed without them.


class _NeverForgets(Revision):
    def _find_eligible(self) -> None:
        known = (*self.elr, *self._were_in_sync)
        self.elr = tuple([broker for broker in self.replicas if broker in known and broker not in self.isr])


class _NeverForgetsController(RealController):
    revision_type = _NeverForgets


class EligibleLeadersAreKept(ControllerWorld):
    controller_type = _NeverForgetsController


# Trap 12: any live replica is elected rather than none, and not marked as unclean.


class _ElectsAnybody(Revision):
    def _elect(self) -> BrokerId:
        state = self.recovery_state
        self.election = Election.UNCLEAN
        leader = super()._elect()
        self.recovery_state = state
        return leader


class _ElectsAnybodyController(RealController):
    revision_type = _ElectsAnybody


class AnybodyIsElected(ControllerWorld):
    controller_type = _ElectsAnybodyController


# A reassignment removes the old replicas when the first of the new ones is in sync.


class _IsHasty(Revision):
    def _complete_reassignment(self) -> None:
        if any(broker in self.isr for broker in self.adding):
            self.isr = tuple(dict.fromkeys((*self.isr, *self.adding)))
        super()._complete_reassignment()


class _IsHastyController(RealController):
    revision_type = _IsHasty


class ReassignmentEndsEarly(ControllerWorld):
    controller_type = _IsHastyController


# A reassignment ends as soon as all new replicas are in sync, however few that leaves (Kafka's rule), and a
# cancelled one always returns to the old replicas.


class _CountsNobody(Revision):
    def _complete_reassignment(self) -> None:
        min_isr, self._min_isr = self._min_isr, 1
        super()._complete_reassignment()
        self._min_isr = min_isr

    def cancel(self) -> bool:
        min_isr, self._min_isr = self._min_isr, 1
        is_done = super().cancel()
        self._min_isr = min_isr
        return is_done


class _CountsNobodyController(RealController):
    revision_type = _CountsNobody


class ReassignmentLeavesTooFew(ControllerWorld):
    controller_type = _CountsNobodyController


# Trap 8: an earlier incarnation of a replica is admitted to the ISR (KIP-903).


class _IgnoresBrokerEpochs(RealController):
    def alter(
        self, broker: int, broker_epoch: int, index: int, proposal: IsrProposal
    ) -> tuple[int, Assignment | None]:
        anonymous = proposal._replace(isr=tuple((member, -1) for member, _ in proposal.isr))
        return super().alter(broker, broker_epoch, index, anonymous)


class BrokerEpochsAreIgnored(ControllerWorld):
    controller_type = _IgnoresBrokerEpochs


# Traps 9 and 11: an outdated proposal is accepted if the leader is the same.


class _IgnoresPartitionEpochs(RealController):
    def alter(
        self, broker: int, broker_epoch: int, index: int, proposal: IsrProposal
    ) -> tuple[int, Assignment | None]:
        present = self.partitions[index].partition_epoch
        return super().alter(broker, broker_epoch, index, proposal._replace(partition_epoch=present))


class PartitionEpochsAreIgnored(ControllerWorld):
    controller_type = _IgnoresPartitionEpochs


# Trap 9: a proposal of the present ISR does not raise the partition epoch, so older proposals stay valid.


class _SavesAChange(RealController):
    def alter(
        self, broker: int, broker_epoch: int, index: int, proposal: IsrProposal
    ) -> tuple[int, Assignment | None]:
        known = self.partitions[index]
        members = {member for member, _ in proposal.isr}
        epochs = (known.leader_epoch, known.partition_epoch)
        if members == set(known.isr) and (proposal.leader_epoch, proposal.partition_epoch) == epochs:
            return ErrorCode.NONE, known
        return super().alter(broker, broker_epoch, index, proposal)


class SameIsrIsNoChange(ControllerWorld):
    controller_type = _SavesAChange


# Trap 7: leaders use the settings they know.


class CommitsUnderAnOldMinimum(ControllerWorld):
    partition_type = TrustsItsSettings


MUTANTS: tuple[type[ControllerWorld], ...] = (
    ForgetfulReplicasStayEligible,
    EligibleLeadersAreKept,
    AnybodyIsElected,
    ReassignmentEndsEarly,
    ReassignmentLeavesTooFew,
    BrokerEpochsAreIgnored,
    PartitionEpochsAreIgnored,
    SameIsrIsNoChange,
    CommitsUnderAnOldMinimum,
)
