"""The plan of a simulated run: everything that its seed decides before the start.

Most plans leave most things out: a run in which everything goes wrong at once explores less than one in which
three things do, often.

A seed keeps its meaning. ``generation`` says which kind of plan it belongs to: plans of a later generation have
more in them, drawn from separate random streams, and everything of an earlier generation is drawn as before. So a
seed that once found a bug is replayed with the same plan. Additions to the plans come with a new generation,
never in an old one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.sim.compaction_plans import COMPACTION_FAULTS, Compaction, compaction_for
from penstock.sim.loop import Streams

# Any plan may have these; of the other faults it has some.
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

# These faults destroy data on a machine; the others do not.
HARMFUL = ("power", "flip", "sync fails", "wipe")

# Faults of the second generation: how often a plan has them, and their mean interval in ms.
LATER_FAULTS = {
    "wipe": (0.3, 20_000.0),
    "refusal": (0.3, 12_000.0),
    "split": (0.3, 20_000.0),
    "far clock": (0.3, 15_000.0),
    "filled disk": (0.3, 15_000.0),
}
# These need other nodes: with copies of the destroyed data, or with right clocks.
NEED_COPIES = ("wipe", "split", "far clock")

# Settings that an operator changes during a run.
CHANGED_SETTINGS = (
    "min.insync.replicas",
    "retention.ms",
    "retention.bytes",
    "flush.messages",
    "flush.ms",
    "unclean.leader.election.enable",
)

# The transaction timeouts of clients.
TRANSACTION_TIMEOUTS_MS = (2_000, 6_000, 15_000)

NEWEST = 6


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run that is decided before the start."""

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
    producers: int
    one_shot_producers: int
    readers: int
    members: int
    administers: bool
    produce_interval_ms: float
    # Whether every node is restarted after the healing.
    restarts_all: bool

    # Fields since the second generation; the defaults are those of the first.
    generation: int = 1
    # Faults with their own schedule and random stream: (name, mean interval).
    later_faults: tuple[tuple[str, float], ...] = ()
    # Topic settings that change during the run.
    changed_settings: tuple[str, ...] = ()
    # For each node: whether its default is flushed mode; empty when all are as ``is_flushed``.
    flushed_nodes: tuple[bool, ...] = ()
    # Number of racks; consumers read from the nearest replica. 0 for none.
    racks: int = 0
    # Number of static members.
    static_members: int = 0
    # Whether a client queries offsets by time.
    asks_by_time: bool = False
    # Whether a topic is deleted and created again repeatedly, with a group that commits to it.
    recreates: bool = False

    # Fields since the third generation.
    # The tellers of each transactional id: whether they speak transactions v2. Several are zombies to each other.
    tellers: tuple[tuple[bool, ...], ...] = ()
    # The processors: whether they speak transactions v2.
    processors: tuple[bool, ...] = ()
    # Partitions of the accounts.
    accounts: int = 2
    transaction_timeout_ms: int = 6_000
    transfer_interval_ms: float = 1_000.0
    # How often tellers sleep within a transaction, and for how long at most.
    sleeps: float = 0.0
    sleep_ms_max: float = 0.0
    # How often a client does not wait for the answer to a request, and sends it again.
    impatience: float = 0.0
    # How often a request gets stuck: the client sends it again, and the first copy arrives later.
    lateness: float = 0.0

    # Fields since the fourth generation.
    # Whether tellers also write to a topic that is deleted and created again repeatedly.
    has_receipts: bool = False

    # Fields since the fifth generation.
    # Compacted topics; None for none.
    compaction: Compaction | None = None

    # Fields since the sixth generation.
    # Whether there is a client whose rights on a topic are taken away and given back again and again.
    has_guest: bool = False
    # The mean time between two changes of client quotas; 0 for none.
    quota_interval_ms: float = 0.0

    @property
    def has_transactions(self) -> bool:
        return bool(self.tellers or self.processors)

    @property
    def in_sync_min(self) -> int:
        """The lowest min.insync.replicas that may be set during the run.

        With 1, a replica that has lost data may have become the only member of the ISR before the loss is known:
        the others were stopped or restarted, and no other replica is eligible. That loss is allowed, so the
        minimum is never 1 where machines lose data.
        """
        harm = {fault for fault in (*self.faults, *dict(self.later_faults)) if fault in HARMFUL}
        if self.is_always_flushed:
            harm.discard("power")
        return min(2, self.replication_factor) if harm else 1

    @property
    def reads_by_id(self) -> bool:
        """Whether readers use topic ids: names cannot distinguish a topic from its successor."""
        return self.generation > 1 and (self.recreates or self.administers)

    @property
    def is_always_flushed(self) -> bool:
        """Whether everything acknowledged is on disk, so that any machine may lose power at any time."""
        return self.is_flushed and not self.flushed_nodes and "flush.messages" not in self.changed_settings

    @property
    def replay_line(self) -> str:
        line = f"penstock sim --seed {self.seed} --seconds {self.seconds:g} --nodes {self.nodes}"
        return line if self.generation == 1 else f"{line} --plans {self.generation}"

    @property
    def settings(self) -> dict[str, str]:
        """The settings of every broker."""
        settings = {
            "auto.create.topics.enable": "false",
            "offsets.topic.num.partitions": "2",
            "offsets.topic.replication.factor": str(self.replication_factor),
            "offsets.topic.segment.bytes": str(max(self.segment_bytes, 4_096)),
            "min.insync.replicas": str(self.min_in_sync),
            "group.initial.rebalance.delay.ms": "100",
            "log.flush.offset.checkpoint.interval.ms": "5000",
            "penstock.durability": _durability(self.is_flushed),
        }
        if self.generation > 1:
            # Records that expire wrongly must have the time to do so.
            settings["log.retention.check.interval.ms"] = "5000"
        if self.generation > 2:
            settings |= {
                "transaction.state.log.num.partitions": "2",
                "transaction.state.log.replication.factor": str(self.replication_factor),
                "transaction.state.log.segment.bytes": str(max(self.segment_bytes, 4_096)),
                "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
            }
        if self.generation > 4:
            # The internal topics are compacted too.
            settings |= {
                "log.cleaner.backoff.ms": "1000",
                "log.cleaner.min.cleanable.ratio": "0.1",
                # The smallest. Memory for more keys takes longer to get than to use.
                "log.cleaner.dedupe.buffer.size": str(1 << 20),
            }
        else:
            settings["log.cleaner.enable"] = "false"
        if self.has_guest:
            # Only the guest's topic has ACLs.
            settings |= {"authorizer.class.name": "acls", "allow.everyone.if.no.acl.found": "true"}
        return settings

    @property
    def settings_of(self) -> dict[int, dict[str, str]]:
        """Overrides of single brokers, by node."""
        return {
            node_id: {"penstock.durability": _durability(is_flushed)}
            for node_id, is_flushed in enumerate(self.flushed_nodes, start=1)
        }


