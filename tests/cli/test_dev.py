"""`penstock dev`: what it remembers, and that its processes live and die as they should."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.dev import FREE_PORTS, METRICS_AFTER, Node, make_plan, readable
from penstock.cli.failures import Failure
from penstock.cli.serve import CLUSTER_FILE
from tests.cli.conftest import Penstock
from tests.support import wait_until

TIMEOUT_S = 60.0

# Stands for a node in the tests of how nodes are kept alive.
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
print("penstock node 1 ready", flush=True)
while True: time.sleep(1)
"""


class TestThePlan:
    def test_three_brokers_all_vote_and_no_two_ports_are_the_same(self, tmp_path: Path) -> None:
        plan = make_plan(tmp_path, 3, 0)
        assert plan.controllers == (1, 2, 3)
        assert len({*plan.ports.values(), *plan.internal_ports.values()}) == 6

    @pytest.mark.parametrize(("count", "voters"), [(1, 1), (2, 1), (3, 3), (4, 3), (5, 3)])
    def test_an_odd_number_votes_and_three_at_most(self, tmp_path: Path, count: int, voters: int) -> None:
        assert make_plan(tmp_path, count, 0).controllers == tuple(range(1, voters + 1))

    def test_the_ports_between_nodes_are_remembered(self, tmp_path: Path) -> None:
        assert make_plan(tmp_path, 3, 0).internal_ports == make_plan(tmp_path, 3, 0).internal_ports

    def test_a_cluster_may_grow_and_its_voters_stay(self, tmp_path: Path) -> None:
        small = make_plan(tmp_path, 2, 0)
        large = make_plan(tmp_path, 4, 0)
        assert large.controllers == small.controllers == (1,)
        assert {node: large.internal_ports[node] for node in (1, 2)} == small.internal_ports
        assert list(large.ports) == [1, 2, 3, 4]

    def test_a_cluster_may_not_shrink(self, tmp_path: Path) -> None:
        make_plan(tmp_path, 3, 0)
        with pytest.raises(Failure, match="holds a cluster of 3 brokers"):
            make_plan(tmp_path, 2, 0)

    def test_a_taken_port_is_named(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(Failure, match=f"cannot use port {port}"):
                make_plan(tmp_path, 1, port)
        assert list(tmp_path.iterdir()) == []

    def test_a_port_that_must_stay_the_same_and_is_taken_is_refused(self, tmp_path: Path) -> None:
        port = make_plan(tmp_path, 3, 0).internal_ports[2]
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(Failure, match=f"cannot use port {port} .*running already"),
        ):
            make_plan(tmp_path, 3, 0)

    def test_the_directory_of_a_single_broker_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "meta.properties").touch()
        with pytest.raises(Failure, match="belongs to a single broker"):
            make_plan(tmp_path, 3, 0)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"internal_ports": {"a": 1}, "controllers": []}'])
    def test_a_damaged_memory_is_not_replaced(self, tmp_path: Path, text: str) -> None:
        (tmp_path / CLUSTER_FILE).write_text(text)
        with pytest.raises(Failure, match="cannot be read"):
            make_plan(tmp_path, 3, 0)
        assert (tmp_path / CLUSTER_FILE).read_text() == text

    def test_every_node_is_told_the_same_controllers_and_an_address_of_its_own(self, tmp_path: Path) -> None:
        plan = make_plan(tmp_path, 4, 0)
        commands = [plan.command(node, ["a=b"]) for node in plan.ports]
        voters = ",".join(f"{node}@127.0.0.1:{plan.internal_ports[node]}" for node in (1, 2, 3))
        assert {option(words, "--controllers") for words in commands} == {voters}
        assert {option(words, "--set") for words in commands} == {"a=b"}
        for node, words in enumerate(commands, start=1):
            assert option(words, "--node-id") == str(node)
            assert option(words, "--data-dir") == str(tmp_path / f"node-{node}")
            assert option(words, "--listen") == f"127.0.0.1:{plan.ports[node]}"
            assert option(words, "--internal") == f"127.0.0.1:{plan.internal_ports[node]}"
            assert option(words, "--metrics") == f"127.0.0.1:{plan.metrics_ports[node]}"
        ports = [*plan.ports.values(), *plan.internal_ports.values(), *plan.metrics_ports.values()]
        assert len(set(ports)) == len(ports)

    def test_metrics_are_on_known_ports_or_on_others_if_these_are_taken(self, tmp_path: Path) -> None:
        port = first_of_free_ports()
        with socket.create_server(("127.0.0.1", port + 1 + METRICS_AFTER)):
            metrics_ports = make_plan(tmp_path, 2, port).metrics_ports
        assert metrics_ports[1] == port + METRICS_AFTER
        assert metrics_ports[2] != port + 1 + METRICS_AFTER


def first_of_free_ports() -> int:
    """A port that is free, as are the next one, and those of the metrics of both."""
    for port in random.sample(FREE_PORTS, 1000):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for each in (port, port + 1, port + METRICS_AFTER, port + 1 + METRICS_AFTER):
                held.enter_context(socket.create_server(("127.0.0.1", each)))
            return port
    raise AssertionError("no free ports")


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--brokers 0", "--brokers"),
        ("--port 65535", "leaves no room for 3 brokers"),
        ("--set retention", "KEY=VALUE"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(
    penstock: Penstock, tmp_path: Path, words: str, complaint: str
) -> None:
    outcome = penstock("dev", "--data-dir", str(tmp_path / "d"), *words.split())
    assert outcome.code == 2
    assert complaint in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "d").exists()


