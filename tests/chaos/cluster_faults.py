"""The faults that befall a cluster, one after the other, drawn like cards from a shuffled deck.

A fault chooses its victim, strikes, holds for a while, and heals. Before the next one the cluster is given time:
always until every node is ready, and until every replica is in sync before a fault that destroys what is on a
disk. All of those strike one node: damage may lie undiscovered in data that nobody reads, and what is destroyed
on two of three nodes may be lost in any system of three copies.

The deck holds every fault once, so each is drawn before one is drawn again.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.model import format_id
from tests.chaos.test_disk_full import SmallDisk
from tests.cluster import wire
from tests.cluster.cluster import Cluster
from tests.support import wait_until

SESSION_S = 9.0
RECOVERY_S = 180.0


@dataclass
class Struck:
    """A fault that was done, for the table."""

    name: str
    victim: str
    held_s: float
    began: float
    healed: float
    recovered: float = 0.0


@dataclass(frozen=True)
class Fault:
    name: str
    strike: Callable[[Faults], str]
    destroys: bool = False


class Faults:
    """Draws and does faults. ``disks`` are the nodes' disks that can be filled."""

    def __init__(
        self, cluster: Cluster, topic: str, seed: int, *, disks: dict[int, SmallDisk] | None = None
    ) -> None:
        self.cluster = cluster
        self.topic = topic
        self.choose = random.Random(seed)
        self.disks = disks or {}
        # Whose disk is destroyed, whenever one is.
        self.fragile = self.any_node()
        self.struck: list[Struck] = []
        self._deck: list[Fault] = []
        self._all = [
            Fault("killed", _kill),
            Fault("killed, back at once", _kill_and_restart),
            Fault("stopped", _stop),
            Fault("controller killed", _kill_controller),
            Fault("paused, shorter than the session", _pause_shortly),
            Fault("paused, longer than the session", _pause_long),
            Fault("all killed at once", _kill_all),
            Fault("wiped", _wipe, destroys=True),
            Fault("segments damaged", _damage, destroys=True),
        ]
        if cluster.network is not None:
            self._all += [
                Fault("cut off", _cut_off),
                Fault("cut off from the other nodes", _cut_from_nodes),
                Fault("heard by nobody", _mute),
                Fault("two nodes cut from each other", _cut_two),
            ]
        if self.disks:
            self._all.append(Fault("disk full", _fill_disk))

    @property
    def names(self) -> list[str]:
        return [fault.name for fault in self._all]

    def next(self) -> Struck:
        """Do the next fault of the deck and wait until all nodes are there again."""
        if not self._deck:
            self._deck = list(self._all)
            self.choose.shuffle(self._deck)
        return self.do(self._deck.pop())

    def do(self, fault: Fault) -> Struck:
        if fault.destroys:
            self.recover()
        began = time.monotonic()
        victim = fault.strike(self)
        healed = time.monotonic()
        done = Struck(fault.name, victim, healed - began, began, healed)
        self.struck.append(done)
        self.cluster.wait_ready(*self.cluster.nodes, timeout_s=RECOVERY_S)
        if self.choose.random() < 0.6:
            self.recover()
        else:
            time.sleep(self.choose.uniform(0, 2))
        done.recovered = time.monotonic()
        return done

    def recover(self) -> None:
        """Wait until every replica of the topic is in sync: after any fault, that must come."""
        self.cluster.wait_in_sync(self.topic, deadline_s=RECOVERY_S)

    # What the faults need

    def any_node(self) -> int:
        return self.choose.choice(sorted(self.cluster.nodes))

    def hold(self, least_s: float, most_s: float) -> None:
        time.sleep(self.choose.uniform(least_s, most_s))


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """A tmpfs that can be filled. Raises CalledProcessError without root."""
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "penstock-test", str(path)]
    subprocess.run(mount, check=True, capture_output=True, text=True)
    try:
        yield SmallDisk(path)
    finally:
        # What a process that was just killed still holds open is let go of when it is gone.
        wait_until(
            lambda: (
                not subprocess.run(["umount", "--lazy", str(path)], check=False).returncode
                or not path.is_mount()
            ),
            30,
            f"{path} is unmounted",
        )


# The faults. Each returns who was struck.


def _kill(faults: Faults) -> str:
    victim = faults.any_node()
    faults.cluster.kill(victim)
    faults.hold(1, 12)
    faults.cluster.start(victim)
    return f"node {victim}"


