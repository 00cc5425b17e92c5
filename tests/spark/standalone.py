"""Spark's own standalone master and worker, as processes beside the test.

The executor that the worker starts, and the Python workers that the executor starts, are processes of their own
too: nothing of the driver's memory or working directory reaches them. All of them share the session of the
process that began it, whatever group they move to, so that ``close`` can tell whether anybody is left.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import pyspark

from tests.support import wait_until

SPARK_HOME = Path(pyspark.__file__).parent
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 120
# What a short life wants of a JVM: the quick compiler, and no files of its own in the system's /tmp.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:-UsePerfData -Djava.io.tmpdir={}"


class StandaloneCluster:
    """A master and one worker of two cores, on free ports, with all their files below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._master: subprocess.Popen[bytes] | None = None
        self._worker: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> StandaloneCluster:
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._master = self._start("master", ["--webui-port", "0"])
            self.url = self._said("master", self._master, r"Starting Spark master at (spark://\S+)")
            size = ["--cores", "2", "--memory", "1g", "--webui-port", "0"]
            size += ["--work-dir", str(self.directory / "work")]
            self._worker = self._start("worker", [*size, self.url])
            self._said("worker", self._worker, r"Successfully registered with master (\S+)")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """For whoever talks to the cluster: the same interpreter, and no file outside the directory."""
        return {
            **os.environ,
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self.directory),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": self.java_options,
            "PYSPARK_PYTHON": sys.executable,
            "TMPDIR": str(self.directory),
        }

    @property
    def java_options(self) -> str:
        return JAVA_OPTIONS.format(self.directory)

    @property
    def session_id(self) -> int:
        """Of the worker, its executors, and their Python workers."""
        assert self._worker is not None
        return self._worker.pid

    def applications(self) -> list[str]:
        """The names of those that the master has admitted so far."""
        log = self._log("master").read_text(errors="replace")
        return re.findall(r"Registered app (.+?) with ID", log)

    def processes(self) -> list[int]:
        """Everybody who was started by the master or the worker and still runs."""
        sessions = {each.pid for each in (self._master, self._worker) if each is not None}
        return [pid for pid in _pids() if _session(pid) in sessions]

    def close(self) -> None:
        """Stop the worker, which stops its executors, then the master; fails if anybody stays."""
        started = [each for each in (self._worker, self._master) if each is not None]
        for process in started:
            if process.poll() is None:
                process.terminate()
        try:
            wait_until(lambda: not self.processes(), STOP_TIMEOUT_S, "the cluster's processes end")
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in started:
                process.wait()

    def _start(self, role: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        name = f"org.apache.spark.deploy.{role}.{role.capitalize()}"
        command = [str(SPARK_HOME / "bin" / "spark-class"), name, "--host", "127.0.0.1", "--port", "0"]
        with self._log(role).open("wb") as log:
            return subprocess.Popen(
                [*command, *arguments],
                env=self.environment,
                cwd=self.directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _said(self, role: str, process: subprocess.Popen[bytes], pattern: str) -> str:
        log = self._log(role)

        def found() -> re.Match[str] | None:
            text = log.read_text(errors="replace")
            assert process.poll() is None, f"the {role} ended with status {process.returncode}:\n{text}"
            return re.search(pattern, text)

        match = wait_until(found, START_TIMEOUT_S, f"the {role} says {pattern!r}")
        assert match is not None
        return match[1]

    def _log(self, role: str) -> Path:
        return self.directory / f"{role}.log"


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session(pid: int) -> int | None:
    """Of a process that runs. An orphan's body is still listed, for ever where process 1 does not bury its dead."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, _, _, session_id = status.rpartition(")")[2].split()[:4]
    return None if state in "ZX" else int(session_id)
