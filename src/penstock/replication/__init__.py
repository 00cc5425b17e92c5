"""Replication: the cores of a partition's leader and of its followers."""
