"""Everything about compacted topics in a simulated run: the topics, their clients, readers and checkers."""

from __future__ import annotations

from collections.abc import Callable

from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.cluster import Cluster, rack_of
from penstock.sim.compaction_checkers import CompactionCheckers
from penstock.sim.compaction_clients import (
    KeyedProducer,
    KeyedTransactionalProducer,
    KeyedTransactor,
    Keys,
    TableOperator,
)
from penstock.sim.compaction_log_checkers import CompactedLogs
from penstock.sim.compaction_plans import Compaction
from penstock.sim.compaction_readers import CompactedReader
from penstock.sim.loop import Loop, start
from penstock.sim.plans import Plan
from penstock.sim.report import Violation
from penstock.sim.topics import TABLE, Topics

# A coordinator aborts a transaction within its timeout and this time, in a healthy cluster.
SLACK_MS = 30_000
# Within this time a healthy node has cleaned everything that may be cleaned.
CLEANING_MS = 60_000
OPERATION_MS = 6_000
# Clocks that run at different rates.
RATE_SLACK = 0.9


class CompactionWorkload:
    def __init__(
        self,
        plan: Plan,
        loop: Loop,
        cluster: Cluster,
        checkers: ClientCheckers,
        topics: Topics,
        client: Callable[[str], Client],
    ) -> None:
        assert plan.compaction is not None
        self._plan = plan
        self.compaction: Compaction = plan.compaction
        self._loop = loop
        self._checkers = checkers
        self._topics = topics
        self._client = client
        self.checkers = CompactionCheckers()
        is_damaging = bool({*plan.faults} & {"flip", "sync fails"})
        self.log = CompactedLogs(
            cluster,
            self.checkers.writes,
            topics,
            tombstones_stay_ms=tombstones_stay_ms(plan),
            is_damaging=is_damaging,
        )
        self._keys = Keys(self.checkers.writes, self.compaction.keys, self.compaction.tombstones)
        self._is_closing = False
        self.producers: list[KeyedProducer] = []
        self.transactors: list[KeyedTransactor] = []
        self.readers: list[CompactedReader] = []
        self.operator: TableOperator | None = None

    @property
    def topics(self) -> list[tuple[str, int]]:
        """The topics that the workload needs, and their partitions."""
        return [(TABLE, self.compaction.partitions)]

    def start(self) -> None:
        compaction = self.compaction
        for number, is_v2 in enumerate(compaction.transactors):
            client = self._client(f"transactor-{number}")
            producer = KeyedTransactionalProducer(
                client,
                self.checkers.transactions,
                f"transactor-{number}",
                f"x{number}",
                is_v2=is_v2,
                timeout_ms=self._plan.transaction_timeout_ms,
                is_alone=True,
                impatience=self._plan.impatience,
                lateness=self._plan.lateness,
            )
            transactor = KeyedTransactor(
                client, self.checkers, self._keys, producer, interval_ms=2 * compaction.interval_ms
            )
            self.transactors.append(transactor)
            start(client.process, transactor.run())
        self._start_reader("table-reader", is_committed=True)
        self._start_reader("table-rereader", is_committed=True, is_repeating=True)
        self._start_reader("table-viewer", is_committed=False)
        if compaction.changes_policy or compaction.deletes_records:
            client = self._client("table-operator")
            self.operator = TableOperator(
                client, self._checkers, self._topics, compaction, interval_ms=OPERATION_MS
            )
            self.operator.ends = self.log.ends
            start(client.process, self.operator.run())

    def use(self, places: list[Place]) -> None:
        """Start producers for new partitions."""
        for place in places:
            if self.compaction.expires:
                self._checkers.starts.expiring[place] = None
            for _ in range(self.compaction.producers):
                name = f"keeper-{len(self.producers)}"
                client = self._client(name)
                producer = KeyedProducer(
                    client,
                    self._checkers,
                    self.checkers,
                    self._topics,
                    self._keys,
                    place,
                    name,
                    interval_ms=self.compaction.interval_ms,
                )
                producer.is_open = not self._is_closing
                self.producers.append(producer)
                start(client.process, producer.run())

    def _start_reader(self, name: str, *, is_committed: bool, is_repeating: bool = False) -> CompactedReader:
        client = self._client(name)
        harm = {*self._plan.faults} & {"flip", "sync fails", "disk fails"}
        reader = CompactedReader(
            client,
            self._checkers,
            self.checkers,
            self._topics,
            name,
            rack=rack_of(len(self.readers), self._plan.racks),
            by_id=self.compaction.recreates,
            is_committed=is_committed,
            is_repeating=is_repeating,
            tombstones_stay_ms=tombstones_stay_ms(self._plan),
            is_excused=bool(harm),
        )
        self.readers.append(reader)
        start(client.process, reader.run())
        return reader

    # After the healing

    def calm(self) -> None:
        """Everything is healed: the clients sleep no more, and the topics are compacted."""
        for transactor in self.transactors:
            transactor.is_calm = True
        if self.operator is not None:
            self.operator.is_open = False

    def close(self) -> None:
        self._is_closing = True
        for producer in self.producers:
            producer.is_open = False
        for transactor in self.transactors:
            transactor.is_open = False

    def settle(self, liveness_ms: int) -> None:
        """Wait until everything is acknowledged and every transaction has ended."""

        def waiting() -> list[str]:
            idle = [str(producer) for producer in self.producers if not producer.is_idle]
            return idle + [str(transactor) for transactor in self.transactors if not transactor.is_idle]

        if not self._loop.run_until(lambda: not waiting(), liveness_ms):
            raise Violation(f"never acknowledged in {liveness_ms} ms without faults: {waiting()}")
        limit_ms = self._plan.transaction_timeout_ms + SLACK_MS
        if not self._loop.run_until(lambda: not self.log.open_transactions(), limit_ms):
            hanging = self.log.open_transactions()
            raise Violation(f"a transaction hangs: {hanging}, {limit_ms} ms after the last write")
        if self.operator is not None and self.compaction.changes_policy:
            settled = start(self.operator.process, self.operator.settle())
            if not self._loop.run_until(lambda: settled.is_kept, liveness_ms):
                raise Violation(f"the policy could not be changed within {liveness_ms} ms without faults")
        self._wait_for_the_cleaners()

    def _wait_for_the_cleaners(self) -> None:
        since_ms = self._loop.now_ms
        while due := self.log.due():
            if self._loop.now_ms > since_ms + CLEANING_MS:
                raise Violation(f"never cleaned in {CLEANING_MS} ms without faults: {due}")
            self._loop.run_for(1_000)

    def start_last_readers(self) -> None:
        self._start_reader("last-table-reader", is_committed=True)

    def unread(self, ends: dict[Place, int]) -> list[str]:
        return [
            f"{reader.name} {place} to {reader.read_to(place)} of {end}"
            for reader in self.readers
            for place, end in ends.items()
            if reader.read_to(place) < end
        ]

    def final(self) -> None:
        self.log.final()
        if self.checkers.writes.acknowledged < 5:
            raise Violation(
                f"vacuous: {self.checkers.writes.acknowledged} records of compacted topics written"
            )
        if not any(reader.passes for reader in self.readers):
            raise Violation("vacuous: no reader has read a compacted topic completely")

    def counts(self) -> dict[str, int]:
        writes = self.checkers.writes
        return {
            "keyed records acknowledged": writes.acknowledged,
            "tombstones acknowledged": writes.tombstones,
            "keyed records found": writes.found_count,
            "keys compared": writes.compared,
            "values excused": writes.excused,
            "tables read": sum(reader.passes for reader in self.readers),
            "files swapped": self.log.swaps,
            "tombstones seen gone": self.log.removed_tombstones,
            "replicas compared": self.log.compared,
            "tables changed": self.operator.changes if self.operator is not None else 0,
        }


def tombstones_stay_ms(plan: Plan) -> float:
    """For how long a tombstone certainly stays; 0 where clocks are set, so that nothing is certain."""
    assert plan.compaction is not None
    if "clock jump" in plan.faults or "far clock" in dict(plan.later_faults):
        return 0
    return max(0, plan.compaction.delete_retention_ms * RATE_SLACK - 2 * plan.clock_skew_ms)
