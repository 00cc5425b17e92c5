"""Followers on a full disk: whom they ask, how often, and what they delete."""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.broker.config import BrokerConfig
from penstock.broker.counters import TopicTraffic
from penstock.broker.logs import Logger
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.replication import full_followers
from penstock.broker.replication.full_followers import ASK_INTERVAL_MS, FullFollowers
from penstock.environment import Environment
from penstock.log.config import LogConfig
from penstock.metadata.image import Image, PartitionImage, TopicImage
from penstock.model import BrokerId, TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchableTopicResponse, FetchResponse, PartitionData
from tests.broker.disks import NODE, Node
from tests.broker.partition.test_hosted_partition import Around
from tests.broker.replication.stage import FakePeers, Sent
from tests.log.test_replicated import BATCH_BYTES, fetched
from tests.replication.making import data, named
from tests.support_files import FakeClock

ME, LEADER, OTHER = BrokerId(NODE), BrokerId(8), BrokerId(9)
TOPIC_ID = TopicId(bytes(15) + b"t")


@dataclass
class Full:
    """A node that follows some partitions of ten batches each, a segment for each batch, on a disk that is full."""

    root: Path
    leaders: tuple[BrokerId, ...] = (LEADER,)
    are_ready: bool = True

    def __post_init__(self) -> None:
        self.node = Node(self.root, "a")
        self.storage = self.node.start()
        self.peers = FakePeers()
        self.clock = FakeClock()
        self.partitions = [self._hosted(index, leader) for index, leader in enumerate(self.leaders)]
        for one in self.partitions:
            assert one.follower_log.append(fetched(0, 10), 10, 0) == ErrorCode.NONE
        self.storage.append_failed(self.partitions[0], OSError(errno.ENOSPC, "No space left on device"))
        environment = Environment(
            self.clock,
            self.node.files,
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            self.node.spawn,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
        )
        self.followers = FullFollowers(
            environment,
            self.storage,
            self.partitions,
            self.peers,
            cast(Logger, self.node.logger),
            are_logs_ready=lambda: self.are_ready,
        )

    def _hosted(self, index: int, leader: BrokerId) -> HostedPartition:
        config, _ = BrokerConfig.load({})
        defaults = config.topic_config(Image(), NODE, "t")
        replicas = (ME, leader)
        image = PartitionImage(index, leader, 1, 1, replicas, (leader,), (bytes(16), bytes(16)))
        topic = TopicImage("t", TOPIC_ID, (image,))
        return HostedPartition(
            self.storage,
            Around(),
            topic,
            image,
            replace(defaults, log=LogConfig(segment_bytes=BATCH_BYTES)),
            TopicTraffic(),
        )

    def ask(self) -> list[Sent]:
        """What is sent when it is time again."""
        self.clock.now += ASK_INTERVAL_MS
        self.followers.look()
        sent = list(self.peers.sent)
        self.peers.sent.clear()
        return sent

    def starts(self) -> list[int]:
        return [one.log.log_start_offset for one in self.partitions]


def answer(*partitions: PartitionData) -> FetchResponse:
    return FetchResponse(responses=[FetchableTopicResponse(topic_id=TOPIC_ID, partitions=list(partitions))])


def begins(index: int, start: int, **values: Any) -> PartitionData:
    return data(index, high_watermark=values.pop("high_watermark", 10), log_start_offset=start, **values)


def test_every_leader_is_asked_once_and_what_it_has_deleted_is_deleted(tmp_path: Path) -> None:
    full = Full(tmp_path, (LEADER, OTHER, LEADER))
    first, second = full.ask()
    assert (first.node, named(first.request)) == (LEADER, [0, 2])
    assert (second.node, named(second.request)) == (OTHER, [1])
    first.done(answer(begins(0, 4), begins(2, 10)))
    second.done(answer(begins(1, 0)))
    assert full.starts() == [4, 0, 10]
    assert len(full.partitions[0].log._segments.items) == 6
    assert full.partitions[2].log.size_bytes == 0
    for one in full.partitions:
        assert one.log.log_end_offset == 10
        one.log.check()


