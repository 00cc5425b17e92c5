"""A cluster of real ``penstock serve`` processes that a test can hurt in every way, one node at a time.

Nodes keep their ports and directories over restarts, so that to a client a restarted node is the same node. All
of them vote on the metadata unless they are added later. Each has a log file of its own; their ends are printed
when the test fails. All of them, and the data, are copied to the directory that PENSTOCK_KEEP names.

Nothing outlives the context: neither a process (one that is paused included) nor a file, and if the tests
themselves are killed the nodes notice that their standard input has ended.

What a newcomer gets wrong: a node prints its ready line only when it is part of a quorum, so nodes are started
together and waited for together.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.cluster import wire
from tests.cluster.network import Network
from tests.cluster.wire import NoAnswer, PartitionView
from tests.support import TAIL_CHARACTERS, wait_until

READY = re.compile(r"^penstock node \d+ ready\b", re.MULTILINE)
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
KEEP = "PENSTOCK_KEEP"
# Below the ports that the kernel gives to outgoing connections: a client must not take the port of a node
# that is down.
PORTS = range(12_000, 32_000)
# Given to nodes of this run, which may not be running just now.
_given: set[int] = set()
LOOPBACK = "127.0.0.1"
# A rebalance need not wait for latecomers in a test.
SETTINGS = {"group.initial.rebalance.delay.ms": "0"}


class Node:
    """One process, its directories and its log."""

    def __init__(
        self,
        node_id: int,
        scratch: Path,
        *,
        host: str,
        data_dirs: Sequence[Path] | None = None,
        rack: str | None = None,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.id = node_id
        self.host = host
        self.port, self.internal_port = free_ports(2)
        self.data_dirs = list(data_dirs or [scratch / f"data-{node_id}"])
        self.rack = rack
        self.log_path = scratch / f"node-{node_id}.log"
        self.output_path = scratch / f"node-{node_id}.out"
        # Words to put before the command, and variables to add: how a test runs it somewhere special.
        self.before = list(before)
        self.environment = dict(environment or {})
        # What the interpreter is told to run, and settings that only this node is started with.
        self.entry = ["-m", "penstock"]
        self.settings: dict[str, str] = {}
        # Where its metrics are, if it has any.
        self.metrics_port: int | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.is_paused = False
        # How much of the output belongs to earlier starts.
        self._output_seen = 0

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def status(self) -> int | None:
        """Of a process that has ended, until it is started again or reaped; -9 for one that was killed."""
        return None if self.process is None else self.process.poll()

    @property
    def pid(self) -> int:
        assert self.process is not None, f"node {self.id} is not running"
        return self.process.pid

    def launch(self, arguments: Sequence[str]) -> None:
        """Begin to start."""
        assert not self.is_running, f"node {self.id} is running already"
        self._output_seen = self.output_path.stat().st_size if self.output_path.exists() else 0
        command = [*self.before, sys.executable, *self.entry, "serve", "--node-id", str(self.id)]
        command += ["--internal", f"{self.host}:{self.internal_port}"]
        if "listeners" not in self.settings:
            command += ["--listen", f"{self.host}:{self.port}"]
        for directory in self.data_dirs:
            command += ["--data-dir", str(directory)]
        if self.metrics_port is not None:
            command += ["--metrics", f"{self.host}:{self.metrics_port}"]
        if self.rack is not None:
            command += ["--rack", self.rack]
        for key, value in self.settings.items():
            command += ["--set", f"{key}={value}"]
        with self.log_path.open("ab") as log, self.output_path.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, *arguments, "--stop-with-stdin"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )

    def is_ready(self) -> bool:
        """Whether this start has come to its ready line. Raises AssertionError when the process has ended."""
        if READY.search(self.output_path.read_text(errors="replace")[self._output_seen :]):
            return True
        assert self.process is not None
        status = self.process.poll()
        assert status is None, (
            f"node {self.id} ended with status {status} before it was ready\n{self.log_tail()}"
        )
        return False

    def signal(self, number: signal.Signals) -> None:
        assert self.is_running, f"node {self.id} is not running (status {self.status})\n{self.log_tail()}"
        os.kill(self.pid, number)

    def reap(self, timeout_s: float) -> int:
        """Wait for the end of the process; its status."""
        assert self.process is not None
        status = self.process.wait(timeout_s)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process, self.is_paused = None, False
        return status

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self) -> str:
        return self.log()[-TAIL_CHARACTERS:]


class Cluster:
    """Started on entering the context, killed and removed on leaving it."""

    def __init__(
        self,
        size: int = 3,
        settings: Mapping[str, str] | None = None,
        *,
        network: Network | None = None,
        racks: Mapping[int, str] | None = None,
        data_dirs: Mapping[int, Sequence[Path]] | None = None,
        environment: Mapping[str, str] | None = None,
        has_metrics: bool = False,
    ) -> None:
        self._has_metrics = has_metrics
        self._settings = {**SETTINGS, **(settings or {})}
        self._size = size
        self._racks = dict(racks or {})
        self._data_dirs = dict(data_dirs or {})
        self._environment = dict(environment or {})
        self.network = network
        self.scratch = Path()
        self.nodes: dict[int, Node] = {}
        self._controllers = ""
        self._is_entered = False

    # The context

    def __enter__(self) -> Self:
        self.scratch = Path(tempfile.mkdtemp(prefix="penstock-cluster-"))
        self._is_entered = True
        try:
            for node_id in range(1, self._size + 1):
                self._make(node_id)
            self._controllers = ",".join(
                f"{node.id}@{node.host}:{node.internal_port}" for node in self.nodes.values()
            )
            self.start(*self.nodes)
        except BaseException:
            self._show_logs()
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.assert_healthy()
        except AssertionError:
            self._show_logs()
            raise
        finally:
            if error is not None:
                self._show_logs()
            self._discard()

    def assert_healthy(self) -> None:
        """Nobody has ended by itself, and nobody has logged a traceback."""
        for node in self.nodes.values():
            assert node.process is None or node.is_running, (
                f"node {node.id} ended by itself (status {node.status})\n{node.log_tail()}"
            )
            log = node.log()
            first = log.find("Traceback")
            assert first < 0, (
                f"node {node.id} logged a traceback:\n{log[max(0, first - 500) : first + TAIL_CHARACTERS]}"
            )

    # What a test does to nodes

    def start(self, *node_ids: int, wait: bool = True) -> None:
        """Start nodes on the directories and ports they had, all at once."""
        for node_id in node_ids:
            self.nodes[node_id].launch(self.arguments())
        if wait:
            self.wait_ready(*node_ids)

    def wait_ready(self, *node_ids: int, timeout_s: float = START_TIMEOUT_S) -> None:
        for node_id in node_ids:
            wait_until(self.nodes[node_id].is_ready, timeout_s, f"node {node_id} is ready")

    def stop(self, *node_ids: int) -> None:
        """SIGTERM, and hold them to a clean end: status 0."""
        for node_id in node_ids:
            self.nodes[node_id].signal(signal.SIGTERM)
        for node_id in node_ids:
            node = self.nodes[node_id]
            try:
                status = node.reap(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"no end of node {node_id} {STOP_TIMEOUT_S:g} s after SIGTERM") from None
            assert status == 0, f"node {node_id}: exit status {status} after SIGTERM\n{node.log_tail()}"

    def kill(self, *node_ids: int) -> None:
        """SIGKILL all of them at once: what a crash looks like. The page cache survives it."""
        for node_id in node_ids:
            self.nodes[node_id].signal(signal.SIGKILL)
        for node_id in node_ids:
            self.nodes[node_id].reap(STOP_TIMEOUT_S)

    def pause(self, node_id: int) -> None:
        self.nodes[node_id].signal(signal.SIGSTOP)
        self.nodes[node_id].is_paused = True

    def resume(self, node_id: int) -> None:
        self.nodes[node_id].signal(signal.SIGCONT)
        self.nodes[node_id].is_paused = False

    def restart(self, node_id: int, *, kill: bool = False) -> None:
        if kill:
            self.kill(node_id)
        else:
            self.stop(node_id)
        self.start(node_id)

    def add(self, *, rack: str | None = None) -> int:
        """One more broker, that does not vote; its id."""
        node_id = max(self.nodes) + 1
        if rack is not None:
            self._racks[node_id] = rack
        self._make(node_id)
        self.start(node_id)
        return node_id

    def wipe(self, node_id: int) -> None:
        """A new, empty disk for a node that is down."""
        node = self.nodes[node_id]
        assert not node.is_running
        for directory in node.data_dirs:
            for path in directory.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def damage(self, node_id: int, topic: str, partition: int, choose: random.Random) -> Path | None:
        """Flip a bit in a segment of a node that is down; which file it was, if there was one with data."""
        node = self.nodes[node_id]
        assert not node.is_running
        segments = [
            path
            for directory in node.data_dirs
            for path in sorted((directory / f"{topic}-{partition}").glob("*.log"))
            if path.stat().st_size
        ]
        if not segments:
            return None
        path = choose.choice(segments)
        with path.open("r+b") as file:
            position = choose.randrange(path.stat().st_size)
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ 1 << choose.randrange(8)]))
        return path

    # What a test asks of them

    @property
    def bootstrap(self) -> str:
        return ",".join(f"{node.host}:{node.port}" for node in self.nodes.values())

    @property
    def running(self) -> list[int]:
        """Those that can answer."""
        return [node.id for node in self.nodes.values() if node.is_running and not node.is_paused]

    def partition(self, topic: str, partition: int) -> PartitionView:
        """As any broker that answers sees it."""
        found: PartitionView = self._any(
            lambda node: wire.partitions(node.address, [topic])[topic, partition]
        )
        return found

    def leader(self, topic: str, partition: int) -> int:
        return self.partition(topic, partition).leader

    def quorum(self) -> Any:
        """The metadata quorum, as its leader describes it."""
        return self._any(lambda node: wire.quorum(node.address))

    def controller(self) -> int:
        """The node that leads the metadata quorum."""
        leader: int = self.quorum().leader_id
        return leader

    def wait_for(
        self,
        topic: str,
        satisfied: Callable[[PartitionView], object],
        what: str,
        *,
        deadline_s: float = 60.0,
        asking: Collection[int] | None = None,
    ) -> None:
        """Wait until every node asked (by default all that run) sees all partitions of a topic so."""

        def all_agree() -> bool:
            for node_id in asking or self.running:
                try:
                    views = wire.partitions(self.nodes[node_id].address, [topic])
                except NoAnswer:
                    return False
                if not views or not all(satisfied(view) for view in views.values()):
                    return False
            return True

        wait_until(all_agree, deadline_s, f"{topic}: {what}")

    def wait_in_sync(
        self, topic: str, *, deadline_s: float = 60.0, asking: Collection[int] | None = None
    ) -> None:
        self.wait_for(
            topic,
            lambda view: view.leader >= 0 and sorted(view.in_sync_replicas) == sorted(view.replicas),
            "all replicas are in sync",
            deadline_s=deadline_s,
            asking=asking,
        )

    # Private

    def _any(self, ask: Callable[[Node], Any], deadline_s: float = 30.0) -> Any:
        """Ask one node after the other until one answers."""
        deadline = time.monotonic() + deadline_s
        while True:
            for node_id in self.running:
                with suppress(NoAnswer, KeyError):
                    return ask(self.nodes[node_id])
            assert time.monotonic() < deadline, "no node answers"
            time.sleep(0.05)

    def _make(self, node_id: int) -> None:
        host, before = LOOPBACK, []
        if self.network is not None:
            host = self.network.add(node_id)
            before = self.network.inside(node_id)
        self.nodes[node_id] = Node(
            node_id,
            self.scratch,
            host=host,
            data_dirs=self._data_dirs.get(node_id),
            rack=self._racks.get(node_id),
            before=before,
            environment=self._environment,
        )
        if self._has_metrics:
            (self.nodes[node_id].metrics_port,) = free_ports(1)

    def arguments(self) -> list[str]:
        """What every node of this cluster is started with."""
        words = ["--controllers", self._controllers]
        if self.network is not None:
            words.append("--insecure")
        for key, value in self._settings.items():
            words += ["--set", f"{key}={value}"]
        return words

    def _show_logs(self) -> None:
        for node in self.nodes.values():
            sys.stderr.write(f"\n--- end of the log of node {node.id} ---\n{node.log_tail()}\n")

    def _discard(self) -> None:
        if not self._is_entered:
            return
        for node in self.nodes.values():
            if node.process is not None:
                if node.process.poll() is None:
                    node.process.kill()  # also ends one that is paused
                node.reap(STOP_TIMEOUT_S)
        keep = os.environ.get(KEEP)
        if keep:
            kept = Path(keep, self.scratch.name)
            kept.mkdir(parents=True, exist_ok=True)
            for node in self.nodes.values():
                with suppress(OSError):
                    shutil.copy(node.log_path, kept)
                for number, directory in enumerate(node.data_dirs):
                    with suppress(OSError, shutil.Error):
                        shutil.copytree(directory, kept / f"data-{node.id}-{number}")
        if self.network is not None:
            self.network.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._is_entered = False


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on or was given: a node has to be told its own, as the others are told them."""
    choose = random.SystemRandom()
    found: list[int] = []
    while len(found) < count:
        port = choose.choice(PORTS)
        if port in _given:
            continue
        with socket.socket() as trial, suppress(OSError):
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((LOOPBACK, port))
            found.append(port)
            _given.add(port)
    return found