def _kill_and_restart(faults: Faults) -> str:
    victim = faults.cluster.leader(faults.topic, 0)
    if victim < 0:
        victim = faults.any_node()
    faults.cluster.restart(victim, kill=True)
    return f"node {victim}"


def _stop(faults: Faults) -> str:
    victim = faults.any_node()
    faults.cluster.stop(victim)
    faults.hold(0, 3)
    faults.cluster.start(victim)
    return f"node {victim}"


def _kill_controller(faults: Faults) -> str:
    victim = faults.cluster.controller()
    faults.cluster.kill(victim)
    faults.hold(0, 3)
    faults.cluster.start(victim)
    return f"node {victim}"


def _pause_shortly(faults: Faults) -> str:
    return _pause(faults, 0.3, SESSION_S - 2)


def _pause_long(faults: Faults) -> str:
    return _pause(faults, SESSION_S + 1, SESSION_S + 5)


def _pause(faults: Faults, least_s: float, most_s: float) -> str:
    victim = faults.any_node()
    faults.cluster.pause(victim)
    faults.hold(least_s, most_s)
    faults.cluster.resume(victim)
    return f"node {victim}"


def _kill_all(faults: Faults) -> str:
    faults.cluster.kill(*faults.cluster.nodes)
    faults.cluster.start(*faults.cluster.nodes)
    return "all"


def _wipe(faults: Faults) -> str:
    victim = faults.fragile
    faults.cluster.kill(victim)
    faults.cluster.wipe(victim)
    faults.cluster.start(victim)
    wait_until_it_votes(faults.cluster, victim)
    return f"node {victim}"


def _damage(faults: Faults) -> str:
    victim = faults.fragile
    faults.cluster.kill(victim)
    partitions = wire.partitions(faults.cluster.nodes[faults.cluster.running[0]].address, [faults.topic])
    damaged = [
        faults.cluster.damage(victim, topic, partition, faults.choose) for topic, partition in partitions
    ]
    faults.cluster.start(victim)
    return f"node {victim}, {sum(path is not None for path in damaged)} segments"


def _cut_off(faults: Faults) -> str:
    network = faults.cluster.network
    assert network is not None
    victim = faults.any_node()
    network.cut_off(victim)
    faults.hold(2, SESSION_S + 5)
    network.heal()
    return f"node {victim}"


def _cut_from_nodes(faults: Faults) -> str:
    network = faults.cluster.network
    assert network is not None
    victim = faults.any_node()
    network.cut_off(victim, also_from_clients=False)
    faults.hold(SESSION_S, SESSION_S + 5)
    network.heal()
    return f"node {victim}"


def _mute(faults: Faults) -> str:
    network = faults.cluster.network
    assert network is not None
    victim = faults.any_node()
    for other in faults.cluster.nodes:
        if other != victim:
            network.mute(victim, other)
    faults.hold(2, SESSION_S + 5)
    network.heal()
    return f"node {victim}"


def _cut_two(faults: Faults) -> str:
    network = faults.cluster.network
    assert network is not None
    one, other = faults.choose.sample(sorted(faults.cluster.nodes), 2)
    network.cut(one, other)
    faults.hold(2, SESSION_S + 5)
    network.heal()
    return f"nodes {one} and {other}"


def _fill_disk(faults: Faults) -> str:
    victim = faults.choose.choice(sorted(faults.disks))
    disk = faults.disks[victim]
    with suppress(OSError):  # the node takes of what is left, too
        disk.fill(0)
    faults.hold(3, 8)
    disk.empty()
    return f"node {victim}"


def wait_until_it_votes(cluster: Cluster, node_id: int) -> None:
    """Wait until a node that came back with an empty disk is a voter again.

    The quorum knows its voters by node and directory. One with another directory is a stranger that only
    follows, so that nobody votes twice, until it is admitted in the place of the one that is gone.
    """
    (first, *_) = cluster.nodes[node_id].data_dirs

    def votes() -> bool:
        properties = dict(
            line.split("=", 1) for line in (first / "meta.properties").read_text().splitlines() if "=" in line
        )
        voters = {
            each.replica_id: format_id(each.replica_directory_id) for each in cluster.quorum().current_voters
        }
        return voters.get(node_id) == properties["directory.id"]

    wait_until(votes, RECOVERY_S, f"node {node_id} votes again")
