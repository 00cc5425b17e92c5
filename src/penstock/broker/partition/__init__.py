"""The partitions hosted here: their logs, replication cores and parked requests, and what is done for all of them.

Imports ``storage`` and ``clocks``. What a partition tells the rest of the node goes through ``PartitionHost``.
"""
