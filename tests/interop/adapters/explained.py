"""Errors of the Python libraries, which say only in their logs why they could not connect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tests.interop.client import ClientError


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def explained(library: str) -> Iterator[None]:
    """Add what the library logs meanwhile to a ClientError."""
    logger, kept = logging.getLogger(library), _Kept()
    logger.addHandler(kept)
    try:
        yield
    except ClientError as error:
        raise ClientError(error.name, "\n".join([error.message, *kept.lines])) from error
    finally:
        logger.removeHandler(kept)
