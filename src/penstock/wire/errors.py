"""The errors of the wire client, each with one line that says what to do.

All are final. The client itself retries broken connections and moved leaders until the deadline.
"""

from __future__ import annotations

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode

# The partition has another leader, or none yet: refresh the metadata and retry.
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
# The right broker, but it cannot do it now: retry.
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
    """Final: an immediate retry would not help."""


class BadBootstrap(WireError, ValueError):
    """The bootstrap list is invalid."""


class BadSecurity(WireError, ValueError):
    """A security setting is invalid. The message does not contain its value."""


class TlsFailed(WireError):
    """No broker could be reached, because TLS with each of them failed. A retry would fail too."""


class AuthenticationFailed(WireError):
    """No broker accepts the user or the token, or none offers the mechanism. A retry would fail too."""


class Unreachable(WireError):
    """No broker of the bootstrap list, and no other known broker, could be reached."""


class TimedOut(WireError):
    """Brokers answered, but the operation did not succeed before the deadline."""


class Unanswered(WireError):
    """A request that must not be repeated was sent and not answered: it may have been done."""


class UnsupportedBroker(WireError):
    """The broker and this client have no version of an API in common."""


class UnknownTopic(WireError):
    """The topic or the partition does not exist."""


class TopicReplaced(UnknownTopic):
    """The topic was deleted and recreated: offsets of the old topic are invalid in the new one."""


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
        # Spark pickles exceptions between processes; the default would pass only the message to __init__.
        return type(self), (self.at, self.offset, self.log_start_offset, self.high_watermark)


class BrokerRefused(WireError):
    """The broker refused with a code that a retry does not change."""

    def __init__(self, message: str, code: int = ErrorCode.NONE) -> None:
        super().__init__(message)
        self.code = code


class BatchTooLarge(BrokerRefused):
    """The batch is larger than the topic's limit."""


class GroupInUse(BrokerRefused):
    """The group has members, so only they may commit offsets."""


class StaleMember(BrokerRefused):
    """The group has gone on without this member, or to another generation. What it committed is not stored."""


class OutOfSequence(BrokerRefused):
    """Continuing might lose, repeat or reorder records."""


class ProduceFailed(WireError):
    """A record was not acknowledged. ``cause`` says why."""

    def __init__(self, cause: WireError, may_be_stored: bool) -> None:
        end = "the record may be stored" if may_be_stored else "the record is not stored"
        super().__init__(f"{cause}; {end}")
        self.cause = cause
        # False: surely not, so it can be sent again. True: nobody knows.
        self.may_be_stored = may_be_stored

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.cause, self.may_be_stored)


class TransactionFailed(BrokerRefused):
    """The open transaction cannot be committed: abort it, then begin another."""


class ProducerFenced(BrokerRefused):
    """A newer producer has the transactional id, or the coordinator timed the transaction out."""


def words_of(code: int, message: str | None = None) -> str:
    """The broker's error message if there is one, else the name of the code."""
    try:
        name = ErrorCode(code).name
    except ValueError:
        name = f"error {code}"
    return (message or name.lower().replace("_", " ")).rstrip(".")
