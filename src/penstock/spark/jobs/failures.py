"""Extract one line from a Spark failure, whose message is a page with the task's traceback in the middle."""

from __future__ import annotations

import re

_NAMED = re.compile(r"[\w.]*(Error|Exception)\b.*: ")


def let_interrupts_pass(error: Exception) -> None:
    """Raise KeyboardInterrupt if it caused the error.

    When Ctrl-C ends a call to the JVM, py4j closes the connection. pyspark makes another call while unwinding,
    and if that fails, its error replaces the interrupt.
    """
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        before = before.__cause__ or before.__context__


def reason(error: Exception) -> str:
    """The reason: the last line with an exception, which is the task's own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if _NAMED.match(line)]
    return (named or lines or [repr(error)])[-1 if named else 0]
