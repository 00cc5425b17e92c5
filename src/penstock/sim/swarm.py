"""One simulated run of a whole cluster from one number: how the cluster is made, what befalls it, what it must
show for it.

The plan of a run is drawn from its seed, and most of it is left out of most plans: a run in which everything
goes wrong at once explores less than one in which three things do, often. A run has two phases. In the first
the nemesis strikes while the clients work, and everything that clients see must be true. Then all is healed,
and everything must come back by itself: every partition led, every copy in sync, every pending record
acknowledged, everything acknowledged read.

What a newcomer gets wrong: a run that found nothing may have done nothing. ``_assert_that_much_happened`` is as
much a check as the others.
"""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass

from penstock.sim.administrator import Administrator
from penstock.sim.checkers import Inspector
from penstock.sim.client import Client, Place
from penstock.sim.cluster import Cluster
from penstock.sim.faults import Nemesis
from penstock.sim.loop import Loop, Process, Streams, Violation, start
from penstock.sim.members import Member
from penstock.sim.network import Fabric
from penstock.sim.producers import Gambler, Identity, Lane
from penstock.sim.readers import Reader
from penstock.sim.report import Report
from penstock.sim.topics import Topics
from penstock.sim.truths import Truths

INSPECTION_MS = 250
# After everything was healed.
LIVENESS_MS = 90_000
SETTLING_MS = 30_000

