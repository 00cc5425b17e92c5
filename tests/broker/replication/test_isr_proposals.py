"""What leaders propose to the controller, with partitions made of a few lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker.replication.isr_proposals import LOOKS_PER_TURN, IsrProposals
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import (
    AlterPartitionRequest,
    AlterPartitionResponse,
    AlterPartitionResponsePartition,
    AlterPartitionResponseTopic,
)
from penstock.protocol.schema import Message, encode
from penstock.replication.follower_activity import FollowerActivity
from penstock.replication.partition import Partition
from tests.broker.replication.stage import ME, SILENCE_MAX_MS, FakeHosted, Following
from tests.replication.making import LAG_MAX_MS, LiveBrokers


class Proposing(Following):
    def __init__(self) -> None:
        super().__init__()
        self.asked: deque[tuple[AlterPartitionRequest, Callable[[Any], None]]] = deque()
        self.answered: list[FakeHosted] = []
        self.broker_epoch = 101
        self.follower_activity = FollowerActivity(SILENCE_MAX_MS, self.loop.clock.now)
        self.proposals = IsrProposals(
            self.environment,
            self.ask,
            self.logger,  # type: ignore[arg-type]
            me=ME,
            broker_epoch=lambda: self.broker_epoch,
            lag_max_ms=LAG_MAX_MS,
            follower_activity=self.follower_activity,
            live=LiveBrokers(1, 2, 3).live,
        )

    def ask(
        self, request: Message, version: int, done: Callable[[Any], None], *, channel: str, timeout_ms: int
    ) -> None:
        assert isinstance(request, AlterPartitionRequest)
        assert (version, channel) == (3, "alter")
        encode(request, version)
        self.asked.append((request, done))

    def lead(self, index: int, isr: tuple[int, ...] = (1, 2)) -> FakeHosted:
        hosted = FakeHosted(index, leader=ME)
        hosted.on_answered = self.answered.append
        hosted.assign(isr=isr, partition_epoch=2)
        return hosted

    def fetched(self, hosted: FakeHosted, replica: int, offset: int = 0) -> None:
        hosted.replication.fetched_by(replica, 100 + replica, offset, hosted.end_offset, self.loop.clock.now)
        if hosted.replication.wants_proposal:
            self.proposals.wants_proposal(hosted)

    def take_asked(self) -> tuple[list[tuple[int, list[int]]], Callable[..., None]]:
        """[(partition, proposed ISR)], and how to answer: (error for all) or nothing for success."""
        self.loop.run_for(0)
        self.proposals.check()
        request, done = self.asked.popleft()
        proposals = [
            (it.partition_index, [state.broker_id for state in it.new_isr_with_epochs])
            for topic in request.topics
            for it in topic.partitions
        ]

        def answer(error: int = 0) -> None:
            done(
                AlterPartitionResponse(
                    topics=[
                        AlterPartitionResponseTopic(
                            topic_id=topic.topic_id,
                            partitions=[
                                AlterPartitionResponsePartition(
                                    partition_index=it.partition_index,
                                    error_code=error,
                                    leader_id=ME,
                                    leader_epoch=it.leader_epoch,
                                    isr=[state.broker_id for state in it.new_isr_with_epochs],
                                    partition_epoch=it.partition_epoch + 1,
                                )
                                for it in topic.partitions
                            ],
                        )
                        for topic in request.topics
                    ]
                )
            )
            self.loop.run_for(0)
            self.proposals.check()

        def no_answer() -> None:
            done(None)
            self.loop.run_for(0)

        self.no_answer: Callable[[], None] = no_answer
        return proposals, answer


def test_the_proposals_of_one_turn_go_together_and_are_adopted() -> None:
    here = Proposing()
    partitions = [here.lead(0), here.lead(1)]
    for hosted in partitions:
        here.fetched(hosted, 3)
    proposals, answer = here.take_asked()
    assert proposals == [(0, [1, 2, 3]), (1, [1, 2, 3])]
    answer()
    assert [hosted.replication.isr for hosted in partitions] == [(1, 2, 3), (1, 2, 3)]
    assert here.answered == partitions
    for hosted in partitions:
        here.fetched(hosted, 2)
    here.loop.run_for(3 * LAG_MAX_MS)
    assert not here.asked


def test_one_request_to_the_controller_is_in_flight_at_a_time() -> None:
    here = Proposing()
    first, second = here.lead(0), here.lead(1)
    here.fetched(first, 3)
    _, answer = here.take_asked()
    here.fetched(second, 3)
    here.loop.run_for(0)
    assert not here.asked
    answer()
    assert here.take_asked()[0] == [(1, [1, 2, 3])]


def test_without_an_answer_a_proposal_is_made_again_from_the_state_then() -> None:
    here = Proposing()
    hosted = here.lead(0)
    here.fetched(hosted, 3)
    here.take_asked()
    here.no_answer()
    assert not here.asked
    hosted.brokers.epochs[3] = None
    here.loop.run_for(25)
    # It may have been committed, so the epoch has to move even if nothing else does.
    proposals, answer = here.take_asked()
    assert proposals == [(0, [1, 2])]
    answer()
    assert hosted.replication.maximal_isr == (1, 2)


def test_failures_make_the_pauses_longer() -> None:
    here = Proposing()
    hosted = here.lead(0)
    here.fetched(hosted, 3)
    for pause_ms in (25, 50, 100, 200):
        here.take_asked()
        here.no_answer()
        here.loop.run_for(pause_ms - 1)
        assert not here.asked
        here.loop.run_for(1)
    assert here.take_asked()[0] == [(0, [1, 2, 3])]


def test_a_refusal_concerns_its_partition_only() -> None:
    here = Proposing()
    first, second = here.lead(0), here.lead(1)
    here.fetched(first, 3)
    here.fetched(second, 3)
    here.loop.run_for(0)
    _, done = here.asked.popleft()
    done(
        AlterPartitionResponse(
            topics=[
                AlterPartitionResponseTopic(
                    topic_id=first.key[0],
                    partitions=[
                        AlterPartitionResponsePartition(
                            partition_index=0, error_code=ErrorCode.INVALID_UPDATE_VERSION
                        ),
                        AlterPartitionResponsePartition(
                            partition_index=1, leader_id=ME, leader_epoch=1, isr=[1, 2, 3], partition_epoch=3
                        ),
                    ],
                )
            ]
        )
    )
    assert first.replication.isr == (1, 2)
    assert second.replication.isr == (1, 2, 3)
    here.loop.run_for(1_000)
    # It waits for the image.
    assert not here.asked


def test_a_replica_that_stays_behind_is_dropped_without_anybody_asking() -> None:
    here = Proposing()
    hosted = here.lead(0, (1, 2, 3))
    here.proposals.wants_proposal(hosted)
    for replica in (2, 3):
        here.fetched(hosted, replica)
    here.loop.run_for(10 * LAG_MAX_MS)
    assert not here.asked
    hosted.end_offset = 1
    hosted.replication.appended(1)
    here.proposals.appended(hosted)
    here.fetched(hosted, 2, 1)
    here.loop.run_for(LAG_MAX_MS)
    assert not here.asked
    here.loop.run_for(LAG_MAX_MS)
    assert here.take_asked()[0] == [(0, [1, 2])]


def test_a_follower_that_has_stopped_fetching_is_dropped_before_it_lags() -> None:
    here = Proposing()
    hosted = here.lead(0, (1, 2, 3))
    hosted.core._is_silent = here.follower_activity.is_silent
    here.proposals.wants_proposal(hosted)
    for replica in (2, 3):
        here.fetched(hosted, replica)
        here.follower_activity.heard(replica, here.loop.clock.now)
    hosted.end_offset = 1
    hosted.replication.appended(1)
    here.proposals.appended(hosted)
    here.fetched(hosted, 2, 1)
    for _ in range(0, SILENCE_MAX_MS, 1_000):
        here.loop.run_for(1_000)
        here.follower_activity.heard(2, here.loop.clock.now)
    assert not here.asked
    here.loop.run_for(2_000)
    assert here.take_asked()[0] == [(0, [1, 2])]


def test_a_follower_that_was_silent_before_there_was_something_to_fetch_is_dropped_soon() -> None:
    here = Proposing()
    hosted = here.lead(0, (1, 2, 3))
    hosted.core._is_silent = here.follower_activity.is_silent
    for replica in (2, 3):
        here.fetched(hosted, replica)
        here.follower_activity.heard(replica, here.loop.clock.now)
    for _ in range(0, 3 * LAG_MAX_MS, 1_000):
        here.loop.run_for(1_000)
        here.follower_activity.heard(2, here.loop.clock.now)
    assert not here.asked
    hosted.end_offset = 1
    hosted.replication.appended(1)
    here.proposals.appended(hosted)
    here.fetched(hosted, 2, 1)
    here.loop.run_for(1_000)
    assert here.take_asked()[0] == [(0, [1, 2])]


def test_a_silent_broker_makes_no_work_for_partitions_where_it_is_not_in_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one whose last partition here has been moved, and which lives on elsewhere."""
    looks = 0

    def looked_at(core: Partition, now_ms: int) -> None:
        nonlocal looks
        looks += 1

    monkeypatch.setattr(Partition, "proposal", looked_at)
    here = Proposing()
    busy = here.lead(0, (1, 2))
    here.follower_activity.heard(3, here.loop.clock.now)
    seconds = 10 * LAG_MAX_MS // 1_000
    for count in range(1, seconds + 1):
        busy.end_offset = count
        busy.replication.appended(count)
        here.proposals.appended(busy)
        here.loop.run_for(1_000)
        here.follower_activity.heard(2, here.loop.clock.now)
    # Those for laggards are twice as often as a replica may lag.
    assert 0 < looks <= 20


