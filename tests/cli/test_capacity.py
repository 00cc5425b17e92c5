"""The figures of the specification's capacity estimates, each by name."""

from __future__ import annotations

import pytest

from penstock.cli.capacity import Workload, cut, estimate, estimate_on_paper, parse_amount, parse_days
from tests.cli.conftest import Penstock

TB, PB, GB = 1e12, 1e15, 1e9

# A million records a second of 1 KB, three copies.
WEEK = Workload(retention_days=7)
MONTH = Workload(retention_days=30)


def test_86_billion_records_a_day() -> None:
    assert estimate(WEEK).records_per_day == 86.4e9
    assert estimate_on_paper(WEEK).records_per_day == 86e9


def test_86_tb_a_day() -> None:
    assert estimate(WEEK).bytes_per_day == 86.4 * TB
    assert estimate_on_paper(WEEK).bytes_per_day == 86 * TB


def test_258_tb_a_day_with_three_copies() -> None:
    assert estimate(WEEK).bytes_per_day_replicated == 259.2 * TB
    assert estimate_on_paper(WEEK).bytes_per_day_replicated == 258 * TB


def test_7_7_pb_in_30_days() -> None:
    assert estimate(MONTH).retained_bytes_replicated == 7.776 * PB
    assert estimate_on_paper(MONTH).retained_bytes_replicated == 7.74 * PB
    assert cut(estimate_on_paper(MONTH).retained_bytes_replicated) == 7.7 * PB


def test_1_gb_a_second_written_and_3_with_copies() -> None:
    assert estimate(WEEK).ingress_bytes_per_s == 1 * GB
    assert estimate(WEEK).replicated_bytes_per_s == 3 * GB


def test_600_tb_in_7_days_is_one_copy() -> None:
    assert estimate(WEEK).retained_bytes == pytest.approx(600 * TB, rel=0.01)
    assert cut(estimate_on_paper(WEEK).retained_bytes) == 600 * TB
    assert estimate(WEEK).retained_bytes_replicated == pytest.approx(1800 * TB, rel=0.01)


def test_30_nodes_at_100_mb_a_second() -> None:
    assert estimate(WEEK).nodes == 30
    assert estimate(WEEK).nodes_for_writes == 30


def test_1000_partitions_of_a_topic() -> None:
    assert estimate(WEEK).partitions == 1000


def test_nodes_and_partitions_carry_the_peak() -> None:
    busy = estimate(Workload(peak_records_per_s=4e6))
    assert (busy.nodes_for_writes, busy.partitions) == (120, 4000)
    assert busy.bytes_per_day == estimate(WEEK).bytes_per_day


def test_small_disks_ask_for_more_nodes() -> None:
    small = estimate(Workload(node_storage_bytes=10 * TB))
    assert (small.nodes_for_storage, small.nodes) == (182, 182)
    assert small.storage_bytes_per_node <= 10 * TB


def test_many_readers_ask_for_network() -> None:
    read = estimate(Workload(readers=50))
    assert (read.nodes_for_network, read.nodes) == (42, 42)


def test_copies_stand_on_different_nodes() -> None:
    assert estimate(Workload(records_per_s=1, replication=5)).nodes == 5


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1M", 1e6),
        ("1KB", 1e3),
        ("1.5 k", 1.5e3),
        ("100MB/s", 100e6),
        ("64KiB", 65536),
        ("20", 20),
        ("7pb", 7e15),
    ],
)
def test_amounts_are_read_with_their_units(text: str, amount: float) -> None:
    assert parse_amount(text) == amount


@pytest.mark.parametrize("text", ["", "M", "-1", "1X", "1MM", "1/h"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount"):
        parse_amount(text)


@pytest.mark.parametrize(
    ("text", "days"), [("7d", 7), ("12h", 0.5), ("2w", 14), ("90m", 0.0625), ("86400s", 1)]
)
def test_durations_are_read_as_days(text: str, days: float) -> None:
    assert parse_days(text) == days


def test_a_duration_needs_its_unit() -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_days("7")


@pytest.mark.parametrize(("amount", "first_two"), [(86.4, 86), (99.9, 99), (5, 5), (1234, 1200), (0, 0)])
def test_cutting_keeps_two_digits(amount: float, first_two: float) -> None:
    assert cut(amount) == pytest.approx(first_two)


def test_the_table_shows_both_reckonings(penstock: Penstock) -> None:
    out = penstock("capacity").out
    lines = {line[:31].strip(): line[31:].split("  ") for line in out.splitlines()}
    assert [cell.strip() for cell in lines["bytes a day, one copy"] if cell.strip()] == ["86.4 TB", "86 TB"]
    assert [cell.strip() for cell in lines["bytes a day, 3 copies"] if cell.strip()] == ["259 TB", "258 TB"]
    assert [cell.strip() for cell in lines["nodes"] if cell.strip()] == ["30", "30"]


def test_json_holds_both_reckonings_and_what_was_asked(penstock: Penstock) -> None:
    document = penstock("capacity", "--retention", "30d", "--json").json
    assert document["workload"]["retention_days"] == 30
    assert document["exact"]["retained_bytes_replicated"] == 7.776 * PB
    assert document["on_paper"]["retained_bytes_replicated"] == 7.74 * PB


@pytest.mark.parametrize(
    "words", [["--rate", "lots"], ["--size", "0"], ["--retention", "long"], ["--replication", "0"]]
)
def test_a_bad_amount_is_wrong_usage(penstock: Penstock, words: list[str]) -> None:
    outcome = penstock("capacity", *words)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
