"""Each rule of `penstock doctor`: what it finds, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.model import TopicPartition
from penstock.monitoring.findings import (
    DAY_MS,
    RULES,
    Certificate,
    Finding,
    Severity,
    Snapshot,
    Thresholds,
    examine,
)
from penstock.monitoring.hanging import Hanging
from penstock.monitoring.hot import HotPartition, KeyShare
from penstock.monitoring.lag import PartitionLag, Retention
from penstock.wire.log_dirs import Cleaning, Replica
from penstock.wire.surveys import BrokerView, LogDirectory, PartitionView, TopicView
from penstock.wire.transaction_admin import PartitionProducer

NOW_MS = 1_800_000_000_000
GB = 10**9
WELL = PartitionView(1, (1, 2, 3), (1, 2, 3))
LAG = PartitionLag("billing", "orders", 0, 10, 0, 100, 90, 5.0)
PRODUCER = PartitionProducer(77, 0, 5, 1, 0, 42)


def snapshot(
    *partitions: PartitionView, lags: tuple[PartitionLag, ...] = (), state: str = "Stable"
) -> Snapshot:
    views = partitions or (WELL,)
    return Snapshot(
        NOW_MS,
        topics={"orders": TopicView(b"a" * 16, False, dict(enumerate(views)))},
        min_in_sync={"orders": 2},
        retentions={"orders": Retention(time_ms=10 * DAY_MS)},
        lags=lags,
        group_states={"billing": state},
    )


def only(one: Snapshot, limits: Thresholds | None = None) -> Finding:
    (found,) = examine(one, limits)
    return found


def test_nothing_is_found_in_a_cluster_that_is_well() -> None:
    well = replace(
        snapshot(lags=(replace(LAG, loss_s=9 * 86_400.0, loss_by="time", lag_per_s=5.0),)),
        brokers=(BrokerView(1, False, 20), BrokerView(2, False, None)),
        directories=(
            LogDirectory(1, "/data", 100 * GB, 50 * GB, False),
            LogDirectory(2, "/old", None, None, False),
        ),
        replicas=(
            Replica("orders", 0, 1, 5, Cleaning(10, 5, 0, None, None)),
            Replica("orders", 0, 2, 5, None),
        ),
        certificates=(Certificate(1, NOW_MS + 90 * DAY_MS),),
    )
    assert examine(well) == []
    assert examine(Snapshot(NOW_MS)) == []


def test_a_partition_without_a_leader_is_offline() -> None:
    found = only(snapshot(PartitionView(-1, (2, 3), (3,)), WELL, PartitionView(-1, (2, 1), ())))
    assert (found.rule, found.severity, found.subject) == ("offline-partitions", Severity.CRITICAL, "orders")
    assert "2 of 3 partitions (0, 2)" in found.what
    assert "brokers 1, 2, 3" in found.advice and "elect orders:0,2 --unclean" in found.advice


def test_fewer_in_sync_than_the_minimum_refuses_writes() -> None:
    found = only(snapshot(PartitionView(1, (1, 2, 3), (1,))))
    assert (found.rule, found.severity) == ("below-min-insync", Severity.CRITICAL)
    assert "min.insync.replicas=2" in found.what and "brokers 2, 3" in found.advice


def test_a_replica_out_of_sync_is_behind() -> None:
    found = only(snapshot(PartitionView(1, (1, 2, 3), (1, 3))))
    assert (found.rule, found.severity) == ("under-replicated", Severity.WARNING)
    assert "broker 2" in found.what


def test_a_topic_with_fewer_replicas_than_the_minimum_needs_only_those() -> None:
    assert examine(snapshot(PartitionView(1, (1,), (1,)))) == []


def test_many_partitions_are_one_finding() -> None:
    found = only(snapshot(*[PartitionView(1, (1, 2, 3), (1, 3))] * 40))
    assert "40 of 40 partitions (0, 1, 2, 3, 4, ...)" in found.what


def test_a_registered_broker_that_does_not_run_is_stopped() -> None:
    found = only(replace(snapshot(), brokers=(BrokerView(2, True, None),)))
    assert (found.rule, found.subject) == ("stopped-broker", "broker 2")


@pytest.mark.parametrize(("ahead_ms", "words"), [(60_000, "60s ahead of"), (-600_000, "10m behind")])
def test_a_clock_that_differs_is_wrong(ahead_ms: int, words: str) -> None:
    found = only(replace(snapshot(), brokers=(BrokerView(2, False, ahead_ms),)))
    assert found.rule == "wrong-clock" and words in found.what


@pytest.mark.parametrize(
    ("usable", "severity"), [(20 * GB, Severity.WARNING), (9 * GB, Severity.CRITICAL), (0, Severity.CRITICAL)]
)
def test_a_disk_is_nearly_full_from_80_percent_on(usable: int, severity: Severity) -> None:
    found = only(replace(snapshot(), directories=(LogDirectory(1, "/data", 100 * GB, usable, False),)))
    assert (found.rule, found.severity, found.subject) == ("disk-nearly-full", severity, "broker 1 /data")


def test_a_failed_directory_is_offline() -> None:
    found = only(replace(snapshot(), directories=(LogDirectory(1, "/data", None, None, True),)))
    assert (found.rule, found.severity) == ("offline-disk", Severity.CRITICAL)


def test_a_replica_that_the_cleaner_has_set_aside_is_found() -> None:
    told = Cleaning(10, 10, 0, None, "cannot read offset 5")
    found = only(replace(snapshot(), replicas=(Replica("orders", 0, 3, 5, told),)))
    assert found.rule == "cleaner-set-aside" and "cannot read offset 5" in found.what


def test_records_that_were_deleted_unread_are_lost() -> None:
    lags = replace(LAG, lost_records=5), replace(LAG, partition=2, lost_records=7)
    found = only(snapshot(lags=lags))
    assert (found.rule, found.severity) == ("lost-records", Severity.CRITICAL)
    assert "12 records of partitions 0, 2" in found.what


@pytest.mark.parametrize(
    ("loss_days", "severity"), [(1.9, Severity.WARNING), (0.4, Severity.CRITICAL), (0.0, Severity.CRITICAL)]
)
def test_little_time_before_retention_is_a_finding(loss_days: float, severity: Severity) -> None:
    lag = replace(LAG, loss_s=loss_days * 86_400, loss_by="time")
    found = only(snapshot(lags=(lag,), state="Empty"))
    assert (found.rule, found.severity) == ("nearly-lost-records", severity)
    assert "start its consumers" in found.advice and "retention.ms" in found.advice


def test_little_space_before_retention_is_a_finding() -> None:
    lag = replace(LAG, loss_s=2 * 3_600.0, loss_by="size")
    found = only(snapshot(lags=(lag, replace(LAG, partition=1, loss_s=86_400.0, loss_by="size"))))
    assert (found.rule, found.severity) == ("nearly-lost-records", Severity.WARNING)
    assert "partition 0 in 2h" in found.what and "retention.bytes" in found.advice


def test_lag_that_grows_is_a_finding_once_it_is_old() -> None:
    growing = replace(LAG, is_growing=True, lag_per_s=12.0, lag_s=31.0)
    found = only(snapshot(WELL, WELL, lags=(growing,)))
    assert found.rule == "growing-lag" and "12 more every second" in found.what
    assert "up to 2, one for each partition" in found.advice
    assert "no members" in only(snapshot(lags=(growing,), state="Empty")).advice
    assert examine(snapshot(lags=(replace(growing, lag_s=29.0),))) == []
    assert only(snapshot(lags=(replace(growing, lag_s=29.0),)), Thresholds(lag_s=5.0)).rule == "growing-lag"


def test_an_offset_beyond_the_end_is_a_finding() -> None:
    found = only(snapshot(lags=(replace(LAG, is_beyond_end=True),)))
    assert found.rule == "beyond-end" and "offsets reset billing --topic orders" in found.advice


def test_a_hot_partition_is_shown_with_its_keys() -> None:
    keys = KeyShare(b"user-1", 50, 700, 0.7), KeyShare(None, 5, 100, 0.1), KeyShare(b"\xff" * 50, 5, 100, 0.1)
    found = only(replace(snapshot(), hot=(HotPartition("orders", 3, 900.0, None, 12.34, keys),)))
    assert (found.rule, found.subject) == ("hot-partition", "orders-3")
    assert "12.3 times the others" in found.what and "user-1 (70%), none (10%), \\xff" in found.what
    alone = only(replace(snapshot(), hot=(HotPartition("orders", 3, 900.0, None, None),)))
    assert "while the others get nothing" in alone.what


def test_a_hanging_transaction_is_shown_with_its_end() -> None:
    found = only(replace(snapshot(), hanging=(Hanging(TopicPartition("orders", 1), PRODUCER, None),)))
    assert (found.rule, found.severity) == ("hanging-transaction", Severity.CRITICAL)
    assert "abort orders --partition 1 --start-offset 42" in found.advice


@pytest.mark.parametrize(
    ("days", "severity"), [(29, Severity.WARNING), (6, Severity.CRITICAL), (-1, Severity.CRITICAL)]
)
def test_a_certificate_near_its_end_is_a_finding(days: int, severity: Severity) -> None:
    found = only(replace(snapshot(), certificates=(Certificate(2, NOW_MS + days * DAY_MS),)))
    assert (found.rule, found.severity, found.subject) == ("certificate-expires", severity, "broker 2")


def test_what_could_not_be_seen_is_one_line() -> None:
    found = only(replace(snapshot(), unseen=("disks of brokers 1 (refused)", "brokers (refused)")))
    assert (found.rule, found.severity) == ("not-seen", Severity.INFO)
    assert "disks of brokers 1 (refused); brokers (refused)" in found.what


def test_the_most_severe_is_first() -> None:
    one = replace(
        snapshot(PartitionView(1, (1, 2, 3), (1, 3)), lags=(replace(LAG, lost_records=5),)), unseen=("x",)
    )
    assert [each.rule for each in examine(one)] == ["lost-records", "under-replicated", "not-seen"]


def test_every_rule_has_something_to_say() -> None:
    """Its advice is never empty, and rules and subjects identify findings."""
    ill = replace(
        snapshot(
            PartitionView(-1, (1,), ()),
            PartitionView(1, (1, 2, 3), (1,)),
            PartitionView(1, (1, 2, 3), (1, 2)),
            lags=(
                replace(
                    LAG,
                    lost_records=1,
                    is_beyond_end=True,
                    is_growing=True,
                    lag_s=99.0,
                    loss_s=0.0,
                    loss_by="time",
                ),
            ),
        ),
        brokers=(BrokerView(2, True, 99_000),),
        directories=(LogDirectory(1, "/a", 10, 1, False), LogDirectory(1, "/b", None, None, True)),
        replicas=(Replica("orders", 0, 3, 5, Cleaning(1, 1, 0, None, "damaged")),),
        hot=(HotPartition("orders", 3, 900.0, None, None),),
        hanging=(Hanging(TopicPartition("orders", 1), PRODUCER, None),),
        certificates=(Certificate(2, NOW_MS),),
        unseen=("x",),
    )
    found = examine(ill)
    assert len({(each.rule, each.subject) for each in found}) == len(found) == len(RULES) + 1
    assert all(each.what and each.advice for each in found)
