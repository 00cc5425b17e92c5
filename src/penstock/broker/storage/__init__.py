"""Data directories: where each log is, its checkpoint, its fsyncs, and what happens when a disk fails or fills.

Imports no other sub-package. It knows a partition as a ``StoredPartition``.
"""
