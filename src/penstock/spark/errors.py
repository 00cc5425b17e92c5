"""What goes wrong before any record is read: one line that says what to do.

Spark shows a Python error inside its own longer message, so the line itself must be enough.
"""

from __future__ import annotations

import os
import sys

# Of a stream that does not begin it reports an error of its own, behind which ours stands in the traceback only.
STREAM_RUNNER = "python_streaming_source_runner"


class SparkOptionError(ValueError):
    """An option of a source, sink or job is missing, unknown, contradictory or malformed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if "pyspark.worker_util" in sys.modules and STREAM_RUNNER not in _program():
            # A process of Spark's, which passes the error on and ends. Its traceback is thousands of characters
            # about Spark and us in front of the one line about the mistake; this is pyspark's own switch.
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"


def _program() -> str:
    """The module that Python was started with (``-m``)."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return "" if spec is None else str(spec.name)


class DataLossError(RuntimeError):
    """Records that should have been read are gone, and ``failOnDataLoss`` is on."""
