"""Settings and fixed limits of groups.

The fields are Kafka's broker settings under our names; the broker's table of settings maps one to the other. The
constants below are not settings: they only keep one client from using up the whole broker.
"""

from __future__ import annotations

from dataclasses import dataclass

DAY_MS = 24 * 60 * 60 * 1000

# A new member has no id to send heartbeats with while its first JoinGroup waits, so its session cannot show
# whether it is alive. It is dropped after this time; a live client retries.
NEW_MEMBER_TIMEOUT_MS = 5 * 60 * 1000

# When only silent static members are left at the end of a rebalance, it is retried after at least this time: a
# rebalance timeout of 0 must not make the retry a busy loop.
RETRY_MS_MIN = 1000

# Group, instance and protocol names are strings in Kafka's record formats, which hold 32,767 bytes. Our limit is
# lower, because names are also kept in memory and written again with every generation.
NAME_BYTES_MAX = 1024
STRING_BYTES_MAX = 32_767

# The part of the client id that goes into a member id (which has a random id after it).
CLIENT_ID_LENGTH_MAX = 255

# Member ids sent with MEMBER_ID_REQUIRED and not used yet, per group. A client uses its id within a round trip,
# so when the table is full the oldest id is the one to drop.
PENDING_MEMBERS_MAX = 1000

# Kafka has no fixed limit here (group.max.size is 2^31-1 by default). A larger group cannot work anyway: the
# leader's JoinGroup response contains every member's metadata.
MEMBERS_MAX = 10_000

# Groups per coordinator (one partition of __consumer_offsets) that clients may create.
GROUPS_MAX = 20_000


@dataclass(frozen=True, slots=True)
class GroupSettings:
    session_timeout_ms_min: int = 6_000  # group.min.session.timeout.ms
    session_timeout_ms_max: int = 30 * 60 * 1000  # group.max.session.timeout.ms
    initial_rebalance_delay_ms: int = 3_000  # group.initial.rebalance.delay.ms
    members_max: int = 2**31 - 1  # group.max.size
    offset_metadata_max: int = 4096  # offset.metadata.max.bytes (characters, as Kafka counts it)
    offsets_retention_ms: int = 7 * DAY_MS  # offsets.retention.minutes
    offsets_retention_check_interval_ms: int = 600_000  # offsets.retention.check.interval.ms
