"""The classic group protocol (JoinGroup, SyncGroup): members join, and one of them assigns the partitions to all.

What groups of every protocol share is in the package above. This package may import it, except
``coordinator.py``, which puts both together.
"""
