"""Bugs planted in the broker, one at a time: every one of them must be found.

A simulator that finds nothing may be looking at nothing. Each mutant here breaks one promise in the real code,
in one place, as a mistake might; the same runs that pass without it must fail with it, within a few seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.broker.coordination.coordinator_partition import CoordinatorPartition
from penstock.broker.membership.membership import Membership, State
from penstock.broker.partition.follower_log import FollowerLog
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.quorum.consensus import Consensus
from penstock.broker.quorum.metadata_log import QUORUM_STATE
from penstock.broker.storage.data_directory import Directory
from penstock.broker.storage.flushing import Flushing
from penstock.log import reading as reading_module
from penstock.log.producers import ProducerStates
from penstock.metadata.broker_registry import BrokerRegistry
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import FlushedTopic
from penstock.replication.partition import Partition
from penstock.sim.disk import SimFiles
from penstock.sim.plans import plan_for
from penstock.sim.report import Report
from penstock.sim.swarm import Run

SEEDS = 25
SECONDS = 15

NETWORK = ("cut", "one-way cut", "isolation", "reset")
PROCESSES = ("crash", "crash of all", "pause", "stop")
POWER = ("power", "power of all", "crash")


def run(seed: int, faults: tuple[str, ...], *, is_flushed: bool, segment_bytes: int = 2_048) -> Report:
    plan = replace(
        plan_for(seed, seconds=SECONDS, nodes=3),
        faults=faults,
        fault_interval_ms=1_500.0,
        produce_interval_ms=300.0,
        is_flushed=is_flushed,
        segment_bytes=segment_bytes,
        members=2,
        producers=2,
        partitions=2,
        administers=False,
    )
    return Run(plan).run()


def seeds_to_kill(faults: tuple[str, ...], *, is_flushed: bool = False) -> int | None:
    for count in range(1, SEEDS + 1):
        report = run(count, faults, is_flushed=is_flushed)
        if report.violation is not None:
            # One that does not fit the code it is planted into is found by anybody.
            assert "TypeError" not in report.violation, report.violation
            return count
    return None


Patch = pytest.MonkeyPatch


def acknowledges_at_once(patch: Patch) -> None:
    """acks=all is answered when the leader alone has the batch."""
    patch.setattr(HostedPartition, "is_acknowledged", lambda self, appended, *, by_all: True)


def counts_nobody_else(patch: Patch) -> None:
    """The high watermark does not wait for the followers in sync."""

    def advance(self: Partition) -> None:
        self.high_watermark = self._proven = max(self.high_watermark, self._own_end)

    patch.setattr(Partition, "_advance", advance)


def serves_more_than_is_committed(patch: Patch) -> None:
    """Consumers read up to the end of the leader's log."""
    read = HostedPartition.read

    def beyond(self: HostedPartition, offset: int, bytes_max: int, **options: Any) -> Any:
        options["ceiling"] = self.log.log_end_offset
        return read(self, offset, bytes_max, **options)

    patch.setattr(HostedPartition, "read", beyond)


def never_truncates(patch: Patch) -> None:
    """A follower whose log parts from its leader's keeps what it has."""
    patch.setattr(FollowerLog, "truncate_for", lambda self, epoch, end_offset: None)


def forgets_producers(patch: Patch) -> None:
    """Every batch is new."""
    patch.setattr(ProducerStates, "check", lambda self, header, wall_ms, refusals: None)


def takes_power_loss_for_a_crash(patch: Patch) -> None:
    """A broker that lost its page cache comes back as if it had everything."""
    recall = Directory.recall

    def forgetful(self: Directory) -> None:
        recall(self)
        self.lost_page_cache = False

    patch.setattr(Directory, "recall", forgetful)


