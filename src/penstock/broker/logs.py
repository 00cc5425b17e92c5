"""The broker's log: structured lines on standard error, as JSON unless it is a terminal.

structlog is imported with the first line, not at start, so that a broker with nothing to log is ready sooner.
"""

from __future__ import annotations

import contextlib
import sys
from copy import copy
from typing import Any


class Logger:
    def __init__(self, **context: Any) -> None:
        self._context = context
        self._log: Any = None

    def named(self, name: str) -> Logger:
        """A logger whose lines have a name of their own."""
        # A copy: loggers of simulations write elsewhere.
        other = copy(self)
        other._context, other._log = {**self._context, "logger": name}, None
        return other

    def info(self, event: str, **values: Any) -> None:
        self._say("info", event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._say("warning", event, values)

    def error(self, event: str, **values: Any) -> None:
        self._say("error", event, values)

    def exception(self, event: str, **values: Any) -> None:
        """Log with the traceback of the current exception: for our own errors, never for a peer's."""
        self._say("exception", event, values)

    def _say(self, level: str, event: str, values: dict[str, Any]) -> None:
        # The reader of a pipe may be gone, or a log file's disk full: that must cost a line, not the broker.
        with contextlib.suppress(OSError):
            getattr(self._loaded(), level)(event, **values)

    def _loaded(self) -> Any:
        if self._log is None:
            import structlog  # noqa: PLC0415 - a tenth of a second that most starts need not pay

            interactive = sys.stderr.isatty()
            renderer: Any = structlog.processors.JSONRenderer()
            if interactive:
                # Without the values of variables, which may be secrets.
                renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
            structlog.configure(
                processors=[
                    structlog.processors.add_log_level,
                    structlog.processors.TimeStamper(fmt="iso"),
                    *([] if interactive else [structlog.processors.format_exc_info]),
                    renderer,
                ],
                logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
            )
            self._log = structlog.get_logger().bind(**self._context)
        return self._log
