"""Our own client, for requests that librdkafka does not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from penstock.cli.client import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, knock
from penstock.cli.connection import Brokers
from penstock.cli.failures import Failure
from penstock.wire import Client, UnknownTopic, WireError


@contextmanager
def connected(bootstrap: Brokers) -> Iterator[Client]:
    """A client of a cluster whose port is open. Its errors become Failure."""
    knock(bootstrap.servers, CONNECT_TIMEOUT_S)
    try:
        with Client(
            bootstrap.servers,
            client_id="penstock-cli",
            deadline_ms=int(REQUEST_TIMEOUT_S * 1000),
            security=bootstrap.security,
        ) as client:
            yield client
    except UnknownTopic as error:
        raise Failure(f"{error}; see `penstock topics list`") from None
    except WireError as error:
        raise Failure(str(error)) from None


def time_text(ms: int | None) -> str | None:
    if ms is None or ms < 0:
        return None
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return None  # a producer may write any timestamp
