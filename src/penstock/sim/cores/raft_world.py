"""State shared by one run of the quorum's simulator: virtual time, randomness, and counts.

All randomness of a run comes from its seed, in separate streams: a change in one place does not shift what the
others draw.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

# How often to check whether a run is done.
LOOK_MS = 200


# Names of the counts.
COUNTED = (
    "nodes",
    "crashes",
    "wipes",
    "pauses",
    "cuts",
    "losses",
    "elections",
    "commits",
    "truncations",
    "snapshots",
    "voter_changes",
)
# Entries in a response, without faults.
FETCHED_MAX = 20


class Swarm:
    """The mixture of faults of this seed. Without it, every run would have the same mixture of everything."""

    def __init__(self, draw: random.Random) -> None:
        self.voters = 3 if draw.random() < 0.7 else 5
        self.spares = 1 if draw.random() < 0.4 else 0
        self.latency_ms = draw.choice((2, 10, 40))
        self.lag_ms = draw.choice((0, 0, 300))
        self.loss = draw.choice((0.0, 0.0, 0.02, 0.1))
        self.doubling = draw.choice((0.0, 0.02, 0.1))
        # A small value lets a log cross an epoch in two steps, which is the case of figure 8 of the Raft paper.
        self.fetched_max = draw.choice((1, 3, FETCHED_MAX))
        self.sync_ms = draw.choice((2, 10, 50))
        self.fault_every_ms = draw.choice((700, 1500, 4000))
        self.propose_every_ms = draw.choice((200, 600))
        # The time between a promise and its storing is short, and random faults miss it.
        self.crash_while_storing = draw.choice((0.0, 0.05))
        self.sees_refusals = draw.random() < 0.6
        self.is_born_badly = draw.random() < 0.3
        names = (
            "crash",
            "crash",
            "storm",
            "cut",
            "cut_one_way",
            "pause",
            "wipe",
            "change",
            "compact",
            "resign",
        )
        self.faults = [name for name in names if draw.random() < 0.7] or ["crash"]


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts = Counter(dict.fromkeys(COUNTED, 0))
        self.events = 0
        self.trace_hash = 0
        self.network_draw = random.Random(seed * 7 + 1)
        self.disk_draw = random.Random(seed * 7 + 2)
        self.faults_draw = random.Random(seed * 7 + 3)
        self.clients_draw = random.Random(seed * 7 + 4)
        self.cores_draw = random.Random(seed * 7 + 5)
        self.swarm = Swarm(random.Random(seed * 7 + 6))
        # Whether faults have ended.
        self.is_healing = False

        self.now_ms = 0
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def later(self, delay_ms: int, callback: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heappush(self._queue, (self.now_ms + delay_ms, self._sequence, callback, arguments))

    def run_until(self, end_ms: int, is_done: Callable[[], bool] | None = None) -> bool:
        """Run events up to this time; True if the run was done before."""
        queue = self._queue
        looked_at_ms = self.now_ms
        while queue and queue[0][0] <= end_ms:
            self.now_ms, sequence, callback, arguments = heappop(queue)
            self.events += 1
            self.trace_hash = (self.trace_hash * 1000003 ^ (self.now_ms << 24 ^ sequence)) & 0xFFFFFFFFFFFF
            callback(*arguments)
            if is_done is not None and self.now_ms - looked_at_ms >= LOOK_MS:
                looked_at_ms = self.now_ms
                if is_done():
                    return True
        self.now_ms = end_ms
        return False
