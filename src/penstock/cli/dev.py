"""`penstock dev`: a cluster of several nodes on this machine, each its own `penstock serve` process.

One thread per node starts its process, prefixes its output with the node's name, and restarts it when it dies, so
`kill -9` on a node shows a real failover. ``cluster.json`` in the data directory keeps what must not change between
runs: the voters, and the nodes' internal ports.

The children have their own process groups, so that Ctrl-C reaches only this process, which then stops the nodes.
Their standard input is a pipe from this process: if it is killed, the pipe closes and they stop
(``--stop-with-stdin``).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.addresses import PORT_MAX
from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.serve import CLUSTER_FILE, DATA_DIR
from penstock.cli.settings import parse_settings

if TYPE_CHECKING:
    from penstock.cli.dev_security import DevSecurity

app = typer.Typer(add_completion=False)

HOST = "127.0.0.1"
NODES_MAX = 99
CONTROLLERS_MAX = 3
# Below the kernel's range for outgoing connections: a node that restarts finds its port free.
FREE_PORTS = range(20_000, 32_000)
# The metrics of the node on port 9092 are on 9464, where many exporters have them, if that port is free.
METRICS_AFTER = 9464 - 9092
# Pause before a dead node is restarted. Doubled with each death up to the maximum; reset when the node lived for
# the maximum.
RESTART_MIN_S = 0.5
RESTART_MAX_S = 10.0
# Nodes stop in a second or two; after this time they are killed.
STOP_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Directories, ports and voters of the cluster."""

    directory: Path
    # By node id.
    ports: dict[int, int]
    internal_ports: dict[int, int]
    metrics_ports: dict[int, int]
    controllers: tuple[int, ...]
    # None: anybody on this machine may do everything.
    security: DevSecurity | None = None

    @property
    def bootstrap(self) -> str:
        return ",".join(f"{HOST}:{port}" for port in self.ports.values())

    def command(self, node: int, settings: list[str]) -> list[str]:
        voters = ",".join(f"{each}@{HOST}:{self.internal_ports[each]}" for each in self.controllers)
        words = [sys.executable, "-m", "penstock", "serve", "--node-id", str(node), "--stop-with-stdin"]
        words += ["--data-dir", str(self.directory / f"node-{node}")]
        address = f"{HOST}:{self.ports[node]}"
        if self.security is None:
            words += ["--listen", address]
        else:
            settings = [*self.security.settings(node, address), *settings]
        words += ["--internal", f"{HOST}:{self.internal_ports[node]}", "--controllers", voters]
        words += ["--metrics", f"{HOST}:{self.metrics_ports[node]}"]
        return words + [word for setting in settings for word in ("--set", setting)]


@app.command()
def dev(
    brokers: Annotated[int, typer.Option("--brokers", min=1, max=NODES_MAX, metavar="N")] = 3,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", metavar="DIR", help="Contains one directory per node.")
    ] = Path(DATA_DIR),
    port: Annotated[
        int,
        typer.Option(
            "--port",
            min=0,
            max=65_535,
            metavar="PORT",
            help="Port of node 1; the other nodes use the next ports. 0 picks free ones.",
        ),
    ] = 9092,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of every broker. Repeatable."),
    ] = None,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="TLS, users with passwords, and ACLs; writes client.properties."),
    ] = False,
) -> int:
    """Run a cluster of several brokers on this machine until Ctrl-C.

    When all are ready it prints one line that starts with `penstock dev ready`. A broker that dies is restarted.
    """
    parse_settings("--set", settings or [])
    if port and port + brokers - 1 > 65_535:
        raise WrongUsage(f"--port {port} leaves no room for {brokers} brokers below 65536")
    plan = make_plan(data_dir, brokers, port, is_secure=secure)
    if secure:
        from penstock.cli.dev_security import DevSecurity  # noqa: PLC0415  # cryptography

        security = DevSecurity(data_dir, list(plan.ports), plan.controllers)
        security.write_clients(plan.bootstrap)
        plan = replace(plan, security=security)
    return Cluster(plan, settings or []).run()


