"""The test run itself: it does not depend on who started it, and a skip does not go unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SKIPPING = """
import pytest

def test_that_runs(): pass

def test_that_does_not():
    pytest.skip("no such disk here")

@pytest.mark.skipif(True, reason="another reason")
def test_that_never_does(): pass
"""
PLUGIN = """
from tests.accounting import Accounting

def pytest_configure(config):
    config.pluginmanager.register(Accounting({allowed!r}))
"""


def run(
    *words: str | Path, cwd: Path, before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            "sh",
            "-c",
            f'{before} exec "$@"',
            "sh",
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *words,
        ],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_tests_of_ctrl_c_pass_where_sigint_was_ignored() -> None:
    done = run("tests/cli/test_client.py", "-k", "ctrl_c", cwd=ROOT, before="trap '' INT;")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@pytest.mark.parametrize(
    ("ci", "allowed", "code"),
    [
        ("true", (), pytest.ExitCode.TESTS_FAILED),
        ("true", ("no such disk",), pytest.ExitCode.TESTS_FAILED),
        ("true", ("no such disk", "another reason"), pytest.ExitCode.OK),
        ("false", (), pytest.ExitCode.OK),
    ],
)
def test_a_skip_that_is_not_listed_fails_ci(
    tmp_path: Path, ci: str, allowed: tuple[str, ...], code: pytest.ExitCode
) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN.format(allowed=allowed))
    (tmp_path / "test_some.py").write_text(SKIPPING)
    done = run(cwd=tmp_path, CI=ci)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"2 skipped, {2 - len(allowed)} of them not listed" in done.stdout
    assert "test_some.py::test_that_does_not: no such disk here" in done.stdout
    assert "in all" in done.stdout
