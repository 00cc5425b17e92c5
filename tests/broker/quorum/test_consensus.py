"""The metadata quorum as a whole: several nodes with their disks, in virtual time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.broker.options import ServeError
from penstock.broker.quorum import committed as quorum_committed
from penstock.broker.quorum import snapshots as quorum_snapshots
from penstock.broker.quorum.consensus import ConsensusSettings
from penstock.broker.quorum.metadata_log import refuse_damage
from penstock.metadata import changes as metadata_changes
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.quorum import (
    AddRaftVoterRequest,
    DescribeQuorumRequest,
    DescribeQuorumRequestPartition,
    DescribeQuorumRequestTopic,
    Endpoint,
    RemoveRaftVoterRequest,
    VoteRequest,
    VoteRequestPartition,
    VoteRequestTopic,
)
from penstock.protocol.records import batches, decode_header, encode_batch
from penstock.raft.storage import SnapshotId
from tests.broker.disks import Lines
from tests.broker.quorum_stage import DIRECTORY, Silent, Stage, StagedNode, topic

LOG = f"{DIRECTORY}/{0:020d}.log"
STATE = f"{DIRECTORY}/quorum-state"
DESCRIBE = DescribeQuorumRequest(
    topics=[
        DescribeQuorumRequestTopic(
            topic_name="__cluster_metadata", partitions=[DescribeQuorumRequestPartition()]
        )
    ]
)


def born(**settings: Any) -> Stage:
    stage = Stage(**settings)
    stage.start_all()
    stage.leader()
    return stage


# A node alone


def test_a_node_alone_leads_at_once_and_needs_no_peers() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.run_for(20)
    assert node.consensus.is_active and node.consensus.leader_id == 1 and node.activity == [True]
    stage.commit(node)
    assert node.topics == ["topic-1"]


@pytest.mark.parametrize("clean", [True, False])
def test_a_node_alone_has_its_topics_again_after_a_restart(clean: bool) -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    stage.commit(node, 5)
    node.stop() if clean else node.crash(loses_power=True)
    node.start(lost_page_cache=not clean)
    stage.leader()
    assert node.topics == [f"topic-{number}" for number in range(1, 6)]
    assert node.consensus.epoch == 2


def test_nobody_is_told_of_a_topic_that_is_not_durable() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    outcome = stage.propose(node)
    assert not outcome and not node.topics
    assert list(node.consensus.decided_image().topics) == ["topic-1"]
    stage.run_for(10)
    assert outcome == ["topic-1"] and node.topics == ["topic-1"]


def test_a_decision_without_changes_waits_for_those_before_it() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    stage.propose(node)
    outcome: list[str] = []
    decision = topic("none", 99)
    decision.changes = []
    assert node.consensus.propose(decision, outcome.append, lambda: outcome.append("lost"))
    assert not outcome
    stage.run_for(10)
    assert outcome == ["none"]


def test_what_is_committed_at_once_is_applied_in_turns_and_answered_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quorum_committed, "CHANGES_PER_TURN", 5)
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    node.deltas.clear()
    seen: dict[str, list[str]] = {}

    def answered(name: str) -> None:
        seen[name] = list(node.topics)

    for number in range(1, 7):
        assert node.consensus.propose(topic(f"topic-{number}", number, 2), answered, seen.clear)
    stage.run_until(lambda: len(seen) == 6)
    # Of three changes each: one in a turn, for two would be too much.
    assert [delta.created for delta in node.deltas] == [(f"topic-{number}",) for number in range(1, 7)]
    assert all(name in topics for name, topics in seen.items()), "answered before it was applied"


def test_a_controller_begins_with_all_that_is_committed_however_many_turns_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quorum_committed, "CHANGES_PER_TURN", 1)
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    stage.commit(node, 5)
    node.crash()
    seen: list[int] = []
    node.start(on_active=lambda is_active: seen.append(len(node.topics)))
    stage.leader()
    assert seen == [5]


def test_leadership_that_is_lost_between_two_turns_makes_no_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quorum_committed, "CHANGES_PER_TURN", 1)
    stage = born()
    stage.commit(stage.leader(), 5)
    stage.agree()
    for node in stage.nodes.values():
        node.crash()
    for node in stage.nodes.values():
        node.activity.clear()
        node.start()
    turning: list[StagedNode] = []

    def look() -> bool:
        # It leads and may go on, but has not come to the end of what it knows to be committed.
        turning[:] = [node for node in stage.nodes.values() if node.consensus.committed._established]
        return bool(turning)

    for _ in range(100_000):
        if look():
            break
        stage.step()
    (node,) = turning
    assert not node.consensus.is_active and len(node.topics) < 5
    node.consensus.resign()
    stage.run_for(2)
    assert not node.activity
    stage.leader()
    stage.agree()


def test_a_full_disk_refuses_a_proposal_and_nothing_else() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    node.files.fail_after(0)
    assert not node.consensus.propose(topic("t", 1), print, print)
    assert node.consensus.decided_image() == node.consensus.image
    node.files.fail_after(None)
    stage.commit(node)
    assert not node.failures


def test_a_disk_that_fails_stops_the_node() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    node.files.fail_after(0, 5)
    with pytest.raises(OSError):
        node.consensus.propose(topic("t", 1), print, print)
    assert node.failures


def test_a_log_of_the_release_before_is_opened_and_gets_its_voters() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    changes = topic("old", 1).changes
    batch = encode_batch(
        [(0, None, metadata_changes.encode(change), []) for change in changes], leader_epoch=1
    )
    node.files.make_directory(DIRECTORY)
    node.files.open(LOG).append([batch])
    node.start()
    stage.leader()
    assert node.topics == ["old"] and node.consensus.epoch == 2
    node.stop()
    node.start()
    stage.leader()
    assert node.topics == ["old"] and node.consensus.epoch == 3


def test_a_damaged_log_is_refused_wherever_a_batch_with_others_behind_it_is_damaged() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    stage.commit(node, 3)
    node.stop()
    file = node.files.open(LOG)
    whole = file.read_at(0, file.size)
    # Also in its length: one that is too large looks like a last batch that is cut short.
    *_, (first, _), (second, _) = batches(whole)
    # (Nothing tells a wrong leader epoch, at 12 to 15.)
    for position in [*range(first, first + 12), *range(first + 16, second)]:
        node.files.damage(LOG, position, 1)
        with pytest.raises(ServeError, match="damaged"):
            node.start()
        file.truncate(0)
        file.append([whole])
    node.start()
    stage.leader()
    assert len(node.topics) == 3


def test_what_a_failed_fsync_left_in_the_page_cache_only_is_written_again() -> None:
    """The kernel counts it as written: no later fsync would cover it, and a power loss would take it."""
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    stage.commit(node, 3)
    node.stop()
    content = node.files.content(LOG)
    whole = bytes(content.data)
    node.start()
    stage.leader()
    again = node.files.content(LOG)
    assert again is not content
    assert again.data[: len(whole)] == whole and again.durable[: len(whole)] == whole


def test_a_last_batch_that_is_cut_short_is_not_damage() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    stage.commit(node, 3)
    node.stop()
    file = node.files.open(LOG)
    whole = file.read_at(0, file.size)
    (*_, (last, _)) = batches(whole)
    for end in range(last, len(whole)):
        file.truncate(0)
        file.append([whole[:end]])
        refuse_damage(node.files, DIRECTORY)


def test_a_log_whose_votes_are_lost_is_refused() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    node.stop()
    node.files.remove(STATE)
    with pytest.raises(ServeError, match="quorum-state is missing"):
        node.start()


def test_a_state_that_cannot_be_read_is_refused() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    node.stop()
    node.files.replace(STATE, b"{}")
    with pytest.raises(ServeError, match="cannot be read"):
        node.start()


def test_the_stored_state_is_kafkas() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    fields = json.loads(node.files.read(STATE))
    assert fields["leaderEpoch"] == 1 and fields["votedId"] == 1 and fields["data_version"] == 1


# Three nodes


def test_three_newborn_nodes_become_a_cluster() -> None:
    stage = born()
    stage.commit(stage.leader(), 3)
    stage.agree()
    assert all(node.topics == ["topic-1", "topic-2", "topic-3"] for node in stage.nodes.values())
    assert len({node.consensus.leader_id for node in stage.nodes.values()}) == 1
    assert all(node.consensus.is_voter for node in stage.nodes.values())


def test_a_node_that_speaks_of_another_does_not_take_its_name() -> None:
    # Every line has the id of the node that writes it, as ``node``.
    lines: list[tuple[str, dict[str, Any]]] = []

    class Heard(Silent):
        def info(self, event: str, **values: Any) -> None:
            lines.append((event, values))

        warning = error = info

    stage = Stage()
    for node in stage.nodes.values():
        node.start(logger=Heard())
    leader = stage.leader()
    stage.agree()
    assert not any("node" in values for _, values in lines)
    assert (
        "the metadata quorum has a leader",
        {"leader": leader.id, "epoch": leader.consensus.epoch},
    ) in lines


def test_two_newborn_nodes_of_three_wait_for_the_third() -> None:
    stage = Stage()
    stage.nodes[1].start()
    stage.nodes[2].start()
    stage.run_for(10_000)
    assert not any(node.is_up and node.consensus.epoch for node in stage.nodes.values())
    stage.nodes[3].start()
    stage.leader()


def test_a_majority_goes_on_without_the_leader() -> None:
    stage = born()
    first = stage.leader()
    stage.commit(first, 2)
    first.crash()
    second = stage.leader()
    assert second is not first and second.consensus.epoch > 1
    stage.commit(second)
    first.start()
    stage.agree()
    assert first.topics == ["topic-1", "topic-2", "topic-3"]


def test_a_leader_whose_process_is_gone_is_replaced_within_half_a_second() -> None:
    stage = born()
    first = stage.leader()
    stage.agree()
    first.crash()
    started_ms = stage.clock.now_ms()
    stage.leader()
    assert stage.clock.now_ms() - started_ms < 500


def test_a_leader_that_stops_hands_over_at_once() -> None:
    stage = born()
    first = stage.leader()
    stage.agree()
    started_ms = stage.clock.now_ms()
    first.consensus.resign()
    assert not first.consensus.is_active and first.activity == [True, False]
    assert stage.leader() is not first
    assert stage.clock.now_ms() - started_ms < 500


def test_a_leader_that_is_cut_off_learns_that_its_proposals_are_lost() -> None:
    stage = born()
    first = stage.leader()
    stage.agree()
    stage.cut(first)
    outcome = stage.propose(first)
    stage.run_for(3000)
    assert outcome == ["lost"] and not first.consensus.is_active
    second = stage.leader()
    stage.commit(second)
    stage.cuts.clear()
    stage.agree()
    assert first.topics == ["topic-2"]


def test_what_only_the_old_leader_had_is_cut_back_and_never_seen() -> None:
    stage = born()
    first = stage.leader()
    stage.agree()
    stage.cut(first)
    for _ in range(3):
        stage.propose(first)
    stage.run_for(100)
    assert len(first.consensus.decided_image().topics) == 3
    first.crash()
    stage.commit(stage.leader())
    stage.cuts.clear()
    first.start()
    stage.agree()
    assert all(node.topics == ["topic-4"] for node in stage.nodes.values())
    assert all(set(delta.created) <= {"topic-4"} for delta in first.deltas)


def test_a_proposal_without_leadership_is_lost() -> None:
    stage = born()
    follower = stage.others(stage.leader())[0]
    outcome = stage.propose(follower)
    stage.run_for(1)
    assert outcome == ["lost"]


def test_a_leader_that_was_asleep_says_nothing_for_certain() -> None:
    stage = born()
    leader = stage.leader()
    stage.agree()
    # Nothing ran, and the clock went on.
    stage.clock.advance(5000)
    outcome: list[str] = []
    decision = topic("none", 99)
    decision.changes = []
    assert leader.consensus.propose(decision, outcome.append, lambda: outcome.append("lost"))
    stage.run_for(1)
    assert outcome == ["lost"]


def test_all_nodes_lose_power_and_nothing_is_lost() -> None:
    stage = born()
    stage.commit(stage.leader(), 4)
    stage.agree()
    for node in stage.nodes.values():
        node.crash(loses_power=True)
    for node in stage.nodes.values():
        node.start(lost_page_cache=True)
    stage.leader()
    stage.agree()
    assert all(len(node.topics) == 4 for node in stage.nodes.values())


def test_a_node_without_a_vote_follows() -> None:
    stage = Stage(observers=(7,))
    stage.start_all()
    stage.commit(stage.leader(), 2)
    stage.agree()
    observer = stage.nodes[7]
    assert observer.topics == ["topic-1", "topic-2"] and not observer.consensus.is_voter
    assert observer.consensus.leader_id == stage.leader().id


def test_a_node_whose_disk_was_wiped_gets_its_vote_back() -> None:
    stage = born()
    leader = stage.leader()
    stage.commit(leader, 2)
    wiped = stage.others(leader)[0]
    wiped.wipe()
    stage.run_for(500)
    wiped.start()
    stage.run_until(lambda: wiped.consensus.is_voter)
    stage.agree()
    assert wiped.topics == ["topic-1", "topic-2"]
    third = next(node for node in stage.others(leader) if node is not wiped)
    third.crash()
    stage.commit(stage.leader())


def test_a_full_disk_keeps_a_follower_behind_and_no_longer_than_it_is_full() -> None:
    stage = born()
    leader = stage.leader()
    stage.agree()
    follower = stage.others(leader)[0]
    follower.files.fail_after(0)
    stage.commit(leader, 2)
    stage.run_for(3000)
    assert stage.leader() is leader and not follower.failures
    follower.files.fail_after(None)
    stage.agree()
    assert len(follower.topics) == 2


def test_an_epoch_whose_first_batch_found_no_room_does_not_count() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    log = node.consensus._log
    log.log.epochs.assign(9, log.end_offset)
    assert log.last_epoch == 1
    assert log.end_offset_for(9) == (1, log.end_offset)


def test_a_node_stops_on_a_full_disk_and_starts_again() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    stage.commit(node, 3)
    node.files.fail_after(0)
    node.stop()
    node.start()
    stage.run_for(1000)
    assert not node.consensus.is_active and not node.failures
    node.files.fail_after(None)
    stage.leader()
    assert len(node.topics) == 3


@pytest.mark.parametrize("theirs", ["other", None])
def test_a_node_of_another_cluster_or_of_none_does_not_raise_the_epoch(theirs: str | None) -> None:
    stage = Stage()
    stage.nodes[1].start(cluster_id="one")
    stage.nodes[2].start(cluster_id="one")
    partition = VoteRequestPartition(replica_epoch=9, replica_id=3)
    request = VoteRequest(
        cluster_id=theirs,
        voter_id=1,
        topics=[VoteRequestTopic(topic_name="__cluster_metadata", partitions=[partition])],
    )
    answer = stage.ask(stage.nodes[1], request, 2)
    assert answer.error_code == ErrorCode.INCONSISTENT_CLUSTER_ID
    assert stage.nodes[1].consensus.epoch == 0


def test_a_request_without_its_partition_is_refused() -> None:
    stage = Stage()
    stage.nodes[1].start()
    assert stage.ask(stage.nodes[1], VoteRequest(), 2).error_code == ErrorCode.INVALID_REQUEST


# What operators see and do


def test_the_leader_describes_the_quorum() -> None:
    stage = Stage(observers=(7,))
    stage.start_all()
    leader = stage.leader()
    stage.agree()
    stage.run_for(1000)
    answer = stage.ask(leader, DESCRIBE, 2).topics[0].partitions[0]
    assert answer.error_code == 0 and answer.leader_id == leader.id
    assert [state.replica_id for state in answer.current_voters] == [1, 2, 3]
    assert [state.log_end_offset for state in answer.current_voters] == [answer.high_watermark] * 3
    assert [state.replica_id for state in answer.observers] == [7]


def test_a_follower_says_that_it_does_not_lead() -> None:
    stage = born()
    leader = stage.leader()
    stage.agree()
    answer = stage.ask(stage.others(leader)[0], DESCRIBE, 2).topics[0].partitions[0]
    assert answer.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER and answer.leader_id == leader.id


def test_a_voter_is_added_and_removed() -> None:
    stage = Stage(observers=(7,))
    stage.start_all()
    leader = stage.leader()
    stage.agree()
    stage.run_for(600)
    added = stage.nodes[7]
    request = AddRaftVoterRequest(voter_id=7, voter_directory_id=added.directory_id, timeout_ms=1000)
    assert stage.ask(leader, request, 1).error_code == 0
    stage.agree()
    assert added.consensus.is_voter
    removed = stage.others(leader)[0]
    remove = RemoveRaftVoterRequest(voter_id=removed.id, voter_directory_id=removed.directory_id)
    assert stage.ask(leader, remove, 0).error_code == 0
    stage.agree()
    assert not removed.consensus.is_voter


def test_where_a_voter_listens_is_not_learned_from_a_change_that_is_refused() -> None:
    stage = Stage(observers=(7,))
    stage.start_all()
    leader = stage.leader()
    stage.agree()
    stage.run_for(600)
    added = stage.nodes[7]

    def listening_at(port: int) -> AddRaftVoterRequest:
        return AddRaftVoterRequest(
            voter_id=7,
            voter_directory_id=added.directory_id,
            timeout_ms=1000,
            listeners=[Endpoint(name="INTERNAL", host="host7", port=port)],
        )

    assert stage.ask(leader, listening_at(9007), 1).error_code == 0
    assert stage.ask(leader, listening_at(9999), 1).error_code == ErrorCode.DUPLICATE_VOTER
    nodes = {node.node_id: node.listeners[0].port for node in stage.ask(leader, DESCRIBE, 2).nodes}
    assert nodes[7] == 9007


def test_a_refused_change_of_voters_says_why() -> None:
    stage = born()
    leader = stage.leader()
    answer = stage.ask(leader, RemoveRaftVoterRequest(voter_id=9, voter_directory_id=bytes(16)), 0)
    assert answer.error_code == ErrorCode.VOTER_NOT_FOUND and answer.error_message


# Snapshots


def names(node_files: list[str]) -> list[str]:
    return [name for name in node_files if ".checkpoint" in name and not name.startswith("leader")]


def test_snapshots_are_made_two_are_kept_and_the_log_before_them_goes() -> None:
    stage = Stage((1,), snapshot_records=20)
    node = stage.nodes[1]
    node.start()
    stage.leader()
    for _ in range(10):
        stage.commit(node, 6)
        stage.run_for(500)
    assert len(names(node.files.list(DIRECTORY))) == 2
    assert node.consensus._log.start_offset > 0
    image = node.consensus.image
    node.stop()
    node.start()
    stage.leader()
    assert node.consensus.image == image and len(node.topics) == 60


def test_an_image_of_any_size_comes_back_from_its_snapshot() -> None:
    stage = Stage((1,), snapshot_records=1000)
    node = stage.nodes[1]
    node.start()
    stage.leader()
    stage.commit(node, 4, partitions=450)
    stage.run_for(2000)
    image = node.consensus.image
    assert len(names(node.files.list(DIRECTORY))) == 1
    node.crash()
    node.files.remove(LOG)
    node.start()
    assert node.consensus.image == image and node.consensus.image.partition_count == 1800


def test_a_damaged_snapshot_gives_way_to_the_one_before() -> None:
    stage = Stage((1,), snapshot_records=20)
    node = stage.nodes[1]
    node.start()
    stage.leader()
    for _ in range(10):
        stage.commit(node, 6)
        stage.run_for(500)
    image = node.consensus.image
    node.stop()
    newest = names(node.files.list(DIRECTORY))[-1]
    node.files.damage(f"{DIRECTORY}/{newest}", 300, 1)
    node.start()
    stage.leader()
    assert node.consensus.image == image
    assert f"{newest}.corrupt" in node.files.list(DIRECTORY)


def test_a_full_disk_gives_up_a_snapshot_and_tries_again_later() -> None:
    stage = Stage((1,), snapshot_records=20)
    node = stage.nodes[1]
    node.start()
    stage.leader()
    stage.commit(node, 15)
    node.files.fail_after(0)
    stage.run_for(500)
    assert not names(node.files.list(DIRECTORY))
    node.files.fail_after(None)
    stage.commit(node, 15)
    stage.run_for(500)
    assert len(names(node.files.list(DIRECTORY))) == 1 and not node.failures


def test_a_follower_that_was_away_too_long_loads_a_snapshot() -> None:
    stage = born(snapshot_records=20)
    leader = stage.leader()
    stage.commit(leader, 2)
    stage.agree()
    away = stage.others(leader)[0]
    away.stop()
    for _ in range(10):
        stage.commit(stage.leader(), 6)
        stage.run_for(500)
    assert stage.leader().consensus._log.start_offset > 10
    away.deltas.clear()
    away.start()
    stage.agree()
    assert len(away.topics) == 62
    assert names(away.files.list(DIRECTORY))
    created = [name for delta in away.deltas for name in delta.created]
    assert sorted(created) == sorted(f"topic-{number}" for number in range(1, 63))
    away.crash()
    away.start()
    stage.agree()
    assert len(away.topics) == 62


def test_a_follower_that_has_no_room_for_a_snapshot_says_so_once_and_waits() -> None:
    stage = born(snapshot_records=20)
    leader = stage.leader()
    stage.commit(leader, 2)
    stage.agree()
    away = stage.others(leader)[0]
    away.stop()
    for _ in range(10):
        stage.commit(stage.leader(), 6)
        stage.run_for(500)
    lines = Lines()
    away.start(logger=lines)
    away.files.fail_after(0)
    stage.run_for(20_000)
    assert away.consensus.is_stuck and not away.failures
    assert sum("full" in line or "snapshot" in line for line in lines.lines) == 1, lines.lines
    away.files.fail_after(None)
    stage.agree()
    assert len(away.topics) == 62 and not away.consensus.is_stuck


def test_a_node_that_dies_before_a_fetched_snapshot_has_replaced_its_log_goes_on_from_the_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(snapshot_records=20)
    third = stage.nodes[3]
    # Its log reaches back to the beginning, so that it can say where another's log parted from it.
    third.start(settings=ConsensusSettings())
    stage.start_all()
    former = led_by_another(stage, third)
    stage.commit(former, 2)
    stage.agree()
    stage.cut(former)
    for _ in range(200):
        # Never committed, and more than the others will have committed.
        stage.propose(former)
    stage.run_until(lambda: not former.consensus.is_active)
    for _ in range(10):
        stage.commit(led_by_another(stage, third), 6)
        stage.run_for(500)

    class Died(BaseException):
        pass

    def die(*_: object) -> None:
        raise Died

    monkeypatch.setattr(former.consensus._log, "start_over", die)
    stage.cuts.clear()
    with pytest.raises(Died):
        stage.run_for(5000)
    former.crash()
    stage.leader().consensus.resign()
    stage.run_until(lambda: third.consensus.is_active)
    former.start()
    stage.agree()
    assert len(former.topics) == 62


def led_by_another(stage: Stage, node: StagedNode) -> StagedNode:
    while (leader := stage.leader()) is node:
        leader.consensus.resign()
        stage.run_until(lambda: not node.consensus.is_active)
    return leader


def test_a_snapshot_that_is_written_while_a_newer_one_is_fetched_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(snapshot_records=20)
    stage.start_all()
    leader = stage.leader()
    stage.commit(leader, 2)
    stage.agree()
    away = stage.others(leader)[0]
    ended: list[Exception | None] = []
    consensus = away.consensus
    older = SnapshotId(consensus.image.offset + 1, consensus.epoch)
    # In so many slices that the last is written when the node has long been brought up to date.
    monkeypatch.setattr(quorum_snapshots, "SLICE_PARTITIONS", 1)
    changes = [change for number in range(1000) for change in topic(f"old-{number}", 10_000 + number).changes]
    image, _ = consensus.image.apply(changes)
    consensus._snapshots.write(older, image, (), (), {}, ended.append)
    stage.cut(away)
    for _ in range(3):
        stage.commit(leader, 15)
        stage.run_for(300)
    stage.cuts.clear()
    stage.agree()
    fetched = consensus._snapshots.ids
    assert len(fetched) == 1 and fetched[0] > older and not ended
    stage.run_until(lambda: bool(ended))
    assert consensus._snapshots.ids == fetched
    assert names(away.files.list(DIRECTORY)) == [
        f"{fetched[0].end_offset:020d}-{fetched[0].epoch:010d}.checkpoint"
    ]


def test_a_newborn_node_joins_by_a_snapshot_and_votes() -> None:
    stage = born(snapshot_records=20)
    leader = stage.leader()
    for _ in range(10):
        stage.commit(leader, 6)
        stage.run_for(500)
    wiped = stage.others(leader)[0]
    wiped.wipe()
    wiped.start()
    stage.run_until(lambda: wiped.consensus.is_voter)
    stage.agree()
    assert len(wiped.topics) == 60


def test_a_snapshot_is_in_kafkas_form() -> None:
    stage = Stage((1,), snapshot_records=20)
    node = stage.nodes[1]
    node.start()
    stage.leader()
    stage.commit(node, 15)
    stage.run_for(500)
    (name,) = names(node.files.list(DIRECTORY))
    data = node.files.read(f"{DIRECTORY}/{name}")
    found = [header for _, header in batches(data)]
    assert [header.is_control for header in found] == [True, True, *[False] * (len(found) - 3), True]
    end_offset, epoch = (int(part) for part in name.removesuffix(".checkpoint").split("-"))
    # Three control records, and two for each topic.
    assert end_offset == 33 and epoch == 1
    offsets = [(header.base_offset, header.next_offset) for header in found]
    assert [base for base, _ in offsets[1:]] == [end for _, end in offsets[:-1]]


def test_the_first_batch_of_a_cluster_names_leader_version_and_voters() -> None:
    stage = Stage((1,))
    node = stage.nodes[1]
    node.start()
    stage.leader()
    header = decode_header(node.files.read(LOG))
    assert header.is_control and header.count == 3 and header.leader_epoch == 1
