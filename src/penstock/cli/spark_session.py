"""A Spark session for one command: found or started, silenced, with a progress bar, and stopped.

The JVM inherits our standard error and writes freely to it. So while our session runs, descriptor 2 is a file, and
our own messages go to a copy of the old descriptor. The file is deleted unless Spark itself failed; then the error
names it.

pyspark is imported inside functions, so that no other command pays for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from penstock.cli.drawing import REDRAW_INTERVAL_S, progress
from penstock.cli.failures import Failure, WrongUsage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN = 17
JAVA_ADVICE = "install it (on Debian: apt install openjdk-17-jre-headless) or set JAVA_HOME"
JAVA_TIMEOUT_S = 30.0

# The last line of a Python traceback, which Spark embeds in its own.
_RAISED = re.compile(r"^(?P<kind>(?:[a-z_]\w*\.)*[A-Z]\w+): (?P<what>.+)$", re.MULTILINE)
# A Java exception as py4j shows it, and the JVM's last messages before it exits.
_THROWN = re.compile(r"^: [\w.$]+(?:Error|Exception): (?P<what>\S.*)$", re.MULTILINE)
_LOGGED = re.compile(
    r'^(?:Exception in thread "main" [\w.$]+:|\S+ \S+ ERROR [\w$.]+:|(?=Invalid )) ?(?P<what>.+)$',
    re.MULTILINE,
)
# Jobs' errors name function parameters; the command line shows the matching options.
_OPTIONS = (
    (re.compile(r"set (?:fail_on_data_loss|failOnDataLoss) to false"), "pass --allow-data-loss"),
    (re.compile(r"pass create_target=True"), "pass --create"),
    (re.compile(r"pass into_itself=True"), "pass --into-itself"),
    (re.compile(r"pass keep_partitions=False"), "pass --by-key"),
    (re.compile(r"run_id='(.*)'"), r"--run-id '\1'"),
    (re.compile(r"start again with full"), "start again with --full"),
    (re.compile(r"\(by_date\)"), "(--by-date)"),
    (re.compile(r"\b(with|without) value_schema\b"), r"\1 --value-schema"),
)
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


# A command is short and draws its own bar. `--conf spark.ui.enabled=true` enables Spark's web page.
QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
# Names of options whose values Spark hides in plans and event logs. Its own list does not have Java's line with a
# user's password.
REDACTED = {"spark.redaction.regex": r"(?i)secret|password|token|access[.]?key|jaas|keystore[.]key"}


class JobBar:
    """Records done, total and rate. Drawn on a terminal only. Thread-safe."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting Spark", total=None, rate="")
        self._begun: float | None = None
        self._redraw_at = 0.0

    def begin(self, description: str) -> None:
        self._progress.update(self._task, description=description)

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._begun is None:
            self._begun = now
        if now >= self._redraw_at or done == total:
            self._redraw_at = now + REDRAW_INTERVAL_S
            rate = f"{done / (now - self._begun):,.0f}/s" if done and now > self._begun else ""
            self._progress.update(self._task, completed=done, total=total, rate=rate)


@contextlib.contextmanager
def spark_session(
    description: str, master: str | None, conf: dict[str, str]
) -> Iterator[tuple[SparkSession, JobBar]]:
    """A session and its bar. Errors of Spark and the job inside become Failure or WrongUsage."""
    _require_libraries()
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if SparkSession.getActiveSession() is not None:
        # Called from a user's program: the session and its output belong to that program.
        with _quiet_libraries(), _bar() as bar, _explained(None):
            yield _start(description, master, conf, bar), bar
        return
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # set by spark-submit, whose JVM runs already
        _require_java()
    with _own_log() as log, _quiet_libraries(), _bar() as bar, _explained(log):
        try:
            spark = _start(description, master, conf, bar)
            if threading.current_thread() is threading.main_thread():
                # Spark's handler would call the JVM in the middle of another call.
                signal.signal(signal.SIGINT, signal.default_int_handler)
            yield spark, bar
        finally:
            _stop()


def _start(description: str, master: str | None, conf: dict[str, str], bar: JobBar) -> SparkSession:
    from penstock import spark as source  # noqa: PLC0415

    spark = source.start(f"penstock {description}", master, conf, defaults=QUIET | REDACTED)
    bar.begin(description)
    return spark


def _stop() -> None:
    """Stop the session, even if its start failed or was interrupted."""
    from pyspark import SparkContext  # noqa: PLC0415

    context = SparkContext._active_spark_context
    if context is None:
        return
    # After Ctrl-C in the middle of a call the JVM may not answer any more; it ends with this process anyway.
    # pyspark's accumulator thread may then print a traceback, which goes to Spark's log.
    with (
        os.fdopen(os.dup(2), "w", errors="backslashreplace") as log,
        contextlib.redirect_stderr(log),
        contextlib.suppress(Exception),
    ):
        context.stop()


