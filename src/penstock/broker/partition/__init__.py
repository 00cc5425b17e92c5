"""The partitions hosted here: one log, its replication core, its flushes and the requests parked on it."""
