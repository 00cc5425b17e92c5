"""How a command line begins and ends, whatever the command."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

import pytest

from penstock import __version__
from penstock.cli import commands
from penstock.sim.plans import NEWEST
from tests.cli.conftest import Penstock


def test_the_version_is_printed(penstock: Penstock) -> None:
    outcome = penstock("--version")
    assert (outcome.code, outcome.out) == (0, f"penstock {__version__}\n")


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_command(penstock: Penstock, words: list[str]) -> None:
    outcome = penstock(*words)
    assert outcome.code == 0
    for noun in commands.COMMANDS:
        assert noun in outcome.out


@pytest.mark.parametrize("noun", commands.COMMANDS)
def test_every_command_has_help(penstock: Penstock, noun: str) -> None:
    outcome = penstock(noun, "--help")
    assert outcome.code == 0
    assert f"penstock {noun}" in outcome.out


@pytest.mark.parametrize("words", ["", "produce", "topics", "topics create", "groups offsets reset", "sim"])
def test_flags_have_no_type_in_the_help(penstock: Penstock, words: str) -> None:
    out = penstock(*words.split(), "--help").out
    assert "--help" in out
    assert "<bool>" not in out


def test_plans_of_the_simulator_that_do_not_exist_are_refused(penstock: Penstock) -> None:
    outcome = penstock("sim", "--plans", str(NEWEST + 1))
    assert outcome.code == 2
    assert f"the newest generation is {NEWEST}" in outcome.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["topic"], "No such command 'topic', did you mean 'topics'? See `penstock --help`"),
        (["kafka"], "No such command 'kafka'; see `penstock --help`"),
        (["--nope"], "No such option: --nope; see `penstock --help`"),
        (["topics", "alter", "t"], "use `penstock configs set TOPIC KEY=VALUE` for settings"),
        (["groups", "reset", "g"], "use `penstock groups offsets reset GROUP`"),
        (["topics", "--json", "delete", "t"], "write --json after `delete`, not before it"),
        (["configs"], "Missing command; see `penstock configs --help`"),
        (["capacity", "--rate", "1M", "--peak", "10K"], "--peak 10K is below --rate 1M"),
        (["topics", "create"], "Missing argument 'TOPIC'; see `penstock topics create --help`"),
        (["produce", "t", "--compression", "zip"], "'zip' is not one of"),
        (["consume", "t", "--max", "many"], "'--max'"),
        (["serve", "--nope"], "unrecognized arguments: --nope; see `penstock serve --help`"),
        (["topics", "describe", "caf\udce9"], "'caf\\xe9' is not UTF-8"),
        (["produce", "t", "--value", "\udcff"], "'\\xff' is not UTF-8"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    penstock: Penstock, words: list[str], complaint: str
) -> None:
    outcome = penstock(*words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("penstock: ")
    assert complaint in outcome.err
    assert outcome.err.count("\n") == 1


def test_ctrl_c_is_exit_code_130_and_says_nothing(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.capacity.estimate", interrupted)
    outcome = penstock("capacity")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")


def test_a_file_that_cannot_be_read_is_one_line(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: object) -> NoReturn:
        raise PermissionError(13, "Permission denied", "secret.txt")

    monkeypatch.setattr("penstock.cli.capacity.estimate", unreadable)
    outcome = penstock("capacity")
    assert outcome.code == 1
    assert outcome.err == "penstock: secret.txt: Permission denied\n"


def test_a_bug_keeps_its_traceback(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr("penstock.cli.capacity.estimate", broken)
    with pytest.raises(ZeroDivisionError):
        penstock("capacity")


def test_the_command_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"penstock {__version__}\n"


def test_a_reader_that_goes_away_is_no_news() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "capacity"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")


def test_serving_imports_none_of_the_tools() -> None:
    """CPU from exec to ready is a target; each of these costs a noticeable part of it."""
    script = """
import sys
from penstock.cli.main import run
import penstock.broker.process
assert run(["serve", "--http", "on"]) == 2
print([name for name in ("typer", "click", "pydantic", "rich", "confluent_kafka") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_estimating_imports_no_client() -> None:
    script = """
import sys
from penstock.cli.main import run
assert run(["capacity", "--json"]) == 0
print([name for name in ("rich", "confluent_kafka") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    "words",
    [
        *(["topics", verb, ""] for verb in ("create", "describe", "delete")),
        ["topics", "trim", "", "--before", "end"],
        ["topics", "add-partitions", "", "--total", "4"],
        ["produce", ""],
        ["produce", "x" * 40_000],
        ["consume", "orders", ""],
        ["consume", "orders", "--group", ""],
        ["groups", "describe", ""],
        ["groups", "describe", "x" * 40_000],
        ["groups", "delete", "readers", ""],
        ["groups", "offsets", "reset", "", "--to", "end"],
        ["configs", "describe", ""],
        ["configs", "set", "", "retention.ms=1"],
        ["configs", "unset", "orders", ""],
    ],
    ids=lambda words: " ".join(word[:20] for word in words),
)
def test_a_name_that_cannot_be_is_wrong_usage_and_nobody_is_asked(
    penstock: Penstock, words: list[str]
) -> None:
    # Nobody listens there: whoever asks fails otherwise.
    outcome = penstock(*words, "--bootstrap", "127.0.0.1:1")

    assert outcome.code == 2, outcome
    assert outcome.err.startswith(
        ("penstock: A topic's name", "penstock: A group's name", "penstock: a setting")
    )
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["topics", "create", "orders", "--partitions", "100001"],
        ["topics", "create", "orders", "--replication", "99999999999999"],
        ["topics", "add-partitions", "orders", "--total", "99999999999999"],
        ["consume", "orders", "--from", "@99999999999999999999"],
    ],
    ids=lambda words: " ".join(words[:-1]),
)
def test_a_number_too_large_for_any_broker_is_wrong_usage(penstock: Penstock, words: list[str]) -> None:
    outcome = penstock(*words)

    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome


@pytest.mark.parametrize(
    ("closing", "words", "code"),
    [(">&-", ["capacity"], 0), ("2>&-", ["capacity", "--rate", "many"], 2), ("<&- >&- 2>&-", ["nope"], 2)],
)
def test_a_stream_that_is_closed_is_as_good_as_nowhere(closing: str, words: list[str], code: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closing}', "sh", sys.executable, "-m", "penstock", *words],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_completing_behind_a_command_that_does_not_exist_is_silent() -> None:
    """What is said while the shell completes is said into the line that somebody types."""
    shell = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock topic x", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "penstock"],
        env={**os.environ, **shell},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, b"", b"")
