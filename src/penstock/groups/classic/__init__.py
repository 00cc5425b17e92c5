"""The classic group protocol (JoinGroup, SyncGroup): members join, and one of them computes the assignment.

The parent package has what groups of every protocol share. This package may import it, except ``coordinator.py``,
which uses both.
"""
