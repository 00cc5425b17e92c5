"""Running one command line in this process, as a person would in a shell."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.cli.main import run


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """A plain table's cells, its heading first."""
        return [line.split() for line in self.out.splitlines()]


Penstock = Callable[..., Outcome]


def _pipe(data: bytes) -> io.TextIOWrapper:
    """Standard input that is a pipe: not a terminal, with bytes underneath."""
    return io.TextIOWrapper(io.BytesIO(data), errors="replace")


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Penstock:
    """Run `penstock WORDS...`; what it printed, and its exit code."""

    def invoke(*words: str, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr("sys.stdin", _pipe(stdin))
        capsys.readouterr()
        code = run(list(words))
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return invoke


@pytest.fixture
def kafka(penstock: Penstock, bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> Penstock:
    """The same, with a running broker to talk to; the command must succeed unless ``code`` says otherwise."""
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", bootstrap)

    def invoke(*words: str, stdin: bytes = b"", code: int = 0) -> Outcome:
        outcome = penstock(*words, stdin=stdin)
        assert outcome.code == code, outcome
        if code != 0:
            assert outcome.err.startswith("penstock: ") and outcome.err.count("\n") == 1, outcome.err
        return outcome

    return invoke
