"""The partitions hosted here: their logs, replication cores and parked requests, and their housekeeping.

Imports ``storage`` and ``clocks``. A partition reaches the rest of the node through ``PartitionHost``.
"""
