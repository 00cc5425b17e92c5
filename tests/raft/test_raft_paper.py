"""The paper's sentences, and KRaft's, one test each.

Raft: Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm" (sections in the names'
comments); the pull of KIP-595, PreVote of KIP-996, voters with directories of KIP-853.
"""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.raft.events import (
    Append,
    AppendFetched,
    BeginEpochRequest,
    EndEpochRequest,
    FetchAnswer,
    FetchRequest,
    Flush,
    HighWatermark,
    LeaderChange,
    Reply,
    Send,
    SnapshotAnswer,
    SnapshotRequest,
    StoreState,
    Truncate,
    VoteAnswer,
    VoteRequest,
    VotersChange,
)
from penstock.raft.roles import Candidate, Follower, Leader, Prospective, Unattached
from penstock.raft.storage import EpochEnd, SnapshotId, StoredState
from penstock.sim.cores.raft_log import Entry
from tests.raft.playing import FIVE, NONE, THREE, Player, log_of, nothing_new, of, replies, sent, voter


def vote(
    epoch: int, candidate: int, *, last_epoch: int = 9, end_offset: int = 99, pre: bool = False
) -> VoteRequest:
    return VoteRequest(epoch, voter(candidate), voter(1), last_epoch, end_offset, pre)


def followed(log_epochs: tuple[int, ...] = (1, 1), *, epoch: int = 2, leader: int = 2) -> Player:
    """A player that follows node 2, with a fetch on its way."""
    player = Player(log_of(*log_epochs))
    player.did = player.ask(BeginEpochRequest(epoch, leader, voter(1)))
    assert isinstance(player.raft.role, Follower)
    return player


# Elections (5.2)


def test_a_node_begins_without_a_leader_and_stands_when_it_hears_of_none() -> None:
    player = Player(log_of(1, 1))
    assert isinstance(player.raft.role, Unattached)
    player.wait(1000)
    assert isinstance(player.raft.role, Prospective)


def test_a_prospective_node_does_not_open_a_new_epoch() -> None:
    player = Player(log_of(1, 1))
    player.wait(5000)
    assert player.raft.epoch == 1


def test_a_candidate_opens_the_next_epoch_and_votes_for_itself_before_it_asks() -> None:
    player = Player(log_of(1, 1))
    did = player.stand()
    assert isinstance(player.raft.role, Candidate)
    assert of(did, StoreState)[0].state == StoredState(2, voter(1), None)
    first_send = next(place for place, effect in enumerate(did) if isinstance(effect, Send))
    assert any(isinstance(effect, StoreState) for effect in did[:first_send])
    assert [request.epoch for request in sent(did, VoteRequest)] == [2, 2]


def test_a_candidate_wins_with_the_votes_of_a_majority() -> None:
    player = Player(log_of(1, 1, voters=FIVE), controllers=(1, 2, 3, 4, 5))
    requests = sent(player.stand(), VoteRequest)
    player.answer(requests[0], VoteAnswer(NONE, 2, None, True))
    assert isinstance(player.raft.role, Candidate)
    player.answer(requests[1], VoteAnswer(NONE, 2, None, True))
    assert isinstance(player.raft.role, Leader)


def test_one_voter_cannot_vote_twice_for_a_candidate() -> None:
    player = Player(log_of(1, 1, voters=FIVE), controllers=(1, 2, 3, 4, 5))
    request = sent(player.stand(), VoteRequest)[0]
    for _ in range(3):
        player.answer(request, VoteAnswer(NONE, 2, None, True))
    assert isinstance(player.raft.role, Candidate)


def test_each_node_votes_for_at_most_one_candidate_in_an_epoch() -> None:
    player = Player(log_of(1, 1))
    assert replies(player.ask(vote(5, 2)))[0].is_granted
    assert not replies(player.ask(vote(5, 3)))[0].is_granted
    assert replies(player.ask(vote(5, 2)))[0].is_granted


def test_a_vote_is_stored_before_it_is_given() -> None:
    did = Player(log_of(1, 1)).ask(vote(5, 2))
    kinds = [type(effect) for effect in did]
    assert of(did, StoreState)[-1].state.voted_for == voter(2)
    assert kinds.index(StoreState) < kinds.index(Reply)


