"""What goes wrong before any record is read: one line that says what to do.

Spark shows a Python error inside its own longer message, so the line itself must be enough.
"""

from __future__ import annotations


class SparkOptionError(ValueError):
    """An option of a source, sink or job is missing, unknown, contradictory or malformed."""


class DataLossError(RuntimeError):
    """Records that should have been read are gone, and ``failOnDataLoss`` is on."""
