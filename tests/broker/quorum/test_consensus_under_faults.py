"""The shell of the quorum under faults at random: what was answered is kept, and all nodes agree in the end.

The core has its own simulator, with far more seeds (``tests/simulation/test_raft_core.py``). This is about what
lies around it: files, snapshots, restarts, bytes on the wire.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.broker.quorum_stage import Stage, StagedNode

SEEDS = int(os.environ.get("PENSTOCK_CONSENSUS_SEEDS", "15"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_was_answered_is_kept(seed: int) -> None:
    chance = random.Random(seed)
    stage = Stage(observers=(7,), snapshot_records=chance.choice((20, 60, 50_000)))
    stage.start_all()
    stage.leader()
    # The outcome of each proposal, by the topic it creates.
    outcomes: dict[str, list[str]] = {}
    for _ in range(80):
        for node in stage.nodes.values():
            if node.is_up and node.consensus.is_active:
                for _ in range(chance.randrange(4)):
                    outcome = stage.propose(node)
                    outcomes[f"topic-{stage._topics}"] = outcome
        stage.run_for(chance.choice((1, 10, 200)))
        if chance.random() < 0.3:
            trouble(stage, chance)
    stage.cuts.clear()
    for node in stage.nodes.values():
        node.files.fail_after(None)
        if not node.is_up:
            node.start(lost_page_cache=True)
    # A leader that was cut off learns of the others first.
    stage.run_for(4000)
    stage.commit(stage.leader())
    stage.agree()
    kept = set(stage.nodes[1].topics)
    promised = {name for name, outcome in outcomes.items() if outcome == [name]}
    assert promised <= kept
    assert promised
    assert all(len(outcome) <= 1 for outcome in outcomes.values()), "answered twice"
    for node in stage.nodes.values():
        assert not node.failures
        node.consensus._log.log.check()
        node.stop()
        node.start()
    stage.leader()
    stage.agree()
    assert set(stage.nodes[1].topics) == kept


def trouble(stage: Stage, chance: random.Random) -> None:
    node = chance.choice(list(stage.nodes.values()))
    match chance.choice(
        ("crash", "power", "stop", "start", "start", "cut", "mend", "full", "resign", "wipe")
    ):
        case "crash" if node.is_up:
            node.crash()
            node.start()
        case "power" if node.is_up:
            node.crash(loses_power=True)
            node.start(lost_page_cache=True)
        case "stop" if node.is_up and up(stage) > 3:
            node.stop()
        case "start" if not node.is_up:
            node.start()
        case "cut":
            stage.cut(node)
        case "mend":
            stage.cuts.clear()
            for other in stage.nodes.values():
                other.files.fail_after(None)
        case "full":
            node.files.fail_after(chance.randrange(5000))
        case "resign" if node.is_up:
            node.consensus.resign()
        case "wipe" if node.is_up and is_spare(stage, node):
            node.wipe()
            node.start()


def up(stage: Stage) -> int:
    return sum(node.is_up for node in stage.nodes.values())


def is_spare(stage: Stage, node: StagedNode) -> bool:
    """Whether all is well without this disk: everybody agrees who votes, and has all there is."""
    running = [other for other in stage.nodes.values() if other.is_up]
    return (
        len(running) == len(stage.nodes)
        and not stage.cuts
        and all(other.consensus.is_voter for other in running if other.id != 7)
        and len({other.consensus.high_watermark for other in running}) == 1
        and all(other.consensus.high_watermark == other.consensus.log_end_offset for other in running)
    )
