"""How voters come and go, and how a cluster is born (KIP-853; DESIGN.md, "Birth of a cluster")."""

from __future__ import annotations

from penstock.protocol.errors import ErrorCode
from penstock.raft.events import (
    Append,
    BeginEpochRequest,
    ChangeVoterRequest,
    DescribeAnswer,
    DescribeRequest,
    Effect,
    EndEpochRequest,
    EpochAnswer,
    FetchRequest,
    HighWatermark,
    KRaftVersion,
    LeaderChange,
    VoteAnswer,
    VoteRequest,
    VotersChange,
)
from penstock.raft.quorum import Voter, voters_of
from penstock.raft.roles import Candidate, Follower, Prospective, Unattached
from tests.raft.playing import NONE, THREE, Player, log_of, nothing_new, of, replies, sent, voter


def established() -> Player:
    """Node 1 leads epoch 2 and has committed its first record."""
    player = Player(log_of(1, 1))
    player.be_elected()
    player.flush()
    player.fetched_by(voter(2), 3)
    assert player.raft.is_established
    return player


def with_a_voter_silent() -> Player:
    """The same, and node 3 has not fetched for too long."""
    player = established()
    player.wait(1000)
    player.fetched_by(voter(2), 3)
    player.wait(600)
    return player


def appended_voters(effects: list[Effect]) -> list[tuple[Voter, ...]]:
    return [
        record.voters
        for append in of(effects, Append)
        for record in append.records
        if isinstance(record, VotersChange)
    ]


def newborn(id: int, life: int = 0, epoch: int = 0) -> DescribeAnswer:
    return DescribeAnswer(ErrorCode.NOT_LEADER_OR_FOLLOWER, epoch, None, (voter(id, life),), 0)


# Changing voters


def test_a_voter_is_admitted_when_its_record_is_committed() -> None:
    player = established()
    player.fetched_by(voter(4), 3)
    did = player.ask(ChangeVoterRequest(voter(4), False))
    assert appended_voters(did) == [(*THREE, voter(4))] and not replies(did)
    player.flush()
    player.fetched_by(voter(2), 4)
    assert EpochAnswer(NONE, 2, 1) in replies(player.fetched_by(voter(4), 4))


def test_the_new_voters_count_from_the_moment_they_are_in_the_log() -> None:
    player = established()
    player.fetched_by(voter(4), 3)
    player.ask(ChangeVoterRequest(voter(4), False))
    player.flush()
    # Two of three would have been enough.
    assert not of(player.fetched_by(voter(2), 4), HighWatermark)
    assert of(player.fetched_by(voter(4), 4), HighWatermark) == [HighWatermark(4)]


def test_one_change_at_a_time() -> None:
    player = established()
    player.fetched_by(voter(4), 3)
    player.ask(ChangeVoterRequest(voter(4), False))
    answer = replies(player.ask(ChangeVoterRequest(voter(3), True)))[0]
    assert answer.error == ErrorCode.REQUEST_TIMED_OUT


def test_no_change_before_the_leader_has_committed_in_its_epoch() -> None:
    player = Player(log_of(1, 1))
    player.be_elected()
    answer = replies(player.ask(ChangeVoterRequest(voter(3), True)))[0]
    assert answer.error == ErrorCode.REQUEST_TIMED_OUT


def test_a_node_that_does_not_fetch_is_not_admitted() -> None:
    answer = replies(established().ask(ChangeVoterRequest(voter(4), False)))[0]
    assert answer.error == ErrorCode.REQUEST_TIMED_OUT


def test_a_node_cannot_vote_with_two_directories() -> None:
    player = established()
    player.fetched_by(voter(3, life=1), 3)
    answer = replies(player.ask(ChangeVoterRequest(voter(3, life=1), False)))[0]
    assert answer.error == ErrorCode.DUPLICATE_VOTER


def test_who_is_no_voter_cannot_be_removed() -> None:
    answer = replies(established().ask(ChangeVoterRequest(voter(4), True)))[0]
    assert answer.error == ErrorCode.VOTER_NOT_FOUND


def test_a_voter_stays_while_those_left_could_not_go_on() -> None:
    player = established()
    player.wait(1400)
    player.fetched_by(voter(2), 3)
    player.wait(200)
    # Node 3 has been silent: without node 2 there would be no majority.
    answer = replies(player.ask(ChangeVoterRequest(voter(2), True)))[0]
    assert answer.error == ErrorCode.INVALID_REQUEST


def test_the_only_voter_stays_also_on_a_clock_that_has_just_begun() -> None:
    player = Player(log_of(1, 1, voters=(voter(1),)), controllers=())
    player.flush()
    answer = replies(player.ask(ChangeVoterRequest(voter(1), True)))[0]
    assert answer.error == ErrorCode.INVALID_REQUEST and player.now_ms < 1000