def _durability(is_flushed: bool) -> str:
    return "flushed" if is_flushed else "replicated"


def plan_for(seed: int, *, seconds: float, nodes: int | None = None, generation: int = 1) -> Plan:
    assert 1 <= generation <= NEWEST
    first = _first_generation(seed, seconds, nodes)
    if generation == 1:
        return first
    second = _second_generation(first)
    if generation == 2:
        return second
    third = _third_generation(second)
    if generation == 3:
        return third
    fourth = _fourth_generation(third)
    if generation == 4:
        return fourth
    fifth = _fifth_generation(fourth)
    return fifth if generation == 5 else _sixth_generation(fifth)


def _first_generation(seed: int, seconds: float, nodes: int | None) -> Plan:
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
        producers=chance.choice([1, 2, 3]),
        one_shot_producers=chance.choice([0, 1, 2]),
        readers=chance.choice([1, 1, 2]),
        members=chance.choice([0, 2, 3]),
        administers=chance.random() < 0.5,
        produce_interval_ms=chance.choice([400.0, 2_000.0]),
        restarts_all=chance.random() < 0.3,
    )


def _second_generation(plan: Plan) -> Plan:
    streams = Streams(plan.seed)

    def is_in(what: str, how_often: float) -> bool:
        return streams[f"plan {what}"].random() < how_often

    has_copies = plan.replication_factor >= 3
    changed: tuple[str, ...] = ()
    if is_in("settings", 0.5):
        changed = tuple(name for name in CHANGED_SETTINGS if is_in(name, 0.6))
    flushed: tuple[bool, ...] = ()
    if is_in("durability", 0.25) and plan.nodes > 1:
        flushed = tuple(is_in(f"durability of {node}", 0.5) for node in range(plan.nodes))
    made = replace(
        plan,
        generation=2,
        flushed_nodes=flushed,
        later_faults=tuple(
            (fault, interval_ms)
            for fault, (how_often, interval_ms) in LATER_FAULTS.items()
            if is_in(fault, how_often) and (has_copies or fault not in NEED_COPIES)
        ),
        changed_settings=changed,
        racks=streams["plan racks"].choice([0, 0, 0, 2, 3]) if plan.nodes > 1 else 0,
        static_members=streams["plan static members"].choice([0, 0, 1, 2]) if plan.members else 0,
        # Queries by time use the headers of batches, which are not checked then.
        asks_by_time=is_in("times", 0.5) and "flip" not in plan.faults,
        recreates=is_in("recreation", 0.35),
    )
    if made.is_always_flushed:
        return made
    # Some records are only in memory: only one machine at a time may lose power, and only if there are others.
    spared = ("power of all",) if has_copies else ("power", "power of all")
    return replace(made, faults=tuple(fault for fault in made.faults if fault not in spared))