def test_a_vote_is_remembered_across_a_restart() -> None:
    stored = of(Player(log_of(1, 1)).ask(vote(5, 2)), StoreState)[-1].state
    restarted = Player(log_of(1, 1), stored=stored)
    assert not replies(restarted.ask(vote(5, 3)))[0].is_granted


def test_a_leader_elected_after_a_restart_leads_a_new_epoch() -> None:
    player = Player(log_of(1, 1), stored=StoredState(7, voter(1), None))
    player.be_elected()
    assert player.raft.epoch == 8


def test_a_candidate_that_hears_of_a_leader_of_its_epoch_follows_it() -> None:
    player = Player(log_of(1, 1))
    player.stand()
    player.ask(BeginEpochRequest(2, 3, voter(1)))
    assert isinstance(player.raft.role, Follower) and player.raft.leader_id == 3


def test_a_candidate_refuses_the_leader_of_an_earlier_epoch() -> None:
    player = Player(log_of(1, 1))
    player.stand()
    answer = replies(player.ask(BeginEpochRequest(1, 3, voter(1))))[0]
    assert answer.error == ErrorCode.FENCED_LEADER_EPOCH and answer.epoch == 2
    assert isinstance(player.raft.role, Candidate)


def test_a_candidate_that_is_not_elected_tries_again_in_a_later_epoch() -> None:
    player = Player(log_of(1, 1))
    for request in sent(player.stand(), VoteRequest):
        player.answer(request, VoteAnswer(NONE, 2, None, False))
    assert isinstance(player.raft.role, Unattached)
    player.be_elected()
    assert player.raft.epoch == 3


def test_election_timeouts_are_drawn_at_random() -> None:
    deadlines = []
    for seed in range(20):
        player = Player(log_of(1, 1))
        node = player.raft._node
        node.random.seed(seed)
        node.become_unattached(2, 0)
        deadlines.append(node.role.election_at_ms)  # type: ignore[union-attr]
    assert len(set(deadlines)) > 10
    assert all(500 <= deadline < 1000 for deadline in deadlines)


def test_whoever_hears_of_a_higher_epoch_gives_up_its_role() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    player.ask(vote(9, 2, last_epoch=0, end_offset=0))
    assert isinstance(player.raft.role, Unattached) and player.raft.epoch == 9
    assert player.raft.voted_for is None


def test_a_single_voter_leads_at_once() -> None:
    player = Player(controllers=())
    assert player.raft.is_leader and player.raft.epoch == 1
    assert [type(effect) for effect in player.did if not isinstance(effect, HighWatermark)][-1] is Flush
    assert of(player.flush(), HighWatermark) == [HighWatermark(1)]


def test_a_single_voter_that_restarts_leads_at_once() -> None:
    log = log_of(3, 3, voters=(voter(1),))
    player = Player(log, controllers=(), stored=StoredState(3, voter(1), 1))
    assert player.raft.is_leader and player.raft.epoch == 4


# PreVote (KIP-996)


def test_a_follower_that_hears_its_leader_would_elect_nobody_else() -> None:
    player = followed()
    player.answer(sent(player.did, FetchRequest)[0], nothing_new(2, 2, 1))
    assert not replies(player.ask(vote(2, 3, pre=True)))[0].is_granted
    assert isinstance(player.raft.role, Follower)


def test_a_leader_would_elect_nobody_else() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    assert not replies(player.ask(vote(2, 3, pre=True)))[0].is_granted


def test_a_follower_whose_leader_is_gone_would_elect_another() -> None:
    player = followed()
    player.answer(sent(player.did, FetchRequest)[0], nothing_new(2, 2, 1))
    player.carry_out(player.raft.unreachable(2, player.now_ms))
    assert replies(player.ask(vote(2, 3, pre=True)))[0].is_granted


def test_a_prevote_is_no_vote() -> None:
    player = Player(log_of(1, 1))
    assert replies(player.ask(vote(1, 2, pre=True)))[0].is_granted
    assert replies(player.ask(vote(1, 3, pre=True)))[0].is_granted
    assert player.raft.voted_for is None


def test_a_follower_stands_at_once_when_the_leaders_process_is_gone() -> None:
    player = followed()
    player.carry_out(player.raft.unreachable(2, player.now_ms))
    player.wait(50)
    assert isinstance(player.raft.role, Prospective)


def test_what_the_leader_sent_before_its_end_does_not_prolong_its_life() -> None:
    player = followed()
    player.carry_out(player.raft.unreachable(2, player.now_ms))
    player.answer(sent(player.did, FetchRequest)[0], nothing_new(2, 2, 1))
    player.wait(50)
    assert isinstance(player.raft.role, Prospective)


