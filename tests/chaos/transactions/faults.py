"""The faults that befall transactions: two hands, one for the brokers and one for the clients, at the same time.

Each hand draws from a shuffled deck, so that each of its faults is drawn before one is drawn again. A broker that
was struck is back before the next one is; clients are struck at any time, so most of their faults meet a cluster
that is in trouble itself. What is destroyed on a disk is the subject of ``test_cluster_faults.py``.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.protocol.messages.groups import FindCoordinatorRequest
from tests.chaos.ledger import Ledger
from tests.chaos.transactions.processes import Clients, Slot
from tests.cluster.cluster import Cluster
from tests.cluster.wire import NoAnswer, Wire
from tests.support import wait_until

GROUP, TRANSACTION = 0, 1
RECOVERY_S = 180.0
# The victim of a fault that could not be done just now.
NOBODY = "nobody"
SESSION_S = 9.0


class Hand(threading.Thread):
    """Does fault after fault until it is told to stop and has done all of its deck."""

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        seed: int,
        rest_s: float,
        deck: Sequence[tuple[str, Callable[[], str], int]],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._ledger = ledger
        self.choose = random.Random(seed)
        self._rest_s = rest_s
        self._all = [(fault, strike) for fault, strike, weight in deck for _ in range(weight)]
        self._deck: list[tuple[str, Callable[[], str]]] = []
        self._stopping = threading.Event()
        self.struck: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return self.struck.total()

    @property
    def has_done_all(self) -> bool:
        return {fault for fault, _ in self._all} <= set(self.struck)

    def stop(self) -> None:
        self._stopping.set()
        self.join(2 * RECOVERY_S)
        assert not self.is_alive(), f"{self.name} hangs"

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self._deck:
                    self._deck = list(self._all)
                    self.choose.shuffle(self._deck)
                fault, strike = self._deck.pop()
                began = time.monotonic()
                victim = strike()
                if victim == NOBODY:
                    continue
                self.struck[fault] += 1
                now = time.strftime("%H:%M:%S")
                print(f"{now} {fault}: {victim}, {time.monotonic() - began:.1f} s", flush=True)
                self._stopping.wait(self.choose.uniform(0, 2 * self._rest_s))
        except BaseException as error:
            self._ledger.violated(f"{self.name} failed: {error!r}")

    def hold(self, least_s: float, most_s: float) -> None:
        time.sleep(self.choose.uniform(least_s, most_s))


class BrokerFaults(Hand):
    """What is done to brokers; coordinators are found by asking."""

    def __init__(
        self, cluster: Cluster, topics: Sequence[str], ids: Sequence[str], group: str, ledger: Ledger, seed: int,
        rest_s: float,
    ) -> None:  # fmt: skip
        super().__init__(
            "faults of brokers",
            ledger,
            seed,
            rest_s,
            [
                ("broker killed", lambda: self._killed(self._any(), 4), 2),
                ("broker stopped", self._stopped, 2),
                ("leader killed, back at once", lambda: self._killed(self._leader(), 0), 3),
                ("transaction coordinator killed", lambda: self._killed(self._transactions(), 3), 3),
                (
                    "transaction coordinator killed, back at once",
                    lambda: self._killed(self._transactions(), 0),
                    3,
                ),
                ("group coordinator killed", lambda: self._killed(self._group_coordinator(), 1), 2),
                ("controller killed", lambda: self._killed(self._cluster.controller(), 2), 2),
                ("broker paused", lambda: self._paused(self._any(), 0.2, 3), 2),
                ("transaction coordinator paused", lambda: self._paused(self._transactions(), 0.2, 5), 3),
                (
                    "transaction coordinator paused past its session",
                    lambda: self._paused(self._transactions(), SESSION_S + 0.5, SESSION_S + 3),
                    1,
                ),
                ("all brokers killed at once", self._all_killed, 1),
            ],
        )
        self._cluster = cluster
        self._topics = topics
        self._ids = ids
        self._group = group

    def _any(self) -> int:
        return self.choose.choice(sorted(self._cluster.nodes))

    def _leader(self) -> int:
        leader = self._cluster.leader(self.choose.choice(self._topics), 0)
        return leader if leader in self._cluster.nodes else self._any()

    def _transactions(self) -> int:
        return self._coordinator(TRANSACTION, self.choose.choice(self._ids))

    def _group_coordinator(self) -> int:
        return self._coordinator(GROUP, self._group)

    def _coordinator(self, kind: int, key: str) -> int:
        try:
            with Wire(self._cluster.nodes[self._any()].address, timeout_s=5) as wire:
                answer = wire.call(FindCoordinatorRequest(key_type=kind, coordinator_keys=[key]), 4)
        except NoAnswer:
            return self._any()
        (found,) = answer.coordinators
        return self._any() if found.error_code else int(found.node_id)

    def _killed(self, victim: int, most_s: float) -> str:
        self._cluster.kill(victim)
        self.hold(0, most_s)
        self._cluster.start(victim)
        return self._recovered(victim)

    def _stopped(self) -> str:
        victim = self._any()
        self._cluster.stop(victim)
        self.hold(0, 2)
        self._cluster.start(victim)
        return self._recovered(victim)

    def _paused(self, victim: int, least_s: float, most_s: float) -> str:
        self._cluster.pause(victim)
        self.hold(least_s, most_s)
        self._cluster.resume(victim)
        return self._recovered(victim)

    def _all_killed(self) -> str:
        self._cluster.kill(*self._cluster.nodes)
        self._cluster.start(*self._cluster.nodes)
        return self._recovered(0)

    def _recovered(self, victim: int) -> str:
        """Mostly wait until all is well; now and then the next fault finds replicas that are behind."""
        self._cluster.wait_ready(*self._cluster.nodes, timeout_s=RECOVERY_S)
        if self.choose.random() < 0.7:
            for topic in self._topics:
                self._cluster.wait_in_sync(topic, deadline_s=RECOVERY_S)
        return f"node {victim}" if victim else "all"


class ClientFaults(Hand):
    """What is done to clients."""

    def __init__(self, clients: Clients, timeout_s: float, ledger: Ledger, seed: int, rest_s: float) -> None:
        super().__init__(
            "faults of clients",
            ledger,
            seed,
            rest_s,
            [
                ("client killed, back at once", lambda: self._killed(0), 4),
                ("client killed, back later", lambda: self._killed(3), 3),
                ("client paused", lambda: self._paused(0.1, 2), 3),
                ("client paused past its time-out", lambda: self._paused(timeout_s + 1.5, timeout_s + 4), 1),
                ("client supplanted, the former goes on", lambda: self._supplanted(0), 3),
                ("client supplanted while it was paused", lambda: self._supplanted(3), 4),
            ],
        )
        self._clients = clients

    def _slot(self) -> Slot:
        return self.choose.choice([slot for slot in self._clients.slots if not slot.is_resting])

    def _killed(self, most_s: float) -> str:
        slot = self._slot()
        with self._clients.lock:
            slot.kill()
        self.hold(0, most_s)
        with self._clients.lock:
            if slot.current is None and not slot.is_resting:
                slot.start()
        return slot.transactional_id

    def _paused(self, least_s: float, most_s: float) -> str:
        slot = self._slot()
        with self._clients.lock:
            victim = slot.current
            if victim is not None:
                victim.pause()
        self.hold(least_s, most_s)
        if victim is not None:
            victim.resume()
        return slot.transactional_id

    def _supplanted(self, paused_s: float) -> str:
        """Another process takes the id. The former, paused meanwhile or not, must not take effect any more.

        It wakes up when the other has the id, or has just asked for it: both are of interest. It must have had the
        id itself: of two that never had it, the one that was started first may well get it last.
        """
        slot = self._slot()
        self._wait_for_words(slot)
        with self._clients.lock:
            if slot.current is None or not slot.current.lines:
                return NOBODY
            former = slot.current
            if paused_s:
                former.pause()
        if paused_s:
            self.hold(0, 0.5)
        with self._clients.lock:
            if slot.current is not former:
                # It was fenced meanwhile, and another is there already.
                return slot.transactional_id
            slot.supplant()
        if self.choose.random() < 0.7:
            self._wait_for_words(slot)
        self.hold(0, paused_s)
        if paused_s:
            former.resume()
        return slot.transactional_id

    def _wait_for_words(self, slot: Slot) -> None:
        """Until the process of a slot has said something, which it does when it has the id."""
        deadline = time.monotonic() + RECOVERY_S
        while time.monotonic() < deadline and not self._stopping.is_set():
            with self._clients.lock:
                if slot.is_resting or (slot.current is not None and slot.current.lines):
                    return
            time.sleep(0.05)


def wait_for_last_stable_offsets(ends: Callable[[str], dict[int, int]], timeout_s: float, what: str) -> None:
    """After the last fault no transaction stays open for longer than its time-out and some slack."""
    wait_until(
        lambda: ends("read_committed") == ends("read_uncommitted"),
        timeout_s,
        f"{what}: the last stable offsets reach the high watermarks",
    )
