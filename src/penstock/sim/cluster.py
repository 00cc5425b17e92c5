"""The nodes of a simulated cluster: real broker code, each on its own machine with a disk and a network.

A ``Machine`` outlives its processes. It can start, stop cleanly, crash, lose power, be paused, and have its disk
wiped. Exceptions and ``on_failure`` of the broker's code are judged here too: a failed assertion is always a
violation, because no fault of a disk or a network may cause one; a node that gives up with a reason is a
violation only if its disk was never harmed.
"""

from __future__ import annotations

import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.broker.config import BrokerConfig
from penstock.broker.logs import Logger
from penstock.broker.options import ServeError, ServeOptions
from penstock.environment import Environment
from penstock.sim.client import Address
from penstock.sim.disk import Disk, SimFiles
from penstock.sim.loop import Loop, Process
from penstock.sim.network import Fabric
from penstock.sim.node import RunningNode, start_node
from penstock.sim.processes import SimProcesses

CLIENT_PORT = 9092
INTERNAL_PORT = 9093
LOG_LINES_KEPT = 300


def rack_of(number: int, racks: int) -> str | None:
    """Nodes, and consumers, are assigned to racks in turn."""
    return f"rack-{number % racks}" if racks else None


class SimLogger(Logger):
    """A logger that keeps the last lines in memory."""

    def __init__(self, cluster: Cluster, machine: Machine) -> None:
        super().__init__()
        self._cluster = cluster
        self._machine = machine

    def info(self, event: str, **values: Any) -> None:
        self._cluster.note(self._machine.host, event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._cluster.note(self._machine.host, event, values)

    def error(self, event: str, **values: Any) -> None:
        self._cluster.note(self._machine.host, event, values)

    def exception(self, event: str, **values: Any) -> None:
        self._cluster.note(self._machine.host, event, values)
        error = sys.exc_info()[1]
        if isinstance(error, Exception):
            self._cluster.escaped(self._machine, error)


class Machine:
    """A host with its disk, and the process on it, if one runs."""

    def __init__(self, node_id: int, disk: Disk) -> None:
        self.node_id = node_id
        self.host = f"node-{node_id}"
        self.disk = disk
        self.process: Process | None = None
        self.files: SimFiles | None = None
        self.jobs: SimProcesses | None = None
        self.node: RunningNode | None = None
        # Why the last process gave up; empty if it did not.
        self.failure = ""
        # Whether the disk was harmed, which excuses giving up.
        self.is_harmed = False
        self.has_power = True
        self.wall_skew_ms = 0
        self.rate = 1.0
        self.starts = 0
        self.is_stopping = False

    def __repr__(self) -> str:
        return self.host

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.is_alive


class Cluster:
    def __init__(
        self,
        loop: Loop,
        fabric: Fabric,
        *,
        nodes: int,
        voters: int,
        data_dirs: int,
        settings: Mapping[str, str],
        # Overrides for single nodes.
        settings_of: Mapping[int, Mapping[str, str]] | None = None,
        # Number of racks; 0 for none.
        racks: int = 0,
        # Metadata records between two snapshots.
        snapshot_records: int,
    ) -> None:
        self.loop = loop
        self.fabric = fabric
        self._settings = settings
        self._settings_of = settings_of or {}
        self._racks = racks
        self._snapshot_records = snapshot_records
        self.machines = {
            node_id: Machine(node_id, Disk(loop.streams[f"disk {node_id}"]))
            for node_id in range(1, nodes + 1)
        }
        self._data_dirs = tuple(f"/disk{number}" for number in range(1, data_dirs + 1))
        self.voters = range(1, voters + 1)
        self.lines: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        # Called when a process has ended.
        self.on_ended: Callable[[Machine], None] = lambda machine: None

    @property
    def addresses(self) -> list[Address]:
        """The bootstrap addresses of clients."""
        return [(machine.host, CLIENT_PORT) for machine in self.machines.values()]

    @property
    def running(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.is_running]

    def options(self, machine: Machine) -> ServeOptions:
        options = ServeOptions(
            node_id=machine.node_id,
            data_dirs=self._data_dirs,
            listen=(machine.host, CLIENT_PORT),
            advertise=None,
            rack=rack_of(machine.node_id, self._racks),
            settings={**self._settings, **self._settings_of.get(machine.node_id, {})},
            config_file=None,
        )
        if len(self.machines) == 1:
            return options
        return replace(
            options,
            internal=(machine.host, INTERNAL_PORT),
            controllers={voter: (self.machines[voter].host, INTERNAL_PORT) for voter in self.voters},
        )

    # What happens to the machines

    def start(self, machine: Machine) -> None:
        assert not machine.is_running and machine.has_power
        machine.starts += 1
        machine.failure = ""
        machine.is_stopping = False
        machine.disk.drop_caches()
        process = machine.process = Process(
            self.loop,
            machine.host,
            wall_skew_ms=machine.wall_skew_ms,
            rate=machine.rate,
            thread_ms=machine.disk.thread_ms,
        )
        process.on_exception = lambda error: self.escaped(machine, error)
        files = machine.files = SimFiles(machine.disk, process)
        files.die = lambda: self.crash(machine)
        self.note(machine.host, "starts", {"number": machine.starts})

        def main() -> None:
            options = self.options(machine)
            config, _ = BrokerConfig.load(options.settings)
            machine.jobs = SimProcesses(process, machine.disk)
            environment = Environment(
                clock=process.clock,
                files=files,
                network=self.fabric.door(process),
                random=self.loop.streams[f"node {machine.node_id}"],
                spawn=process.spawn,
                processes=machine.jobs,
            )
            try:
                machine.node = start_node(
                    environment,
                    options,
                    config,
                    SimLogger(self, machine),
                    snapshot_records=self._snapshot_records,
                    on_ready=lambda: self.note(machine.host, "is ready", {}),
                    on_failure=lambda reason: self.gave_up(machine, reason),
                )
            except (ServeError, OSError) as error:
                self.gave_up(machine, str(error))

        process.spawn.soon(main)

    def stop(self, machine: Machine) -> None:
        """Ask the process to stop cleanly, which takes a while."""
        if machine.is_running and machine.node is not None and not machine.is_stopping:
            machine.is_stopping = True
            self.note(machine.host, "is asked to stop", {})
            node, process = machine.node, machine.process
            assert process is not None
            process.spawn.soon(lambda: node.stop(lambda: self._ended(machine, process, "stopped")))

    def crash(self, machine: Machine) -> None:
        """End the process at once; the machine stays on."""
        if machine.is_running:
            assert machine.process is not None
            self._ended(machine, machine.process, "crashed")

    def set_clock(self, machine: Machine, wall_skew_ms: int) -> None:
        """Set the offset of the wall clock from true time. It survives restarts."""
        machine.wall_skew_ms = wall_skew_ms
        if machine.process is not None:
            machine.process.clock.wall_skew_ms = wall_skew_ms
        self.note(machine.host, "has another time", {"skew_ms": wall_skew_ms})

    def lose_power(self, machine: Machine) -> None:
        machine.has_power = False
        self.fabric.power_lost(machine.host)
        self.crash(machine)
        machine.disk.lose_power()
        self.note(machine.host, "lost power", {})

    def restore_power(self, machine: Machine) -> None:
        machine.has_power = True
        self.fabric.power_back(machine.host)

    def wipe(self, machine: Machine) -> None:
        self.crash(machine)
        machine.disk.wipe()
        self.note(machine.host, "has a new disk", {})

    # What comes out of the code

    def gave_up(self, machine: Machine, reason: str) -> None:
        """The node gave up, with a reason."""
        machine.failure = reason
        self.note(machine.host, "gave up", {"reason": reason})
        # A node need not start on a full disk, but a running one must continue.
        is_excused = machine.node is None and machine.disk.is_full
        if not machine.is_harmed and not is_excused:
            self.loop.violate(f"{machine.host} gave up though its disk was never harmed: {reason}")
        self.crash(machine)

    def escaped(self, machine: Machine, error: Exception) -> None:
        """An uncaught exception of the broker's code."""
        if isinstance(error, OSError) and machine.is_stopping:
            # It could not stop cleanly; the next start recovers.
            self.note(machine.host, "could not stop cleanly", {"error": error})
            self.crash(machine)
            return
        if isinstance(error, OSError) and machine.is_harmed:
            self.gave_up(machine, f"an internal error: {error}")
            return
        trace = "".join(traceback.format_exception(error))
        self.loop.violate(f"{machine.host}: {error!r}\n{trace}")

    def _ended(self, machine: Machine, process: Process, how: str) -> None:
        if not process.is_alive:
            return
        self.note(machine.host, how, {})
        process.end()
        machine.node = None
        self.on_ended(machine)

    def note(self, who: str, event: str, values: Mapping[str, Any]) -> None:
        told = " ".join(f"{name}={value}" for name, value in values.items())
        self.lines.append(f"{self.loop.now_ms / 1000:10.4f} {who:8} {event} {told}".rstrip())