def test_the_loss_of_another_node_disturbs_no_follower() -> None:
    player = followed()
    player.carry_out(player.raft.unreachable(3, player.now_ms))
    player.wait(500)
    assert isinstance(player.raft.role, Follower)


def test_whoever_would_not_be_elected_goes_back_to_its_leader() -> None:
    player = followed()
    did = player.wait(1300)
    for _ in range(50):
        for request in sent(did, VoteRequest):
            player.answer(request, VoteAnswer(NONE, 2, 2, False))
        did = player.wait(100)
        if isinstance(player.raft.role, Follower):
            break
    assert isinstance(player.raft.role, Follower) and player.raft.epoch == 2


# The election restriction (5.4.1)


@pytest.mark.parametrize(
    ("last_epoch", "end_offset", "is_granted"),
    [(3, 1, True), (2, 4, True), (2, 3, True), (2, 2, False), (1, 9, False)],
)
def test_a_voter_refuses_a_candidate_whose_log_is_behind_its_own(
    last_epoch: int, end_offset: int, is_granted: bool
) -> None:
    player = Player(log_of(1, 2, 2))
    answer = replies(player.ask(vote(5, 2, last_epoch=last_epoch, end_offset=end_offset)))[0]
    assert answer.is_granted is is_granted


# Log replication (5.3)


def test_a_leader_appends_a_record_of_its_epoch_when_it_is_elected() -> None:
    player = Player(log_of(1, 1))
    did = player.be_elected()
    (append,) = of(did, Append)
    assert append.epoch == 2 and isinstance(append.records[0], LeaderChange)
    assert [request.leader_id for request in sent(did, BeginEpochRequest)] == [1, 1]


def test_a_leader_counts_itself_only_as_far_as_it_has_flushed() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    assert not of(player.fetched_by(voter(2), 3), HighWatermark)
    assert of(player.flush(), HighWatermark) == [HighWatermark(3)]


def test_an_entry_is_committed_when_a_majority_has_it() -> None:
    player = Player(log_of(1, 1, voters=FIVE), controllers=(1, 2, 3, 4, 5))
    player.be_elected()
    player.flush()
    assert not of(player.fetched_by(voter(2), 3), HighWatermark)
    assert of(player.fetched_by(voter(3), 3), HighWatermark) == [HighWatermark(3)]


def test_entries_of_earlier_epochs_are_committed_only_with_one_of_this_epoch() -> None:
    # 5.4.2, figure 8.
    player = Player(log_of(1, 1))
    player.be_elected()
    player.flush()
    assert not of(player.fetched_by(voter(2), 2), HighWatermark)
    assert not player.raft.is_established
    assert of(player.fetched_by(voter(2), 3), HighWatermark) == [HighWatermark(3)]
    assert player.raft.is_established


def test_a_node_without_a_vote_counts_for_nothing() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    player.flush()
    assert not of(player.fetched_by(voter(9), 3), HighWatermark)
    assert not of(player.fetched_by(voter(2, life=1), 3), HighWatermark)


def test_the_leader_holds_a_fetch_until_there_is_something_to_answer() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    player.flush()
    player.fetched_by(voter(2), 3)
    request = FetchRequest(2, voter(2), 3, 2, 3, 500)
    assert not replies(player.ask(request))
    assert replies(player.propose()) == [FetchAnswer(NONE, 2, 1, 3)]


def test_the_leader_answers_a_fetch_with_nothing_when_its_time_is_over() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    player.flush()
    player.fetched_by(voter(2), 3)
    assert not replies(player.ask(FetchRequest(2, voter(2), 3, 2, 3, 300)))
    assert not replies(player.wait(299))
    assert replies(player.wait(1)) == [FetchAnswer(NONE, 2, 1, 3)]


def test_a_follower_hears_at_once_of_what_its_own_fetch_committed() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    player.flush()
    assert replies(player.fetched_by(voter(2), 3)) == [FetchAnswer(NONE, 2, 1, 3)]