# Every run may have these; of the others a run has some.
NETWORK_FAULTS = ("cut", "one-way cut", "isolation", "cut from clients", "reset", "clog")
PROCESS_FAULTS = (
    "crash",
    "crash while writing",
    "crash of all",
    "stop",
    "pause",
    "pause of a client",
    "clock jump",
)
DISK_FAULTS = ("slow disk", "full disk", "disk fails")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run that is decided before it begins."""

    seed: int
    seconds: float
    nodes: int
    voters: int
    data_dirs: int
    replication_factor: int
    min_in_sync: int
    is_flushed: bool
    segment_bytes: int
    snapshot_records: int
    faults: tuple[str, ...]
    fault_interval_ms: float
    latency_ms: float
    splits: float
    cold_reads: float
    evictions: float
    clock_skew_ms: int
    clock_drift: float
    partitions: int
    lanes: int
    gamblers: int
    readers: int
    members: int
    administers: bool
    lane_interval_ms: float
    # When all is healed, every node is started anew.
    restarts_all: bool


def plan_for(seed: int, *, seconds: float, nodes: int | None = None) -> Plan:
    chance = Streams(seed)["swarm"]
    count = chance.choices([1, 3, 5], [1, 8, 1])[0]
    if nodes is not None:
        count = nodes
    replication_factor = min(count, 3)
    is_flushed = chance.random() < 0.4
    enabled: list[str] = []
    for family in (NETWORK_FAULTS, PROCESS_FAULTS, DISK_FAULTS):
        if chance.random() < 0.75:
            enabled += [fault for fault in family if chance.random() < 0.6]
    if chance.random() < 0.5 and (is_flushed or replication_factor >= 3):
        enabled.append("power")
        if is_flushed and chance.random() < 0.5:
            enabled.append("power of all")
    if replication_factor >= 3 and chance.random() < 0.3:
        enabled.append(chance.choice(["flip", "sync fails"]))
    if not enabled:
        enabled = ["crash"]
    return Plan(
        seed=seed,
        seconds=seconds,
        nodes=count,
        voters=min(count, 3),
        data_dirs=chance.choice([1, 1, 2]),
        replication_factor=replication_factor,
        min_in_sync=min(2, replication_factor),
        is_flushed=is_flushed,
        segment_bytes=chance.choice([2_048, 8_192, 1 << 20]),
        snapshot_records=chance.choice([20, 100, 50_000]),
        faults=tuple(enabled),
        fault_interval_ms=chance.choice([1_500.0, 4_000.0, 10_000.0]),
        latency_ms=chance.choice([0.2, 1.0, 20.0]),
        splits=chance.choice([0.0, 0.1]),
        cold_reads=chance.choice([0.0, 0.02]),
        evictions=chance.choice([0.0, 0.02]),
        clock_skew_ms=chance.choice([0, 0, 100, 5_000]),
        clock_drift=chance.choice([0.0, 0.0, 0.0001, 0.005]),
        partitions=chance.choice([1, 2, 4]),
        lanes=chance.choice([1, 2, 3]),
        gamblers=chance.choice([0, 1, 2]),
        readers=chance.choice([1, 1, 2]),
        members=chance.choice([0, 2, 3]),
        administers=chance.random() < 0.5,
        lane_interval_ms=chance.choice([400.0, 2_000.0]),
        restarts_all=chance.random() < 0.3,
    )


class Run:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = Loop(Streams(plan.seed))
        self.fabric = Fabric(self.loop)
        self.fabric.weather.latency_ms = plan.latency_ms
        self.fabric.weather.jitter_ms = plan.latency_ms
        self.fabric.weather.splits = plan.splits
        self.truths = Truths()
        self.topics = Topics()
        self.cluster = Cluster(
            self.loop,
            self.fabric,
            nodes=plan.nodes,
            voters=plan.voters,
            data_dirs=plan.data_dirs,
            settings=_settings(plan),
            snapshot_records=plan.snapshot_records,
        )
        chance = self.loop.streams["swarm"]
        for machine in self.cluster.machines.values():
            machine.disk.cold_reads = plan.cold_reads
            machine.disk.evictions = plan.evictions
            machine.wall_skew_ms = chance.randint(-plan.clock_skew_ms, plan.clock_skew_ms)
            machine.rate = 1 + chance.uniform(-plan.clock_drift, plan.clock_drift)
        self.inspector = Inspector(self.cluster, self.topics)
        self.nemesis: Nemesis | None = None
        # Nothing new is written from now on.
        self._is_closing = False
        # By host.
        self._clients: dict[str, Process] = {}
        self.lanes: list[Lane] = []
        self.gamblers: list[Gambler] = []
        self.readers: list[Reader] = []
        self.members: list[Member] = []
        self.administrator: Administrator | None = None

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
        except AssertionError as found:
            # One of the broker's own, asked by the inspector.
            violation = "".join(traceback.format_exception(found))
        report = self._report(violation)
        # Nobody is left waiting: coroutines are closed, connections forgotten.
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
            replay=replay_line(self.plan),
            log=tuple(self.cluster.lines),
        )

    def _begin(self) -> None:
        """A cluster without faults, with its first topic."""
        for machine in self.cluster.machines.values():
            self.cluster.start(machine)
        plan = self.plan
        self.administrator = Administrator(
            self._client("admin"),
            self.truths,
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
        made = start(self.administrator.process, self.administrator.create("orders", plan.partitions, {}))
        if not self.loop.run_until(lambda: made.is_kept, LIVENESS_MS):
            raise Violation(f"no topic could be made within {LIVENESS_MS} ms of the first start")
        self._inspect()

    def _be_unsafe(self) -> None:
        plan = self.plan
        for number in range(plan.readers):
            self._start_reader(f"reader-{number}")
        for number in range(plan.members):
            client = self._client(f"member-{number}")
            member = Member(
                client, self.truths, self.topics, "workers", f"member-{number}", subscription=["orders"]
            )
            self.members.append(member)
            start(client.process, member.run())
        if plan.administers:
            assert self.administrator is not None
            start(self.administrator.process, self.administrator.run())
        self.nemesis = Nemesis(
            self.cluster,
            faults=plan.faults,
            interval_ms=plan.fault_interval_ms,
            clients=self._clients,
            is_flushed=plan.is_flushed,
            is_whole=self.inspector.is_whole,
        )
        self.loop.run_for(plan.seconds * 1000)

    def _be_alive(self) -> None:
        """All is well again: now everything has to come to its end."""
        assert self.nemesis is not None and self.administrator is not None
        self.nemesis.heal()
        self.cluster.note("nemesis", "has healed everything", {})
        self.administrator.is_open = False
        if self.plan.restarts_all:
            for machine in self.cluster.running:
                self.cluster.stop(machine)
            self.loop.run_for(1_000)
        if not self.loop.run_until(self.inspector.is_whole, LIVENESS_MS):
            raise Violation(
                f"not whole {LIVENESS_MS} ms after everything was healed: {self.inspector.what_is_missing()}"
            )
        # Whatever can be written is written in a cluster that is whole.
        before = [lane.acknowledged for lane in self.lanes]
        heartbeats = sum(member.heartbeats for member in self.members)
        self.loop.run_for(SETTLING_MS)
        for lane, count in zip(self.lanes, before):
            if lane.is_wanted and lane.acknowledged == count:
                raise Violation(f"{lane} got nothing acknowledged in {SETTLING_MS} ms after all was whole")
        if self.members and sum(member.heartbeats for member in self.members) == heartbeats:
            raise Violation(f"no member of the group was in a generation for {SETTLING_MS} ms without faults")
        self._is_closing = True
        for lane in self.lanes:
            lane.is_open = False
        for gambler in self.gamblers:
            gambler.is_open = False
        for member in self.members:
            member.is_open = False
        if not self.loop.run_until(lambda: all(lane.is_idle for lane in self.lanes), LIVENESS_MS):
            waiting = [str(lane) for lane in self.lanes if not lane.is_idle]
            raise Violation(f"never acknowledged in {LIVENESS_MS} ms without faults: {waiting}")

    def _end(self) -> None:
        """Read everything once more, from the beginning, and compare."""
        self.loop.run_for(5_000)
        ends = self.inspector.ends()
        last = self._start_reader("last-reader")

        def unread() -> list[str]:
            return [
                f"{reader.name} {place} to {reader.offset(place)} of {end}"
                for reader in (last, *self.readers)
                for place, end in ends.items()
                if reader.offset(place) < end
            ]

        if not self.loop.run_until(lambda: not unread(), LIVENESS_MS):
            raise Violation(f"unseen after {LIVENESS_MS} ms without faults: {', '.join(unread())}")
        self.truths.promises.final({place: position.offset for place, position in last.positions.items()})
        self.inspector.final()
        self._assert_that_much_happened()

    def _assert_that_much_happened(self) -> None:
        """A run that proves something has written, read and met faults."""
        if self.truths.promises.acknowledged < 5:
            raise Violation(f"vacuous: {self.truths.promises.acknowledged} records acknowledged")
        if self.truths.polls.polled < 5:
            raise Violation(f"vacuous: {self.truths.polls.polled} records read")

    # Clients

    def _client(self, name: str) -> Client:
        process = self._clients[name] = Process(self.loop, name)
        return Client(process, self.fabric, self.cluster.addresses, self.loop.streams[f"workload {name}"])

    def _start_reader(self, name: str) -> Reader:
        client = self._client(name)
        reader = Reader(client, self.truths, self.topics, name)
        if name != "last-reader":
            self.readers.append(reader)
        start(client.process, reader.run())
        return reader

    def _use(self, places: list[Place]) -> None:
        """Write to partitions that were just made."""
        plan, chance = self.plan, self.loop.streams["swarm"]
        shared, identity = self._client(f"producer-{len(self.lanes)}"), Identity()
        for place in places:
            self.inspector.expect(place)
            for number in range(plan.lanes if place.partition == 0 else 1):
                name = f"lane-{len(self.lanes)}"
                client = shared if number == 0 else self._client(name)
                lane = Lane(
                    client,
                    self.truths,
                    self.topics,
                    place,
                    name,
                    identity=identity if number == 0 else Identity(),
                    interval_ms=plan.lane_interval_ms,
                )
                lane.is_open = not self._is_closing
                self.lanes.append(lane)
                start(client.process, lane.run())
            for _ in range(plan.gamblers if place.partition == 0 else 0):
                name = f"gambler-{len(self.gamblers)}"
                client = self._client(name)
                gambler = Gambler(
                    client,
                    self.truths,
                    self.topics,
                    place,
                    name,
                    interval_ms=plan.lane_interval_ms * 2,
                    acks=chance.choice([1, -1]),
                )
                gambler.is_open = not self._is_closing
                self.gamblers.append(gambler)
                start(client.process, gambler.run())

    def _inspect(self) -> None:
        self.inspector.look()
        self.loop.after(INSPECTION_MS, self._inspect, "inspect")

    def _counts(self) -> dict[str, int]:
        truths = self.truths
        counts = {
            "acknowledged": truths.promises.acknowledged,
            "refused": truths.promises.refused,
            "read": truths.polls.polled,
            "compared": truths.values.compared + self.inspector.compared,
            "commits": truths.commits.acknowledged,
            "resumed": truths.commits.resumed,
            "generations": len(truths.owners.generations),
            "changes": self.administrator.changes if self.administrator is not None else 0,
            "elections": self.inspector.elections,
            "starts": sum(machine.starts for machine in self.cluster.machines.values()),
            "connections": self.fabric.connections_made,
        }
        if self.nemesis is not None:
            counts["faults"] = sum(self.nemesis.counts.values())
            counts |= {f"fault: {name}": count for name, count in sorted(self.nemesis.counts.items())}
        return counts


def run(seed: int, *, seconds: float = 60, nodes: int | None = None) -> Report:
    return Run(plan_for(seed, seconds=seconds, nodes=nodes)).run()


def replay_line(plan: Plan) -> str:
    return f"penstock sim --seed {plan.seed} --seconds {plan.seconds:g} --nodes {plan.nodes}"


def describe(plan: Plan) -> dict[str, object]:
    return asdict(plan)


def _settings(plan: Plan) -> dict[str, str]:
    settings = {
        "auto.create.topics.enable": "false",
        "offsets.topic.num.partitions": "2",
        "offsets.topic.replication.factor": str(plan.replication_factor),
        "offsets.topic.segment.bytes": str(max(plan.segment_bytes, 4_096)),
        "min.insync.replicas": str(plan.min_in_sync),
        "group.initial.rebalance.delay.ms": "100",
        "log.flush.offset.checkpoint.interval.ms": "5000",
        "penstock.durability": "flushed" if plan.is_flushed else "replicated",
    }
    return settings
