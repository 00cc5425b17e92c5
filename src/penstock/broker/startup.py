"""Prepares a broker's logs before it is unfenced.

``Membership`` calls ``prepare`` when the image is as new as the registration. The data directories are compared
with the image, every log that the last run did not close is opened and thereby recovered, and damage is reported.
Then the broker may be unfenced and begins to follow.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.coordination.coordinators import CoordinatorRegistry
from penstock.broker.logs import Logger
from penstock.broker.node_partition_host import NodePartitionHost
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.quorum.consensus import Consensus
from penstock.broker.replication.directory_reports import DirectoryReports
from penstock.broker.storage.storage import Storage
from penstock.environment import Environment
from penstock.metadata.values import LOST_DIRECTORY

RECOVERED_PER_TURN = 16


class Startup:
    def __init__(
        self,
        environment: Environment,
        logger: Logger,
        storage: Storage,
        consensus: Consensus,
        partitions: Partitions,
        directories: DirectoryReports,
        coordinators: CoordinatorRegistry,
        host: NodePartitionHost,
    ) -> None:
        self._environment = environment
        self._logger = logger
        self._storage = storage
        self._consensus = consensus
        self._partitions = partitions
        self._directories = directories
        self._coordinators = coordinators
        self._host = host
        # Every log that the last run did not close was opened.
        self._has_recovered = False

    @property
    def has_recovered(self) -> bool:
        """Whether every log that the last run did not close has been opened."""
        return self._has_recovered or not self._storage.partitions_to_recover()

    def prepare(self, then: Callable[[], None]) -> None:
        """Quarantine strays, open every log the last run did not close, then begin to follow."""
        self._storage.quarantine_strays(self._consensus.image)
        waiting = iter(self._storage.partitions_to_recover())

        def recover_some() -> None:
            for _ in range(RECOVERED_PER_TURN):
                name = next(waiting, None)
                if name is None:
                    self.prepared(then)
                    return
                hosted = self._partitions.get(name.topic, name.partition)
                if hosted is not None:
                    self._recover(hosted)
            self._environment.spawn.soon(recover_some)

        recover_some()

    def prepared(self, then: Callable[[], None]) -> None:
        """Every log was opened."""
        self._has_recovered = True
        for hosted in list(self._partitions):
            if hosted.image.directory(self._host.me) == LOST_DIRECTORY:
                # An earlier process found it damaged and did not report it as repaired. It is not in sync.
                self._directories.damaged(hosted, 0)

        def go_on() -> None:
            then()
            # Coordinators first. A partition whose role changes meanwhile is handled twice, which does no harm.
            everyone = sorted(self._partitions, key=lambda hosted: hosted.topic not in self._coordinators)
            self._host.roles_changed(everyone)

        # Once unfenced, this broker may become a leader. The controller must know of damaged replicas before that.
        self._directories.when_reported(go_on)

    def _recover(self, hosted: HostedPartition) -> None:
        try:
            _ = hosted.log
        except OSError as error:
            # Other partitions can be served. Requests for this one get a storage error.
            self._logger.error("cannot open", partition=repr(hosted), error=str(error))
            self._directories.damaged(hosted, 0)
