"""What `penstock serve` takes and what it refuses; the broker itself is tested elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.broker import server
from penstock.broker.options import ServeError, ServeOptions
from tests.cli.conftest import Penstock


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """The options with which a broker would have been started."""
    seen: list[ServeOptions] = []

    def run(options: ServeOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(server, "run", run)
    return seen


def test_without_options_it_is_a_node_of_its_own(penstock: Penstock, started: list[ServeOptions]) -> None:
    assert penstock("serve").code == 0
    assert started == [
        ServeOptions(
            node_id=1,
            data_dirs=("penstock-data",),
            listen=("127.0.0.1", 9092),
            advertise=None,
            rack=None,
            settings={},
            config_file=None,
        )
    ]


def test_every_option_reaches_the_broker(penstock: Penstock, started: list[ServeOptions]) -> None:
    words = "serve --node-id 7 --data-dir d --listen [::1]:0 --advertise kafka.example:19092 --http off"
    words += " --rack r2 --set log.retention.hours=24 --set a=b=c --set a=d=e --config penstock.toml"
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
        )
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--listen 0.0.0.0:9092", "pass --insecure if the network is trusted"),
        ("--listen [::]:9092", "[::]:9092 is open to other machines"),
        ("--listen 10.1.2.3:9092", "open to other machines"),
        ("--listen 0.0.0.0:9092 --insecure", "tell them where with --advertise"),
        ("--listen 9092", "has no port"),
        ("--listen nowhere.invalid:9092", "cannot be found"),
        ("--advertise kafka.example:0", "clients cannot connect to kafka.example:0"),
        ("--advertise 0.0.0.0:9092", "clients cannot connect to 0.0.0.0:9092"),
        ("--advertise kafka.example", "--advertise: 'kafka.example' has no port"),
        ("--controllers 1@127.0.0.1:9094", "not supported yet; leave --controllers out"),
        ("--internal 127.0.0.1:9094", "not supported yet; leave --internal out"),
        ("--http 127.0.0.1:8080", "leave --http out"),
        ("--data-dir a --data-dir b", "name one --data-dir"),
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

    monkeypatch.setattr(server, "run", run)
    outcome = penstock("serve")
    assert outcome.code == 1
    assert outcome.err == "penstock: port 9092 is taken; choose another with --listen\n"


def test_the_brokers_exit_code_is_the_commands(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "run", lambda options: 3)
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
    assert done.stderr.startswith("penstock: python -O is refused")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
