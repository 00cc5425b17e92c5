"""Whole clusters, one seed after the other. A failing seed says the line that replays it.

``PENSTOCK_SIM_SEEDS`` says how many seeds (50), ``PENSTOCK_SIM_SEED`` where they begin.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from hashlib import sha256

import pytest

from penstock.broker.quorum.metadata_log import MetadataLog
from penstock.metadata.values import LOST_DIRECTORY
from penstock.sim import operators, swarm
from penstock.sim.client import Client
from penstock.sim.compaction_plans import COMPACTION_FAULTS
from penstock.sim.disk import Directory
from penstock.sim.plans import CHANGED_SETTINGS, LATER_FAULTS, NEWEST, Plan, plan_for
from penstock.sim.report import Report

FIRST_SEED = int(os.environ.get("PENSTOCK_SIM_SEED", "1"))
SEEDS = int(os.environ.get("PENSTOCK_SIM_SEEDS", "50"))
SECONDS = 20
# What the first hundred seeds plan, without what later generations have added to plans.
FIRST_GENERATION = "0578a2590f2ada53"

# Seeds that once found something: what, is said in the changes that mended it.
PINNED = (
    (29, 20, 3),  # a follower that starts over inside a batch
    (37, 20, 3),  # batches of a producer before the last segment, forgotten by a clean restart
    (90, 20, 3),  # a lost page cache, forgotten by the second start
    (188, 20, 3),  # a damaged replica that is not in sync but eligible
    (214, 30, 3),  # a damaged leader that nobody replaces
    (244, 30, 3),  # a damaged tail taken for a torn one
    (264, 30, 1),  # topics of a metadata snapshot that nobody hosts
    (1090, 30, 3),  # a batch that overtakes the first of its producer
    (3019, 30, 1),  # the only replica of a partition after its disk came back
    (3038, 30, 3),  # a lost page cache, forgotten by a clean stop before the registration
    (500230, 40, 3),  # a bit that flips behind the only check
    (500478, 40, 3),  # a damaged batch taken for a write that the power loss took
    (500444, 40, 3),  # killed before it wrote its new epoch down, and taken for one that lost something
    (71014, 40, 3),  # killed before it heard its new epoch, and taken for the same by the next controller
    (911066, 40, 3),  # started without one of two disks, and nothing on the other was counted on either
    (910847, 40, 3),  # started without a disk, and no longer eligible for what lay safely on it
    (630232, 40, 3),  # a batch behind one that a lapsed lease refused, called out of order
    (910104, 40, 3),  # a deletion replayed at the start, and what then had the topic's name deleted with it
    (7000419, 60, 3),  # damage cut off by a process that died before it had told of it
    (31001480, 60, 5),  # an epoch that a full disk did not take, and the broker taken for one that lost data
    (31001194, 60, 3),  # batches behind those that a leader without the topic refused, taken before them
    (31000275, 60, 3),  # old damage that every append came upon, and nobody mended
    (31001116, 60, 3),  # the same, come upon by the recovery of a log, which it ended
    (7000176, 60, 3),  # started while its second disk was full, and never used that disk again
)


# The same for plans of the second generation.
PINNED_SECOND = (
    (44000023, 60, 3),  # a power loss in replicated mode, judged by the settings of a flushed controller
    (44000011, 60, 3),  # offsets by time from a leader that does not know what is committed
    (43000013, 60, 3),  # records deleted by a clock ten days ahead
    (43000021, 60, 3),  # records refused by a slow clock, and those behind them called out of order
    (5, 20, 3),  # a producer that waits for ever when its topic is switched to flushed
    (23, 20, 3),  # deleted records that come back with an eligible leader
    (61000089, 60, 5),  # a minimum of 1, and a flipped bit in the only copy that counts: the plan's own fault
    (60000043, 60, 3),  # a wiped disk where one copy was allowed to be enough: the simulator's own fault
    (
        61000217,
        60,
        3,
    ),  # a reader by name, served by a broker that had not heard of a new topic: the simulator's fault
    (61000313, 60, 3),  # an answer to a commit that came after a newer generation's: the simulator's fault
    (62000095, 60, 3),  # a wiped voter that was down when the snapshot came, and never voted again
    (8820082, 60, 3),  # flushed replicas without a record or a directory, given up after a power loss
    (60000053, 60, 3),  # a node that joins on a full disk has no room for the id of its cluster
    (64000020, 60, 3),  # a voter that forgot what it had confirmed: an fsync had failed in the process before
    (65000138, 60, 3),  # a damaged log of offsets that its coordinator could not load, and did not report
    (64000046, 60, 3),  # the only copy of a new topic wiped: the nemesis' own fault
    (170000364, 60, 3),  # replaced disks and a partition without a record, never in sync again
    (174000652, 60, 3),  # where the leader begins, said with an order to truncate and never again
    (175000683, 60, 3),  # a controller that was stopped, and renews the lease of its own broker
    (179000019, 60, 3),  # a broker that was unfenced between two looks: the checker's own fault
    (183001461, 60, 3),  # the same, and the broker never knew of the first fence
    (67000373, 60, 3),  # deleted records that come back with a replica that was not in sync meanwhile
)


def explain(report: Report) -> str:
    return "\n".join([*report.log[-60:], str(report.violation), f"replay: {report.replay}"])


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
def test_a_cluster_keeps_its_promises(seed: int) -> None:
    # Every other one with the plans of the first generation: those of the others have more in them. Transactions
    # take longest.
    generation = NEWEST if seed % 6 == 1 else 1 + seed % 2
    report = swarm.run(seed, seconds=SECONDS, generation=generation)
    assert report.is_good, explain(report)


@pytest.mark.parametrize(("seed", "seconds", "nodes"), PINNED)
def test_what_was_found_stays_mended(seed: int, seconds: float, nodes: int) -> None:
    report = swarm.run(seed, seconds=seconds, nodes=nodes)
    assert report.is_good, explain(report)


# And of the third.
PINNED_THIRD = (
    (9022, 60, 3),  # a late EndTxn of a classic client commits its next transaction: the checker's own fault
    (920000068, 60, 3),  # late offsets of a classic client, committed with its next transaction: likewise
)


@pytest.mark.parametrize(("seed", "seconds", "nodes"), PINNED_THIRD)
def test_what_plans_with_transactions_found_stays_mended(seed: int, seconds: float, nodes: int) -> None:
    report = swarm.run(seed, seconds=seconds, nodes=nodes, generation=3)
    assert report.is_good, explain(report)


# And of the fourth.
PINNED_FOURTH = (
    (940900008, 60, 3),  # an index of aborted transactions that was cut to nothing took no more entries
    # A late EndTxn of a classic client commits offsets: the checker's own fault. And a replica whose log began
    # inside a batch told its leader so before a restart would have known.
    (990001538, 60, 3),
    (990001976, 60, 3),  # a late answer to a reader that has read on elsewhere: likewise
)


@pytest.mark.parametrize(("seed", "seconds", "nodes"), PINNED_FOURTH)
def test_what_plans_with_recreated_topics_in_transactions_found_stays_mended(
    seed: int, seconds: float, nodes: int
) -> None:
    report = swarm.run(seed, seconds=seconds, nodes=nodes, generation=4)
    assert report.is_good, explain(report)


# And of the fifth.
PINNED_FIFTH = (
    (5, 30, 3),  # a delete horizon set from the earliest time that it may be
    (2007, 40, 3),  # a replica that lost power, and may not copy its log again because it counts as committed
    (2008, 40, 3),  # a late answer of a nearer replica: the checker's own fault
    (2018, 40, 3),  # a replica that copies what another one has compacted further: likewise
    (4012, 40, 3),  # likewise, after its disk was wiped
    (994000000, 30, 3),  # a reader of a log whose records are all deleted by age: likewise
    (992000493, 40, 3),  # a transaction that is open and whose records are deleted by age: likewise
    (997000359, 40, 3),  # a leader that has not heard of its successor: likewise
    (997000590, 40, 3),  # a tombstone of uncertain outcome, gone before a slow reader came to it: likewise
    (997000692, 40, 3),  # a full disk while a log that begins inside a batch is copied
    (992000214, 40, 3),  # a killed replica that knew less of what is committed than when it compacted
    (992000086, 60, 3),  # a late response to a reader that has begun again: likewise
    (
        992000006,
        60,
        3,
    ),  # the beginning of an epoch checkpoint, left by a power failure and taken for the whole
)


@pytest.mark.parametrize(("seed", "seconds", "nodes"), PINNED_FIFTH)
def test_what_plans_with_compacted_topics_found_stays_mended(seed: int, seconds: float, nodes: int) -> None:
    report = swarm.run(seed, seconds=seconds, nodes=nodes, generation=5)
    assert report.is_good, explain(report)


# And of the sixth.
PINNED_SIXTH = (
    (998000016, 40, 3),  # a flipped bit in a producer id, which opened a transaction that nobody could end
    (1001000064, 25, 3),  # a job that began on a slow disk and stayed slow: the simulator's own fault
    (1002000291, 25, 3),  # a copy of what an uncertain tombstone superseded: likewise
    (1002001251, 25, 3),  # a flipped bit behind an empty batch: the simulator's own fault
    (1002001840, 12, 3),  # a quota that was set by a late request after it was removed: likewise
)


@pytest.mark.parametrize(("seed", "seconds", "nodes"), PINNED_SIXTH)
def test_what_plans_with_guests_and_quotas_found_stays_mended(seed: int, seconds: float, nodes: int) -> None:
    report = swarm.run(seed, seconds=seconds, nodes=nodes, generation=6)
    assert report.is_good, explain(report)


@pytest.mark.parametrize(("seed", "seconds", "nodes"), PINNED_SECOND)
def test_what_later_plans_found_stays_mended(seed: int, seconds: float, nodes: int) -> None:
    report = swarm.run(seed, seconds=seconds, nodes=nodes, generation=2)
    assert report.is_good, explain(report)


def test_a_follower_whose_directory_is_gone_fetches_everything_again() -> None:
    run = swarm.Run(replace(plan_for(3, seconds=20, nodes=3), data_dirs=1, administers=False))
    run._begin()
    run.loop.run_for(20_000)
    assert run.inspector.is_whole()
    machine = run.cluster.machines[3]
    run.cluster.stop(machine)
    run.loop.run_for(5_000)
    disk = machine.disk.find("/disk1")
    assert isinstance(disk, Directory) and "orders-0" in disk.entries
    disk.drop("orders-0")
    run.cluster.start(machine)
    assert run.loop.run_until(run.inspector.is_whole, swarm.LIVENESS_MS), run.inspector.what_is_missing()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_broker_may_be_given_other_directories(before: int, after: int) -> None:
    run = swarm.Run(replace(plan_for(3, seconds=20, nodes=3), data_dirs=before, administers=False))
    run._begin()
    run.loop.run_for(20_000)
    assert run.inspector.is_whole()
    machine = run.cluster.machines[3]
    run.cluster.stop(machine)
    run.loop.run_for(5_000)
    run.cluster._data_dirs = tuple(f"/disk{number + 1}" for number in range(after))
    run.cluster.start(machine)
    assert run.loop.run_until(run.inspector.is_whole, swarm.LIVENESS_MS), run.inspector.what_is_missing()


def test_a_stop_before_the_logs_were_looked_at_leaves_no_word_that_they_are_in_order() -> None:
    run = swarm.Run(replace(plan_for(3, seconds=20, nodes=3), data_dirs=1, administers=False))
    run._begin()
    run.loop.run_for(20_000)
    machine = run.cluster.machines[3]
    run.cluster.crash(machine)
    for other in ("node-1", "node-2"):
        run.fabric.cut(machine.host, other)
        run.fabric.cut(other, machine.host)
    run.cluster.start(machine)
    run.loop.run_for(1_000)
    run.cluster.stop(machine)
    assert run.loop.run_until(lambda: not machine.is_running, 20_000)
    disk = machine.disk.find("/disk1")
    assert isinstance(disk, Directory) and ".kafka_cleanshutdown" not in disk.entries
    run.fabric.mend_all()
    run.cluster.start(machine)
    assert run.loop.run_until(run.inspector.is_whole, swarm.LIVENESS_MS), run.inspector.what_is_missing()
    run.cluster.stop(machine)
    assert run.loop.run_until(lambda: not machine.is_running, 20_000)
    assert ".kafka_cleanshutdown" in disk.entries


def test_a_wiped_voter_votes_again_when_its_removal_is_in_snapshots_only() -> None:
    """Two changes give it its vote back. It dies between them, and every node is started from a snapshot since."""
    plan = plan_for(3, seconds=20, nodes=3)
    run = swarm.Run(replace(plan, data_dirs=1, administers=False, snapshot_records=5))
    run._begin()
    assert run.loop.run_until(run.inspector.is_sound, swarm.LIVENESS_MS)
    wiped, *others = [run.cluster.machines[node_id] for node_id in (3, 1, 2)]

    def logs() -> list[MetadataLog]:
        nodes = [machine.node for machine in others if machine.node is not None]
        return [each.broker.consensus._log for each in nodes]

    run.cluster.wipe(wiped)
    run.cluster.start(wiped)
    assert run.loop.run_until(lambda: all(len(log.voters[-1][1]) == 2 for log in logs()), swarm.LIVENESS_MS)
    run.cluster.crash(wiped)

    removed_at = max(log.voters[-1][0] for log in logs())

    def restart_the_others() -> None:
        for machine in others:
            run.cluster.crash(machine)
            run.cluster.start(machine)
            run.loop.run_for(20_000)

    def has_snapshot(log: MetadataLog) -> bool:
        return log.snapshot_id is not None and log.snapshot_id.end_offset > removed_at

    for _ in range(10):
        restart_the_others()
        if all(has_snapshot(log) for log in logs()):
            break
    assert all(has_snapshot(log) for log in logs())
    restart_the_others()
    run.cluster.start(wiped)
    assert run.loop.run_until(run.inspector.is_sound, swarm.LIVENESS_MS), [log.voters for log in logs()]


def test_a_damaged_replica_whose_broker_dies_before_it_is_mended_is_fetched_again() -> None:
    """The controller has written it off by then, and the next process does not come upon the damage by itself."""
    run = swarm.Run(replace(plan_for(3, seconds=20, nodes=3), data_dirs=1, administers=False))
    run._begin()
    run.loop.run_for(20_000)
    assert run.inspector.is_whole()
    machine = run.cluster.machines[3]
    assert machine.node is not None
    broker = machine.node.broker
    hosted = broker.partitions.get("orders", 0)
    assert hosted is not None
    broker.replication.directories._damaged[hosted] = 2**62  # it never gets to the mending
    broker.replication.directories._report(hosted)
    assert run.loop.run_until(
        lambda: hosted is not None and hosted.image.directory(broker.node_id) == LOST_DIRECTORY, 5_000
    )
    run.cluster.crash(machine)
    run.cluster.start(machine)
    assert run.loop.run_until(run.inspector.is_whole, swarm.LIVENESS_MS), run.inspector.what_is_missing()


def test_a_seed_means_the_same_in_every_process() -> None:
    """Nothing may depend on the order of a set, on an address in memory or on the time of day."""
    program = (
        "from penstock.sim import swarm\n"
        "for seed, generation in ((2, 1), (5, 1), (11, 2)):\n"
        "    report = swarm.run(seed, seconds=10, generation=generation)\n"
        "    print(report.trace_hash, report.events, sorted(report.counts.items()))\n"
    )
    told = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        told.append(ended.stdout)
    assert told[0].count("\n") == 3
    assert told[0] == told[1]


def test_a_later_generation_adds_to_the_plan_of_a_seed_and_changes_nothing_else() -> None:
    for seed in range(50):
        first, second = (plan_for(seed, seconds=10, generation=each) for each in (1, 2))
        added = {field.name: field.default for field in fields(Plan) if field.default is not MISSING}
        # Where not everything is flushed any more, power is spared.
        assert set(first.faults) - set(second.faults) <= {"power", "power of all"}
        assert replace(second, **added, faults=first.faults) == first


def test_plans_of_the_first_generation_are_those_that_pinned_seeds_were_found_with() -> None:
    drawn = [
        getattr(plan_for(seed, seconds=60), field.name)
        for seed in range(100)
        for field in fields(Plan)
        if field.default is MISSING
    ]
    assert sha256(repr(drawn).encode()).hexdigest()[:16] == FIRST_GENERATION


def test_every_kind_of_trouble_is_in_some_plan() -> None:
    plans = [plan_for(seed, seconds=60, generation=NEWEST) for seed in range(100)]
    later = {fault for plan in plans for fault, _ in plan.later_faults}
    assert later == {*LATER_FAULTS, *COMPACTION_FAULTS}
    assert {name for plan in plans for name in plan.changed_settings} == set(CHANGED_SETTINGS)
    assert {plan.racks for plan in plans} == {0, 2, 3}
    assert any(len(set(plan.flushed_nodes)) == 2 for plan in plans)
    assert {plan.static_members for plan in plans} == {0, 1, 2}
    assert {is_v2 for plan in plans for is_v2 in (*plan.processors, *sum(plan.tellers, ()))} == {False, True}
    assert {len(set(tellers)) for plan in plans for tellers in plan.tellers} == {1, 2}
    assert {plan.asks_by_time for plan in plans} == {plan.recreates for plan in plans} == {False, True}
    assert {plan.has_receipts for plan in plans} == {False, True}
    compacted = [plan.compaction for plan in plans if plan.compaction is not None]
    assert {compaction.policy for compaction in compacted} == {"compact", "compact,delete"}
    for name in ("changes_policy", "deletes_records", "recreates", "expires"):
        assert {getattr(compaction, name) for compaction in compacted} == {False, True}


def test_one_copy_is_never_enough_where_copies_are_destroyed() -> None:
    plan = plan_for(60000043, seconds=60, nodes=3, generation=2)
    assert "wipe" in dict(plan.later_faults) and plan.in_sync_min == 2
    spared = replace(plan, later_faults=())
    assert spared.in_sync_min == 1
    assert replace(spared, faults=("flip",)).in_sync_min == 2
    # A power loss costs nothing where everything is on disks.
    flushed = replace(spared, faults=("power",), is_flushed=True, changed_settings=("min.insync.replicas",))
    assert flushed.in_sync_min == 1
    assert replace(flushed, flushed_nodes=(True, True, False)).in_sync_min == 2


@pytest.mark.parametrize(("faults", "expected"), [(("flip",), {"2", "3"}), (("crash",), {"1", "2", "3"})])
def test_an_operator_lowers_the_minimum_no_further_than_the_plan_allows(
    monkeypatch: pytest.MonkeyPatch, faults: tuple[str, ...], expected: set[str]
) -> None:
    asked: set[str | None] = set()

    async def set_config(client: Client, resource: int, name: str, setting: str, value: str | None) -> bool:
        asked.add(value)
        return True

    monkeypatch.setattr(operators, "set_config", set_config)
    plan = plan_for(60000043, seconds=20, nodes=3, generation=2)
    plan = replace(plan, faults=faults, later_faults=(), changed_settings=("min.insync.replicas",))
    run = swarm.Run(plan)
    run._begin()
    run._start_later_clients()
    run.loop.run_for(60_000)
    assert asked == expected


@pytest.mark.parametrize(("recreates", "oldest"), [(False, 11), (True, 13)])
def test_readers_name_topics_by_id_where_topics_are_made_again(recreates: bool, oldest: int) -> None:
    versions = set()
    for seed in range(20):
        plan = plan_for(seed, seconds=20, nodes=3, generation=2)
        run = swarm.Run(replace(plan, recreates=recreates, administers=False))
        versions.add(run._start_reader("reader").version)
        run._clients["reader"].end()
    assert min(versions) == oldest


def test_other_seeds_do_other_things() -> None:
    assert plan_for(1, seconds=10) == plan_for(1, seconds=10)
    assert len({plan_for(seed, seconds=10).faults for seed in range(50)}) > 30
