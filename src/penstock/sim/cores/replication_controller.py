"""The controller of the replication simulator: a deliberately small model of the real one.

It is one object that never fails, so that everything that goes wrong is caused by the replicas. It fences
brokers, elects leaders from the in-sync replicas and then from the eligible leader replicas (KIP-966), and
compares every proposal with the partition epoch. The brokers' images follow its history, each at its own pace.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from penstock.protocol.errors import ErrorCode
from penstock.replication.events import NO_LEADER, Assignment, IsrProposal


class BrokerChange(NamedTuple):
    broker: int
    broker_epoch: int
    is_fenced: bool


class PartitionChange(NamedTuple):
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    assignment: Assignment


class MinIsrChange(NamedTuple):
    value: int


Change: TypeAlias = BrokerChange | PartitionChange | MinIsrChange


class ModelController:
    def __init__(self, replicas: list[tuple[int, ...]], min_isr: int) -> None:
        self.min_isr = min_isr
        # Committed, in order; a broker's image is a prefix of it.
        self.history: list[Change] = []
        # Broker -> broker epoch, whether it is fenced, time of its last heartbeat.
        self.epochs: dict[int, int] = {}
        self.fenced: dict[int, bool] = {}
        self.heard_ms: dict[int, int] = {}
        self.partitions = [Assignment(NO_LEADER, 0, 0, members, members) for members in replicas]
        self.elections = 0
        self.isr_changes = 0

    # Brokers

    def register(self, broker: int, *, is_unclean: bool, now_ms: int) -> int:
        """Register a restarted broker. If it may have lost records, it leaves the ISR and the eligible leaders."""
        epoch = len(self.history) + 1
        self.epochs[broker] = epoch
        self.fenced[broker] = True
        self.heard_ms[broker] = now_ms
        self.history.append(BrokerChange(broker, epoch, True))
        for index in range(len(self.partitions)):
            self._without(index, broker, is_unclean=is_unclean)
        return epoch

    def heard(self, broker: int, epoch: int, now_ms: int) -> bool:
        """A heartbeat; False when it is of an earlier incarnation."""
        if self.epochs.get(broker) != epoch:
            return False
        self.heard_ms[broker] = now_ms
        if self.fenced[broker]:
            self.fenced[broker] = False
            self.history.append(BrokerChange(broker, epoch, False))
            for index, partition in enumerate(self.partitions):
                if partition.leader == NO_LEADER:
                    self._write(index, partition.isr, partition.elr)
        return True

    def expire(self, now_ms: int, session_ms: int) -> None:
        for broker, heard_ms in self.heard_ms.items():
            if not self.fenced[broker] and now_ms - heard_ms > session_ms:
                self.fenced[broker] = True
                self.history.append(BrokerChange(broker, self.epochs[broker], True))
                for index in range(len(self.partitions)):
                    self._without(index, broker, is_unclean=False)

    # Partitions

    def alter(
        self, broker: int, broker_epoch: int, index: int, proposal: IsrProposal
    ) -> tuple[int, Assignment | None]:
        """AlterPartition: (error, the committed assignment)."""
        partition = self.partitions[index]
        if self.epochs.get(broker) != broker_epoch:
            return ErrorCode.STALE_BROKER_EPOCH, None
        if proposal.leader_epoch < partition.leader_epoch:
            return ErrorCode.FENCED_LEADER_EPOCH, None
        if partition.leader != broker:
            return ErrorCode.INVALID_REQUEST, None
        if self.is_old(proposal, partition):
            return ErrorCode.INVALID_UPDATE_VERSION, None
        for member, epoch in proposal.isr:
            if member not in partition.replicas:
                return ErrorCode.INVALID_REQUEST, None
            if self.fenced.get(member, True) or epoch not in (-1, self.epochs[member]):
                return ErrorCode.INELIGIBLE_REPLICA, None
        self.isr_changes += 1
        self._write(index, tuple([member for member, _ in proposal.isr]), partition.elr)
        return ErrorCode.NONE, self.partitions[index]

    def is_old(self, proposal: IsrProposal, partition: Assignment) -> bool:
        return proposal.partition_epoch != partition.partition_epoch

    def set_min_isr(self, value: int) -> None:
        """Change the setting, and clear replicas that were eligible only because of the old one."""
        self.min_isr = value
        self.history.append(MinIsrChange(value))
        for index, partition in enumerate(self.partitions):
            if partition.elr and partition.isr and len(partition.isr) >= self._isr_needed(partition):
                self._write(index, partition.isr, partition.elr)

    def elect(self, index: int, leader: int) -> None:
        """Move the leadership, or renew it: the same leader with a new epoch."""
        partition = self.partitions[index]
        if leader in partition.isr and not self.fenced.get(leader, True):
            self._write(index, partition.isr, partition.elr, leader=leader, is_election=True)

    def _isr_needed(self, partition: Assignment) -> int:
        return min(self.min_isr, len(partition.replicas))

    def _without(self, index: int, broker: int, *, is_unclean: bool) -> None:
        partition = self.partitions[index]
        if broker not in partition.replicas:
            return
        gone = broker if is_unclean else None
        isr = tuple([member for member in partition.isr if member != broker])
        elr = tuple([member for member in partition.elr if member != gone])
        if isr != partition.isr or elr != partition.elr or partition.leader == broker:
            self._write(index, isr, elr, gone=gone)

    def _write(
        self,
        index: int,
        isr: tuple[int, ...],
        elr: tuple[int, ...],
        *,
        gone: int | None = None,
        leader: int | None = None,
        is_election: bool = False,
    ) -> None:
        old = self.partitions[index]
        if not isr or len(isr) < self._isr_needed(old):
            # A replica that leaves now has everything committed, and stays eligible until more is committed.
            eligible = dict.fromkeys((*elr, *old.isr))
            elr = tuple([member for member in eligible if member not in isr and member != gone])
        else:
            elr = ()
        chosen = old.leader if leader is None else leader
        if chosen == NO_LEADER or chosen not in isr or self.fenced.get(chosen, True):
            chosen = NO_LEADER
            for member in old.replicas:
                if member in isr and not self.fenced.get(member, True):
                    chosen = member
                    break
            else:
                for member in old.replicas:
                    if member in elr and not self.fenced.get(member, True):
                        chosen = member
                        isr = (*isr, member)
                        elr = tuple([other for other in elr if other != member])
                        if len(isr) >= self._isr_needed(old):
                            elr = ()
                        break
        leader_epoch = old.leader_epoch
        if chosen != old.leader or is_election:
            leader_epoch += 1
            self.elections += 1
        self.partitions[index] = Assignment(
            chosen, leader_epoch, old.partition_epoch + 1, old.replicas, isr, elr
        )
        self.history.append(PartitionChange(index, self.partitions[index]))