class Watched:
    """A Node of `dev` whose process is any command, running in a thread of its own."""

    def __init__(self, *command: str) -> None:
        self.lines: list[str] = []
        self.ready: list[int] = []
        self.failures: list[str] = []
        self.node = Node(1, list(command), self.lines.append, self.ready.append, self.failures.append)
        self.thread = threading.Thread(target=self.node.run)
        self.thread.start()

    def ended(self) -> bool:
        self.thread.join(TIMEOUT_S)
        return not self.thread.is_alive()


class TestANode:
    def test_one_that_dies_after_it_was_ready_is_started_again(self) -> None:
        watched = Watched(sys.executable, "-c", "print('penstock node 1 ready', flush=True); exit(3)")
        wait_until(lambda: len(watched.ready) >= 2, TIMEOUT_S, "a second life")
        watched.node.stop(kill=False)
        assert watched.ended()
        assert watched.lines[0] == "node-1 | penstock node 1 ready"
        assert "ended with code 3; restarting in 0.5 s" in watched.lines[1]
        assert watched.failures == []

    def test_one_that_refuses_to_start_is_given_up_with_its_reason(self) -> None:
        watched = Watched(sys.executable, "-c", "print('penstock: no room; make some'); exit(1)")
        assert watched.ended()
        assert watched.failures == ["node-1 could not start: no room; make some"]

    def test_one_that_does_not_listen_is_killed_by_the_second_stop(self) -> None:
        watched = Watched(sys.executable, "-c", STUBBORN)
        wait_until(lambda: watched.ready, TIMEOUT_S, "the node is ready")
        watched.node.stop(kill=False)
        wait_until(lambda: "node-1 | no" in watched.lines, TIMEOUT_S, "it was asked to stop")
        assert watched.thread.is_alive()
        watched.node.stop(kill=True)
        assert watched.ended()

    def test_one_that_is_waiting_to_be_started_again_stops_at_once(self) -> None:
        watched = Watched(sys.executable, "-c", "print('penstock node 1 ready', flush=True); exit(3)")
        wait_until(lambda: len(watched.lines) > 1, TIMEOUT_S, "it has died")
        watched.node.stop(kill=False)
        assert watched.ended()


def test_the_log_of_a_node_is_shown_to_people_in_words() -> None:
    fenced = {"node": 3, "broker": 2, "event": "broker fenced", "level": "warning"}
    fenced["timestamp"] = "2026-11-16T07:58:38.783317Z"
    assert readable(json.dumps(fenced)) == "07:58:38 warning: broker fenced broker=2"
    failed = {**fenced, "level": "info", "exception": "Traceback\n  at home"}
    assert readable(json.dumps(failed)) == "07:58:38 broker fenced broker=2\nTraceback\n  at home"


@pytest.mark.parametrize("line", ["penstock node 1 ready", "", "1", "[]", "null", "{}", '{"event": "x"}'])
def test_any_other_line_is_shown_as_it_is(line: str) -> None:
    assert readable(line) == line


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "penstock",
            "dev",
            "--brokers",
            "3",
            "--port",
            "0",
            "--data-dir",
            tmp_path / "d",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()  # its nodes then stop by themselves


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"it ended before it said {pattern!r}:\n{seen}")


def ports_when_ready(process: subprocess.Popen[str]) -> list[int]:
    bootstrap = read_until(process, r"^penstock dev ready bootstrap=(\S+)$")[1]
    return [int(address.rpartition(":")[2]) for address in bootstrap.split(",")]


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def node_process(directory: Path) -> int:
    """The process that serves a data directory, found by its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(directory).encode() in words:
            return int(path.parent.name)
    raise AssertionError(f"no process serves {directory}")


def test_all_nodes_serve_when_it_is_ready_and_none_when_it_was_stopped(
    cluster: subprocess.Popen[str], tmp_path: Path
) -> None:
    ports = ports_when_ready(cluster)
    assert len(ports) == 3
    assert all(map(is_listening, ports))
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [
        CLUSTER_FILE,
        "node-1",
        "node-2",
        "node-3",
    ]
    assert json.loads((tmp_path / "d" / CLUSTER_FILE).read_text())["controllers"] == [1, 2, 3]

    cluster.send_signal(signal.SIGTERM)
    assert cluster.wait(TIMEOUT_S) == 0
    assert not any(map(is_listening, ports))


def test_the_metrics_of_every_node_can_be_read_where_it_says(cluster: subprocess.Popen[str]) -> None:
    for node in (1, 2, 3):
        url = read_until(cluster, rf"^penstock dev: metrics of node {node}: (\S+)$")[1]
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            assert f'penstock_build_info{{node_id="{node}"'.encode() in answer.read()


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process by /proc")
def test_a_killed_node_comes_back_on_its_port(cluster: subprocess.Popen[str], tmp_path: Path) -> None:
    ports = ports_when_ready(cluster)
    subprocess.run(["kill", "-9", str(node_process(tmp_path / "d" / "node-2"))], check=True)
    read_until(cluster, r"^node-2 \| .*was killed by SIGKILL; restarting")
    read_until(cluster, r"^node-2 \| penstock node 2 ready")
    assert is_listening(ports[1])


def test_nodes_do_not_outlive_it_when_it_is_killed(cluster: subprocess.Popen[str]) -> None:
    ports = ports_when_ready(cluster)
    cluster.kill()
    wait_until(lambda: not any(map(is_listening, ports)), TIMEOUT_S, "the nodes have stopped")


def test_it_stops_in_good_order_when_nobody_reads_what_it_says(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "dev", "--port", "0", "--data-dir", tmp_path / "d"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(TIMEOUT_S) == 1


def test_a_node_that_cannot_start_stops_them_all(tmp_path: Path) -> None:
    (tmp_path / "node-2").write_text("not a directory")
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "dev", "--port", "0", "--data-dir", tmp_path],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("penstock: node-2 could not start: ")
    assert done.stderr.count("\n") == 1
