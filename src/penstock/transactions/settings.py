"""Settings and fixed limits of transactions.

The fields are Kafka's broker settings under our names; the broker's table of settings maps one to the other. The
constants below are not settings: they only keep one client from using up the whole broker.
"""

from __future__ import annotations

from dataclasses import dataclass

DAY_MS = 24 * 60 * 60 * 1000

# A transactional id is a string in Kafka's record format, which holds 32,767 bytes. Our limit is lower, because ids
# are also kept in memory and written again with every change.
ID_BYTES_MAX = 1024

# Transactional ids per coordinator (one partition of __transaction_state).
IDS_MAX = 20_000

# Ids that are removed by one decision.
EXPIRED_MAX = 1_000

# Transactions that are aborted by one decision, after their time-out. Each is written with its partitions.
ABORTED_MAX = 100
# No more of them if they have this many partitions together: a decision has a limited size.
ABORTED_PARTITIONS_MAX = 10_000

# The end of a transaction whose markers are all written is written again after this time, if it could not be
# written: too few replicas in sync, or a full disk.
COMPLETE_RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    timeout_ms_max: int = 15 * 60 * 1000  # transaction.max.timeout.ms
    id_expiration_ms: int = 7 * DAY_MS  # transactional.id.expiration.ms
    # transaction.abort.timed.out.transaction.cleanup.interval.ms
    abort_timed_out_interval_ms: int = 10_000
    # transaction.remove.expired.transaction.cleanup.interval.ms
    remove_expired_interval_ms: int = 3_600_000
