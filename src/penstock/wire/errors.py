"""What can go wrong for a caller of the wire client, each in one line that says what to do about it.

A newcomer looks here for connections that broke and leaders that moved. There are none: those are retried inside
the client until the deadline, and what reaches the caller is final.
"""

from __future__ import annotations

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode

# The partition is led by somebody else, or by nobody yet: ask for metadata and try again.
LEADER_MOVED = frozenset(
    (
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.BROKER_NOT_AVAILABLE,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.LISTENER_NOT_FOUND,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
    )
)
# The broker is the right one and cannot do it now.
BUSY = frozenset(
    (
        ErrorCode.UNKNOWN_SERVER_ERROR,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.NOT_CONTROLLER,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        ErrorCode.UNSTABLE_OFFSET_COMMIT,
    )
)
COORDINATOR_MOVED = frozenset(
    (
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
    )
)


class WireError(Exception):
    """Final: trying again at once would not help."""


class BadBootstrap(WireError, ValueError):
    """The list of brokers is not one."""


class Unreachable(WireError):
    """No broker of the list, and none that was known, could be reached."""


class TimedOut(WireError):
    """Brokers were there, and yet it did not succeed before the deadline."""


class UnsupportedBroker(WireError):
    """The broker and this client have no version of an API in common."""


class UnknownTopic(WireError):
    """The topic, or the partition of it, does not exist."""


class TopicReplaced(UnknownTopic):
    """The topic was deleted and made again: offsets of the old one mean nothing in the new."""


class OffsetOutOfRange(WireError):
    def __init__(self, at: TopicPartition, offset: int, log_start_offset: int, high_watermark: int) -> None:
        super().__init__(
            f"{at} has no offset {offset}: it holds {log_start_offset} up to {high_watermark} (exclusive)"
        )
        self.at = at
        self.offset = offset
        self.log_start_offset = log_start_offset
        self.high_watermark = high_watermark

    def __reduce__(self) -> tuple[object, ...]:
        # Spark carries exceptions between processes; the default would call us with the message alone.
        return type(self), (self.at, self.offset, self.log_start_offset, self.high_watermark)


class BrokerRefused(WireError):
    """The broker said no, with a code that trying again does not change."""

    def __init__(self, message: str, code: int = ErrorCode.NONE) -> None:
        super().__init__(message)
        self.code = code


class BatchTooLarge(BrokerRefused):
    """The topic does not take batches of this size."""


class GroupInUse(BrokerRefused):
    """The group has members of its own, whose offsets nobody else may commit."""


class OutOfSequence(BrokerRefused):
    """Going on might lose records, repeat them or change their order."""


def words_of(code: int, message: str | None = None) -> str:
    """The broker's own words if it has any, else the name of the code."""
    try:
        name = ErrorCode(code).name
    except ValueError:
        name = f"error {code}"
    return (message or name.lower().replace("_", " ")).rstrip(".")
