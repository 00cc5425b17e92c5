"""One simulated run of a whole cluster from one seed.

The plan of a run is drawn from its seed (``plans.py``). A run has two phases. In the first the nemesis injects
faults while the clients work, and everything that clients see must be correct. Then all faults are healed, and
the cluster must recover by itself: every partition has a leader, every copy is in sync, every pending record is
acknowledged, everything acknowledged is read.

A run without a violation may have done nothing, so ``_assert_that_much_happened`` is a check like the others.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from penstock.metadata.security import QuotaEntity
from penstock.sim.administrator import Administrator
from penstock.sim.checkers import Inspector
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.cluster import Cluster, rack_of
from penstock.sim.compaction_workload import CompactionWorkload
from penstock.sim.faults import Nemesis
from penstock.sim.guests import GUEST, Guest, Warden
from penstock.sim.loop import Loop, Process, Streams, start
from penstock.sim.members import Member
from penstock.sim.network import Fabric
from penstock.sim.offset_clients import OffsetCommitter, TimeQuerier
from penstock.sim.operators import Operator, Recreator
from penstock.sim.plans import Plan, plan_for
from penstock.sim.producers import IdempotentProducer, Identity, OneShotProducer
from penstock.sim.quota_operator import QuotaOperator
from penstock.sim.readers import Reader
from penstock.sim.report import Report, Violation
from penstock.sim.topics import COMPACTED, RECEIPTS, RECREATED, TRANSACTIONAL, Topics
from penstock.sim.transaction_workload import TransactionWorkload

INSPECTION_MS = 250
# Limits after everything was healed.
LIVENESS_MS = 90_000
SETTLING_MS = 30_000


class Run:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = Loop(Streams(plan.seed))
        self.fabric = Fabric(self.loop)
        self.fabric.weather.latency_ms = plan.latency_ms
        self.fabric.weather.jitter_ms = plan.latency_ms
        self.fabric.weather.splits = plan.splits
        self.checkers = ClientCheckers()
        self.topics = Topics()
        self.cluster = Cluster(
            self.loop,
            self.fabric,
            nodes=plan.nodes,
            voters=plan.voters,
            data_dirs=plan.data_dirs,
            settings=plan.settings,
            settings_of=plan.settings_of,
            racks=plan.racks,
            snapshot_records=plan.snapshot_records,
        )
        chance = self.loop.streams["swarm"]
        for machine in self.cluster.machines.values():
            machine.disk.cold_reads = plan.cold_reads
            machine.disk.evictions = plan.evictions
            machine.wall_skew_ms = chance.randint(-plan.clock_skew_ms, plan.clock_skew_ms)
            machine.rate = 1 + chance.uniform(-plan.clock_drift, plan.clock_drift)
        self.inspector = Inspector(self.cluster, self.topics)
        self.transactions: TransactionWorkload | None = None
        if plan.has_transactions:
            self.transactions = TransactionWorkload(
                plan, self.loop, self.cluster, self.checkers, self.topics, self._client
            )
        self.compaction: CompactionWorkload | None = None
        if plan.compaction is not None:
            self.compaction = CompactionWorkload(
                plan, self.loop, self.cluster, self.checkers, self.topics, self._client
            )
        self.nemesis: Nemesis | None = None
        # Whether producers have stopped writing new records.
        self._is_closing = False
        # By host.
        self._clients: dict[str, Process] = {}
        self.producers: list[IdempotentProducer] = []
        self.one_shot_producers: list[OneShotProducer] = []
        self.readers: list[Reader] = []
        self.members: list[Member] = []
        self.administrator: Administrator | None = None
        self.operator: Operator | None = None
        self.quota_operator: QuotaOperator | None = None
        self.recreator: Recreator | None = None
        self.archivist: Recreator | None = None
        self.table_recreator: Recreator | None = None
        self.guest: Guest | None = None
        # The latest producers of the recreated topic, by partition and number.
        self._recreated_producers: dict[tuple[int, int], IdempotentProducer] = {}

    # The run

    def run(self) -> Report:
        violation: str | None = None
        try:
            self._begin()
            self._be_unsafe()
            self._be_alive()
            self._end()
        except Violation as found:
            violation = str(found)
        except Exception as found:
            # A broker's own assertion, called by the inspector; or a bug in the simulator, which must not stop
            # the other seeds of a long run.
            violation = "".join(traceback.format_exception(found))
        report = self._report(violation)
        # Close all coroutines and drop all connections.
        for process in self._clients.values():
            process.end()
        for machine in self.cluster.machines.values():
            if machine.process is not None:
                machine.process.end()
        return report

    def _report(self, violation: str | None) -> Report:
        return Report(
            what="cluster",
            seed=self.plan.seed,
            violation=violation,
            virtual_ms=int(self.loop.now_ms),
            events=self.loop.events,
            trace_hash=self.loop.trace_hash,
            counts=self._counts(),
            replay=self.plan.replay_line,
            log=tuple(self.cluster.lines),
        )

    def _begin(self) -> None:
        """Start the cluster without faults and create its first topic."""
        for machine in self.cluster.machines.values():
            self.cluster.start(machine)
        plan = self.plan
        self.administrator = self._administrator(self._client("admin"))
        self._make_topic("orders", plan.partitions)
        for name, partitions in self.transactions.topics if self.transactions is not None else ():
            self._make_topic(name, partitions)
        if self.compaction is not None:
            for name, partitions in self.compaction.topics:
                self._make_topic(name, partitions, self.compaction.compaction.configs)
        self._inspect()

    def _make_topic(self, name: str, partitions: int, configs: dict[str, str] | None = None) -> None:
        assert self.administrator is not None
        made = start(self.administrator.process, self.administrator.create(name, partitions, configs or {}))
        if not self.loop.run_until(lambda: made.is_kept, LIVENESS_MS):
            raise Violation(f"no topic could be made within {LIVENESS_MS} ms of the first start")

    def _be_unsafe(self) -> None:
        plan = self.plan
        for number in range(plan.readers):
            self._start_reader(f"reader-{number}")
        for number in range(plan.members):
            client = self._client(f"member-{number}")
            member = Member(
                client,
                self.checkers,
                self.topics,
                "workers",
                f"member-{number}",
                subscription=["orders"],
                instance=f"instance-{number}" if number < plan.static_members else None,
            )
            self.members.append(member)
            start(client.process, member.run())
        if plan.administers:
            assert self.administrator is not None
            start(self.administrator.process, self.administrator.run())
        self._start_later_clients()
        if self.transactions is not None:
            self.transactions.start()
        if self.compaction is not None:
            self.compaction.start()
        self.nemesis = Nemesis(
            self.cluster,
            faults=plan.faults,
            interval_ms=plan.fault_interval_ms,
            clients=self._clients,
            later_faults=plan.later_faults,
            is_flushed=plan.is_always_flushed,
            # Plans of the first generation have no wipes, and need less.
            is_whole=self.inspector.is_whole if plan.generation == 1 else self.inspector.is_sound,
        )
        self.loop.run_for(plan.seconds * 1000)

    def _be_alive(self) -> None:
        """Heal everything and check that all work completes."""
        assert self.nemesis is not None and self.administrator is not None
        self.nemesis.heal()
        self.cluster.note("nemesis", "has healed everything", {})
        self.administrator.is_open = False
        if self.operator is not None:
            self.operator.is_open = False
        if self.quota_operator is not None:
            self.quota_operator.is_open = False
        for recreator in (self.recreator, self.archivist, self.table_recreator):
            if recreator is not None:
                recreator.is_open = False
        if self.plan.restarts_all:
            for machine in self.cluster.running:
                self.cluster.stop(machine)
            self.loop.run_for(1_000)
        is_whole = self.inspector.is_whole if self.plan.generation == 1 else self.inspector.is_sound
        if not self.loop.run_until(is_whole, LIVENESS_MS):
            missing = self.inspector.what_is_missing() or "a node that was wiped does not vote again"
            raise Violation(f"not whole {LIVENESS_MS} ms after everything was healed: {missing}")
        quotas = self.quota_operator
        if quotas is not None and not self.loop.run_until(lambda: quotas.is_done, LIVENESS_MS):
            raise Violation(f"quotas could not be removed within {LIVENESS_MS} ms without faults")
        # Everything that can be written is written in a healthy cluster.
        before = [producer.acknowledged for producer in self.producers]
        heartbeats = sum(member.heartbeats for member in self.members)
        transfers: dict[str, int] = {}
        if self.transactions is not None:
            self.transactions.calm()
            transfers = self.transactions.transfers()
        if self.compaction is not None:
            self.compaction.calm()
        self.loop.run_for(SETTLING_MS)
        if self.transactions is not None:
            self.transactions.went_on(transfers, LIVENESS_MS)
        for producer, count in zip(self.producers, before):
            if producer.is_wanted and producer.acknowledged == count:
                raise Violation(
                    f"{producer} got nothing acknowledged in {SETTLING_MS} ms after all was whole"
                )
        if self.members and sum(member.heartbeats for member in self.members) == heartbeats:
            raise Violation(f"no member of the group was in a generation for {SETTLING_MS} ms without faults")
        self._is_closing = True
        for producer in self.producers:
            producer.is_open = False
        for one_shot in self.one_shot_producers:
            one_shot.is_open = False
        for member in self.members:
            member.is_open = False
        if self.transactions is not None:
            self.transactions.close()
        if self.compaction is not None:
            self.compaction.close()
        if not self.loop.run_until(lambda: all(producer.is_idle for producer in self.producers), LIVENESS_MS):
            waiting = [str(producer) for producer in self.producers if not producer.is_idle]
            raise Violation(f"never acknowledged in {LIVENESS_MS} ms without faults: {waiting}")
        if self.transactions is not None:
            self.transactions.settle(LIVENESS_MS)
        if self.compaction is not None:
            self.compaction.settle(LIVENESS_MS)

    def _end(self) -> None:
        """Read everything again from the beginning, and compare."""
        self.loop.run_for(5_000)
        all_ends = self.inspector.ends()
        ends = {
            place: end
            for place, end in all_ends.items()
            if place.topic not in (*TRANSACTIONAL, *COMPACTED, RECEIPTS)
        }
        compacted_ends = {place: end for place, end in all_ends.items() if place.topic in COMPACTED}
        transactional_ends = {place: end for place, end in all_ends.items() if place.topic in TRANSACTIONAL}
        last = self._start_reader("last-reader")
        if self.transactions is not None:
            self.transactions.start_last_readers()
        if self.compaction is not None:
            self.compaction.start_last_readers()

        def unread() -> list[str]:
            unread = [
                f"{reader.name} {place} to {reader.offset(place)} of {end}"
                for reader in (last, *self.readers)
                for place, end in ends.items()
                if reader.offset(place) < end
            ]
            if self.transactions is not None:
                unread += self.transactions.unread(transactional_ends)
            if self.compaction is not None:
                unread += self.compaction.unread(compacted_ends)
            return unread

        if not self.loop.run_until(lambda: not unread(), LIVENESS_MS):
            raise Violation(f"unseen after {LIVENESS_MS} ms without faults: {', '.join(unread())}")
        self.checkers.promises.final({place: position.offset for place, position in last.positions.items()})
        if self.transactions is not None:
            self.transactions.final()
        if self.compaction is not None:
            self.compaction.final()
        self.inspector.final()
        self._assert_that_much_happened()

    def _assert_that_much_happened(self) -> None:
        """A meaningful run has written and read records."""
        if self.checkers.promises.acknowledged < 5:
            raise Violation(f"vacuous: {self.checkers.promises.acknowledged} records acknowledged")
        if self.checkers.polls.polled < 5:
            raise Violation(f"vacuous: {self.checkers.polls.polled} records read")

    # Clients

    def _administrator(self, client: Client) -> Administrator:
        plan = self.plan
        return Administrator(
            client,
            self.checkers,
            self.topics,
            interval_ms=6_000,
            replication_factor=plan.replication_factor,
            configs={
                "segment.bytes": str(plan.segment_bytes),
                "min.insync.replicas": str(plan.min_in_sync),
                "file.delete.delay.ms": "1000",
            },
            on_made=self._use,
        )

    def _start_later_clients(self) -> None:
        """Start the clients that only plans since the second generation have."""
        plan = self.plan
        if plan.changed_settings:
            client = self._client("operator")
            self.operator = Operator(
                client,
                self.topics,
                plan.changed_settings,
                in_sync_min=plan.in_sync_min,
                copies=plan.replication_factor,
                interval_ms=3_000,
            )
            start(client.process, self.operator.run())
        if plan.quota_interval_ms:
            client = self._client("quota-operator")
            self.quota_operator = QuotaOperator(client, plan.quota_interval_ms, self._quotas)
            start(client.process, self.quota_operator.run())
        if plan.recreates:
            client = self._client("recreator")
            self.recreator = Recreator(self._administrator(client), self.topics, client, RECREATED)
            start(client.process, self.recreator.run())
            client = self._client("bookkeeper")
            committer = OffsetCommitter(client, self.checkers, self.topics, "books", interval_ms=1_500)
            start(client.process, committer.run())
        if plan.has_receipts:
            client = self._client("archivist")
            self.archivist = Recreator(self._administrator(client), self.topics, client, RECEIPTS)
            start(client.process, self.archivist.run())
        if plan.compaction is not None and plan.compaction.recreates:
            client = self._client("table-recreator")
            self.table_recreator = Recreator(
                self._administrator(client), self.topics, client, COMPACTED[1], plan.compaction.configs
            )
            start(client.process, self.table_recreator.run())
        if plan.has_guest:
            self.guest = Guest(self._client(GUEST), self.cluster, copies=plan.replication_factor)
            start(self.guest.process, self.guest.run())
            warden = Warden(self._client("warden"), self.cluster)
            start(warden.process, warden.run())
        if plan.asks_by_time:
            client = self._client("timekeeper")
            querier = TimeQuerier(client, self.checkers, self.topics, "timekeeper", interval_ms=1_500)
            start(client.process, querier.run())

    def _quotas(self) -> Iterator[tuple[QuotaEntity, str]]:
        for machine in self.cluster.running:
            if machine.node is not None:
                for entity, quotas in machine.node.image.security.quotas.items():
                    yield from ((entity, key) for key in quotas)

    def _client(self, name: str) -> Client:
        process = self._clients[name] = Process(self.loop, name)
        return Client(process, self.fabric, self.cluster.addresses, self.loop.streams[f"workload {name}"])

    def _start_reader(self, name: str) -> Reader:
        client = self._client(name)
        rack = rack_of(len(self.readers), self.plan.racks)
        reader = Reader(client, self.checkers, self.topics, name, rack=rack, by_id=self.plan.reads_by_id)
        if name != "last-reader":
            self.readers.append(reader)
        start(client.process, reader.run())
        return reader

    def _use(self, places: list[Place]) -> None:
        """Start producers for new partitions."""
        plan, chance = self.plan, self.loop.streams["swarm"]
        if places[0].topic in (*TRANSACTIONAL, RECEIPTS):
            for place in places:
                self.inspector.expect(place)
            return
        if places[0].topic in COMPACTED:
            assert self.compaction is not None
            for place in places:
                self.inspector.expect(place)
            self.compaction.use(places)
            return
        shared, identity = self._client(f"producer-{len(self.producers)}"), Identity()
        for place in places:
            self.inspector.expect(place)
            for number in range(plan.producers if place.partition == 0 else 1):
                # The name seeds its random stream and is part of its values: another name would change every run.
                name = f"lane-{len(self.producers)}"
                client = shared if number == 0 else self._client(name)
                key = (place.partition, number)
                is_again = place.topic == RECREATED
                producer = IdempotentProducer(
                    client,
                    self.checkers,
                    self.topics,
                    place,
                    name,
                    identity=identity if number == 0 else Identity(),
                    interval_ms=plan.produce_interval_ms,
                    predecessor=self._recreated_producers.get(key) if is_again else None,
                )
                if is_again:
                    self._recreated_producers[key] = producer
                producer.is_open = not self._is_closing
                self.producers.append(producer)
                start(client.process, producer.run())
            for _ in range(plan.one_shot_producers if place.partition == 0 else 0):
                name = f"gambler-{len(self.one_shot_producers)}"
                client = self._client(name)
                one_shot = OneShotProducer(
                    client,
                    self.checkers,
                    self.topics,
                    place,
                    name,
                    interval_ms=plan.produce_interval_ms * 2,
                    acks=chance.choice([1, -1]),
                )
                one_shot.is_open = not self._is_closing
                self.one_shot_producers.append(one_shot)
                start(client.process, one_shot.run())

    def _inspect(self) -> None:
        self.inspector.look()
        if self.transactions is not None:
            self.transactions.log.look()
        if self.compaction is not None:
            self.compaction.log.look()
        self.loop.after(INSPECTION_MS, self._inspect, "inspect")

    def _counts(self) -> dict[str, int]:
        checkers = self.checkers
        counts = {
            "acknowledged": checkers.promises.acknowledged,
            "refused": checkers.promises.refused,
            "read": checkers.polls.polled,
            "compared": checkers.values.compared + self.inspector.compared,
            "commits": checkers.commits.acknowledged,
            "resumed": checkers.commits.resumed,
            "generations": len(checkers.owners.generations),
            "changes": self.administrator.changes if self.administrator is not None else 0,
            "elections": self.inspector.elections,
            "starts": sum(machine.starts for machine in self.cluster.machines.values()),
            "connections": self.fabric.connections_made,
        }
        if self.plan.generation > 1:
            counts |= {
                "settings changed": self.operator.changes if self.operator is not None else 0,
                "topics recreated": self.recreator.recreations if self.recreator is not None else 0,
                "asked by time": checkers.times.asked,
                "metadata compared": self.inspector.metadata_compared,
                "read from followers": sum(reader.read_nearby for reader in self.readers),
            }
        if self.transactions is not None:
            counts |= self.transactions.counts()
            if self.archivist is not None:
                counts["receipts recreated"] = self.archivist.recreations
        if self.compaction is not None:
            counts |= self.compaction.counts()
            if self.table_recreator is not None:
                counts["tables recreated"] = self.table_recreator.recreations
        if self.guest is not None:
            counts |= self.guest.counts()
        if self.quota_operator is not None:
            counts |= {
                "quotas changed": self.quota_operator.changes,
                "connections seen delayed": self.inspector.delayed,
            }
        if self.nemesis is not None:
            counts["faults"] = sum(self.nemesis.counts.values())
            counts |= {f"fault: {name}": count for name, count in sorted(self.nemesis.counts.items())}
        return counts


def run(seed: int, *, seconds: float = 60, nodes: int | None = None, generation: int = 1) -> Report:
    return Run(plan_for(seed, seconds=seconds, nodes=nodes, generation=generation)).run()
