"""This broker's membership in the cluster: registration, heartbeats, its lease, how current its metadata is.

Imports ``controller``, ``quorum``, ``network``, ``clocks`` and ``storage``; nothing of partitions.
"""
