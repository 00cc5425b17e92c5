"""What goes wrong before any record is read: one line that says what to do.

Spark shows a Python error inside its own longer message, so the line itself must be enough.
"""

from __future__ import annotations

import os
import sys


class SparkOptionError(ValueError):
    """An option of a source, sink or job is missing, unknown, contradictory or malformed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if "pyspark.worker" in sys.modules or "pyspark.worker_util" in sys.modules:
            # A process of Spark's, which passes the error on and ends. Its traceback is thousands of characters
            # about Spark and us in front of the one line about the mistake; this is pyspark's own switch.
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"


class DataLossError(RuntimeError):
    """Records that should have been read are gone, and ``failOnDataLoss`` is on."""
