"""What a run of the tests ends with: minutes per directory, and every skip.

Where ``CI=true`` a skip that is not listed here fails the run: a test that CI silently skips protects nobody.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import PurePosixPath

import pytest

# Parts of the reasons for which CI may skip a test, each with a comment that says why. CI's machine has root, a C
# compiler, Java, Node.js and Go, so nothing needs to be here.
ALLOWED_SKIPS: tuple[str, ...] = ()


class Accounting:
    """Adds up the reports of a run."""

    def __init__(self, allowed: tuple[str, ...] = ALLOWED_SKIPS) -> None:
        self._allowed = allowed
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tests: defaultdict[str, int] = defaultdict(int)
        # Test and reason.
        self._skips: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        directory = str(PurePosixPath(report.nodeid.partition("::")[0]).parent)
        self._seconds[directory] += report.duration
        self._tests[directory] += report.when == "call"
        if report.skipped:
            self._skipped(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # A whole module that skips itself has no tests to report.
        if report.skipped:
            self._skipped(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted and os.environ.get("CI") == "true" and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("minutes per directory")
        for directory in sorted(self._seconds, key=lambda directory: -self._seconds[directory]):
            minutes = self._seconds[directory] / 60
            terminalreporter.line(f"{minutes:6.2f}  {self._tests[directory]:5}  {directory}")
        terminalreporter.line(
            f"{sum(self._seconds.values()) / 60:6.2f}  {sum(self._tests.values()):5}  in all"
        )
        terminalreporter.section("skips")
        for test, reason in self._skips:
            listed = "listed    " if self._is_listed(reason) else "NOT LISTED"
            terminalreporter.line(f"{listed}  {test}: {reason}")
        terminalreporter.line(f"{len(self._skips)} skipped, {len(self.unlisted)} of them not listed")

    @property
    def unlisted(self) -> list[tuple[str, str]]:
        return [skip for skip in self._skips if not self._is_listed(skip[1])]

    def _skipped(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        # The place and the reason; an expected failure has only its own text.
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self._skips.append((report.nodeid, reason.removeprefix("Skipped: ")))

    def _is_listed(self, reason: str) -> bool:
        return any(part in reason for part in self._allowed)
