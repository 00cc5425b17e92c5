"""What the broker says about itself: structured lines on standard error, JSON when nobody is watching.

structlog is loaded with the first line, not at start: a broker that has nothing to report is ready sooner.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any


class Logger:
    def __init__(self, **context: Any) -> None:
        self._context = context
        self._log: Any = None

    def info(self, event: str, **values: Any) -> None:
        self._say("info", event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._say("warning", event, values)

    def error(self, event: str, **values: Any) -> None:
        self._say("error", event, values)

    def exception(self, event: str, **values: Any) -> None:
        """With the traceback of the exception being handled: for our own mistakes, never for a peer's."""
        self._say("exception", event, values)

    def _say(self, level: str, event: str, values: dict[str, Any]) -> None:
        # The reader may have gone, or the disk of a log file be full: a line is lost then, and not the broker.
        with contextlib.suppress(OSError):
            getattr(self._loaded(), level)(event, **values)

    def _loaded(self) -> Any:
        if self._log is None:
            import structlog  # noqa: PLC0415 - a tenth of a second that most starts need not pay

            interactive = sys.stderr.isatty()
            renderer: Any = (
                structlog.dev.ConsoleRenderer() if interactive else structlog.processors.JSONRenderer()
            )
            structlog.configure(
                processors=[
                    structlog.processors.add_log_level,
                    structlog.processors.TimeStamper(fmt="iso"),
                    *([] if interactive else [structlog.processors.format_exc_info]),
                    renderer,
                ],
                logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
            )
            self._log = structlog.get_logger(**self._context)
        return self._log
