"""DescribeLogDirs: what a broker has on its disks, and how far it is compacted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.log.cleaning_state import CleaningReport, CleaningRun
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.placement import (
    DescribableLogDirTopic,
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
)
from tests.broker.conftest import Node
from tests.broker.phrases import batch, create_topic, keyed, only, produce, produce_request, put
from tests.broker.stage import Peer, Stage
from tests.broker.wire import Wire
from tests.support import BrokerProcess

Unique = Callable[[str], str]

VERSIONS = range(1, 6)


def described(wire: Any, *topics: tuple[str, list[int]], version: int = 5, cleaning: bool = False) -> Any:
    wanted = [DescribableLogDirTopic(topic=name, partitions=numbers) for name, numbers in topics]
    return wire.call(DescribeLogDirsRequest(topics=wanted or None, include_cleaning=cleaning), version)


def partitions(response: Any) -> dict[tuple[str, int], DescribeLogDirsPartition]:
    return {
        (topic.name, each.partition_index): each
        for result in response.results
        for topic in result.topics
        for each in topic.partitions
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_tells_sizes_and_room(node: Node, wire: Wire, unique: Unique, version: int) -> None:
    name = unique("t")
    create_topic(wire, name, 2)
    sent = batch(b"x" * 1000)
    assert produce(wire, name, sent).error_code == 0
    response = described(wire, (name, [0, 1, 7]), ("no-such-topic", [0]), version=version)
    assert response.error_code == 0
    result = only(response.results)
    assert (result.error_code, result.is_cordoned) == (0, False)
    assert Path(result.log_dir) == Path(node.process.data_dir)
    if version >= 4:
        assert 0 < result.usable_bytes <= result.total_bytes
    else:
        assert (result.total_bytes, result.usable_bytes) == (-1, -1)
    found = partitions(response)
    # A partition has no directory before its first record.
    assert found.keys() == {(name, 0)}
    one = found[name, 0]
    assert (one.partition_size, one.offset_lag, one.is_future_key) == (len(sent), 0, False)


def test_all_topics_are_described_when_none_is_named(wire: Wire, unique: Unique) -> None:
    names = [unique("a"), unique("b")]
    for name in names:
        create_topic(wire, name)
        put(wire, name, b"v")
    assert {(name, 0) for name in names} <= partitions(described(wire)).keys()


def test_a_log_that_is_not_open_has_its_size_too() -> None:
    with BrokerProcess() as process:
        with Wire((process.host, process.port)) as wire:
            create_topic(wire, "t", configs={"segment.bytes": "100"})
            sizes = [len(sent) for sent in (batch(b"x" * 90), batch(b"y" * 80))]
            put(wire, "t", b"x" * 90)
            put(wire, "t", b"y" * 80)
        process.stop()
        process.start()
        with Wire((process.host, process.port)) as wire:
            assert partitions(described(wire, ("t", [0])))["t", 0].partition_size == sum(sizes)


# How far logs are compacted


REPORT = CleaningReport(
    cleanable_bytes=1000,
    dirty_bytes=300,
    first_dirty_offset=42,
    last_run=CleaningRun(1_700_000_000_000, 1500, 5000, 700, 90, 10),
    set_aside=None,
)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def peer(stage: Stage) -> Peer:
    peer = Peer(stage)
    create_topic(peer, "t", configs={"cleanup.policy": "compact"})  # type: ignore[arg-type]
    return peer


def test_a_report_is_told_to_those_who_ask(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    produced = peer.call(produce_request("t", keyed(b"v")), 9)
    assert only(only(produced.responses).partition_responses).error_code == 0
    monkeypatch.setattr(HostedPartition, "cleaning_report", lambda self: REPORT)
    for version in (2, 5):
        told = partitions(described(peer, ("t", [0]), version=version, cleaning=True))["t", 0].cleaning
        assert told is not None and told.last_run is not None
        assert (told.cleanable_bytes, told.dirty_bytes, told.first_dirty_offset) == (1000, 300, 42)
        assert told.set_aside is None
        run = told.last_run
        assert (run.ended_ms, run.duration_ms) == (1_700_000_000_000, 1500)
        assert (run.bytes_before, run.bytes_after, run.records_before, run.records_after) == (
            5000,
            700,
            90,
            10,
        )
    # Version 1 has no room for it, and others need not be told.
    assert partitions(described(peer, version=1, cleaning=True))["t", 0].cleaning is None
    assert partitions(described(peer, version=5))["t", 0].cleaning is None


def test_a_log_never_compacted_or_set_aside_says_so(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    peer.call(produce_request("t", keyed(b"v")), 9)
    report = CleaningReport(10, 10, 0, None, "a batch is corrupt")
    monkeypatch.setattr(HostedPartition, "cleaning_report", lambda self: report)
    told = partitions(described(peer, cleaning=True))["t", 0].cleaning
    assert told is not None and told.last_run is None
    assert told.set_aside == "a batch is corrupt"


def test_a_log_without_a_report_has_none(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    peer.call(produce_request("t", keyed(b"v")), 9)
    monkeypatch.setattr(HostedPartition, "cleaning_report", lambda self: None)
    assert partitions(described(peer, cleaning=True))["t", 0].cleaning is None


def test_a_disk_that_cannot_be_asked_has_no_size(
    stage: Stage, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: str) -> int:
        raise OSError("the disk is gone")

    monkeypatch.setattr(stage.environment.files, "capacity", failing)
    result = only(described(peer).results)
    assert (result.error_code, result.total_bytes, result.usable_bytes) == (ErrorCode.NONE, -1, -1)


def test_a_log_that_cannot_be_read_has_no_report(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: HostedPartition) -> CleaningReport | None:
        raise OSError("the disk is gone")

    peer.call(produce_request("t", keyed(b"v")), 9)
    monkeypatch.setattr(HostedPartition, "cleaning_report", failing)
    found = partitions(described(peer, cleaning=True))["t", 0]
    assert found.cleaning is None and found.partition_size > 0
