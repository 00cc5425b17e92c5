"""Why Spark gave up, in one line: its own message is a page, and has the task's traceback in the middle."""

from __future__ import annotations

import re

_NAMED = re.compile(r"[\w.]*(Error|Exception)\b.*: ")


def let_interrupts_pass(error: Exception) -> None:
    """Raises KeyboardInterrupt if that is what the error has come of.

    py4j hangs up on a call to the JVM that Ctrl-C ends. pyspark makes another on its way out, and where that fails
    its error takes the interrupt's place.
    """
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        before = before.__cause__ or before.__context__


def reason(error: Exception) -> str:
    """The line that says why: the last that names an exception, which is the task's own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if _NAMED.match(line)]
    return (named or lines or [repr(error)])[-1 if named else 0]