def reports_all_as_flushed(patch: Patch) -> None:
    """A broker that lost its page cache says that all it confirmed was on the disk."""
    register = BrokerRegistry.register

    def believed(self: BrokerRegistry, request: Any, now_ms: int, from_host: str | None) -> Any:
        request.flushed = [
            FlushedTopic(topic_id=topic.id, partitions=[partition.index for partition in topic.partitions])
            for topic in self._decided.image.topics.values()
        ]
        return register(self, request, now_ms, from_host)

    patch.setattr(BrokerRegistry, "register", believed)


def does_not_wait_for_the_disk(patch: Patch) -> None:
    """In flushed mode what was merely written counts."""
    account = HostedPartition._appended

    def at_once(self: Flushing, offset: int, callback: Callable[[ErrorCode], None]) -> None:
        callback(ErrorCode.NONE)

    def appended(self: HostedPartition, log: Any) -> int:
        account(self, log)
        assert self._core is not None
        self._core.appended(log.log_end_offset)
        self.advance()
        return 0

    patch.setattr(Flushing, "when_flushed", at_once)
    patch.setattr(HostedPartition, "_appended", appended)
    # Nor does anybody hurry the disk.
    patch.setattr(HostedPartition, "_flush_messages", 2**63 - 1)


def does_not_sync_the_metadata(patch: Patch) -> None:
    """Metadata count as durable when they are merely written."""

    def flush(self: Consensus, done: Callable[[], None]) -> None:
        log = self._log.log
        offset, _ = log.prepare_flush()

        def flushed() -> None:
            log.flushed(offset)
            done()

        self._environment.spawn.soon(flushed)

    patch.setattr(Consensus, "_flush", flush)


def does_not_sync_directories(patch: Patch) -> None:
    """New names are not made durable."""
    patch.setattr(SimFiles, "sync_directory", lambda self, path: None)


def forgets_groups(patch: Patch) -> None:
    """A new coordinator does not read what the one before has written."""

    def replay(self: CoordinatorPartition[Any]) -> None:
        self._replayed = self._replay_end

    patch.setattr(CoordinatorPartition, "_replay_some", replay)


def serves_damaged_bytes(patch: Patch) -> None:
    """What another process left on the disk is sent unseen."""
    patch.setattr(reading_module, "checked_end", lambda segment, position, end, following: (end, -1))


def forgets_its_vote(patch: Patch) -> None:
    """What a voter promised is not durable."""
    replace_file = SimFiles.replace

    def volatile(self: SimFiles, path: str, data: Any, *, durable: bool = True) -> None:
        replace_file(self, path, data, durable=durable and QUORUM_STATE not in path)

    patch.setattr(SimFiles, "replace", volatile)


def never_loses_its_lease(patch: Patch) -> None:
    """A broker that the controller no longer hears serves on."""
    patch.setattr(Membership, "is_serving", lambda self: self.state in (State.ACTIVE, State.STOPPING))


MUTANTS: list[tuple[Callable[[Patch], None], tuple[str, ...], bool]] = [
    (acknowledges_at_once, PROCESSES, False),
    (counts_nobody_else, PROCESSES, False),
    (serves_more_than_is_committed, PROCESSES, False),
    (never_truncates, (*NETWORK, *PROCESSES), False),
    (forgets_producers, NETWORK, False),
    (takes_power_loss_for_a_crash, ("power", "crash"), False),
    (reports_all_as_flushed, ("power", "crash"), False),
    (does_not_wait_for_the_disk, POWER, True),
    (does_not_sync_the_metadata, POWER, True),
    (does_not_sync_directories, POWER, True),
    (forgets_groups, PROCESSES, False),
    (serves_damaged_bytes, ("flip", "stop"), False),
    (forgets_its_vote, (*POWER, "cut", "isolation"), True),
    (never_loses_its_lease, NETWORK, False),
]


@pytest.mark.parametrize(
    ("mutant", "faults", "is_flushed"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_bug_is_found(
    mutant: Callable[[Patch], None],
    faults: tuple[str, ...],
    is_flushed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    assert seeds_to_kill(faults, is_flushed=is_flushed) is not None, f"{SEEDS} seeds did not find it"