def make_plan(directory: Path, count: int, port: int, *, is_secure: bool = False) -> Plan:
    """The saved plan, completed with newly chosen ports; saved before any node is started."""
    remembered = _remembered(directory)
    if remembered["internal_ports"] and remembered["is_secure"] != is_secure:
        was, advice = ("without", "without --secure") if is_secure else ("with", "with --secure")
        raise Failure(
            f"{directory} holds a cluster that began {was} --secure; run it {advice} or choose another --data-dir"
        )
    internal_ports: dict[int, int] = remembered["internal_ports"]
    if count < len(internal_ports):
        raise Failure(
            f"{directory} holds a cluster of {len(internal_ports)} brokers; "
            f"run it with --brokers {len(internal_ports)} or choose another --data-dir"
        )
    with contextlib.ExitStack() as held:
        ports = {}
        for node in range(1, count + 1):
            ports[node] = (
                _hold(held, port + node - 1, "choose others with --port") if port else _hold_free(held)
            )
        for node in range(1, count + 1):
            if node in internal_ports:
                # The voters know each other by this port, so it must not change.
                _hold(held, internal_ports[node], f"is the cluster in {directory} running already?")
            else:
                internal_ports[node] = _hold_free(held)
        metrics_ports = {
            node: _hold_or_free(held, at + METRICS_AFTER if port else 0) for node, at in ports.items()
        }
    # Two voters tolerate no more failures than one.
    controllers = remembered["controllers"] or list(
        range(1, 1 + (CONTROLLERS_MAX if count >= CONTROLLERS_MAX else 1))
    )
    what = {"internal_ports": internal_ports, "controllers": controllers}
    _remember(directory, {**what, "is_secure": True} if is_secure else what)
    return Plan(directory, ports, internal_ports, metrics_ports, tuple(controllers))


class Cluster:
    """The nodes of a plan, kept running until stopped."""

    def __init__(self, plan: Plan, settings: list[str]) -> None:
        self._plan = plan
        self._nodes = [
            Node(number, plan.command(number, settings), self._say, self._ready, self._gave_up)
            for number in plan.ports
        ]
        self._lock = threading.Lock()
        self._waiting_for = set(plan.ports)
        self._stopping = threading.Event()
        self._interrupts = 0
        self._failure: Exception | None = None

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupted)
        threads = [threading.Thread(target=node.run, name=node.name) for node in self._nodes]
        for thread in threads:
            thread.start()
        self._stopping.wait()
        deadline = time.monotonic() + STOP_MAX_S
        # Repeated, because a process may just be starting, and for a second Ctrl-C.
        while any(thread.is_alive() for thread in threads):
            for node in self._nodes:
                node.stop(kill=self._interrupts > 1 or time.monotonic() > deadline)
            time.sleep(0.02)
        if self._failure is not None:
            raise self._failure
        return 0

    def _interrupted(self, number: int, frame: object) -> None:
        self._interrupts += 1
        self._stopping.set()

    def _say(self, line: str) -> None:
        try:
            with self._lock:
                print(line, flush=True)
        except OSError as error:
            # Most likely a broken pipe, which ends other commands too.
            self._end(error)

    def _ready(self, node: int) -> None:
        with self._lock:
            if node not in self._waiting_for:
                return
            self._waiting_for.discard(node)
            if self._waiting_for:
                return
        self._say(f"penstock dev ready bootstrap={self._plan.bootstrap}")
        for each, port in self._plan.metrics_ports.items():
            self._say(f"penstock dev: metrics of node {each}: http://{HOST}:{port}/metrics")
        for line in [] if self._plan.security is None else self._plan.security.advice(self._plan.bootstrap):
            self._say(f"penstock dev: {line}")

    def _gave_up(self, reason: str) -> None:
        self._end(Failure(reason))

    def _end(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        self._stopping.set()


class Node:
    """Runs one node's process and restarts it. ``run`` is its thread; ``stop`` ends it."""

    def __init__(
        self,
        number: int,
        command: list[str],
        say: Callable[[str], None],
        ready: Callable[[int], None],
        gave_up: Callable[[str], None],
    ) -> None:
        self.name = f"node-{number}"
        self._number = number
        self._command = command
        self._say = say
        self._ready = ready
        self._gave_up = gave_up
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._was_ready = False
        # The signal already sent to the current process.
        self._told: signal.Signals | None = None

    def run(self) -> None:
        pause_s = RESTART_MIN_S
        while not self._stopping.is_set():
            begun = time.monotonic()
            code, last_line = self._live()
            if self._stopping.is_set():
                break
            if not self._was_ready and code > 0:
                # It refused to start and would refuse again.
                self._gave_up(f"{self.name} could not start: {last_line.removeprefix('penstock: ')}")
                break
            if time.monotonic() - begun > RESTART_MAX_S:
                pause_s = RESTART_MIN_S
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._say(f"{self.name} | penstock dev: {how}; restarting in {pause_s:g} s")
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, RESTART_MAX_S)

    def stop(self, *, kill: bool) -> None:
        """Terminate the process (once), or kill it. May be called repeatedly, from another thread."""
        self._stopping.set()
        process = self._process
        wanted = signal.SIGKILL if kill else signal.SIGTERM
        if process is not None and self._told is not wanted:
            self._told = wanted
            process.send_signal(wanted)

    def _live(self) -> tuple[int, str]:
        """Run the process once. Returns its exit code and its last line."""
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._process = process
        assert process.stdout is not None and process.stdin is not None
        line = ""
        for line in process.stdout:
            shown = readable(line) if sys.stdout.isatty() else line
            self._say(f"{self.name} | {shown.rstrip()}")
            if line.startswith(f"penstock node {self._number} ready"):
                self._was_ready = True
                self._ready(self._number)
        code = process.wait()
        self._process = None
        process.stdin.close()
        process.stdout.close()
        return code, line.strip()


