"""Programs and packages that tests need and that pip does not bring: found, or installed, on first use.

Everything lands in the git-ignored ``.cache/`` of the checkout and is reused by later runs; two runs at once
take turns. A registry that fails once in a while is asked again. The policy for what cannot be had: on a
developer's machine the test is skipped with the reason; where ``CI=true`` it fails, because a test that CI
silently skips protects nobody.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"

INSTALL_TIMEOUT_S = 300
DOWNLOAD_ATTEMPTS = 3
# Before the second attempt; twice as long before the third.
DOWNLOAD_PAUSE_S = 5.0

# KafkaJS brings gzip only. Its usual codec packages compile C++ or download binaries when installed; these
# are whole as they are downloaded.
KAFKAJS_PACKAGES = ("kafkajs@2.2.4", "kafkajs-snappy@1.1.0", "lz4-napi@2.10.0", "@bokuweb/zstd-wasm@0.0.27")


class Missing(Exception):
    """A program or package that is not here and could not be installed."""


def skip_or_fail(missing: Missing) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must not skip: {missing}", pytrace=False)
    pytest.skip(str(missing))


def program(name: str) -> str:
    """The path of a program. Raises Missing."""
    path = shutil.which(name)
    if path is None:
        raise Missing(f"{name} is not installed")
    return path


def run(command: Sequence[str | Path], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run an installer or a compiler and return what it printed. Raises Missing when it fails."""
    shown = " ".join(str(word) for word in command)
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"`{shown}` did not end within {INSTALL_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise Missing(f"`{shown}` failed ({done.returncode}):\n{done.stdout[-2000:]}")
    return done.stdout


def download(
    command: Sequence[str | Path], *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> str:
    """Run an installer that asks a registry, and again when that fails. Raises Missing.

    The clock of the test that happens to come first stands still meanwhile: its timeout is for what it tests.
    """
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        for attempt in range(1, DOWNLOAD_ATTEMPTS):
            try:
                return run(command, cwd=cwd, env=env)
            except Missing:
                time.sleep(DOWNLOAD_PAUSE_S * attempt)
        try:
            return run(command, cwd=cwd, env=env)
        except Missing as missing:
            raise Missing(f"at the last of {DOWNLOAD_ATTEMPTS} attempts {missing}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)


@contextmanager
def cached(kind: str, *inputs: str | bytes) -> Iterator[tuple[Path, bool]]:
    """A directory of the cache named after what is made from ``inputs``, and whether it is there already.

    When it is not, the caller fills it; it counts as made only if the caller leaves without an exception.
    """
    digest = hashlib.sha256(b"\0".join(i.encode() if isinstance(i, str) else i for i in inputs))
    directory = CACHE / kind / digest.hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    made = directory / ".made"
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists():
            yield directory, True
            return
        yield directory, False
        made.touch()


def kcat() -> str:
    """kcat's path; root installs it with apt where it is missing. Raises Missing."""
    found = shutil.which("kcat")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        # Somebody else may be installing something.
        patient = ("-o", "DPkg::Lock::Timeout=120")
        download(["apt-get", "update", "-qq"], env=quiet)
        download(["apt-get", "install", "-y", "-qq", *patient, "kcat"], env=quiet)
    return program("kcat")


def node_modules() -> Path:
    """A directory whose ``node_modules`` holds KafkaJS and its codecs. Raises Missing."""
    npm = program("npm")
    program("node")
    with cached("node", *KAFKAJS_PACKAGES) as (directory, made):
        if not made:
            (directory / "package.json").write_text('{"private": true}\n')
            quiet = ("--no-audit", "--no-fund", "--ignore-scripts")
            download([npm, "install", *quiet, *KAFKAJS_PACKAGES], cwd=directory)
        return directory


def python_with(*packages: str) -> Path:
    """The Python of an environment with these packages, for those that do not go with ours. Raises Missing."""
    with cached("python", sys.version, *packages) as (directory, made):
        environment = directory / "environment"
        if not made:
            run([sys.executable, "-m", "venv", "--clear", environment])
            pip = (environment / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check")
            download([*pip, *packages])
        return environment / "bin" / "python"


def go_program(module: Path, package: str) -> Path:
    """Build one program of a Go module and return its path. Raises Missing."""
    go = program("go")
    files = sorted(path for path in module.rglob("*") if path.is_file())
    inputs = [str(path.relative_to(module)).encode() + b"\0" + path.read_bytes() for path in files]
    with cached("go", package, *inputs) as (directory, made):
        target = directory / package
        if not made:
            environment = {
                "GOMODCACHE": str(CACHE / "go" / "modules"),
                "GOCACHE": str(CACHE / "go" / "build"),
                "GOFLAGS": "-mod=readonly -modcacherw -trimpath",
            }
            download([go, "build", "-o", target, f"./{package}"], cwd=module, env=environment)
        return target