def test_nobody_is_asked_again_before_it_is_time_or_before_it_has_answered(tmp_path: Path) -> None:
    full = Full(tmp_path)
    (sent,) = full.ask()
    full.followers.look()
    assert not full.peers.sent
    assert not full.ask(), "the first question is still out"
    sent.done(None)
    assert full.starts() == [0]
    assert len(full.ask()) == 1


def test_many_partitions_are_asked_about_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_followers, "ASKED_MAX", 2)
    full = Full(tmp_path, (LEADER,) * 5)
    rounds = []
    for _ in range(4):
        (sent,) = full.ask()
        rounds.append(named(sent.request))
        sent.done(None)
    assert rounds == [[0, 1], [2, 3], [4], [0, 1]]


def test_the_logs_are_left_alone_until_they_are_ready_and_while_there_is_room(tmp_path: Path) -> None:
    full = Full(tmp_path)
    full.are_ready = False
    assert not full.ask()
    full.are_ready = True
    full.storage.look_for_room()
    assert not full.storage.is_any_full
    assert not full.ask()


def test_what_is_led_here_is_nobody_elses_to_delete(tmp_path: Path) -> None:
    full = Full(tmp_path)
    (one,) = full.partitions
    (sent,) = full.ask()
    one.assign(one.image._replace(leader=ME, leader_epoch=2, partition_epoch=2, isr=(ME,)))
    sent.done(answer(begins(0, 4)))
    assert full.starts() == [0]
    assert not full.ask()


def test_an_answer_of_another_epoch_or_after_there_is_room_means_nothing(tmp_path: Path) -> None:
    full = Full(tmp_path)
    (one,) = full.partitions
    (sent,) = full.ask()
    one.assign(one.image._replace(leader=OTHER, leader_epoch=2, partition_epoch=2))
    sent.done(answer(begins(0, 4)))
    assert full.starts() == [0]
    (sent,) = full.ask()
    assert sent.node == OTHER
    full.storage.look_for_room()
    sent.done(answer(begins(0, 4)))
    assert full.starts() == [0], "it is fetched from now on, and hears of it that way"


def test_a_tail_that_the_leader_does_not_have_is_cut_and_then_what_has_expired_is_deleted(
    tmp_path: Path,
) -> None:
    """A leader that found its disk full may have written what nobody has fetched."""
    full = Full(tmp_path)
    (one,) = full.partitions
    one.assign(one.image._replace(leader_epoch=2, partition_epoch=2))
    one.follower_log.append(fetched(10, 5, epoch=2), 10, 0)
    one.assign(one.image._replace(leader=OTHER, leader_epoch=3, partition_epoch=3))
    (sent,) = full.ask()
    sent.done(answer(begins(0, 4, diverging=(0, 12))))
    assert (one.log.log_start_offset, one.log.log_end_offset) == (0, 10)
    (sent,) = full.ask()
    assert sent.request.topics[0].partitions[0].fetch_offset == 10
    sent.done(answer(begins(0, 4, high_watermark=12)))
    assert (one.log.log_start_offset, one.log.log_end_offset) == (4, 10)
    one.log.check()


def test_what_the_leader_has_left_behind_altogether_is_given_up(tmp_path: Path) -> None:
    full = Full(tmp_path)
    (one,) = full.partitions
    (sent,) = full.ask()
    sent.done(answer(begins(0, 500, error=ErrorCode.OFFSET_OUT_OF_RANGE, high_watermark=600)))
    assert (one.log.log_start_offset, one.log.log_end_offset) == (500, 500)
    assert one.log.size_bytes == 0
    assert not full.ask(), "there is nothing left to delete"


def test_a_disk_that_fails_meanwhile_is_no_reason_to_stop(tmp_path: Path) -> None:
    full = Full(tmp_path, (LEADER, LEADER))
    (sent,) = full.ask()
    full.partitions[0].take_offline()
    sent.done(answer(begins(0, 4), begins(1, 4)))
    assert full.partitions[1].log.log_start_offset == 4
    (sent,) = full.ask()
    assert named(sent.request) == [1]
