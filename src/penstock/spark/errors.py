"""Errors of the source, the sink and the jobs: one line that says what to do.

Spark embeds a Python error in its own longer message, so the line must be sufficient.
"""

from __future__ import annotations

import os
import sys

# For a stream that fails to start, Spark reports its own error, and ours appears only in the traceback.
STREAM_RUNNER = "python_streaming_source_runner"


class SparkOptionError(ValueError):
    """An option of a source, sink or job is missing, unknown, contradictory or malformed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if "pyspark.worker_util" in sys.modules and STREAM_RUNNER not in _program():
            # A Spark process that passes the error on and ends. Its traceback would put thousands of characters
            # before the one line that matters; this is pyspark's own switch.
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"


def _program() -> str:
    """The module that Python was started with (``-m``)."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return "" if spec is None else str(spec.name)


class DataLossError(RuntimeError):
    """Records that should have been read are gone, and ``failOnDataLoss`` is on."""