@contextlib.contextmanager
def _bar() -> Iterator[JobBar]:
    with progress() as drawn:
        yield JobBar(drawn)


@contextlib.contextmanager
def _own_log() -> Iterator[Path]:
    """Point descriptor 2 at a file, and sys.stderr at the original descriptor."""
    descriptor, name = tempfile.mkstemp(prefix="penstock-spark-", suffix=".log")
    path = Path(name)
    before, was_stderr = os.dup(2), sys.stderr
    os.dup2(descriptor, 2)
    os.close(descriptor)
    if was_stderr is sys.__stderr__:
        sys.stderr = os.fdopen(os.dup(before), "w", buffering=1, errors="backslashreplace")
    is_wanted = False
    try:
        yield path
    except _SparkFailed:
        is_wanted = True
        raise
    finally:
        if sys.stderr is not was_stderr:
            sys.stderr.close()
            sys.stderr = was_stderr
        os.dup2(before, 2)
        os.close(before)
        if not is_wanted:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence py4j and pyspark, which log errors that they also raise. Our own log is shown."""
    root, queries = logging.getLogger(), logging.getLogger("SQLQueryContextLogger")
    ours = logging.getLogger("penstock")
    nothing, handler = logging.NullHandler(), _Stderr()
    handler.setFormatter(logging.Formatter("penstock: %(message)s"))
    level = queries.level
    root.addHandler(nothing)  # py4j logs here; without a handler Python would print it
    queries.setLevel(logging.CRITICAL + 1)
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        queries.setLevel(level)
        root.removeHandler(nothing)


class _Stderr(logging.StreamHandler[Any]):
    """Writes to the current sys.stderr, which the progress bar replaces to stay below the output."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _SparkFailed(Failure):
    """Spark itself failed. Its log is kept."""


@contextlib.contextmanager
def _explained(log: Path | None) -> Iterator[None]:
    """Turn exceptions of jobs and Spark into one line."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415
    from pyspark.errors import AnalysisException, ParseException, PySparkException  # noqa: PLC0415

    from penstock.spark.errors import DataLossError, SparkOptionError  # noqa: PLC0415
    from penstock.spark.jobs.failures import let_interrupts_pass  # noqa: PLC0415
    from penstock.wire import WireError  # noqa: PLC0415

    try:
        yield
    except SparkOptionError as error:
        raise WrongUsage(_with_options(str(error))) from None
    except (DataLossError, WireError) as error:
        raise Failure(_with_options(str(error))) from None
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        raise Failure(f"{where}{error.strerror or error}") from None
    except (AnalysisException, ParseException) as error:
        # An error in --sql: the first line is the message, the rest is the plan.
        raise Failure(_first_line(str(error)).rstrip("; ")) from None
    except (PySparkException, Py4JError) as error:
        let_interrupts_pass(error)
        where = "" if log is None else f"; Spark's log is in {log}"
        raise _SparkFailed(f"Spark failed: {_cause(str(error), log).rstrip('.')}{where}") from None
    except RuntimeError as error:
        # A job's own error: an archive, a replay or a snapshot that could not continue.
        if type(error).__module__.startswith("penstock."):
            raise Failure(_with_options(str(error))) from None
        raise


def _with_options(text: str) -> str:
    for parameter, option in _OPTIONS:
        text = parameter.sub(option, text)
    return text


def _require_libraries() -> None:
    missing = [name for name in ("pyspark", "pyarrow", "pandas") if find_spec(name) is None]
    if missing:
        raise Failure(f"{missing[0]} is not installed; run pip install 'penstock-mq[spark]'")


def _require_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin") if home else None)
    if java is None:
        where = f"JAVA_HOME={home} has no Java" if home else "there is no java on the PATH"
        raise Failure(f"Spark needs Java {JAVA_MIN} or later; {where}: {JAVA_ADVICE}")
    try:
        said = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure(f"Spark needs Java {JAVA_MIN} or later; {java} does not run: {error}") from None
    found = _JAVA_VERSION.search(said.stderr + said.stdout)
    if found is not None and int(found[1]) < JAVA_MIN:
        raise Failure(f"Spark needs Java {JAVA_MIN} or later; {java} is Java {found[1]}: {JAVA_ADVICE}")


def _cause(text: str, log: Path | None) -> str:
    """The most useful line of Spark's output: a worker's Python error, the JVM's, or the last in its log."""
    raised = list(_RAISED.finditer(text))
    if raised:
        return raised[-1]["what"]
    thrown = _THROWN.search(text)
    # "stopped SparkContext" does not say why; the log may.
    if thrown is not None and "stopped SparkContext" not in thrown["what"]:
        return thrown["what"]
    logged = [] if log is None else list(_LOGGED.finditer(log.read_text(errors="replace")))
    return logged[-1]["what"] if logged else _first_line(text)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason was given")
