"""The transaction coordinator among producers, under seeds: it holds, and every planted bug is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.protocol.messages.transactions import EndTxnRequest
from penstock.sim.cores.transactions import World, run
from penstock.sim.cores.transactions_clients import TIMEOUT_MS, Process, Wait
from penstock.sim.cores.transactions_mutants import MUTANTS
from penstock.sim.report import Violation
from penstock.transactions.changes import Identity

SEEDS = 150
# The rarest needs some 270.
SEEDS_TO_KILL_MAX = 1_500
# Lives in which something was wrong once.
PINNED = (921000333, 922001983)


def test_every_life_keeps_its_transactions_whole() -> None:
    counts: Counter[str] = Counter()
    for seed in (*range(SEEDS), *PINNED):
        counts.update(run(seed).counts)
    # A life in which nothing happened proves nothing.
    least = {
        "transactions": 5_000,
        "commits": 2_500,
        "aborts": 1_000,
        "markers": 8_000,
        "timeouts": 100,
        "deaths": 150,
        "fail-overs": 5_000,
        "lost messages": 2_000,
        "refused": 900,
        "refused writes": 300,
    }
    assert {name: counts[name] for name in least if counts[name] < least[name]} == {}


class _Conversation:
    """A world without producers, for requests that arrive one by one and are committed at once."""

    def __init__(self) -> None:
        self.world = World(0)
        # No faults.
        self.world._is_healed = True
        self._process = Process(self.world, "mine", is_v2=True)
        producer = self.init()
        self.transaction = self.world.begin("mine", producer)
        self._request = EndTxnRequest(
            transactional_id="mine", producer_id=producer.id, producer_epoch=producer.epoch, committed=True
        )
        assert self._answer(self.world.add(self.transaction, ("money", 0), is_v2=True)) == ErrorCode.NONE

    def init(self) -> Identity:
        request = InitProducerIdRequest(transactional_id="mine", transaction_timeout_ms=TIMEOUT_MS)
        response = self._answer(self.world.init(request, self._process))
        return Identity(response.producer_id, response.producer_epoch)

    def commit(self) -> ErrorCode:
        response = self._answer(self.world.end(self.transaction, self._request, is_v2=True))
        return ErrorCode(response.error_code)

    def _answer(self, send: Wait) -> Any:
        answers: list[Any] = []
        send(answers.append)
        # Less than the time-out of a transaction, and enough for the log and the markers.
        self.world._run_until(self.world.now_ms + 500)
        return answers[0]


def test_a_refused_copy_of_a_commit_that_was_granted_refuses_nothing() -> None:
    talk = _Conversation()
    assert talk.commit() is ErrorCode.NONE
    talk.init()
    # The network has repeated the request, and a new producer came between the two.
    assert talk.commit() is ErrorCode.PRODUCER_FENCED
    talk.transaction.ended(("money", 0), True)
    talk.world._check_end()


def test_a_commit_that_is_refused_before_any_is_granted_must_not_happen() -> None:
    talk = _Conversation()
    # The first aborts the transaction of the one before.
    talk.init()
    assert talk.commit() is ErrorCode.PRODUCER_FENCED
    talk.transaction.ended(("money", 0), True)
    with pytest.raises(Violation, match="the commit of 0 was refused and happened"):
        talk.world._check_end()


def _seeds_to_kill(mutant: type[World]) -> int | None:
    for count in range(1, SEEDS_TO_KILL_MAX + 1):
        try:
            run(count - 1, mutant)
        except Violation:
            return count
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_every_planted_bug_is_found(mutant: type[World]) -> None:
    count = _seeds_to_kill(mutant)
    assert count is not None, f"{mutant.__name__} lived through {SEEDS_TO_KILL_MAX} seeds"
    print(f"{mutant.__name__}: {count} seeds to kill")


def test_a_seed_is_the_same_life_whatever_the_hashes_are() -> None:
    program = (
        "from penstock.sim.cores.transactions import run\n"
        "for seed in range(8):\n"
        "    report = run(seed)\n"
        "    print(report.events, report.trace_hash, sorted(report.counts.items()))\n"
    )
    lives = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert lives[0] == lives[1]
    assert lives[0]
