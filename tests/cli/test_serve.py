"""What `penstock serve` takes and what it refuses; the broker itself is tested elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.broker import process
from penstock.broker.options import ServeError, ServeOptions
from penstock.cli.dev import make_plan
from tests.cli.conftest import Penstock

THREE = "--controllers 1@127.0.0.1:9094,2@127.0.0.1:9095,3@127.0.0.1:9096"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """The options with which a broker would have been started."""
    seen: list[ServeOptions] = []

    def run(options: ServeOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(process, "run", run)
    return seen


def test_without_options_it_is_a_node_of_its_own(penstock: Penstock, started: list[ServeOptions]) -> None:
    assert penstock("serve").code == 0
    assert started == [
        ServeOptions(
            node_id=1,
            data_dirs=("penstock-data",),
            listen=None,
            advertise=None,
            rack=None,
            settings={},
            config_file=None,
            internal=None,
            controllers={},
            roles=("broker", "controller"),
        )
    ]


def test_every_option_reaches_the_broker(penstock: Penstock, started: list[ServeOptions]) -> None:
    words = "serve --node-id 7 --data-dir d --listen [::1]:0 --advertise kafka.example:19092 --http off"
    words += " --rack r2 --set log.retention.hours=24 --set a=b=c --set a=d=e --config penstock.toml"
    words += " --metrics [::1]:9464"
    assert penstock(*words.split()).code == 0
    assert started == [
        ServeOptions(
            node_id=7,
            data_dirs=("d",),
            listen=("::1", 0),
            advertise=("kafka.example", 19092),
            rack="r2",
            settings={"log.retention.hours": "24", "a": "d=e"},
            config_file="penstock.toml",
            metrics=("::1", 9464),
        )
    ]


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("", None),
        ("--metrics off", None),
        ("--metrics 9464", ("127.0.0.1", 9464)),
        ("--metrics 0.0.0.0:9464 --insecure", ("0.0.0.0", 9464)),
    ],
)
def test_metrics_are_off_unless_asked_for_and_a_port_alone_is_for_this_machine(
    penstock: Penstock, started: list[ServeOptions], words: str, address: tuple[str, int] | None
) -> None:
    assert penstock("serve", *words.split()).code == 0
    assert started[0].metrics == address


def test_the_first_administrator_comes_from_the_environment_and_does_not_stay_there(
    penstock: Penstock, started: list[ServeOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN", "admin:a-password")
    assert penstock("serve").code == 0
    assert started[0].admin == "admin:a-password" and "a-password" not in repr(started[0])
    assert "PENSTOCK_ADMIN" not in os.environ


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--listen 0.0.0.0:9092", "pass --insecure if the network is trusted"),
        ("--listen [::]:9092", "[::]:9092 is open to other machines"),
        ("--listen 10.1.2.3:9092", "open to other machines"),
        ("--listen 0.0.0.0:9092 --insecure", "add --advertise"),
        ("--listen 9092", "has no port"),
        ("--metrics 0.0.0.0:9464", "metrics at 0.0.0.0:9464 can be read by other machines"),
        ("--metrics here", "--metrics: 'here' has no port"),
        ("--metrics 70000", "'70000' in '127.0.0.1:70000' is not a port"),
        ("--listen 127.0.0.1:9092 --metrics 9092", "--metrics needs an address of its own"),
        ("--listen nowhere.invalid:9092", "cannot resolve host"),
        ("--advertise kafka.example:0", "clients cannot connect to kafka.example:0"),
        ("--advertise 0.0.0.0:9092", "clients cannot connect to 0.0.0.0:9092"),
        ("--advertise kafka.example", "--advertise: 'kafka.example' has no port"),
        ("--controllers 1@127.0.0.1:9094", "--controllers needs --internal HOST:PORT"),
        ("--internal 127.0.0.1:9094", "--internal needs --controllers"),
        (
            f"{THREE} --internal 10.1.2.3:9094",
            "differs from the address of node 1 in --controllers, 127.0.0.1:9094",
        ),
        (
            f"{THREE} --internal 127.0.0.1:9095",
            "differs from the address of node 1 in --controllers, 127.0.0.1:9094",
        ),
        (f"{THREE} --internal 0.0.0.0:9097 --node-id 4", "other nodes cannot connect to 0.0.0.0"),
        (f"{THREE} --internal 127.0.0.1:9094 --listen 127.0.0.1:9094", "are the same address"),
        (f"{THREE} --internal 127.0.0.1:9094 --roles broker", "its --roles must include controller"),
        (f"{THREE} --internal 127.0.0.1:9097 --roles controller --node-id 4", "not among --controllers"),
        (f"{THREE} --internal 127.0.0.1:9094 --roles king", "write broker, controller, or"),
        (f"{THREE} --internal 127.0.0.1:9094 --roles broker,broker", "write broker, controller, or"),
        (
            f"{THREE} --internal 127.0.0.1:9094 --roles controller --listen 127.0.0.1:9092",
            "only a controller has no clients",
        ),
        ("--roles controller", "only a controller needs a cluster; add --controllers"),
        ("--roles broker", "only a broker needs a cluster; add --controllers"),
        ("--controllers 127.0.0.1:9094", "write ID@HOST:PORT,..."),
        ("--controllers one@127.0.0.1:9094", "write ID@HOST:PORT,..."),
        ("--controllers 1@127.0.0.1", "--controllers: '127.0.0.1' has no port"),
        ("--controllers 1@127.0.0.1:0", "no node can connect to 127.0.0.1:0"),
        ("--controllers 1@0.0.0.0:9094", "no node can connect to 0.0.0.0:9094"),
        ("--controllers 1@127.0.0.1:1,1@127.0.0.1:2", "node 1 is given twice"),
        ("--controllers 1@127.0.0.1:1,2@127.0.0.1:1", "127.0.0.1:1 is given twice"),
        ("--http 127.0.0.1:8080", "omit --http"),
        ("--data-dir a --data-dir ./a", "the same directory is given twice"),
        ("--set retention", "KEY=VALUE"),
        ("--set =5", "KEY=VALUE"),
        ("--node-id -1", "from 0 to"),
        ("--node-id one", "invalid int value: 'one'"),
        ("--listen", "expected one argument"),
        ("again", "unrecognized arguments: again"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(
    penstock: Penstock, started: list[ServeOptions], words: str, complaint: str
) -> None:
    outcome = penstock("serve", *words.split())
    assert outcome.code == 2
    assert complaint in outcome.err
    assert outcome.err.count("\n") == 1
    assert started == []


def test_the_directory_of_a_cluster_on_this_machine_is_left_alone(
    penstock: Penstock, started: list[ServeOptions], tmp_path: Path
) -> None:
    make_plan(tmp_path, 3, 0)
    outcome = penstock("serve", "--data-dir", str(tmp_path))
    assert outcome.code == 1
    assert "holds a cluster of `penstock dev`" in outcome.err
    assert started == []


def test_a_node_of_a_cluster_knows_the_controllers_and_where_it_listens_to_the_others(
    penstock: Penstock, started: list[ServeOptions]
) -> None:
    words = f"serve --node-id 2 {THREE} --internal 127.0.0.1:9095 --data-dir a --data-dir b"
    assert penstock(*words.split()).code == 0
    (options,) = started
    assert options.data_dirs == ("a", "b")
    assert options.controllers == {n: ("127.0.0.1", 9093 + n) for n in (1, 2, 3)}
    assert options.internal == options.internal_told == ("127.0.0.1", 9095)
    assert options.roles == ("broker", "controller")


@pytest.mark.parametrize(
    ("words", "roles"),
    [
        ("--internal 127.0.0.1:9094", ("broker", "controller")),
        ("--internal 127.0.0.1:9094 --roles controller,broker", ("broker", "controller")),
        ("--internal 127.0.0.1:9094 --roles controller", ("controller",)),
        ("--internal 127.0.0.1:9097 --node-id 4", ("broker",)),
        ("--internal 127.0.0.1:9097 --node-id 4 --roles broker", ("broker",)),
    ],
)
def test_a_listed_node_is_a_controller_and_any_other_a_broker(
    penstock: Penstock, started: list[ServeOptions], words: str, roles: tuple[str, ...]
) -> None:
    assert penstock("serve", *THREE.split(), *words.split()).code == 0
    assert started[0].roles == roles


def test_a_controller_may_listen_on_every_interface_and_be_told_by_its_name(
    penstock: Penstock, started: list[ServeOptions]
) -> None:
    words = "serve --controllers 1@one.example:9094 --internal 0.0.0.0:9094 --insecure"
    assert penstock(*words.split()).code == 0
    assert started[0].internal == ("0.0.0.0", 9094)
    assert started[0].internal_told == ("one.example", 9094)


@pytest.mark.parametrize(("count", "lines"), [(1, 0), (2, 1), (3, 0), (4, 1), (5, 0)])
def test_an_even_number_of_controllers_is_remarked_on(
    penstock: Penstock, started: list[ServeOptions], count: int, lines: int
) -> None:
    listed = ",".join(f"{n}@127.0.0.1:{9093 + n}" for n in range(1, count + 1))
    outcome = penstock("serve", "--controllers", listed, "--internal", "127.0.0.1:9094")
    assert (outcome.code, outcome.err.count("\n"), len(started)) == (0, lines, 1)


def test_an_open_listener_is_allowed_to_those_who_ask_for_it(
    penstock: Penstock, started: list[ServeOptions]
) -> None:
    words = "serve --listen 0.0.0.0:9092 --advertise kafka.example:9092 --insecure"
    assert penstock(*words.split()).code == 0
    assert started[0].listen == ("0.0.0.0", 9092)


def test_a_broker_that_cannot_start_says_why_in_one_line(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(options: ServeOptions) -> int:
        raise ServeError("port 9092 is taken;\nchoose another with --listen")

    monkeypatch.setattr(process, "run", run)
    outcome = penstock("serve")
    assert outcome.code == 1
    assert outcome.err == "penstock: port 9092 is taken; choose another with --listen\n"


def test_the_brokers_exit_code_is_the_commands(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "run", lambda options: 3)
    assert penstock("serve").code == 3


def test_windows_is_sent_to_wsl(
    penstock: Penstock, started: list[ServeOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.serve.sys.platform", "win32")
    outcome = penstock("serve")
    assert (outcome.code, started) == (1, [])
    assert "WSL" in outcome.err


def test_serving_without_assertions_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-m", "penstock", "serve", "--listen", "127.0.0.1:0", "--data-dir", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("penstock: run Python without -O")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_cannot_find_the_others_says_what_it_waits_for(tmp_path: Path) -> None:
    first = "127.0.0.1:1"
    words = f"--node-id 4 --listen 127.0.0.1:0 --internal 127.0.0.1:0 --controllers 1@{first} --data-dir {tmp_path}"
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", *words.split()], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        process.terminate()
        assert process.wait(30) == 0
    assert "waiting for the cluster" in said
