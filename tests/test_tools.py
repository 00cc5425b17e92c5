"""Downloads: a registry that fails once in a while does not fail a test, one that goes on failing says how."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import tools
from tests.tools import DOWNLOAD_ATTEMPTS, Missing, download


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "DOWNLOAD_PAUSE_S", 0.0)


@pytest.fixture
def installer(tmp_path: Path) -> Callable[[int], list[str]]:
    """A command that fails so many times before it succeeds; ``attempts`` counts how often it was run."""
    script = 'echo x >> "$1/attempts"; echo "502 Bad Gateway"; [ $(wc -l < "$1/attempts") -gt "$2" ]'
    return lambda failures: ["sh", "-c", script, "installer", str(tmp_path), str(failures)]


def attempts(tmp_path: Path) -> int:
    return len((tmp_path / "attempts").read_text().splitlines())


@pytest.mark.parametrize("failures", range(DOWNLOAD_ATTEMPTS))
def test_a_download_that_fails_at_first_is_tried_again(
    installer: Callable[[int], list[str]], tmp_path: Path, failures: int
) -> None:
    assert download(installer(failures)) == "502 Bad Gateway\n"
    assert attempts(tmp_path) == failures + 1


def test_a_download_that_goes_on_failing_says_what_the_last_attempt_said(
    installer: Callable[[int], list[str]], tmp_path: Path
) -> None:
    with pytest.raises(Missing, match=r"(?s)last of 3 attempts .*failed \(1\):\n502 Bad Gateway"):
        download(installer(DOWNLOAD_ATTEMPTS))
    assert attempts(tmp_path) == DOWNLOAD_ATTEMPTS


@pytest.fixture
def ringing() -> Iterator[list[int]]:
    """Signals of an alarm that is set to ring after a moment, as the one that ends a test that takes too long."""
    rung: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, _: rung.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.3)
    yield rung
    signal.setitimer(signal.ITIMER_REAL, *timer)
    signal.signal(signal.SIGALRM, handler)


def test_a_download_does_not_use_up_the_time_of_its_test(ringing: list[int]) -> None:
    download(["sleep", "1"])
    assert ringing == []
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.3