def _third_generation(plan: Plan) -> Plan:
    chance = Streams(plan.seed)["plan transactions"]
    # A client speaks one generation of the protocol, but the one that replaces it may be newer.
    is_v2 = [chance.random() < 0.6 for _ in range(6)]
    timeout_ms = chance.choice(TRANSACTION_TIMEOUTS_MS)
    tellers: list[tuple[bool, ...]] = []
    for number in range(chance.choice([1, 2, 2, 3])):
        again = chance.choice([(), (), (is_v2[number],), (not is_v2[number],)])
        tellers.append((is_v2[number], *again))
    return replace(
        plan,
        generation=3,
        tellers=tuple(tellers),
        processors=tuple(is_v2[3 : 3 + chance.choice([0, 1, 2, 3])]),
        accounts=chance.choice([2, 2, 3, 5]),
        transaction_timeout_ms=timeout_ms,
        sleeps=chance.choice([0.05, 0.05, 0.5]),
        # Longer than the timeout, or just long enough for something to come in between.
        sleep_ms_max=chance.choice([500.0, 2.5 * timeout_ms]),
        transfer_interval_ms=chance.choice([300.0, 1_000.0, 3_000.0]),
        impatience=chance.choice([0.0, 0.04, 0.04, 0.2]),
        lateness=chance.choice([0.0, 0.0, 0.03, 0.15]),
        # The traffic of the earlier generations is still there, but less of it.
        produce_interval_ms=max(plan.produce_interval_ms, 1_000.0),
    )


def _fourth_generation(plan: Plan) -> Plan:
    return replace(plan, generation=4, has_receipts=Streams(plan.seed)["plan receipts"].random() < 0.6)


def _fifth_generation(plan: Plan) -> Plan:
    chance = Streams(plan.seed)["plan compaction"]
    made = replace(plan, generation=5, compaction=compaction_for(chance))
    faults = [
        (fault, interval_ms)
        for fault, (how_often, interval_ms) in COMPACTION_FAULTS.items()
        if chance.random() < how_often and (plan.nodes > 1 or fault != "absence")
    ]
    if chance.random() < 0.6:
        # The other traffic takes most of the time of a run.
        made = replace(made, tellers=(), processors=(), has_receipts=False)
    return replace(made, later_faults=(*plan.later_faults, *faults))


def _sixth_generation(plan: Plan) -> Plan:
    streams = Streams(plan.seed)
    return replace(
        plan,
        generation=6,
        has_guest=streams["plan guest"].random() < 0.6,
        quota_interval_ms=streams["plan quotas"].choice([0.0, 1_000.0, 4_000.0]),
    )