def test_a_leader_that_is_removed_leads_until_that_is_committed() -> None:
    player = established()
    player.ask(ChangeVoterRequest(voter(1), True))
    player.flush()
    assert player.raft.is_leader
    player.fetched_by(voter(2), 4)
    assert player.raft.is_leader
    did = player.fetched_by(voter(3), 4)
    assert not player.raft.is_leader and sent(did, EndEpochRequest)
    player.wait(5000)
    assert isinstance(player.raft.role, Unattached)


def test_a_change_is_void_for_whoever_asked_when_leadership_is_lost() -> None:
    player = established()
    player.ask(ChangeVoterRequest(voter(3), True))
    did = player.ask(VoteRequest(9, voter(2), voter(1), 9, 9, False))
    assert EpochAnswer(ErrorCode.NOT_LEADER_OR_FOLLOWER, 9, None) in replies(did)


def test_a_wiped_voter_is_replaced_by_removing_it_first() -> None:
    player = with_a_voter_silent()
    wiped = voter(3, life=1)
    did = player.fetched_by(wiped, 3)
    assert appended_voters(did) == [THREE[:2]]
    player.flush()
    player.fetched_by(voter(2), 4)
    did = player.fetched_by(wiped, 4)
    assert appended_voters(did) == [voters_of((voter(1), voter(2), wiped))]


def test_a_disk_that_was_replaced_is_soon_forgotten() -> None:
    player = with_a_voter_silent()
    wiped = voter(3, life=1)
    player.fetched_by(wiped, 3)
    player.flush()
    player.fetched_by(voter(2), 4)
    player.fetched_by(wiped, 4)
    player.flush()
    player.fetched_by(voter(2), 5)
    player.fetched_by(wiped, 5)
    assert player.raft.voters == voters_of((voter(1), voter(2), wiped))
    player.wait(1000)
    assert [replica for replica, _, _ in player.raft.progress()] == [voter(2), wiped]


def test_a_wiped_voter_far_away_is_replaced_though_changes_never_pause() -> None:
    player = with_a_voter_silent()
    wiped = voter(3, life=1)
    for end in range(4, 10):
        # Node 2 is near: what is appended is committed long before node 3 can ask for what follows it.
        player.propose()
        player.flush()
        player.fetched_by(voter(2), end)
        if appended_voters(player.fetched_by(wiped, end - 1)):
            break
    assert player.raft.voters == THREE[:2]


def test_a_wiped_voter_that_has_yet_to_read_the_log_is_not_replaced() -> None:
    player = with_a_voter_silent()
    wiped = voter(3, life=1)
    player.propose(10)
    player.flush()
    player.fetched_by(voter(2), 13)
    for offset in range(4, 10):
        assert not appended_voters(player.fetched_by(wiped, offset))
    assert appended_voters(player.fetched_by(wiped, 13))


def test_a_voter_is_not_replaced_while_it_fetches_itself() -> None:
    player = established()
    player.wait(1400)
    player.fetched_by(voter(3), 3)
    assert not appended_voters(player.fetched_by(voter(3, life=1), 3))


def test_a_voter_that_was_removed_on_purpose_does_not_come_back() -> None:
    player = established()
    player.ask(ChangeVoterRequest(voter(3), True))
    player.flush()
    player.fetched_by(voter(2), 4)
    assert not appended_voters(player.fetched_by(voter(3), 4))


def test_replacing_can_be_switched_off() -> None:
    player = Player(log_of(1, 1), replaces_wiped_voters=False)
    player.be_elected()
    player.flush()
    player.fetched_by(voter(2), 3)
    player.wait(1400)
    player.fetched_by(voter(2), 3)
    player.wait(200)
    assert not appended_voters(player.fetched_by(voter(3, life=1), 3))


# Directories


def test_a_vote_is_given_only_by_the_disk_it_is_asked_of() -> None:
    player = Player(log_of(1, 1))
    request = VoteRequest(5, voter(2), voter(1, life=1), 9, 9, False)
    answer = replies(player.ask(request))[0]
    assert answer.error == ErrorCode.INVALID_VOTER_KEY and not answer.is_granted
    assert player.raft.epoch == 1


def test_a_wiped_voter_observes_and_never_stands() -> None:
    player = Player(log_of(1, 1), me=voter(3, life=1))
    player.ask(BeginEpochRequest(2, 2, voter(3, life=1)))
    assert isinstance(player.raft.role, Follower)
    did = player.wait(20_000)
    assert not sent(did, VoteRequest) and isinstance(player.raft.role, Unattached)


def test_an_observer_finds_the_leader_by_asking_a_voter() -> None:
    player = Player(log_of(1, 1), me=voter(9))
    (request,) = sent(player.wait(0), DescribeRequest)
    did = player.answer(request, DescribeAnswer(ErrorCode.NOT_LEADER_OR_FOLLOWER, 4, 2, THREE, 7))
    assert player.raft.leader_id == 2
    assert sent(did, FetchRequest)[0].epoch == 4


# Birth


def test_newborn_nodes_find_each_other_and_elect_one_of_them() -> None:
    player = Player()
    requests = sent(player.wait(0), DescribeRequest)
    assert len(requests) == 2
    player.answer(requests[0], newborn(2))
    assert isinstance(player.raft.role, Unattached)
    did = player.answer(requests[1], newborn(3))
    assert isinstance(player.raft.role, Prospective)
    assert [request.voter for request in sent(did, VoteRequest)] == [voter(2), voter(3)]