def test_partitions_that_are_in_order_are_not_looked_at() -> None:
    here = Proposing()
    everyone = [here.lead(index, (1, 2, 3)) for index in range(50)]
    for hosted in everyone:
        here.proposals.appended(hosted)
        for replica in (2, 3):
            here.fetched(hosted, replica)
    here.loop.run_for(LAG_MAX_MS)
    assert not here.proposals._unsettled
    assert not here.asked


def test_very_many_proposals_are_sent_in_portions() -> None:
    here = Proposing()
    everyone = [here.lead(index) for index in range(LOOKS_PER_TURN + 10)]
    for hosted in everyone:
        here.fetched(hosted, 3)
    proposals, answer = here.take_asked()
    assert len(proposals) == LOOKS_PER_TURN
    answer()
    assert len(here.take_asked()[0]) == 10


def test_a_partition_that_we_lead_no_longer_is_forgotten() -> None:
    here = Proposing()
    hosted = here.lead(0)
    here.fetched(hosted, 3)
    here.proposals.forget(hosted)
    here.loop.run_for(LAG_MAX_MS)
    assert not here.asked


def test_a_partition_whose_disk_has_failed_is_not_told_of_answers() -> None:
    here = Proposing()
    lost, other, unasked = here.lead(0), here.lead(1), here.lead(2)
    here.fetched(lost, 3)
    here.fetched(other, 3)
    _, answer = here.take_asked()
    here.fetched(unasked, 3)
    lost.is_offline = unasked.is_offline = True
    answer()
    assert here.answered == [other]
    here.loop.run_for(LAG_MAX_MS)
    assert not here.proposals._wanted


def test_a_new_leader_is_looked_at_though_nobody_appends_and_nobody_comes() -> None:
    here = Proposing()
    hosted = FakeHosted(0, leader=ME)
    assert hosted.replication.wants_proposal
    here.proposals.wants_proposal(hosted)
    here.loop.run_for(2 * LAG_MAX_MS)
    assert here.take_asked()[0] == [(0, [1])]


def test_nothing_is_proposed_before_this_broker_is_registered() -> None:
    here = Proposing()
    here.broker_epoch = -1
    hosted = here.lead(0)
    here.fetched(hosted, 3)
    here.loop.run_for(100)
    assert not here.asked
    here.broker_epoch = 101
    here.loop.run_for(LAG_MAX_MS)
    assert here.take_asked()[0] == [(0, [1, 2, 3])]


def test_a_closed_broker_proposes_no_more() -> None:
    here = Proposing()
    hosted = here.lead(0)
    here.fetched(hosted, 3)
    here.proposals.close()
    here.loop.run_for(10 * LAG_MAX_MS)
    assert not here.asked