def test_a_follower_fetches_again_only_when_what_it_got_is_durable() -> None:
    player = followed()
    answer = FetchAnswer(NONE, 2, 2, 1, records=[Entry(2, "a"), Entry(2, "b")])
    did = player.answer(sent(player.did, FetchRequest)[0], answer)
    assert of(did, AppendFetched) and of(did, Flush) and not sent(did, FetchRequest)
    (request,) = sent(player.flush(), FetchRequest)
    assert (request.offset, request.last_epoch) == (4, 2)


def test_a_follower_knows_as_committed_what_the_leader_says_and_it_has() -> None:
    player = followed()
    answer = FetchAnswer(NONE, 2, 2, 9, records=[Entry(2, "a")])
    did = player.answer(sent(player.did, FetchRequest)[0], answer)
    assert of(did, HighWatermark) == [HighWatermark(2), HighWatermark(3)]


def test_an_answer_counts_only_for_the_fetch_that_is_outstanding() -> None:
    player = followed()
    request = sent(player.did, FetchRequest)[0]
    answer = FetchAnswer(NONE, 2, 2, 1, records=[Entry(2, "a")])
    player.answer(request, answer)
    player.flush()
    player.answer(request, answer)
    assert player.log.end_offset == 3


def test_a_follower_that_missed_an_epoch_truncates_to_where_the_logs_part() -> None:
    player = followed((1, 1, 2, 2, 2), epoch=4)
    did = player.answer(
        sent(player.did, FetchRequest)[0], FetchAnswer(NONE, 4, 2, 2, diverging=EpochEnd(1, 2))
    )
    assert of(did, Truncate) == [Truncate(2)]
    (request,) = sent(did, FetchRequest)
    assert (request.offset, request.last_epoch) == (2, 1)


def test_a_follower_truncates_an_epoch_the_leader_never_had_and_asks_again() -> None:
    # KIP-279: two failovers in a row.
    player = followed((1, 1, 3, 3), epoch=5)
    did = player.answer(
        sent(player.did, FetchRequest)[0], FetchAnswer(NONE, 5, 2, 1, diverging=EpochEnd(2, 4))
    )
    assert of(did, Truncate) == [Truncate(2)]


def test_a_follower_never_removes_what_is_committed() -> None:
    player = followed((1, 1))
    request = player.answer(sent(player.did, FetchRequest)[0], nothing_new(2, 2, 2))
    with pytest.raises(AssertionError, match="committed"):
        player.answer(sent(request, FetchRequest)[0], FetchAnswer(NONE, 2, 2, 2, diverging=EpochEnd(1, 1)))


def test_the_leader_says_where_a_followers_log_parts_from_its_own() -> None:
    player = Player(log_of(1, 1, 3))
    player.be_elected()
    answer = replies(player.ask(FetchRequest(4, voter(2), 5, 2, 0, 0)))[0]
    assert answer.diverging == EpochEnd(1, 2)


def test_an_empty_log_is_the_beginning_of_every_log_whatever_epoch_it_claims() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    answer = replies(player.ask(FetchRequest(2, voter(2), 0, 2, 0, 0)))[0]
    assert not answer.error and answer.diverging is None and answer.snapshot_id is None


@pytest.mark.parametrize(("offset", "epoch"), [(-1, 0), (1, -1)])
def test_a_fetch_from_nowhere_is_refused(offset: int, epoch: int) -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    answer = replies(player.ask(FetchRequest(2, voter(2), offset, epoch, 0, 0)))[0]
    assert answer.error == ErrorCode.INVALID_REQUEST


def test_what_a_fetch_with_another_log_says_is_not_counted() -> None:
    player = Player(log_of(1, 1, 3))
    player.be_elected()
    player.flush()
    did = player.ask(FetchRequest(4, voter(2), 4, 2, 0, 0))
    assert not of(did, HighWatermark)


def test_a_follower_of_an_earlier_epoch_is_told_of_this_one() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    answer = replies(player.ask(FetchRequest(1, voter(2), 2, 1, 0, 0)))[0]
    assert answer == FetchAnswer(ErrorCode.FENCED_LEADER_EPOCH, 2, 1, 0)


def test_a_node_that_does_not_lead_says_who_does() -> None:
    player = followed()
    answer = replies(player.ask(FetchRequest(2, voter(3), 2, 1, 0, 0)))[0]
    assert answer == FetchAnswer(ErrorCode.NOT_LEADER_OR_FOLLOWER, 2, 2, 0)


