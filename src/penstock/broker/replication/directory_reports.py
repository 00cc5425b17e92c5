"""Reports to the controller which data directory each replica is in, and which replicas are damaged.

A broker with several directories reports where it has put each replica (KIP-858), so that the controller knows what
is lost with a disk. A replica that turns out to be damaged is reported as lost too: the controller removes it from
the ISR and makes another replica the leader, and only then is the damaged part truncated and fetched again. In the
other order, an in-sync replica would lack committed records.

A damaged replica that is the last one in sync is not reported. Half of the only copy is more than nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.controller.controller_client import ControllerClient
from penstock.broker.logs import Logger
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.storage.storage import Storage
from penstock.environment import Environment, Timer
from penstock.metadata.values import LOST_DIRECTORY
from penstock.protocol.messages.brokers import (
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsRequestDirectory,
    AssignReplicasToDirsRequestPartition,
    AssignReplicasToDirsRequestTopic,
    AssignReplicasToDirsResponse,
)

VERSION = 0
CHANNEL = "directories"
RETRY_MS = 500
# How soon a failed repair is tried again; it mostly fails on a full disk. An attempt may read the whole log.
MEND_AGAIN_MS = 30_000
PARTITIONS_PER_REQUEST_MAX = 2_000
TIMEOUT_MS = 5_000


class DirectoryReports:
    def __init__(
        self,
        environment: Environment,
        storage: Storage,
        controller: ControllerClient,
        logger: Logger,
        *,
        node_id: int,
        broker_epoch: Callable[[], int],
        role_changed: Callable[[HostedPartition], None],
    ) -> None:
        """``role_changed(hosted)``: the partition is no longer usable, or is usable again."""
        self._environment = environment
        self._storage = storage
        self._controller = controller
        self._logger = logger
        self._node_id = node_id
        self._broker_epoch = broker_epoch
        self._role_changed = role_changed
        # Partitions to report, in order.
        self._waiting: dict[HostedPartition, None] = {}
        # Damaged replicas and where the damage begins. Repaired once they are neither in the ISR nor eligible.
        self._damaged: dict[HostedPartition, int] = {}
        self._mend_timer: Timer | None = None
        self._is_asking = False
        self._on_reported: list[Callable[[], None]] = []

    def close(self) -> None:
        if self._mend_timer is not None:
            self._mend_timer.cancel()

    @property
    def has_damaged(self) -> bool:
        """Whether any replica waits to be repaired."""
        return bool(self._damaged)

    def when_reported(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the controller has received all reports so far."""
        if self._is_asking:
            self._on_reported.append(then)
        else:
            then()

    def placed(self, hosted: HostedPartition) -> None:
        """A replica got a directory."""
        storage = self._storage
        # A broker with one directory need not report, unless the metadata names a directory it no longer has.
        if len(storage.directories) > 1 or storage.has_lost(hosted.image.directory(self._node_id)):
            self._report(hosted)

    def damaged(self, hosted: HostedPartition, offset: int) -> None:
        """A replica is damaged from the batch with this offset on."""
        if hosted in self._damaged or hosted.is_deleted or not self.has_others(hosted):
            return
        self._damaged[hosted] = offset
        hosted.is_offline = True
        self._role_changed(hosted)
        self._report(hosted)

    def assigned(self, hosted: HostedPartition) -> None:
        """The metadata of a partition changed: repair it if it is damaged and may be repaired now."""
        offset = self._damaged.get(hosted)
        if offset is None:
            return
        image = hosted.image
        if hosted.is_deleted:
            del self._damaged[hosted]
        elif image.directory(self._node_id) == LOST_DIRECTORY and self._node_id not in (
            *image.isr,
            *image.eligible_leader_replicas,
            image.leader,
        ):
            # Without LOST_DIRECTORY the image may be older than the report, and a change in between may have added
            # this replica to the ISR for the data it had before.
            del self._damaged[hosted]
            try:
                hosted.mend(offset)
            except OSError as error:
                self._logger.error("cannot repair a replica", partition=repr(hosted), error=str(error))
                # The attempt may have found more damage.
                self._damaged[hosted] = min(offset, self._damaged.get(hosted, offset))
                if self._mend_timer is None:
                    self._mend_timer = self._environment.spawn.later(MEND_AGAIN_MS, self._mend_again)
                return
            self._logger.warning("fetching a damaged replica again", partition=repr(hosted), offset=offset)
            self._role_changed(hosted)
            self._report(hosted)

    def _mend_again(self) -> None:
        self._mend_timer = None
        for hosted in list(self._damaged):
            self.assigned(hosted)

    def has_others(self, hosted: HostedPartition) -> bool:
        """Whether another replica is in the ISR or eligible, and so may have what this one lacks."""
        image = hosted.image
        return any(replica != self._node_id for replica in (*image.isr, *image.eligible_leader_replicas))

    def _report(self, hosted: HostedPartition) -> None:
        self._waiting[hosted] = None
        if not self._is_asking:
            self._is_asking = True
            self._environment.spawn.soon(self._ask)

    def _ask(self) -> None:
        directories: dict[bytes, dict[bytes, list[int]]] = {}
        asked = list(self._waiting)[:PARTITIONS_PER_REQUEST_MAX]
        for hosted in asked:
            if hosted.is_deleted:
                continue
            try:
                id = LOST_DIRECTORY if hosted in self._damaged else self._storage.place(hosted).id
            except OSError:
                continue  # its disk is offline; the next heartbeat tells the controller
            directories.setdefault(id, {}).setdefault(hosted.topic_id, []).append(hosted.index)
        for hosted in asked:
            del self._waiting[hosted]
        if not directories:
            self._settled()
            return
        request = AssignReplicasToDirsRequest(
            broker_id=self._node_id,
            broker_epoch=self._broker_epoch(),
            directories=[
                AssignReplicasToDirsRequestDirectory(
                    id=id,
                    topics=[
                        AssignReplicasToDirsRequestTopic(
                            topic_id=topic,
                            partitions=[
                                AssignReplicasToDirsRequestPartition(partition_index=index)
                                for index in indexes
                            ],
                        )
                        for topic, indexes in topics.items()
                    ],
                )
                for id, topics in directories.items()
            ],
        )

        def answered(response: AssignReplicasToDirsResponse | None) -> None:
            failed = response is None or bool(response.error_code)
            if failed:
                for hosted in asked:
                    self._waiting[hosted] = None
            if self._waiting:
                self._environment.spawn.later(RETRY_MS if failed else 0, self._ask)
            else:
                self._settled()
            for hosted in asked:
                self.assigned(hosted)

        self._controller.ask(request, VERSION, answered, channel=CHANNEL, timeout_ms=TIMEOUT_MS)

    def _settled(self) -> None:
        self._is_asking = False
        waiting, self._on_reported = self._on_reported, []
        for then in waiting:
            then()
