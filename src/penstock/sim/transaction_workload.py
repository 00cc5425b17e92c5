"""Everything about transactions in a simulated run: their topics, clients, readers and checkers."""

from __future__ import annotations

from collections.abc import Callable

from penstock.protocol.messages.groups import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.cluster import Cluster, rack_of
from penstock.sim.loop import Loop, start
from penstock.sim.plans import Plan
from penstock.sim.report import Violation
from penstock.sim.tellers import Processor, Teller
from penstock.sim.topics import ACCOUNTS, INPUTS, OUTPUTS, Topics
from penstock.sim.transaction_checkers import TransactionCheckers
from penstock.sim.transaction_log_checkers import CommittedTransactions
from penstock.sim.transaction_readers import TransactionReader
from penstock.sim.transactional_producer import TransactionalProducer

GROUP = "processors"
OFFSET_FETCH_VERSION = 8
# A coordinator aborts a transaction within its timeout and this time, in a healthy cluster.
SLACK_MS = 30_000


class TransactionWorkload:
    def __init__(
        self,
        plan: Plan,
        loop: Loop,
        cluster: Cluster,
        checkers: ClientCheckers,
        topics: Topics,
        client: Callable[[str], Client],
    ) -> None:
        self._plan = plan
        self._loop = loop
        self._checkers = checkers
        self._topics = topics
        self._client = client
        self.checkers = TransactionCheckers()
        self.log = CommittedTransactions(cluster, self.checkers.classic, topics)
        self.tellers: list[Teller] = []
        self.processors: list[Processor] = []
        self.readers: list[TransactionReader] = []
        # The offsets that the group has committed in the end, by partition.
        self._committed: dict[int, int] | None = None
        self._healed_ms = 0.0

    @property
    def topics(self) -> list[tuple[str, int]]:
        """The topics that the workload needs, and their partitions."""
        chance = self._loop.streams["transaction topics"]
        topics = [(ACCOUNTS, self._plan.accounts)] if self._plan.tellers else []
        if self._plan.processors:
            topics += [(OUTPUTS, chance.choice([1, 2])), (INPUTS, chance.choice([1, 2]))]
        return topics

    def start(self) -> None:
        plan = self._plan
        for number, generations in enumerate(plan.tellers):
            for instance, is_v2 in enumerate(generations):
                client = self._client(f"teller-{number}-{instance}")
                producer = self._producer(
                    client, f"bank-{number}", f"t{number}.{instance}", is_v2, is_alone=len(generations) == 1
                )
                teller = Teller(
                    client,
                    producer,
                    interval_ms=plan.transfer_interval_ms,
                    sleeps=plan.sleeps,
                    sleep_ms_max=plan.sleep_ms_max,
                    has_receipts=plan.has_receipts,
                )
                self.tellers.append(teller)
                start(client.process, teller.run())
        for number, is_v2 in enumerate(plan.processors):
            client = self._client(f"processor-{number}")
            producer = self._producer(client, f"processor-{number}", f"p{number}", is_v2, is_alone=True)
            processor = Processor(
                client, self._checkers, self._topics, GROUP, f"processor-{number}", producer
            )
            self.processors.append(processor)
            start(client.process, processor.run())
        self.start_reader("committed-0", is_committed=True)
        self.start_reader("committed-1", is_committed=True)
        self.start_reader("uncommitted", is_committed=False)

    def _producer(
        self, client: Client, transactional_id: str, name: str, is_v2: bool, *, is_alone: bool
    ) -> TransactionalProducer:
        return TransactionalProducer(
            client,
            self.checkers,
            transactional_id,
            name,
            is_v2=is_v2,
            timeout_ms=self._plan.transaction_timeout_ms,
            is_alone=is_alone,
            impatience=self._plan.impatience,
            lateness=self._plan.lateness,
        )

    def start_reader(self, name: str, *, is_committed: bool) -> TransactionReader:
        client = self._client(name)
        reader = TransactionReader(
            client,
            self._checkers,
            self.checkers,
            self._topics,
            name,
            rack=rack_of(len(self.readers), self._plan.racks),
            is_committed=is_committed,
        )
        self.readers.append(reader)
        start(client.process, reader.run())
        return reader

    # After the healing

    def transfers(self) -> dict[str, int]:
        """The committed transfers of each transactional id so far."""
        counts: dict[str, int] = {}
        for teller in self.tellers:
            transactional_id = str(teller).split(".")[0]
            counts[transactional_id] = counts.get(transactional_id, 0) + teller.transfers
        return counts

    def calm(self) -> None:
        """Everything is healed: the tellers sleep no more."""
        self._healed_ms = self._loop.now_ms
        for teller in self.tellers:
            teller.is_calm = True

    def went_on(self, before: dict[str, int], liveness_ms: int) -> None:
        """Check that every transactional id has committed something, or does so within this time."""

        def stuck() -> list[str]:
            now = self.transfers()
            return [
                transactional_id
                for transactional_id, count in now.items()
                if count == before[transactional_id]
            ]

        self._wait_for_ends(self._healed_ms, "everything was healed")
        if not self._loop.run_until(lambda: not stuck(), liveness_ms):
            raise Violation(f"no transfer was committed in {liveness_ms} ms without faults: {stuck()}")

    def close(self) -> None:
        for teller in self.tellers:
            teller.is_open = False
        for processor in self.processors:
            processor.is_open = False

    def settle(self, liveness_ms: int) -> None:
        """Wait until the coordinators have ended every transaction that nobody else ends."""
        if not self._loop.run_until(lambda: all(teller.is_idle for teller in self.tellers), liveness_ms):
            waiting = [str(teller) for teller in self.tellers if not teller.is_idle]
            raise Violation(f"transactions have not ended in {liveness_ms} ms without faults: {waiting}")
        self._wait_for_ends(self._loop.now_ms, "the clients were closed")

    def _wait_for_ends(self, since_ms: float, event: str) -> None:
        """14: wait until all transactions that were open then have ended."""
        limit_ms = self._plan.transaction_timeout_ms + SLACK_MS
        if not self._loop.run_until(lambda: not self.log.open_since(since_ms), limit_ms):
            raise Violation(
                f"a transaction hangs: open more than {limit_ms} ms after {event}, with a timeout of "
                f"{self._plan.transaction_timeout_ms} ms: {self.log.open_since(since_ms)}"
            )

    def start_last_readers(self) -> None:
        self.start_reader("last-committed", is_committed=True)
        if self._plan.processors:
            client = self._client("auditor")
            start(client.process, self._fetch_offsets(client))

    async def _fetch_offsets(self, client: Client) -> None:
        await client.refresh([INPUTS])
        while self._committed is None:
            await client.back_off()
            coordinator = await client.find_coordinator(GROUP)
            partitions = [place.partition for place in client.places.get(INPUTS, [])]
            if coordinator is None or not partitions:
                await client.refresh([INPUTS])
                continue
            wanted = OffsetFetchRequestGroup(
                group_id=GROUP, topics=[OffsetFetchRequestTopics(name=INPUTS, partition_indexes=partitions)]
            )
            request = OffsetFetchRequest(groups=[wanted], require_stable=True)
            response = await client.call(coordinator, request, OFFSET_FETCH_VERSION)
            if response is None or response.groups[0].error_code:
                continue
            found = response.groups[0].topics[0].partitions
            if not any(partition.error_code for partition in found):
                self._committed = {
                    partition.partition_index: max(0, partition.committed_offset) for partition in found
                }

    def unread(self, ends: dict[Place, int]) -> list[str]:
        unread = [
            f"{reader.name} {place} to {reader.offset(place)} of {end}"
            for reader in self.readers
            for place, end in ends.items()
            if reader.offset(place) < end
        ]
        if self._plan.processors and self._committed is None:
            unread.append("the offsets of the processors")
        return unread

    def final(self) -> None:
        checkers = self.checkers
        checkers.atomic.final()
        is_excused = checkers.atomic.excused > 0
        checkers.money.final(is_excused=is_excused)
        if self._committed is not None and not is_excused:
            checkers.outputs.final(self._committed)
        checkers.view.final()
        if checkers.atomic.committed_count < 1:
            raise Violation("vacuous: no transaction was committed")
        if checkers.atomic.compared < 5:
            raise Violation(f"vacuous: {checkers.atomic.compared} records of transactions compared")

    def counts(self) -> dict[str, int]:
        checkers = self.checkers
        return {
            "transactions committed": checkers.atomic.committed_count,
            "transactions aborted": checkers.atomic.aborted_count,
            "transactions excused": checkers.atomic.excused,
            "producers fenced": checkers.zombies.fenced,
            "producers initialized": checkers.zombies.initialized_count,
            "transaction records compared": checkers.atomic.compared + checkers.view.count,
            "stable offsets compared": self.log.compared,
            "markers": self.log.markers,
            "outputs": checkers.outputs.count,
        }
