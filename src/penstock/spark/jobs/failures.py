"""Why Spark gave up, in one line: its own message is a page, and has the task's traceback in the middle."""

from __future__ import annotations

import re

_NAMED = re.compile(r"[\w.]*(Error|Exception)\b.*: ")


def reason(error: Exception) -> str:
    """The line that says why: the last that names an exception, which is the task's own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if _NAMED.match(line)]
    return (named or lines or [repr(error)])[-1 if named else 0]
