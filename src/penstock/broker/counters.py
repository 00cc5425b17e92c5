"""Plain numbers that the parts of a broker count while they work. ``metrics/`` reads them when it is asked to.

Counting is on the path of every request, so there is nothing here but integers: no locks, no labels, no names. They
are counted whether somebody reads them or not.
"""

from __future__ import annotations

from bisect import bisect_left

# Upper bounds of times, inclusive, in microseconds. Few, because each is a time series for each API.
BOUNDS_US = (500, 1_000, 5_000, 20_000, 100_000, 500_000, 2_000_000, 10_000_000)


class Durations:
    """How often something took how long."""

    __slots__ = ("counts", "sum_us")

    def __init__(self) -> None:
        # By bound, not cumulative; the last is for what took longer than every bound.
        self.counts = [0] * (len(BOUNDS_US) + 1)
        self.sum_us = 0

    def add(self, duration_us: int) -> None:
        self.counts[bisect_left(BOUNDS_US, duration_us)] += 1
        self.sum_us += duration_us


class ApiCounts:
    """The requests of one API: how long their answers took, and the errors in these."""

    __slots__ = ("answered", "durations", "errors")

    def __init__(self) -> None:
        # In the current turn of a connection.
        self.answered = 0
        self.durations = Durations()
        # By error code: how often it was in a response. A response may have one for each partition.
        self.errors: dict[int, int] = {}

    def failed(self, error: int) -> None:
        self.errors[error] = self.errors.get(error, 0) + 1


class RequestCounts:
    """The requests that one server has answered, by API."""

    def __init__(self) -> None:
        self.by_api: dict[int, ApiCounts] = {}
        # The APIs of which requests were answered in the current turn of a connection. Usually one.
        self.answered: list[ApiCounts] = []

    def of(self, key: int) -> ApiCounts:
        counts = self.by_api.get(key)
        if counts is None:
            counts = self.by_api[key] = ApiCounts()
        return counts

    def turn_ended(self, duration_us: int) -> None:
        """The answers of this turn are about to be sent at once, so all took the same time: that of the turn."""
        bucket = bisect_left(BOUNDS_US, duration_us)
        for counts in self.answered:
            durations, count = counts.durations, counts.answered
            durations.counts[bucket] += count
            durations.sum_us += count * duration_us
            counts.answered = 0
        self.answered.clear()


class TopicTraffic:
    """Records and bytes of a topic that went into and out of this broker."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "messages_in",
        "messages_out",
        "replication_bytes_in",
        "replication_bytes_out",
    )

    def __init__(self) -> None:
        # Of clients.
        self.bytes_in = 0
        self.bytes_out = 0
        self.messages_in = 0
        # By offsets, so records that were compacted away count too.
        self.messages_out = 0
        # Of other brokers.
        self.replication_bytes_in = 0
        self.replication_bytes_out = 0


class WaitingRequests:
    """Requests that wait now: fetches for data, produces for their replicas or a flush."""

    __slots__ = ("fetches", "produces")

    def __init__(self) -> None:
        self.fetches = 0
        self.produces = 0
