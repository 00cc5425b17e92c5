"""Data directories: which log lies where, what is remembered of it, its fsyncs, and what happens when a disk fails.

Imports no other room. It knows a partition as a ``StoredPartition``.
"""