def readable(line: str) -> str:
    """A node's log line as text. The node logs JSON because its output is not a terminal."""
    try:
        said = json.loads(line)
        event, when, level = said.pop("event"), said.pop("timestamp"), said.pop("level")
    except (ValueError, LookupError, TypeError, AttributeError):
        return line
    said.pop("node", None)
    trace = said.pop("exception", None)
    words = [when[11:19], *([] if level == "info" else [f"{level}:"]), event]
    words += [f"{name}={value}" for name, value in said.items()]
    return " ".join(words) + ("" if trace is None else f"\n{trace}")


def _remembered(directory: Path) -> dict[str, Any]:
    path = directory / CLUSTER_FILE
    try:
        stored = json.loads(path.read_text())
        internal = {int(node): int(port) for node, port in stored["internal_ports"].items()}
        controllers = [int(node) for node in stored["controllers"]]
        is_secure = bool(stored.get("is_secure", False))
        return {"internal_ports": internal, "controllers": controllers, "is_secure": is_secure}
    except FileNotFoundError:
        if any(directory.glob("meta.properties")):
            raise Failure(
                f"{directory} belongs to a single broker (`penstock serve`); choose another --data-dir"
            ) from None
        return {"internal_ports": {}, "controllers": [], "is_secure": False}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Failure(f"{path} cannot be read; move it away if its nodes are new") from None


def _remember(directory: Path, what: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / CLUSTER_FILE
    # Atomic: a half-written file would keep the cluster from starting.
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(what, indent=2) + "\n")
    os.replace(beside, path)


def _hold(held: contextlib.ExitStack, port: int, advice: str) -> int:
    """Reserve a port while other ports are chosen."""
    try:
        held.enter_context(_bound(port))
    except OSError as error:
        raise Failure(f"cannot use port {port} ({error.strerror}); {advice}") from None
    return port


def _hold_or_free(held: contextlib.ExitStack, port: int) -> int:
    """Reserve a port that is only a proposal; 0 proposes none."""
    if 0 < port <= PORT_MAX:
        with contextlib.suppress(OSError):
            held.enter_context(_bound(port))
            return port
    return _hold_free(held)


def _hold_free(held: contextlib.ExitStack) -> int:
    for port in random.sample(FREE_PORTS, 1000):
        with contextlib.suppress(OSError):
            held.enter_context(_bound(port))
            return port
    raise Failure(f"found no free port between {FREE_PORTS.start} and {FREE_PORTS.stop}")


def _bound(port: int) -> socket.socket:
    taken = socket.socket()
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((HOST, port))
        # On Linux two sockets with SO_REUSEADDR can both be bound until one of them listens.
        taken.listen(1)
    except OSError:
        taken.close()
        raise
    return taken
