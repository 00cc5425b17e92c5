"""Whether this node is in the cluster and has caught up, so that the next node may be restarted.

Ready means: registered and unfenced, with a current lease; all committed metadata applied that this node knows of;
and every replica here in sync, except those that a reassignment is just adding. A node that is only a controller is
ready when it knows the leader of the quorum and has applied the metadata.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.broker import Broker
from penstock.broker.membership.membership import State
from penstock.broker.partition.hosted_partition import HostedPartition

PARTITIONS_PER_SLICE = 5_000


class Readiness:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def check(self, then: Callable[[str | None], None]) -> None:
        """Call ``then``, perhaps some turns later, with one line that says why it is not ready; None if it is."""
        reason = self._reason()
        if reason is not None or not self._broker.is_broker:
            then(reason)
            return
        self._look(list(self._broker.partitions), 0, then)

    def _reason(self) -> str | None:
        broker = self._broker
        consensus, membership = broker.consensus, broker.membership
        if broker.is_broker:
            if membership.state is State.ACTIVE:
                if not membership.is_serving():
                    return "the controller has not answered a heartbeat for too long"
            elif membership.state is State.FENCED:
                return "fenced: the controller has not admitted this broker yet, or not again"
            else:
                return str(membership.state.value)
        if consensus.leader_id is None:
            return "the metadata quorum has no leader"
        behind = consensus.high_watermark - (consensus.image.offset + 1)
        if behind > 0:
            return f"the metadata is {behind} records behind"
        return None

    def _look(self, everyone: list[HostedPartition], start: int, then: Callable[[str | None], None]) -> None:
        me = self._broker.node_id
        for hosted in everyone[start : start + PARTITIONS_PER_SLICE]:
            if hosted.is_deleted:
                continue
            if hosted.is_offline:
                then(
                    f"partition {hosted.topic}-{hosted.index} is offline: its disk has failed, or it is damaged"
                )
                return
            image = hosted.image
            if me not in image.isr and me not in image.adding_replicas:
                then(f"the replica of partition {hosted.topic}-{hosted.index} is not in sync")
                return
        start += PARTITIONS_PER_SLICE
        if start >= len(everyone):
            then(None)
        else:
            self._broker.environment.spawn.soon(lambda: self._look(everyone, start, then))
