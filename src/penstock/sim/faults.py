"""The nemesis: injects faults into a simulated cluster.

At random times it injects one of the faults in the run's plan, and undoes it after a while. ``heal`` undoes all
of them at once and stops.

A cluster survives some faults only one at a time: when a machine has lost power (in ``replicated`` mode, where
records are committed before they are on a disk), or its disk was damaged or wiped, the other copies must be
whole. So these faults hit a second machine only when ``is_whole`` says that every partition has all its copies
again. Plans with these faults never lower ``min.insync.replicas`` to 1 (``Plan.in_sync_min``). Faults are held
back only here: the checkers excuse nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from penstock.protocol.records import HEADER_SIZE, CorruptBatch, batches
from penstock.sim.cluster import CLIENT_PORT, INTERNAL_PORT, Cluster, Machine
from penstock.sim.loop import Event, Process
from penstock.sim.plans import HARMFUL

# Positions in the header of a batch.
LENGTH_AT = 8
EPOCH_AT = 12
EPOCH_BYTES = 4

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

# How long a fault waits for a job that it can kill, and how often it looks for one.
JOB_WAIT_MS = 3_000
JOB_LOOK_MS = 50

# Harmful faults that may go unnoticed until the data is read: copies may look whole and not be.
SILENT = ("flip", "sync fails")


class Nemesis:
    def __init__(
        self,
        cluster: Cluster,
        *,
        faults: Sequence[str],
        interval_ms: float,
        clients: Mapping[str, Process],
        # Faults with their own schedule and random stream: (name, mean interval).
        later_faults: Sequence[tuple[str, float]] = (),
        # Whether any machine may lose power at any time, because everything acknowledged is on disk.
        is_flushed: bool,
        is_whole: Callable[[], bool],
    ) -> None:
        self._cluster = cluster
        self._loop = cluster.loop
        self._fabric = cluster.fabric
        self._chance = cluster.loop.streams["faults"]
        self._faults = list(faults)
        self._interval_ms = interval_ms
        # By host; clients may be added later.
        self._clients = clients
        self._is_flushed = is_flushed
        self._is_whole = is_whole
        # The machine that was last harmed.
        self._victim: Machine | None = None
        # The harm may stay unnoticed for long: no other machine may be harmed any more.
        self._is_silently_harmed = False
        self._is_over = False
        # Resets a clock that was set far off.
        self._set_clock_right: Callable[[], None] | None = None
        self._restarts: dict[int, Event] = {}
        self.counts: dict[str, int] = {}
        cluster.on_ended = self._ended
        if self._faults:
            self._strike_later()
        for fault, mean_ms in later_faults:
            self._strike_by_itself(fault, mean_ms)

    # Striking

    def _strike_later(self) -> None:
        self._loop.after(self._chance.expovariate(1 / self._interval_ms), self._strike, "fault")

    def _strike(self) -> None:
        if self._is_over:
            return
        fault = self._chance.choice(self._faults)
        machine = self._chance.choice(list(self._cluster.machines.values()))
        self._strike_with(fault, machine)
        self._strike_later()

    def _strike_by_itself(self, fault: str, mean_ms: float) -> None:
        chance = self._loop.streams[f"fault {fault}"]

        def strike() -> None:
            if not self._is_over:
                self._strike_with(fault, chance.choice(list(self._cluster.machines.values())))
                self._strike_by_itself(fault, mean_ms)

        self._loop.after(chance.expovariate(1 / mean_ms), strike, "fault")

    def _strike_with(self, fault: str, machine: Machine) -> None:
        if fault not in HARMFUL or self._may_harm(fault, machine):
            strikes = getattr(self, "_" + fault.replace(" ", "_").replace("-", "_"))
            if strikes(machine):
                self._count(fault, machine)

    def _count(self, fault: str, machine: Machine) -> None:
        self.counts[fault] = self.counts.get(fault, 0) + 1
        self._cluster.note("nemesis", fault, {"machine": machine.host})

    def _may_harm(self, fault: str, machine: Machine) -> bool:
        if fault == "power" and self._is_flushed and not self._is_silently_harmed:
            return True
        is_first = self._victim is None or self._victim is machine
        if is_first or (not self._is_silently_harmed and self._is_whole()):
            self._victim = machine
            self._is_silently_harmed = self._is_silently_harmed or fault in SILENT
            return True
        return False

    def _soon(self, strike: Callable[[Machine], bool], machine: Machine) -> None:
        """Strike within two seconds, mostly at once."""

        def now() -> None:
            if not self._is_over:
                strike(machine)

        self._loop.after(self._chance.random() ** 3 * 2_000, now, "fault")

    def _for_a_while(self, shortest_ms: float, longest_ms: float, undo: Callable[[], None]) -> None:
        # Mostly short, sometimes long.
        self._undo_in(shortest_ms + (longest_ms - shortest_ms) * self._chance.random() ** 3, undo)

    def _undo_in(self, duration_ms: float, undo: Callable[[], None]) -> None:
        def over() -> None:
            if not self._is_over:
                undo()

        self._loop.after(duration_ms, over, "undo")

    def heal(self) -> None:
        """Stop injecting faults, repair everything and start all nodes."""
        self._is_over = True
        self._fabric.mend_all()
        if self._set_clock_right is not None:
            self._set_clock_right()
        self._fabric.weather.clogs = 0.0
        for process in self._clients.values():
            process.resume()
        for machine in self._cluster.machines.values():
            machine.disk.heal()
            if machine.files is not None:
                machine.files.changes_left = None
            if machine.process is not None:
                machine.process.resume()
            if not machine.has_power:
                self._cluster.restore_power(machine)
            if not machine.is_running:
                self._restart(machine, 0)
            elif machine.is_harmed:
                # A failed directory stays offline until it is repaired and the node restarted.
                self._cluster.crash(machine)

    # Processes

    def _ended(self, machine: Machine) -> None:
        """Restart an ended process after a while."""
        if machine.has_power:
            longest_ms = 500 if self._is_over else 20_000
            self._restart(machine, 50 + longest_ms * self._chance.random() ** 3)

    def _restart(self, machine: Machine, delay_ms: float) -> None:
        before = self._restarts.get(machine.node_id)
        if before is not None:
            before.cancel()

        def restart() -> None:
            if not machine.is_running and machine.has_power:
                self._cluster.start(machine)

        self._restarts[machine.node_id] = self._loop.after(delay_ms, restart, "start")

    def _crash(self, machine: Machine) -> bool:
        if not machine.is_running:
            return False
        self._cluster.crash(machine)
        return True

    def _crash_while_writing(self, machine: Machine) -> bool:
        if not machine.is_running or machine.files is None:
            return False
        machine.files.changes_left = self._chance.randrange(40)
        return True

    def _crash_of_all(self, machine: Machine) -> bool:
        for each in self._cluster.running:
            self._soon(self._crash, each)
        return True

    def _absence(self, machine: Machine) -> bool:
        """The process crashes and stays away for long."""
        if not machine.is_running:
            return False
        self._cluster.crash(machine)
        self._restart(machine, self._loop.streams["fault absence"].uniform(8_000, 40_000))
        return True

    def _killed_job(self, machine: Machine) -> bool:
        """Kill the child process of a node, if there is one, or the next one soon."""
        return self._kill_a_job(machine, JOB_WAIT_MS)

    def _kill_a_job(self, machine: Machine, wait_ms: float) -> bool:
        if self._is_over or not machine.is_running:
            return False
        if machine.jobs is not None and machine.jobs.is_running:
            machine.jobs.kill()
            return True
        if wait_ms > 0:
            self._loop.after(JOB_LOOK_MS, lambda: self._kill_late(machine, wait_ms - JOB_LOOK_MS), "fault")
        return False

    def _kill_late(self, machine: Machine, wait_ms: float) -> None:
        if self._kill_a_job(machine, wait_ms):
            self._count("killed job", machine)

    def _stop(self, machine: Machine) -> bool:
        if not machine.is_running or machine.is_stopping:
            return False
        self._cluster.stop(machine)
        return True

    def _pause(self, machine: Machine) -> bool:
        if not machine.is_running or machine.process is None:
            return False
        machine.process.pause(10 + 20_000 * self._chance.random() ** 3)
        return True

    def _pause_of_a_client(self, machine: Machine) -> bool:
        process = self._chance.choice(list(self._clients.values()))
        process.pause(10 + 20_000 * self._chance.random() ** 3)
        return True

    def _clock_jump(self, machine: Machine) -> bool:
        by_ms = self._chance.randint(-20_000, 20_000)
        machine.wall_skew_ms += by_ms
        if machine.process is not None:
            machine.process.clock.wall_skew_ms += by_ms
        return True

    def _far_clock(self, machine: Machine) -> bool:
        """Set the clock of one machine wrong, by an hour or by days, for a while."""
        if self._set_clock_right is not None:
            return False  # one at a time: most clocks must be right
        chance = self._loop.streams["fault far clock"]
        before_ms = machine.wall_skew_ms
        by_ms = chance.choice([HOUR_MS, 2 * DAY_MS, 10 * DAY_MS, 400 * DAY_MS]) * chance.choice([-1, 1])
        self._cluster.set_clock(machine, before_ms + by_ms)

        def set_right() -> None:
            self._set_clock_right = None
            self._cluster.set_clock(machine, before_ms)

        self._set_clock_right = set_right
        self._undo_in(chance.uniform(500, 30_000), set_right)
        return True

    # Network

    def _cut_pairs(self, pairs: list[tuple[str, str]], duration_ms: float | None = None) -> bool:
        pairs = [pair for pair in pairs if pair[0] != pair[1]]
        if not pairs:
            return False
        for pair in pairs:
            self._fabric.cut(*pair)

        def mend() -> None:
            for pair in pairs:
                self._fabric.mend(*pair)

        if duration_ms is None:
            self._for_a_while(50, 30_000, mend)
        else:
            self._undo_in(duration_ms, mend)
        return True

    def _others(self, machine: Machine) -> list[str]:
        return [other.host for other in self._cluster.machines.values() if other is not machine]

    def _cut(self, machine: Machine) -> bool:
        others = self._others(machine)
        if not others:
            return False
        other = self._chance.choice(others)
        return self._cut_pairs([(machine.host, other), (other, machine.host)])

    def _one_way_cut(self, machine: Machine) -> bool:
        others = self._others(machine)
        if not others:
            return False
        other = self._chance.choice(others)
        return self._cut_pairs([(machine.host, other)])

    def _isolation(self, machine: Machine) -> bool:
        others = self._others(machine)
        ways = self._chance.randrange(3)
        out = [(machine.host, other) for other in others] if ways != 1 else []
        into = [(other, machine.host) for other in others] if ways != 2 else []
        return self._cut_pairs(out + into)

    def _cut_from_clients(self, machine: Machine) -> bool:
        clients = [host for host in self._clients if self._chance.random() < 0.7]
        return self._cut_pairs(
            [(machine.host, host) for host in clients] + [(host, machine.host) for host in clients]
        )

    def _split(self, machine: Machine) -> bool:
        """Split the network: the machine and some clients on one side, all others on the other."""
        chance = self._loop.streams["fault split"]
        near = [machine.host, *(host for host in self._clients if chance.random() < 0.3)]
        far = [host for host in (*self._others(machine), *self._clients) if host not in near]
        ways = [(one, other) for one in near for other in far]
        return self._cut_pairs(
            [*ways, *((other, one) for one, other in ways)], duration_ms=chance.uniform(1_000, 30_000)
        )

    def _refusal(self, machine: Machine) -> bool:
        """The machine refuses new connections; perhaps it also loses its present ones."""
        chance = self._loop.streams["fault refusal"]
        ports = chance.choice([[CLIENT_PORT], [INTERNAL_PORT], [CLIENT_PORT, INTERNAL_PORT]])
        for port in ports:
            self._fabric.refuse(machine.host, port)
        if chance.random() < 0.5:
            for host in (*self._others(machine), *self._clients):
                self._fabric.reset_some(host, machine.host)

        def accept() -> None:
            for port in ports:
                self._fabric.refuse_no_more(machine.host, port)

        self._undo_in(chance.uniform(200, 15_000), accept)
        return True

    def _reset(self, machine: Machine) -> bool:
        hosts = [*self._others(machine), *self._clients]
        return self._fabric.reset_some(self._chance.choice(hosts), machine.host) > 0

    def _clog(self, machine: Machine) -> bool:
        weather = self._fabric.weather
        weather.clogs = self._chance.choice([0.01, 0.1, 0.3])

        def clear() -> None:
            weather.clogs = 0.0

        self._for_a_while(500, 20_000, clear)
        return True

    # Disks

    def _slow_disk(self, machine: Machine) -> bool:
        disk = machine.disk
        disk.slowness = self._chance.choice([5.0, 50.0, 300.0])

        def recover() -> None:
            disk.slowness = 1.0

        self._for_a_while(500, 15_000, recover)
        return True

    def _full_disk(self, machine: Machine) -> bool:
        disk = machine.disk
        disk.room_bytes = self._chance.choice([0, 100, 2_000])

        def make_room() -> None:
            disk.room_bytes = None

        self._for_a_while(500, 15_000, make_room)
        return True

    def _filled_disk(self, machine: Machine) -> bool:
        """Other files fill one disk, for longer than a broker can wait."""
        chance, disk = self._loop.streams["fault filled disk"], machine.disk
        below = f"/disk{chance.randint(1, 2)}"
        disk.fill(below, left_bytes=chance.choice([0, 100, 2_000, 20_000]))
        self._undo_in(chance.uniform(1_000, 40_000), lambda: disk.free(below))
        return True

    def _disk_fails(self, machine: Machine) -> bool:
        machine.is_harmed = True
        disk = machine.disk
        disk.failing = (f"/disk{self._chance.randint(1, 2)}",)

        def repair() -> None:
            disk.failing = ()

        self._for_a_while(500, 15_000, repair)
        return True

    def _sync_fails(self, machine: Machine) -> bool:
        machine.is_harmed = True
        machine.disk.failing_syncs = 1
        return True

    def _flip(self, machine: Machine) -> bool:
        """Flip one bit in a record that has been on disk for long.

        Not while the power is off: then it would look like a write that never reached the disk.

        A running broker checks what others wrote once, and never checks what it wrote itself (decision 0013). As
        long as the process lives, a bit that flips after that is for consumers to find, and breaks no promise. So
        bytes that this process has written or checked stay right in the page cache until the next process starts.
        """
        if not machine.has_power:
            return False
        segments = [
            (path, content)
            for path, content in machine.disk.files()
            if path.endswith(".log")
            and "__cluster_metadata" not in path
            and content.is_durable
            and content.data
        ]
        if not segments:
            return False
        machine.is_harmed = True
        path, content = self._chance.choice(segments)
        position = _noticeable(bytes(content.data), self._chance.randrange(len(content.data)))
        is_cached = machine.node is not None and machine.node.vouches_for(path, position)
        content.flip(position, 1 << self._chance.randrange(8), is_cached=is_cached)
        return True

    def _wipe(self, machine: Machine) -> bool:
        """Replace the disk by an empty one. The node must be able to start with that."""
        if self._is_the_only_copy(machine):
            return False
        self._cluster.wipe(machine)
        if machine.has_power:
            self._restart(machine, self._loop.streams["fault wipe"].uniform(50, 5_000))
        return True

    def _is_the_only_copy(self, machine: Machine) -> bool:
        """Whether a partition has no other copy that counts, as in the first moments of a topic."""
        images = [each.node.image for each in self._cluster.machines.values() if each.node is not None]
        newest = max(images, key=lambda image: image.offset, default=None)
        return newest is None or any(
            {*partition.isr, *partition.eligible_leader_replicas} <= {machine.node_id}
            for topic in newest.topics.values()
            for partition in topic.partitions
        )

    def _power(self, machine: Machine) -> bool:
        if not machine.has_power:
            return False
        self._cluster.lose_power(machine)

        def restore() -> None:
            if not machine.has_power:
                self._cluster.restore_power(machine)
                self._restart(machine, self._chance.uniform(50, 3_000))

        self._for_a_while(100, 20_000, restore)
        return True

    def _power_of_all(self, machine: Machine) -> bool:
        if self._is_silently_harmed:
            return False
        for each in self._cluster.machines.values():
            self._soon(self._power, each)
        return True


def _noticeable(data: bytes, position: int) -> int:
    """The position, or one near it where damage can be detected.

    No checksum covers the leader epoch of a batch, so a wrong epoch that fits between its neighbours is accepted
    (by Kafka too). And a last batch with a larger length looks like one that a crash cut short.
    """
    with suppress(CorruptBatch):  # damaged before
        for start, header in batches(data):
            is_last = start + header.size == len(data)
            if start + (LENGTH_AT if is_last else EPOCH_AT) <= position < start + EPOCH_AT + EPOCH_BYTES:
                # A last batch may be empty. Its checksum covers the end of its header.
                return min(start + HEADER_SIZE, len(data) - 1)
            if position < start + header.size:
                break
    return position
