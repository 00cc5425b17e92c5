"""`penstock sim`, as people type it."""

from __future__ import annotations

import json

import pytest
import typer.main

from penstock.cli.failures import Failure
from penstock.cli.sim import app
from penstock.sim import swarm
from penstock.sim.plans import plan_for
from penstock.sim.report import Report


def sim(*words: str) -> None:
    typer.main.get_command(app).main(args=list(words), prog_name="penstock sim", standalone_mode=False)


def test_one_run_says_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    sim("--seed", "3", "--seconds", "5", "--nodes", "1")
    told = capsys.readouterr().out
    assert "cluster: 1 seed" in told
    assert "acknowledged" in told
    assert "0 violations" in told


def test_json_has_a_report_for_every_seed(capsys: pytest.CaptureFixture[str]) -> None:
    sim("--seed", "3", "--seeds", "2", "--seconds", "5", "--nodes", "1", "--json")
    reports = json.loads(capsys.readouterr().out)
    assert [report["seed"] for report in reports] == [3, 4]
    assert all(report["violation"] is None and report["counts"]["acknowledged"] for report in reports)


def test_a_violation_fails_and_ends_with_the_line_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(seed: int, **_: object) -> Report:
        return Report(
            "cluster", seed, violation="lost write", replay=f"penstock sim --seed {seed}", log=("line",)
        )

    monkeypatch.setattr(swarm, "run", run)
    with pytest.raises(Failure, match="penstock sim --seed 7"):
        sim("--seed", "7")
    told = capsys.readouterr().out.splitlines()
    assert told[-3:] == ["line", "lost write", "replay: penstock sim --seed 7"]


def test_an_error_of_the_simulator_itself_is_reported_like_a_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: swarm.Run) -> None:
        raise ValueError("a bad book")

    monkeypatch.setattr(swarm.Run, "_begin", fail)
    with pytest.raises(Failure, match="2 violations"):
        sim("--seed", "7", "--seeds", "2")
    assert "ValueError: a bad book" in capsys.readouterr().out


def test_the_replay_line_says_what_was_run() -> None:
    assert plan_for(9, seconds=12.5, nodes=5).replay_line == "penstock sim --seed 9 --seconds 12.5 --nodes 5"
    assert (
        plan_for(9, seconds=60, nodes=3, generation=2).replay_line
        == "penstock sim --seed 9 --seconds 60 --nodes 3 --plans 2"
    )
