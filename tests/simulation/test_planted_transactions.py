"""Bugs of transactions, planted in the broker: each must be found, by the checker that is there for it.

The clusters here have no more in them than a bug needs: tellers who transfer money and lose patience with answers,
a network that delivers late, brokers that are stopped for a while.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.broker.coordination.coordinator_partition import CoordinatorPartition
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.transactions.marker_sender import MarkerSender
from penstock.groups.coordinator import Coordinator as GroupCoordinator
from penstock.log.log import Log
from penstock.metadata.topics import TRANSACTION_STATE
from penstock.protocol.errors import ErrorCode
from penstock.sim.plans import Plan
from penstock.sim.swarm import Run
from penstock.sim.topics import RECEIPTS
from penstock.transactions import coordinator as coordinator_module
from penstock.transactions import outcomes, transitions
from penstock.transactions.changes import NOBODY, Identity, TransactionStored
from tests.simulation.lean import finds, lean

Patch = pytest.MonkeyPatch

SECONDS = 12.0


def bank(seed: int, *tellers: tuple[bool, ...], **changes: Any) -> Plan:
    """Three nodes without faults, tellers, and whatever a bug needs on top."""
    plan = replace(
        lean(seed, seconds=SECONDS, generation=3),
        tellers=tellers,
        transaction_timeout_ms=4_000,
        sleeps=0.7,
        sleep_ms_max=400.0,
        transfer_interval_ms=100.0,
        accounts=2,
    )
    return replace(plan, **changes)


V2 = (True,)
CLASSIC = (False,)


def test_a_late_produce_that_joins_the_next_transaction(monkeypatch: Patch) -> None:
    identity_error = outcomes.identity_error

    def lenient(stored: TransactionStored, identity: Identity) -> ErrorCode:
        if identity.id == stored.producer.id and identity.epoch < stored.producer.epoch:
            return ErrorCode.NONE
        return identity_error(stored, identity)

    monkeypatch.setattr(coordinator_module, "identity_error", lenient)
    assert (
        finds(
            lambda seed: bank(seed, V2, V2, V2, impatience=0.1, lateness=0.3, accounts=5),
            "G1a|precommitted|torn|zombie",
        )
        is not None
    )


def test_a_late_end_that_ends_the_next_transaction(monkeypatch: Patch) -> None:
    """KAFKA-17754."""
    ended_v2 = outcomes.ended_v2

    def lenient(stored: TransactionStored, identity: Identity, *arguments: Any) -> Any:
        if identity.id == stored.producer.id and identity.epoch < stored.producer.epoch:
            identity = stored.producer
        return ended_v2(stored, identity, *arguments)

    monkeypatch.setattr(coordinator_module, "ended_v2", lenient)
    assert (
        finds(
            lambda seed: bank(seed, V2, V2, V2, impatience=0.1, lateness=0.3),
            "G1a|precommitted|torn|lost write",
        )
        is not None
    )


def test_an_init_producer_id_whose_answer_was_lost_and_that_is_not_recognised(monkeypatch: Patch) -> None:
    initialized = transitions.initialized

    def forgetful(
        old: TransactionStored, producer: Identity, timeout_ms: int, previous: Identity, wall_ms: int
    ) -> TransactionStored:
        return initialized(old, producer, timeout_ms, NOBODY, wall_ms)

    monkeypatch.setattr(transitions, "initialized", forgetful)
    assert (
        finds(
            lambda seed: bank(seed, CLASSIC, CLASSIC, CLASSIC, impatience=0.3, lateness=0.1),
            "fenced without a rival",
            first=3,
        )
        is not None
    )


def test_markers_that_are_sent_before_the_decision_is_committed(monkeypatch: Patch) -> None:
    when_committed = CoordinatorPartition._when_committed

    def hasty(self: Any, decision: Any, appended: Any, answer: Any, unavailable: Any) -> None:
        if self.hosted.topic == TRANSACTION_STATE and appended is not None:
            appended = None
        when_committed(self, decision, appended, answer, unavailable)

    monkeypatch.setattr(CoordinatorPartition, "_when_committed", hasty)
    assert (
        finds(
            lambda seed: bank(
                seed, V2, V2, V2, faults=("crash",), latency_ms=20.0, sleeps=0.0, transfer_interval_ms=20.0
            ),
            # The next coordinator may also not know the epoch that the producer was told.
            "torn|lost write|a transaction hangs|fenced without a rival",
            first=4,
        )
        is not None
    )


def test_a_last_stable_offset_past_an_open_transaction(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Log, "last_stable_offset", lambda self, high_watermark: high_watermark)
    assert finds(lambda seed: bank(seed, V2), "last stable offset|precommitted|past an open") is not None


def test_aborted_records_in_an_answer_to_a_reader_of_committed_ones(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Log, "aborted_transactions", lambda self, offset, end_offset: [])
    assert finds(lambda seed: bank(seed, V2, CLASSIC), "G1a") is not None


def test_offsets_of_an_aborted_transaction_that_are_committed(monkeypatch: Patch) -> None:
    end_transaction = GroupCoordinator.end_transaction

    def generous(self: GroupCoordinator, producer_id: int, is_commit: bool) -> Any:
        return end_transaction(self, producer_id, True)

    monkeypatch.setattr(GroupCoordinator, "end_transaction", generous)
    assert (
        finds(
            lambda seed: bank(seed, processors=(True, False), produce_interval_ms=300.0),
            "lost commit|no output",
            first=4,
        )
        is not None
    )


def test_a_leader_after_a_failover_that_does_not_verify(monkeypatch: Patch) -> None:
    append = HostedPartition.append

    def trusting(self: HostedPartition, records: memoryview, **options: Any) -> Any:
        if self.leader_epoch > 0:
            options["is_verified"] = True
        return append(self, records, **options)

    monkeypatch.setattr(HostedPartition, "append", trusting)
    assert (
        finds(
            lambda seed: bank(seed, V2, V2, faults=("crash",), transfer_interval_ms=300.0),
            "a transaction hangs",
        )
        is not None
    )


def test_without_a_bug_the_same_clusters_are_good() -> None:
    plan = bank(1, V2, CLASSIC, faults=("crash", "pause"), impatience=0.2, lateness=0.1, processors=(True,))
    report = Run(plan).run()
    assert report.violation is None, report.violation
    assert report.counts["transactions committed"] > 10
    assert report.counts["transactions aborted"] > 3


def test_a_coordinator_that_takes_a_topic_for_deleted(monkeypatch: Patch) -> None:
    route = MarkerSender._route

    def hasty(sender: MarkerSender, marker: Any) -> None:
        if marker.topic == RECEIPTS:
            sender._written(marker.coordinator, marker.due, [(marker.topic, marker.partition)])
        else:
            route(sender, marker)

    monkeypatch.setattr(MarkerSender, "_route", hasty)
    assert finds(lambda seed: receipts(seed, V2, CLASSIC), "a transaction hangs") is not None


def receipts(seed: int, *tellers: tuple[bool, ...]) -> Plan:
    return replace(bank(seed, *tellers), generation=4, has_receipts=True)