def born_of(player: Player) -> list[Effect]:
    requests = sent(player.wait(0), DescribeRequest)
    player.answer(requests[0], newborn(2))
    return player.answer(requests[1], newborn(3))


def test_the_first_leader_needs_every_vote() -> None:
    player = Player()
    one, other = sent(born_of(player), VoteRequest)
    player.answer(one, VoteAnswer(NONE, 0, None, True))
    assert isinstance(player.raft.role, Prospective)
    one, other = sent(player.answer(other, VoteAnswer(NONE, 0, None, True)), VoteRequest)
    player.answer(one, VoteAnswer(NONE, 1, None, True))
    assert isinstance(player.raft.role, Candidate)
    player.answer(other, VoteAnswer(NONE, 1, None, True))
    assert player.raft.is_leader


def test_the_first_leader_writes_down_who_the_voters_are() -> None:
    player = Player()
    did = born_of(player)
    for _ in range(2):
        did = [
            effect
            for request in sent(did, VoteRequest)
            for effect in player.answer(request, VoteAnswer(NONE, request.epoch, None, True))
        ]
    (append,) = of(did, Append)
    assert [type(record) for record in append.records] == [LeaderChange, KRaftVersion, VotersChange]
    assert append.records[2].voters == THREE == player.raft.voters


def test_a_later_leader_does_not_repeat_them() -> None:
    player = Player(log_of(1, 1))
    (append,) = of(player.be_elected(), Append)
    assert [type(record) for record in append.records] == [LeaderChange]


def test_a_newborn_node_waits_for_those_that_do_not_answer() -> None:
    player = Player()
    requests = sent(player.wait(0), DescribeRequest)
    player.answer(requests[0], newborn(2))
    player.answer(requests[1], None)
    did = player.wait(10_000)
    assert isinstance(player.raft.role, Unattached) and not sent(did, VoteRequest)
    assert len(sent(did, DescribeRequest)) > 10


def test_what_was_answered_in_an_earlier_round_does_not_count() -> None:
    player = Player()
    first = sent(player.wait(0), DescribeRequest)
    player.answer(first[0], newborn(2))
    second = sent(player.wait(500), DescribeRequest)
    player.answer(first[1], newborn(3))
    player.answer(second[1], newborn(3))
    assert isinstance(player.raft.role, Unattached)


def test_a_newborn_node_joins_the_cluster_that_exists() -> None:
    player = Player()
    requests = sent(player.wait(0), DescribeRequest)
    player.answer(requests[0], DescribeAnswer(NONE, 3, 2, THREE, 17))
    assert isinstance(player.raft.role, Follower) and player.raft.leader_id == 2


def test_a_newborn_node_founds_nothing_where_a_log_has_begun() -> None:
    player = Player()
    requests = sent(player.wait(0), DescribeRequest)
    player.answer(requests[0], DescribeAnswer(ErrorCode.NOT_LEADER_OR_FOLLOWER, 0, None, THREE, 1))
    did = player.answer(requests[1], newborn(3))
    assert not sent(did, VoteRequest)


def test_a_newborn_node_that_is_not_listed_only_observes() -> None:
    player = Player(me=voter(9))
    requests = sent(player.wait(0), DescribeRequest)
    for request in requests:
        player.answer(request, newborn(2))
    did = player.wait(10_000)
    assert not sent(did, VoteRequest)


def test_a_newborn_node_says_that_it_knows_only_itself() -> None:
    answer = replies(Player().ask(DescribeRequest()))[0]
    assert answer == newborn(1)


def test_a_voter_with_a_log_says_whom_it_knows() -> None:
    answer = replies(Player(log_of(1, 1)).ask(DescribeRequest()))[0]
    assert answer == DescribeAnswer(ErrorCode.NOT_LEADER_OR_FOLLOWER, 1, None, THREE, 2)


def test_whoever_has_a_log_refuses_a_candidate_without_one() -> None:
    player = Player(log_of(1, 1))
    answer = replies(player.ask(VoteRequest(2, voter(2), voter(1), 0, 0, False)))[0]
    assert not answer.is_granted


def test_a_follower_with_an_empty_log_looks_for_all_others_again_when_its_leader_is_lost() -> None:
    player = Player()
    did = player.ask(BeginEpochRequest(1, 2, voter(1)))
    player.answer(sent(did, FetchRequest)[0], nothing_new(1, 2, 0))
    did = player.wait(3000)
    assert not sent(did, VoteRequest) and len(sent(did, DescribeRequest)) >= 2


def test_a_log_of_the_release_before_gets_its_voters_written() -> None:
    log = log_of(1, 1)
    log.voters = [(-1, (voter(1),))]
    player = Player(log, controllers=())
    (append,) = of(player.did, Append)
    assert [type(record) for record in append.records] == [LeaderChange, KRaftVersion, VotersChange]