def test_fetches_that_wait_are_answered_when_leadership_is_lost() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    player.flush()
    player.fetched_by(voter(2), 3)
    player.ask(FetchRequest(2, voter(2), 3, 2, 3, 500))
    answer = replies(player.ask(vote(7, 3)))[0]
    assert answer.error == ErrorCode.NOT_LEADER_OR_FOLLOWER and answer.epoch == 7


# Leaders that leave


def test_a_leader_that_no_majority_fetches_from_resigns() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    player.wait(1000)
    player.fetched_by(voter(2), 2)
    player.wait(1400)
    assert player.raft.is_leader
    player.wait(200)
    assert not player.raft.is_leader and player.raft.epoch == 2


def test_a_leader_that_was_stopped_does_not_count_the_fetches_it_finds_in_its_sockets() -> None:
    """Another may lead by now, and a broker on this node must not have its lease renewed by us."""
    player = Player(log_of(1, 1))
    player.be_elected()
    player.fetched_by(voter(2), 2)
    player.now_ms += 10_000
    answers = replies(player.fetched_by(voter(2), 2))
    assert not player.raft.is_leader and not player.raft.is_followed(player.now_ms)
    assert [answer.error for answer in answers] == [ErrorCode.NOT_LEADER_OR_FOLLOWER]


def test_a_leader_that_stops_names_those_first_who_have_most() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    player.fetched_by(voter(3), 2)
    did = player.carry_out(player.raft.resign(player.now_ms))
    assert [request.preferred for request in sent(did, EndEpochRequest)] == [(voter(3), voter(2))] * 2
    assert not player.raft.is_leader


def test_the_preferred_successor_stands_at_once() -> None:
    player = followed()
    player.ask(EndEpochRequest(2, 2, (voter(1), voter(3))))
    player.wait(1)
    assert isinstance(player.raft.role, Prospective)


def test_a_leader_without_room_for_its_first_record_does_not_lead() -> None:
    player = Player(log_of(1, 1))
    for request in sent(player.stand(), VoteRequest):
        player.raft.answered(request, VoteAnswer(NONE, 2, None, True), player.now_ms)
    player.carry_out(player.raft.append_failed(player.now_ms))
    assert not player.raft.is_leader


def test_a_follower_without_room_goes_on_following() -> None:
    player = followed()
    request = sent(player.did, FetchRequest)[0]
    answer = FetchAnswer(NONE, 2, 2, 1, records=[Entry(2, "a")])
    assert of(player.raft.answered(request, answer, player.now_ms), AppendFetched)
    player.carry_out(player.raft.append_failed(player.now_ms))
    assert sent(player.wait(500), FetchRequest)[0].offset == 2


# Snapshots (7; KIP-630)


def test_a_follower_before_the_leaders_log_is_sent_to_the_snapshot() -> None:
    player = Player(log_of(1, 1, 2, 2))
    player.be_elected()
    player.flush()
    player.fetched_by(voter(2), 5)
    player.log.compact(3)
    answer = replies(player.ask(FetchRequest(3, voter(3), 2, 1, 0, 0)))[0]
    assert answer.snapshot_id == SnapshotId(3, 2)
    assert replies(player.ask(FetchRequest(3, voter(3), 3, 1, 0, 0)))[0].snapshot_id == SnapshotId(3, 2)
    assert replies(player.ask(FetchRequest(3, voter(3), 3, 2, 0, 0)))[0].snapshot_id is None


def test_a_snapshot_is_fetched_piece_by_piece_and_then_the_log_behind_it() -> None:
    player = followed()
    snapshot_id = SnapshotId(7, 2)
    did = player.answer(
        sent(player.did, FetchRequest)[0], FetchAnswer(NONE, 2, 2, 9, snapshot_id=snapshot_id)
    )
    for position in (0, 2):
        (request,) = sent(did, SnapshotRequest)
        assert request.position == position
        did = player.answer(request, SnapshotAnswer(NONE, 2, 2, snapshot_id, position, 4, b"ab"))
    assert (player.log.start_offset, player.log.end_offset) == (7, 7)
    assert player.raft.high_watermark == 7
    assert sent(did, FetchRequest)[0].offset == 7


def test_the_log_view_keeps_the_newest_voters_of_a_truncated_log() -> None:
    log = log_of(1, 1)
    log.append(Entry(2, (VotersChange(FIVE[:4]),)))
    player = Player(log)
    assert player.raft.voters == FIVE[:4]
    log.truncate(2)
    assert player.raft.voters == THREE
